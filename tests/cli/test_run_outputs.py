# SPDX-License-Identifier: Apache-2.0
"""Outputs of `qnnbroker run`: files that are whole or not there, comparisons with a place."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qnnbroker.cli.problems import Failure, WrongUsage
from qnnbroker.cli.run_outputs import (
    Destination,
    compare,
    raise_if_different,
    summary,
    write_npz,
)

Array = np.ndarray[Any, Any]

Y: Array = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_an_npz_takes_every_name_and_numpy_reads_it(tmp_path: Path) -> None:
    names = ["y", "file", "args", "a/b:0", "ü", "..", "x.npy"]
    path = tmp_path / "out.npz"
    Destination.parse(str(path)).write({n: Y + i for i, n in enumerate(names)})
    with np.load(path) as found:
        assert [np.array_equal(found[n], Y + i) for i, n in enumerate(names[:-1])] == [True] * 6
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_directory_gets_one_file_per_output_and_no_name_leaves_it(tmp_path: Path) -> None:
    names = ["y", "a/b", "a:b", "../../evil", ".", "..", "", "ü" * 300]
    target = tmp_path / "out"
    files = Destination.parse(f"{target}/").write({n: Y + i for i, n in enumerate(names)})
    assert list(files) == names
    assert len(set(files.values())) == len(names)
    for number, name in enumerate(names):
        assert Path(files[name]).parent == target
        assert np.array_equal(np.load(files[name]), Y + number)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert Path(files["a/b"]).name == "a_b.npy"
    assert Path(files["a:b"]).name == "a_b_2.npy"


def test_what_cannot_be_a_destination_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text, part in (
        ("x.txt", "x.txt"),
        (f"{tmp_path}/none/x.npz", "no directory"),
        (f"{tmp_path}/none/deep/", "no directory"),
        (f"{tmp_path}/file/", "something else"),
    ):
        with pytest.raises(WrongUsage, match=part):
            Destination.parse(text)
    assert Destination.parse(str(tmp_path)).is_directory


def test_equal_outputs_have_no_differences() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert compare({"y": Y, "odd": odd}, {"y": Y.copy(), "odd": odd.copy()}, 0.0) == []
    raise_if_different([])


def test_the_tolerance_is_the_distance_that_is_allowed() -> None:
    other = Y + np.float32(0.5)
    assert compare({"y": Y}, {"y": other}, 0.5) == []
    (difference,) = compare({"y": Y}, {"y": other}, 0.25)
    assert (difference.count, difference.distance) == (6, 0.5)


def test_a_difference_says_where_and_by_how_much() -> None:
    other = Y.copy()
    other[1, 2] += 3
    other[0, 1] -= 1
    (difference,) = compare({"y": Y}, {"y": other}, 1e-3)
    assert (difference.count, difference.index) == (2, (1, 2))
    assert (difference.found, difference.expected, difference.distance) == (5.0, 8.0, 3.0)
    assert "2 of 6 elements" in str(difference)
    assert "[1, 2]: found 5, expected 8, apart by 3" in str(difference)
    with pytest.raises(Failure, match=r"output 'y' differs in 2") as caught:
        raise_if_different([difference])
    assert caught.value.reason == "DIFFERENT"


def test_nan_against_a_number_is_a_difference_whatever_the_tolerance() -> None:
    (difference,) = compare({"y": np.array([np.nan])}, {"y": np.array([1.0])}, 1e9)
    assert difference.count == 1
    (difference,) = compare({"y": np.array([np.inf])}, {"y": np.array([-np.inf])}, 1e9)
    assert difference.distance == np.inf


def test_integers_that_floats_cannot_tell_apart_are_different() -> None:
    a, b = np.array([2**62], np.int64), np.array([2**62 + 1], np.int64)
    assert [d.count for d in compare({"y": a}, {"y": b}, 0.0)] == [1]
    a8, b8 = np.array([0], np.uint8), np.array([255], np.uint8)
    assert [d.distance for d in compare({"y": a8}, {"y": b8}, 0.0)] == [255.0]
    yes, no = np.array([True]), np.array([False])
    assert [d.distance for d in compare({"y": yes}, {"y": no}, 0.0)] == [1.0]


def test_missing_extra_and_other_outputs_are_differences() -> None:
    found = compare({"y": Y, "extra": Y}, {"y": Y.astype(np.float16), "gone": Y}, 1.0)
    texts = [str(d) for d in found]
    assert texts == [
        "output 'gone' is expected, the graph gives 'y', 'extra'",
        "output 'y' is float32[2, 3], expected float16[2, 3]",
        "output 'extra' is not expected; expected are 'y', 'gone'",
    ]
    with pytest.raises(Failure, match="and 2 more outputs differ"):
        raise_if_different(found)


def test_empty_and_scalar_outputs_are_compared_and_summed_up() -> None:
    empty, scalar = np.zeros((0, 3), np.float32), np.array(2.0, np.float32)
    assert compare({"e": empty, "s": scalar}, {"e": empty, "s": scalar}, 0.0) == []
    (difference,) = compare({"s": scalar}, {"s": scalar + 1}, 0.0)
    assert difference.index == ()
    assert summary(empty) == {"dtype": "float32", "shape": [0, 3]}
    assert summary(scalar)["mean"] == 2.0
    assert summary(np.array([np.nan, 1.0]))["max"] is None
    assert summary(np.array([True, False]))["max"] == 1.0


def test_written_npz_files_hold_what_was_written(tmp_path: Path) -> None:
    with open(tmp_path / "x.npz", "wb") as file:
        write_npz(file, {"y": Y})
    with np.load(tmp_path / "x.npz") as found:
        assert found.files == ["y"]
        assert np.array_equal(found["y"], Y)
