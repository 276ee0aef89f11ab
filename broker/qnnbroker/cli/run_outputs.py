# SPDX-License-Identifier: Apache-2.0
"""What `qnnbroker run` does with results: files that are whole or not there, and comparisons."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .problems import Failure, WrongUsage
from .temporary import whole_file

Array = npt.NDArray[Any]

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the outputs go: one .npz, or a directory with an .npy for each."""

    path: Path
    is_directory: bool

    @classmethod
    def parse(cls, text: str) -> "Destination":
        """Looks at the text and at what is there.

        Raises:
            WrongUsage: neither an .npz nor a directory, or its parent is missing.
        """
        path = Path(text)
        is_directory = text.endswith("/") or path.is_dir()
        if not is_directory and path.suffix != ".npz":
            raise WrongUsage(
                f"--output wants a directory (ending in '/') or a file *.npz, found {text!r}"
            )
        if is_directory and path.exists() and not path.is_dir():
            raise WrongUsage(f"--output wants a directory, {text!r} is something else")
        if not path.absolute().parent.is_dir():
            raise WrongUsage(f"--output {text!r}: there is no directory {str(path.parent)!r}")
        return cls(path, is_directory)

    def write(self, outputs: Mapping[str, Array]) -> dict[str, str]:
        """Writes every output; returns the file of each."""
        if not self.is_directory:
            with whole_file(self.path) as file:
                write_npz(file, outputs)
            return dict.fromkeys(outputs, str(self.path))
        self.path.mkdir(exist_ok=True)
        files: dict[str, str] = {}
        for name, array in outputs.items():
            target = self.path / self._file_name(name, files)
            with whole_file(target) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
            files[name] = str(target)
        return files

    def _file_name(self, tensor: str, taken: Mapping[str, str]) -> str:
        """A tensor's name as a plain file name: it may hold slashes."""
        stem = _UNSAFE.sub("_", tensor).lstrip(".")[:200] or "output"
        used = {Path(path).name for path in taken.values()}
        name, number = f"{stem}.npy", 1
        while name in used:
            number += 1
            name = f"{stem}_{number}.npy"
        return name


def write_npz(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """As numpy.savez does, which cannot take every name."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


@dataclass(frozen=True, slots=True)
class Difference:
    """How one output differs from what was expected.

    `count` elements are further apart than the tolerance; the furthest is at `index`.
    """

    output: str
    what: str
    count: int = 0
    index: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0
    distance: float = 0.0

    def __str__(self) -> str:
        return f"output {self.output!r} {self.what}"


def compare(
    found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float
) -> list[Difference]:
    """Every output that is further than `tolerance` from the expected one. NaN equals NaN."""
    differences = []
    for name in expected:
        if name not in found:
            differences.append(
                Difference(name, f"is expected, the graph gives {', '.join(map(repr, found))}")
            )
    for name, array in found.items():
        if name not in expected:
            differences.append(
                Difference(name, f"is not expected; expected are {', '.join(map(repr, expected))}")
            )
        elif (difference := _compare_one(name, array, expected[name], tolerance)) is not None:
            differences.append(difference)
    return differences


def _compare_one(name: str, found: Array, expected: Array, tolerance: float) -> Difference | None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return Difference(
            name,
            f"is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}",
        )
    with np.errstate(all="ignore"):
        # Exact for what floats cannot hold: big integers are equal or not before they are rounded.
        same = (found == expected) | ((found != found) & (expected != expected))
        distance = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    over = ~same & ~(distance <= tolerance)
    if tolerance == 0:
        over = ~same
    count = int(np.count_nonzero(over))
    if not count:
        return None
    index = tuple(
        int(i) for i in np.unravel_index(int(np.argmax(np.where(over, distance, -1))), found.shape)
    )
    a, b, d = float(found[index]), float(expected[index]), float(distance[index])
    return Difference(
        name,
        f"differs in {count} of {found.size} elements by more than {tolerance:g}, most at "
        f"{list(index)}: found {a:.9g}, expected {b:.9g}, apart by {d:.3g}",
        count=count,
        index=index,
        expected=b,
        found=a,
        distance=d,
    )


def raise_if_different(differences: list[Difference]) -> None:
    """Raises Failure, reason DIFFERENT, with the first difference and how many there are."""
    if differences:
        more = f" (and {len(differences) - 1} more outputs differ)" if len(differences) > 1 else ""
        raise Failure(f"{differences[0]}{more}", reason="DIFFERENT")


def summary(array: Array) -> dict[str, Any]:
    """Dtype, shape and, for numbers, smallest, mean and largest."""
    found: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size:
        with np.errstate(all="ignore"):
            values = (array.min(), array.astype(np.float64).mean(), array.max())
        # JSON has no NaN and no infinity.
        found |= {
            key: float(v) if np.isfinite(v) else None
            for key, v in zip(("min", "mean", "max"), values, strict=True)
        }
    return found
