# SPDX-License-Identifier: Apache-2.0
"""Machine: what the numbers were measured on, and how busy it was."""

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Load per core above which absolute numbers are somebody else's too.
QUIET_LOAD = 0.3

_PACKAGES = ("qnnbroker", "numpy", "grpcio", "protobuf", "onnxruntime", "onnxruntime-qnn", "onnx")


@dataclass(frozen=True)
class Machine:
    """Described once, when a run starts.

    `load_average` is that of the last minute, before anything was measured.
    """

    cpu: str
    cores: int
    memory_gib: float
    virtual: bool
    kernel: str
    architecture: str
    load_average: float
    python: str
    packages: dict[str, str]
    time: str

    @classmethod
    def look(cls) -> "Machine":
        """This machine, now."""
        cpu, flags = _cpu()
        return cls(
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            virtual="hypervisor" in flags,
            kernel=platform.release(),
            architecture=platform.machine(),
            load_average=round(os.getloadavg()[0], 2),
            python=f"{platform.python_implementation()} {sys.version.split()[0]}",
            packages=_packages(),
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    @property
    def busy(self) -> bool:
        """Whether it did so much else that absolute numbers cannot be judged; ratios can."""
        return self.load_average > QUIET_LOAD * self.cores

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        kind = ", virtual" if self.virtual else ""
        return [
            ("machine", f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB{kind}"),
            ("kernel", f"{self.kernel} {self.architecture}"),
            ("load before", str(self.load_average)),
            ("software", ", ".join([self.python, *map(" ".join, self.packages.items())])),
            ("time", self.time),
        ]


def _cpu() -> tuple[str, list[str]]:
    """Model and flags, as the kernel has them; other architectures than x86 say less."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    model = found.get("model name") or found.get("Model") or found.get("CPU part") or "unknown"
    return model, (found.get("flags") or found.get("Features") or "").split()


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
