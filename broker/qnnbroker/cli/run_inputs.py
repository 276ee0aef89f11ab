# SPDX-License-Identifier: Apache-2.0
"""What `qnnbroker run --input` means: arrays for a graph's inputs, checked before they are read."""

import os
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qnnbroker.protos.tensors import TensorSpec

from .problems import Failure, WrongUsage

Array = npt.NDArray[Any]

#: `*=zeros` is for every input that is not named.
EVERY_OTHER = "*"


@dataclass(frozen=True, slots=True)
class InputArgument:
    """One `--input`: NAME=SOURCE, or the path of an .npz with several."""

    text: str

    def splits(self) -> list[tuple[str, str]]:
        """Every way to read it as NAME=SOURCE: a tensor's name may hold a "=" itself."""
        found = [i for i, c in enumerate(self.text) if c == "="]
        return [(self.text[:i], self.text[i + 1 :]) for i in found]


def parse_arguments(texts: Sequence[str]) -> list[InputArgument]:
    """The arguments, as far as they can be checked without a graph.

    Raises:
        WrongUsage: neither NAME=SOURCE nor an .npz.
    """
    for text in texts:
        if text.endswith(".npz") and ("=" not in text or os.path.exists(text)):
            continue
        name, equals, source = text.partition("=")
        if not (name and equals and source):
            raise WrongUsage(
                f"--input wants NAME=SOURCE or the path of an .npz file, found {text!r}",
                reason="INPUT",
            )
    return [InputArgument(text) for text in texts]


def gather(
    arguments: Sequence[InputArgument], specs: Mapping[str, TensorSpec], graph: str
) -> dict[str, Array]:
    """An array for each input of the graph, of exactly its dtype and shape.

    Raises:
        WrongUsage: reason INPUT; an input is given twice, or a seed is no number.
        Failure: reason INPUT; a name that the graph has not, a missing input, a file that is not
            there or no good, another dtype, shape or size than the graph wants.
    """
    arrays: dict[str, Array] = {}
    others = None

    def add(name: str, array: Array) -> None:
        if name in arrays:
            raise WrongUsage(f"the input {name!r} is given twice", reason="INPUT")
        arrays[name] = array

    for argument in arguments:
        if argument.text.endswith(".npz") and os.path.exists(argument.text):
            for name in npz_names(argument.text):
                add(name, _from_npz(argument.text, name, _spec(specs, name, graph)))
            continue
        name, source = _split(argument, specs, graph)
        if name == EVERY_OTHER:
            others = source
        else:
            add(name, read_source(source, _spec(specs, name, graph)))
    missing = [name for name in specs if name not in arrays]
    if others is not None:
        for name in missing:
            add(name, read_source(others, specs[name]))
    elif missing:
        raise _bad(
            f"graph {graph!r} wants the input {specs[missing[0]]}, none is given; "
            f"its inputs are {_listed(specs)} (--input '*=zeros' fills what is not named)"
        )
    return arrays


def _split(argument: InputArgument, specs: Mapping[str, TensorSpec], graph: str) -> tuple[str, str]:
    splits = argument.splits()
    if not splits:  # an .npz that is not there
        raise _bad(f"there is no file {argument.text!r}")
    for name, source in splits:
        if name in specs or name == EVERY_OTHER:
            return name, source
    _spec(specs, splits[0][0], graph)  # raises
    raise AssertionError("a known name was not found")


def _spec(specs: Mapping[str, TensorSpec], name: str, graph: str) -> TensorSpec:
    if name not in specs:
        raise _bad(f"graph {graph!r} has no input {name!r}; its inputs are {_listed(specs)}")
    return specs[name]


def read_source(source: str, spec: TensorSpec) -> Array:
    """The array that `source` stands for: zeros, random[:SEED], an .npy, an .npz or raw bytes."""
    kind, _, seed = source.partition(":")
    if source == "zeros":
        return np.zeros(spec.shape, spec.dtype)
    if kind == "random":
        if seed and not seed.isascii() or not (seed or "0").isdigit():
            raise WrongUsage(
                f"random wants a whole number as its seed, found {seed!r}", reason="INPUT"
            )
        return random_array(spec, int(seed or "0"))
    check_file(source)
    if source.endswith(".npy"):
        with open(source, "rb") as file:
            _check_header(file, spec, source)
            array: Array = _loaded(
                source, lambda: np.load(source, allow_pickle=False, mmap_mode="r")
            )
            return array
    if source.endswith(".npz"):
        names = npz_names(source)
        if spec.name not in names and len(names) != 1:
            raise _bad(f"{source!r} has no array {spec.name!r}; it has {_listed(names)}")
        return _from_npz(source, spec.name if spec.name in names else names[0], spec)
    size = os.stat(source).st_size
    if size != spec.size_bytes:
        raise _bad(f"raw bytes for the input {spec} are {spec.size_bytes}; {source!r} has {size}")
    return np.fromfile(source, spec.dtype).reshape(spec.shape)


def random_array(spec: TensorSpec, seed: int) -> Array:
    """The same for the same seed and tensor: floats in [0, 1), integers of their full range."""
    generator = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.dtype.kind == "f":
        return generator.random(spec.shape).astype(spec.dtype)
    if spec.dtype.kind == "b":
        return generator.integers(0, 2, spec.shape).astype(spec.dtype)
    limits = np.iinfo(spec.dtype)  # type: ignore[type-var]
    return generator.integers(limits.min, limits.max, spec.shape, spec.dtype, endpoint=True)


def check_file(path: str) -> None:
    """Refuses what is not a regular file that we can read; never waits for a FIFO.

    Raises:
        Failure: reason INPUT.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise _bad(f"the file {path!r} cannot be used: {text}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        found = kinds.get(stat.S_IFMT(mode), "a device")
        raise _bad(f"a regular file wanted, {path!r} is {found}")
    if not os.access(path, os.R_OK):
        raise _bad(f"the file {path!r} cannot be read by this user")


def npz_names(path: str) -> list[str]:
    """The names of the arrays in an .npz file."""
    check_file(path)
    with _opened(path) as archive:
        return [n.removesuffix(".npy") for n in archive.namelist()]


def read_npz(path: str) -> dict[str, Array]:
    """All arrays of an .npz file, by name."""
    check_file(path)

    def load() -> dict[str, Array]:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    with _opened(path):
        found: dict[str, Array] = _loaded(path, load)
    return found


def _opened(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _bad(f"{path!r} is not an .npz file: {error}") from error


def _from_npz(path: str, name: str, spec: TensorSpec) -> Array:
    where = f"{name} in {Path(path).name}"

    def load() -> Array:
        with np.load(path, allow_pickle=False) as arrays:
            found: Array = arrays[name]
            return found

    with _opened(path) as archive:
        member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
        try:
            file = archive.open(member)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise _bad(f"{where} cannot be read: {error}") from error
        with file:
            _check_header(file, spec, where)
    array: Array = _loaded(where, load)
    return array


def _check_header(file: IO[bytes], spec: TensorSpec, where: str) -> None:
    """Compares an .npy's own words with the spec, before any of its data is read."""

    def read() -> tuple[Any, ...]:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file)
        return np.lib.format.read_array_header_2_0(file)

    shape, _, dtype = _loaded(where, read)
    if dtype != spec.dtype or tuple(shape) != spec.shape:
        found = f"{dtype.name if dtype.isnative else dtype.str}{list(shape)}"
        raise _bad(
            f"the input {spec.name!r} wants {spec.dtype}{list(spec.shape)}, found {found} ({where})"
        )


def _loaded(where: str, load: Any) -> Any:
    """What `load` returns; whatever a damaged file makes numpy raise becomes one Failure."""
    try:
        return load()
    except MemoryError:
        raise
    except Exception as error:
        raise _bad(f"{where} is not a sound array file: {error}") from error


def _bad(message: str) -> Failure:
    return Failure(message, reason="INPUT")


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(repr(n) for n in names) or "none"
