# SPDX-License-Identifier: Apache-2.0
"""What a parsed binary must be like before the worker creates it."""

from collections.abc import Sequence

from qnnbroker.protos.errors import InvalidRequest, NotFound, VersionMismatch
from qnnbroker.v1 import control_pb2 as pb

from . import compatibility
from .backends.base import BinarySpec
from .compatibility import FAKE_PROVIDER, ONE_SOC_MODEL
from .epcontext import FAKE_MAGIC, Wrapper, sniff
from .files import ModelFile

#: Enough to tell what kind of file it is.
_HEAD_BYTES = 64


def check_kind(file: ModelFile, backend: pb.BackendInfo) -> None:
    """Refuses what the library could only answer with a code of its own: another kind of file, or
    a binary of the other library. Blocks.

    Raises:
        InvalidRequest: reason BAD_FILE.
    """
    head = file.read(0, _HEAD_BYTES)
    name, fake = str(file.path), backend.provider == FAKE_PROVIDER
    if sniff(head) != "binary":
        raise InvalidRequest(
            f"{name!r} is neither a context binary nor an ONNX model ({file.size_bytes} bytes, "
            f"starting with {head[:8].hex(' ')})",
            reason="BAD_FILE",
        )
    if head.startswith(FAKE_MAGIC) and not fake:
        raise InvalidRequest(
            f"{name!r} is a context binary of the fake QNN library, which this broker does not "
            "run: it wants `qnnbroker serve --backend fake`",
            reason="BAD_FILE",
        )
    if fake and not head.startswith(FAKE_MAGIC):
        raise InvalidRequest(
            f"{name!r} is no context binary of the fake QNN library, which is what this broker "
            "runs (--backend fake); real ones want a broker on the real library",
            reason="BAD_FILE",
        )


def check_spec(spec: BinarySpec, backend: pb.BackendInfo) -> list[str]:
    """Refuses what would harm the process or is for another library or chip.

    Returns:
        What differs but is let pass on an emulated device.

    Raises:
        Unsupported, VersionMismatch: see `compatibility.check`.
    """
    return compatibility.check(facts_of(spec), backend)


def facts_of(spec: BinarySpec) -> compatibility.Facts:
    """What a parsed binary says of itself."""
    return compatibility.Facts(
        spec.backend_id,
        spec.build_id,
        spec.core_api_version,
        spec.backend_api_version,
        spec.dsp_arch,
        spec.soc_model,
        spec.shared_weight_bytes,
    )


def check_wrapper(wrapper: Wrapper | None, spec: BinarySpec) -> list[str]:
    """Where a wrapper says something else than its binary, which alone counts."""
    said = compatibility.of_wrapper(wrapper.metadata) if wrapper is not None else None
    return [] if said is None else compatibility.differences(said, facts_of(spec))


def check_names(spec: BinarySpec, names: Sequence[str]) -> None:
    """Refuses graph names that the binary does not have; QNN would ignore them.

    Raises:
        NotFound: reason GRAPH_UNKNOWN.
    """
    known = {graph.name for graph in spec.graphs}
    if unknown := sorted(set(names) - known):
        raise NotFound(
            f"the binary has no graph {unknown[0]!r}; it has {sorted(known)}",
            reason="GRAPH_UNKNOWN",
        )


def check_class(spec: BinarySpec, resident: list[BinarySpec]) -> None:
    """Refuses a binary of another class than the resident ones: they would destroy each other.

    Binaries compiled with a soc_model and those without cannot live in one process (both then fail
    or crash). The file tells only part of it: SoC 0 means that neither SoC nor arch was given. A
    trial finds out the rest.

    Raises:
        VersionMismatch: reason BINARY_CLASS.
    """
    for other in resident:
        if bool(other.soc_model) != bool(spec.soc_model):
            raise VersionMismatch(
                f"the binary was compiled {'with' if spec.soc_model else 'without'} a SoC model, "
                f"the resident ones {'with' if other.soc_model else 'without'}; the two kinds "
                f"cannot live in one process: {ONE_SOC_MODEL}",
                reason="BINARY_CLASS",
                wanted=other.soc_model,
                found=spec.soc_model,
            )
