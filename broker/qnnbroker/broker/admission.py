# SPDX-License-Identifier: Apache-2.0
"""What a parsed binary must be like before the worker creates it."""

from collections.abc import Sequence

from qnnbroker.protos.errors import NotFound, VersionMismatch
from qnnbroker.v1 import control_pb2 as pb

from . import compatibility
from .backends.base import BinarySpec
from .epcontext import Wrapper


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
                "cannot live in one process: compile all with --soc-model",
                reason="BINARY_CLASS",
                wanted=other.soc_model,
                found=spec.soc_model,
            )
