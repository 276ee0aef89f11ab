# SPDX-License-Identifier: Apache-2.0
"""QnnError and the names of QNN's codes."""

import pickle

import pytest

from qnnbroker.native import qnn_error
from qnnbroker.native.qnn_error import QnnError, name_of


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "success"),
        (1000, "common: not supported"),
        (6004, "graph: invalid tensor"),
        (30010, "system: malformed or truncated context binary"),
        (5099, "context: error 5099"),
        (49999, "system: error 49999"),
        (61234, "interface: error 61234"),
        (999, "unknown error 999"),
        (-1, "unknown error -1"),
        (1 << 63, f"unknown error {1 << 63}"),
    ],
)
def test_every_code_has_a_name(code: int, name: str) -> None:
    assert name_of(code) == name


def test_every_named_constant_is_in_the_table() -> None:
    constants = {k: v for k, v in vars(qnn_error).items() if k.isupper() and isinstance(v, int)}
    assert constants["NOT_SUPPORTED"] == 1000
    for code in constants.values():
        assert f"error {code}" not in name_of(code)


def test_an_error_says_code_name_operation_and_message() -> None:
    error = QnnError(5005, "contextCreateFromBinary", "the file is of another age")
    assert error.name == "context: cannot be created from the binary"
    for part in ("5005", error.name, "contextCreateFromBinary", "the file is of another age"):
        assert part in str(error)
    assert str(QnnError(1002, "deviceCreate")).endswith("(common: memory allocation failed)")


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(QnnError(1007, "graphExecute", "again")))
    assert (error.code, error.operation, error.message) == (1007, "graphExecute", "again")
