# SPDX-License-Identifier: Apache-2.0
"""What a model of the zoo is: where it comes from, how it is made, and what it should answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from zoo.fetch import Package

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = Mapping[str, Array]
Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Case:
    """One real input with its right answer.

    Attributes:
        label: what the input is.
        feeds: input name to array, as the model wants it.
        check: takes the outputs by name; returns whether they are right, and the answer in words.
    """

    label: str
    feeds: Feeds
    check: Callable[[Outputs], tuple[bool, str]]


class Model(ABC):
    """One model. Objects are cheap: nothing is fetched before a method is called."""

    name: ClassVar[str]
    task: ClassVar[str]
    #: "fp16": compiled from floats; "u8": quantised with `calibration()` first.
    precision: ClassVar[Literal["fp16", "u8"]]
    #: Everything that making the model and its cases needs.
    packages: ClassVar[tuple[Package, ...]]

    @abstractmethod
    def write_float(self, path: Path) -> None:
        """Write the float model with static shapes to `path`."""

    def calibration(self) -> list[Feeds]:
        """Typical inputs to quantise with, none of them among the cases. Empty for fp16."""
        return []

    @abstractmethod
    def cases(self) -> list[Case]:
        """Inputs with known answers."""
