# SPDX-License-Identifier: Apache-2.0
"""Inputs of `qnnbroker run`: every source, and every way in which one can be wrong."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qnnbroker.cli.problems import Failure, WrongUsage
from qnnbroker.cli.run_inputs import gather, parse_arguments, random_array, read_npz
from qnnbroker.cli.run_outputs import write_npz
from qnnbroker.protos.tensors import ELEMENTS, TensorSpec

Array = np.ndarray[Any, Any]

SPECS = {
    s.name: s
    for s in (
        TensorSpec("x", np.dtype(np.float32), (2, 3)),
        TensorSpec("a=b", np.dtype(np.uint8), (4,)),
    )
}
X: Array = np.arange(6, dtype=np.float32).reshape(2, 3)
AB: Array = np.arange(4, dtype=np.uint8)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inputs(*texts: str) -> dict[str, Array]:
    return gather(parse_arguments(texts), SPECS, "g")


def refused(*texts: str) -> str:
    with pytest.raises(Failure) as caught:
        inputs(*texts)
    assert caught.value.reason == "INPUT"
    return str(caught.value)


def wrong_usage(*texts: str) -> str:
    """What is wrong whatever the graph and the files are."""
    with pytest.raises(WrongUsage) as caught:
        inputs(*texts)
    assert caught.value.reason == "INPUT"
    return str(caught.value)


def test_arrays_come_from_npy_npz_raw_bytes_zeros_and_random() -> None:
    np.save("x.npy", X)
    np.savez("x.npz", x=X, other=AB)
    np.savez("one.npz", whatever=X)
    np.savez_compressed("packed.npz", x=X)
    Path("x.raw").write_bytes(X.tobytes())
    for source in ("x.npy", "x.npz", "one.npz", "packed.npz", "x.raw"):
        found = inputs(f"x={source}", "a=b=zeros")
        assert np.array_equal(found["x"], X), source
        assert not found["a=b"].any()
    found = inputs("x=random:3", "*=random")
    assert np.array_equal(found["x"], inputs("x=random:3", "*=random:9")["x"])
    assert not np.array_equal(found["x"], inputs("x=random:4", "*=random")["x"])


def test_one_npz_may_hold_several_inputs() -> None:
    with open("all.npz", "wb") as file:
        write_npz(file, {"x": X, "a=b": AB})
    found = inputs("all.npz")
    assert np.array_equal(found["x"], X)
    assert np.array_equal(found["a=b"], AB)


def test_arrays_in_fortran_order_and_a_newer_header_are_taken() -> None:
    np.save("f.npy", np.asfortranarray(X))
    with open("v2.npy", "wb") as file:
        np.lib.format.write_array(file, X, version=(2, 0))
    for source in ("f.npy", "v2.npy"):
        assert np.array_equal(inputs(f"x={source}", "*=zeros")["x"], X)


@pytest.mark.parametrize("dtype", [np.dtype(e.name) for e in ELEMENTS.values()], ids=str)
def test_random_has_the_dtype_and_shape_and_is_the_same_again(dtype: "np.dtype[Any]") -> None:
    spec = TensorSpec("t", dtype, (5, 7))
    made = random_array(spec, 1)
    assert (made.dtype, made.shape) == (dtype, (5, 7))
    assert np.array_equal(made, random_array(spec, 1))
    assert len(np.unique(made)) > 1
    assert not np.array_equal(made, random_array(TensorSpec("u", dtype, (5, 7)), 1))


def test_another_dtype_or_shape_says_wanted_and_found() -> None:
    np.save("d.npy", X.astype(np.float64))
    np.save("s.npy", X.T)
    np.save("e.npy", X.astype(">f4"))
    np.savez("d.npz", x=X.astype(np.int32))
    wanted = r"the input 'x' wants float32\[2, 3\], found "
    assert re.match(wanted + r"float64\[2, 3\] \(d.npy\)", refused("x=d.npy"))
    assert re.match(wanted + r"float32\[3, 2\]", refused("x=s.npy"))
    assert re.match(wanted + r">f4\[2, 3\]", refused("x=e.npy"))
    assert re.match(wanted + r"int32\[2, 3\] \(x in d.npz\)", refused("x=d.npz"))
    assert re.match(wanted + r"int32", refused("d.npz"))


def test_raw_bytes_must_be_exactly_as_many() -> None:
    for size in (0, 23, 25):
        Path("raw").write_bytes(b"\0" * size)
        assert refused("x=raw") == (
            f"raw bytes for the input x: float32[2, 3] are 24; 'raw' has {size}"
        )


def test_unknown_missing_and_double_inputs_are_named() -> None:
    assert refused("q=zeros") == "graph 'g' has no input 'q'; its inputs are 'x', 'a=b'"
    assert "wants the input a=b: uint8[4], none is given" in refused("x=zeros")
    assert wrong_usage("x=zeros", "x=zeros", "*=zeros") == "the input 'x' is given twice"
    np.savez("q.npz", q=X)
    assert "no input 'q'" in refused("q.npz")
    assert refused("none.npz") == "there is no file 'none.npz'"
    np.savez("two.npz", p=X, q=X)
    assert refused("x=two.npz", "*=zeros") == "'two.npz' has no array 'x'; it has 'p', 'q'"


@pytest.mark.parametrize("text", ["", "x", "=zeros", "x=", "=", "x.npy"])
def test_what_is_no_input_argument_is_wrong_usage(text: str) -> None:
    with pytest.raises(WrongUsage, match="NAME=SOURCE"):
        parse_arguments([text])


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", " 1", "²"])
def test_a_seed_is_a_whole_number(seed: str) -> None:
    assert repr(seed) in wrong_usage(f"x=random:{seed}")


@pytest.mark.parametrize("suffix", ["npy", "npz", "bin"])
def test_what_is_no_regular_file_is_refused_and_a_fifo_not_waited_for(suffix: str) -> None:
    Path(f"directory.{suffix}").mkdir()
    os.mkfifo(f"fifo.{suffix}")
    assert "No such file" in refused(f"x=none.{suffix}")
    assert "is a directory" in refused(f"x=directory.{suffix}")
    assert "is a FIFO" in refused(f"x=fifo.{suffix}")
    assert "is a device" in refused("x=/dev/zero")


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, b"\x93NUMPY", b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16, b"PK\x05\x06"],
)
def test_damaged_array_files_are_refused(suffix: str, content: bytes) -> None:
    Path(f"bad.{suffix}").write_bytes(content)
    assert f"bad.{suffix}" in refused(f"x=bad.{suffix}", "*=zeros")


def test_truncated_array_files_are_refused() -> None:
    np.save("x.npy", X)
    np.savez("x.npz", x=X)
    for name in ("x.npy", "x.npz"):
        data = Path(name).read_bytes()
        Path(name).write_bytes(data[:-10])
        assert name in refused(f"x={name}", "*=zeros")


def test_pickled_objects_are_not_loaded() -> None:
    np.save("o.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez("o.npz", x=np.array([{"a": 1}], dtype=object))
    assert "found object" in refused("x=o.npy", "*=zeros")
    assert "found object" in refused("o.npz", "*=zeros")
    with pytest.raises(Failure, match="o.npz"):
        read_npz("o.npz")


def test_a_header_that_promises_too_much_is_refused_before_memory_is_asked_for() -> None:
    with open("huge.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"shape": (1 << 40,), "fortran_order": False, "descr": "<f4"}
        )
    assert f"found float32[{1 << 40}]" in refused("x=huge.npy", "*=zeros")
