# SPDX-License-Identifier: Apache-2.0
"""errors: one tree, stable reasons, exceptions that behave as the built-in ones they also are."""

import copy
import pickle

import pytest

from qnnbroker.protos import errors
from qnnbroker.protos.errors import BrokerError, all_error_types

TYPES = all_error_types()


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = [
        line.removeprefix("    +-- ").split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if line.startswith("    +-- ")
    ]
    assert drawn == [t.__name__ for t in TYPES[1:]]


def test_the_docstring_names_the_builtin_that_each_class_also_is() -> None:
    for line in (errors.__doc__ or "").splitlines():
        if "(" in line and line.startswith("    +-- "):
            name, builtin = line.removeprefix("    +-- ").split()[:2]
            found = [b.__name__ for b in getattr(errors, name).__bases__]
            assert found == ["BrokerError", builtin.strip("()")]


@pytest.mark.parametrize("cls", TYPES)
def test_the_default_reason_is_one_of_the_reasons(cls: type[BrokerError]) -> None:
    assert cls.default_reason in cls.reasons
    assert len(set(cls.reasons)) == len(cls.reasons)
    assert cls("text").reason == cls.default_reason
    for reason in cls.reasons:
        assert reason == reason.upper()
        assert reason.replace("_", "").isalnum()


def test_a_reason_belongs_to_one_class_or_means_the_same_everywhere() -> None:
    owners: dict[str, list[str]] = {}
    for cls in TYPES:
        for reason in cls.reasons:
            owners.setdefault(reason, []).append(cls.__name__)
    shared = {r: o for r, o in owners.items() if len(o) > 1}
    assert shared == {"INTERNAL": ["BrokerError", "BackendError"]}


@pytest.mark.parametrize("cls", TYPES)
def test_the_text_is_the_message_alone(cls: type[BrokerError]) -> None:
    error = cls("tensor 'a' needs 4 bytes", reason=cls.reasons[-1], buffer_id=12)
    assert str(error) == "tensor 'a' needs 4 bytes"
    assert error.message == "tensor 'a' needs 4 bytes"
    assert error.reason == cls.reasons[-1]
    assert error.ids == {"buffer_id": "12"}
    assert error.args == ("tensor 'a' needs 4 bytes",)


@pytest.mark.parametrize("cls", TYPES)
@pytest.mark.parametrize("how", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_copying_and_pickling(cls: type[BrokerError], how: object) -> None:
    error = cls("text", reason=cls.reasons[-1], wanted=1, found=2)
    again = how(error)  # type: ignore[operator]
    assert type(again) is cls
    assert str(again) == "text"
    assert again.reason == error.reason
    assert again.ids == {"wanted": "1", "found": "2"}


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.InvalidRequest, ValueError),
        (errors.NotFound, LookupError),
        (errors.NotAllowed, PermissionError),
        (errors.DeadlineExpired, TimeoutError),
        (errors.BrokerUnavailable, ConnectionError),
        (errors.BrokerLost, ConnectionResetError),
        (errors.Unsupported, NotImplementedError),
    ],
)
def test_callers_may_catch_the_builtin(cls: type[BrokerError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin) as caught:
        raise cls("text")
    assert isinstance(caught.value, BrokerError)
