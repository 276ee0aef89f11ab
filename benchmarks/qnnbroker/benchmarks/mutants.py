# SPDX-License-Identifier: Apache-2.0
"""Damaged context binaries and wrappers, by the hundred, the same ones for the same seed.

Each is a small directory with the file to load. Most of them the QNN library itself would not
survive, or would not notice.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
#: What the binary is called, so that other names of that length can be written over it.
BINARY_NAME = "m0123456789a_ctx_qnn.bin"
WRAPPER_NAME = "m0123456789a_ctx.onnx"
MANIFEST_NAME = "m0123456789a_ctx.manifest.json"


@dataclass(frozen=True)
class Original:
    """A sound model in a directory: BINARY_NAME, WRAPPER_NAME and maybe MANIFEST_NAME.

    `other` is the content of another sound binary.
    """

    directory: Path
    other: bytes

    @property
    def binary(self) -> bytes:
        return (self.directory / BINARY_NAME).read_bytes()

    @property
    def wrapper(self) -> bytes:
        return (self.directory / WRAPPER_NAME).read_bytes()


@dataclass(frozen=True)
class Mutant:
    """One damaged model: what was done to it, and the file to load."""

    kind: str
    path: Path


def mutants(
    original: Original, count: int, scratch: Path, *, seed: int = 1, manifest: bool = False
) -> Iterator[Mutant]:
    """So many, in turn of their kinds. Each is gone when the next one is asked for."""
    kinds = list(KINDS.items())
    for number in range(count):
        kind, mutate = kinds[number % len(kinds)]
        chance = random.Random(f"{seed} {number}")
        folder = scratch / f"mutant-{number}"
        shutil.copytree(original.directory, folder)
        if not manifest:
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
        try:
            yield Mutant(f"{number} {kind}", mutate(folder, original, chance))
        finally:
            shutil.rmtree(folder)


Mutation = Callable[[Path, Original, random.Random], Path]
KINDS: dict[str, Mutation] = {}


def _mutation(function: Mutation) -> Mutation:
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def _of_binary(folder: Path, change: Callable[[bytearray], "bytearray | bytes"]) -> Path:
    path = folder / BINARY_NAME
    path.write_bytes(change(bytearray(path.read_bytes())))
    # Half of them through their wrapper, half by themselves.
    return path if int(folder.name.split("-")[1]) % 2 else folder / WRAPPER_NAME


def _flip(data: bytearray, at: int, chance: random.Random) -> bytearray:
    data[at] ^= 1 << chance.randrange(8)
    return data


@_mutation
def a_bit_of_the_head(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: _flip(d, chance.randrange(256), chance))


@_mutation
def a_bit_of_the_description(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: _flip(d, chance.randrange(256, PAGE), chance))


@_mutation
def a_bit_anywhere(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: _flip(d, chance.randrange(len(d)), chance))


@_mutation
def a_burst(folder: Path, original: Original, chance: random.Random) -> Path:
    def change(data: bytearray) -> bytearray:
        at = chance.randrange(len(data) - 64)
        data[at : at + 64] = chance.randbytes(64)
        return data

    return _of_binary(folder, change)


@_mutation
def two_pages_swapped(folder: Path, original: Original, chance: random.Random) -> Path:
    def change(data: bytearray) -> bytearray:
        a, b = (n * PAGE for n in chance.sample(range(len(data) // PAGE), 2))
        data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
        return data

    return _of_binary(folder, change)


@_mutation
def the_second_half_zero(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: d[: len(d) // 2] + bytes(len(d) - len(d) // 2))


@_mutation
def truncated(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: d[: chance.randrange(1, len(d))])


@_mutation
def longer(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: d + chance.randbytes(chance.choice((1, PAGE))))


@_mutation
def empty(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: b"")


@_mutation
def random_bytes(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_binary(folder, lambda d: chance.randbytes(len(d)))


@_mutation
def absurd_counts(folder: Path, original: Original, chance: random.Random) -> Path:
    """A word of the description becomes as large as a word can be."""

    def change(data: bytearray) -> bytearray:
        at = chance.randrange(PAGE // 4) * 4
        data[at : at + 4] = chance.choice((b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80"))
        return data

    return _of_binary(folder, change)


@_mutation
def another_binary(folder: Path, original: Original, chance: random.Random) -> Path:
    (folder / BINARY_NAME).write_bytes(original.other)
    return folder / WRAPPER_NAME


def _of_wrapper(folder: Path, change: Callable[[bytearray], "bytearray | bytes"]) -> Path:
    path = folder / WRAPPER_NAME
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


@_mutation
def a_bit_of_the_wrapper(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_wrapper(folder, lambda d: _flip(d, chance.randrange(len(d)), chance))


@_mutation
def a_truncated_wrapper(folder: Path, original: Original, chance: random.Random) -> Path:
    return _of_wrapper(folder, lambda d: d[: chance.randrange(1, len(d))])


@_mutation
def absurd_lengths_in_the_wrapper(folder: Path, original: Original, chance: random.Random) -> Path:
    def change(data: bytearray) -> bytearray:
        at = chance.randrange(len(data))
        data[at : at + 1] = b"\xff" * chance.choice((4, 9, 10))
        return data

    return _of_wrapper(folder, change)


def _named(name: str) -> Mutation:
    """The wrapper names that file instead."""
    assert len(name) == len(BINARY_NAME), name

    def mutate(folder: Path, original: Original, chance: random.Random) -> Path:
        here = folder / name
        if name.startswith("fifo"):
            os.mkfifo(here)
        elif name.startswith("zero"):
            here.symlink_to("/dev/zero")
        elif name.startswith("dir"):
            here.mkdir()
        elif name.startswith("loop"):
            here.symlink_to(name)
        return _of_wrapper(folder, lambda d: d.replace(BINARY_NAME.encode(), name.encode()))

    return mutate


for _what, _name in (
    ("a wrapper that names a file above", "../../../../etc/hostname"),
    ("a wrapper that names an absolute path", "/dev/../dev/../dev//zero"),
    ("a wrapper that names a FIFO", "fifo-aaaaaaaaaaaaaaa.bin"),
    ("a wrapper that names a device", "zero-aaaaaaaaaaaaaaa.bin"),
    ("a wrapper that names a directory", "dir--aaaaaaaaaaaaaaa.bin"),
    ("a wrapper that names a link to itself", "loop-aaaaaaaaaaaaaaa.bin"),
    ("a wrapper that names nothing", "none-aaaaaaaaaaaaaaa.bin"),
):
    KINDS[_what] = _named(_name)
