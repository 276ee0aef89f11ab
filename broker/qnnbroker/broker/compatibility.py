# SPDX-License-Identifier: Apache-2.0
"""Whether a context binary is for this library and this device, from what both say of themselves.

On hardware a difference is refused: the library itself may load such a binary and compute nonsense.
An emulation always reports the same chip and runs the binaries of all, so there it is only told.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qnnbroker.protos.errors import Unsupported, VersionMismatch
from qnnbroker.v1 import control_pb2

#: Where onnxruntime-qnn writes into a wrapper what it compiled for.
METADATA_KEY = "ep_compatibility_info.QNNExecutionProvider"
#: What the shipped stand-in library calls itself.
FAKE_PROVIDER = "QNNBROKER_FAKE"
#: What to do about binaries that cannot be in one process.
ONE_SOC_MODEL = (
    "compile all of them with the same --soc-model (`qnnbroker compile` takes 60 where none is "
    "named); not all numbers go together on the emulation, 30 and 60 do not"
)
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a binary says of itself. 0, "" and () mean that it does not say."""

    backend_id: int
    build_id: str
    core_api_version: tuple[int, ...]
    backend_api_version: tuple[int, ...]
    dsp_arch: int
    soc_model: int
    shared_weight_bytes: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing that differs."""

    what: str
    wanted: str
    found: str
    reason: str

    def __str__(self) -> str:
        return f"the binary has {self.what} {self.found}, wanted {self.wanted}"


def of_wrapper(metadata: Mapping[str, str]) -> Facts | None:
    """What a wrapper says of its binary; None if it says nothing, or in a way nobody knows here.

    The text is "v2:6:2.51.0:5.51.0:73:43:0:0": scheme, backend id, SDK, backend API, arch, SoC.
    """
    parts = metadata.get(METADATA_KEY, "").split(":")
    if parts[0] != "v2" or len(parts) < 6:
        return None
    try:
        backend_id, arch, soc = int(parts[1]), int(parts[4]), int(parts[5])
    except ValueError:
        return None
    return Facts(backend_id, parts[2], (), version(parts[3]), arch, soc, 0)


def differences(said: Facts, binary: Facts) -> list[str]:
    """Where a wrapper says something else than the binary that it names."""
    return [
        f"the wrapper says {what} {theirs}, its binary {ours}"
        for what, theirs, ours in (
            ("QNN backend", said.backend_id, binary.backend_id),
            ("SDK build", dotted(version(said.build_id)), dotted(version(binary.build_id))),
            ("backend API", dotted(said.backend_api_version), dotted(binary.backend_api_version)),
            ("DSP arch", said.dsp_arch, binary.dsp_arch),
            ("SoC", said.soc_model, binary.soc_model),
        )
        if theirs and ours and theirs != ours
    ]


def takes_shared_weights(backend: control_pb2.BackendInfo) -> bool:
    """False for the emulation, which dies of a binary whose graphs share weights."""
    return not backend.emulated or backend.provider == FAKE_PROVIDER


def mismatches(facts: Facts, backend: control_pb2.BackendInfo) -> list[Mismatch]:
    """All that differs between a binary and the backend: versions, then the chip."""
    found = []
    for what, theirs, ours in (
        ("SDK build", version(facts.build_id), version(backend.build_id)),
        ("core API", facts.core_api_version, version(backend.core_api_version)),
        ("backend API", facts.backend_api_version, version(backend.backend_api_version)),
    ):
        # Libraries read what an older one of the same major version wrote.
        if any(theirs) and any(ours) and (theirs[0] != ours[0] or theirs > ours):
            wanted = f"{ours[0]}.x up to {dotted(ours)}"
            found.append(Mismatch(what, wanted, dotted(theirs), "CONTEXT_BINARY_VERSION"))
    for what, theirs_, ours_ in (
        ("DSP arch", facts.dsp_arch, backend.dsp_arch),
        ("SoC", facts.soc_model, backend.soc_model),
    ):
        if theirs_ and ours_ and theirs_ != ours_:
            found.append(Mismatch(what, str(ours_), str(theirs_), "WRONG_CHIP"))
    return found


def check(facts: Facts, backend: control_pb2.BackendInfo) -> list[str]:
    """Refuses what does not fit or would do harm; before the library creates anything of it.

    Returns:
        What differs but is let pass, since there is no real chip: sentences for people.

    Raises:
        Unsupported: reason SHARED_WEIGHTS.
        VersionMismatch: reason CONTEXT_BINARY_VERSION or WRONG_CHIP, with both values.
    """
    if facts.backend_id != backend.backend_id:
        raise VersionMismatch(
            f"the binary is for QNN backend {facts.backend_id}, this one is {backend.backend_id}",
            reason="CONTEXT_BINARY_VERSION",
            wanted=backend.backend_id,
            found=facts.backend_id,
        )
    if facts.shared_weight_bytes and not takes_shared_weights(backend):
        raise Unsupported(
            f"the binary shares {facts.shared_weight_bytes} bytes of weights between its graphs; "
            "the emulation cannot load such a file (it would crash)",
            reason="SHARED_WEIGHTS",
        )
    found = mismatches(facts, backend)
    if found and not backend.emulated:
        raise VersionMismatch(
            "; ".join(map(str, found)),
            reason=found[0].reason,
            wanted=found[0].wanted,
            found=found[0].found,
        )
    return passed(found)


def passed(found: list[Mismatch]) -> list[str]:
    """What is said of differences that an emulation does not mind.

    It has no chip, so nobody should compile anew for the one that it claims to be.
    """
    chip = [m for m in found if m.reason == "WRONG_CHIP"]
    said = [str(m) for m in found if m not in chip]
    if chip:
        said.append(
            f"compiled for {', '.join(f'{m.what} {m.found}' for m in chip)}; the emulation, which "
            f"calls itself {', '.join(f'{m.what} {m.wanted}' for m in chip)}, runs it all the "
            "same: there is nothing to do"
        )
    return said


def version(text: str) -> tuple[int, ...]:
    """The three numbers in "v2.51.0.260929181845" or "2.40.0"; () when there are none."""
    match = _VERSION.match(text)
    return tuple(map(int, match.groups())) if match else ()


def dotted(numbers: tuple[int, ...]) -> str:
    """(2, 40, 0) -> "2.40.0"."""
    return ".".join(map(str, numbers))
