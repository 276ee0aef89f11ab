# SPDX-License-Identifier: Apache-2.0
"""Why the compiler refused a model: its messages and log, as one typed error in plain words."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qnnbroker.protos.errors import BackendError, BrokerError, InvalidRequest, Unsupported

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_UNSUPPORTED = re.compile(r"\{ name: (?P<name>[^{}]*), type: (?P<op>[^{},]*) \}")
_NODE_FAILED = re.compile(
    r"failed for node `(?P<name>[^`]*)` of type `(?P<op>[^`]*)` with error code (?P<code>\d+)"
)
_SETUP_FAILED = re.compile(r"QNN SetupBackend failed (?P<why>.*)")
_FINALIZE_FAILED = re.compile(r"Failed to finalize QNN graph\.?\s*(?:Error: )?(?P<why>.*)")
_NAMES_SHOWN = 4
_KINDS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the model as the partitioner sees it, after ONNX Runtime's own rewriting."""

    op_type: str
    name: str


def plain_log(text: str) -> str:
    """The log without terminal colours."""
    return _COLOUR.sub("", text)


def is_about_operators(message: str) -> bool:
    """Whether this refusal means that some operators would have to run on the CPU."""
    return (
        "fallback to CPU EP has been explicitly disabled" in message
        # Said when an operator that is a function was taken apart and only partly placed.
        or "Encountered an invalid node while compiling a model" in message
    )


def operators_in_log(log: str) -> list[Operator]:
    """The operators that the execution provider's log calls unsupported, once each."""
    found: dict[Operator, None] = {}
    for line in log.splitlines():
        if "Unsupported nodes in QNN EP" in line:
            for match in _UNSUPPORTED.finditer(line):
                if not match["op"].startswith("QNNExecutionProvider"):
                    found[Operator(match["op"], match["name"])] = None
    return list(found)


def operators_error(
    model: str, refused: Sequence[Operator], total_count: int | None, log: str
) -> Unsupported:
    """Some operators have no HTP implementation for these types and shapes."""
    if not refused:
        return Unsupported(
            f"'{model}' does not run on the HTP as a whole: some of its operators need "
            "the CPU, which qnnbroker does not use silently; the compiler did not name them",
            refusal="operators",
        )
    count = len(refused)
    of = f" of its {total_count}" if total_count else ""
    noun = "operator" if (total_count or count) == 1 else "operators"
    return Unsupported(
        f"'{model}' does not run on the HTP as a whole; not supported there: {count}{of} {noun}, "
        f"{_listed(refused, log)}. It would need the CPU, which qnnbroker does not use silently",
        refusal="operators",
        operators=",".join(sorted({op.op_type for op in refused})),
        nodes=",".join(op.name for op in refused if op.name),
    )


def other_error(model: str, message: str, log: str, soc_model: int) -> BrokerError:
    """Any other failure of the compiler.

    Args:
        model: file name, for the message.
        message: text of ONNX Runtime's exception.
        log: what the libraries logged, without colours.
        soc_model: the SoC number that was asked for.
    """
    if "Failed to compose Qnn graph" in message or "Failed to add supported node" in message:
        nodes = _failed_nodes(log)
        where = f", at {nodes}" if nodes else ""
        return Unsupported(
            f"'{model}' was refused while its QNN graph was being built{where}: each operator is "
            "known to the HTP, but not with these shapes or parameters",
            refusal="compose",
            nodes=nodes,
        )
    if match := _FINALIZE_FAILED.search(message):
        why = match["why"].strip() or "no reason given"
        return Unsupported(
            f"'{model}' was refused when the HTP finalised its graph ({why}): the operators are "
            "supported, but the graph does not fit the chip: a tensor may be too large, or a "
            "type is not one of this chip's",
            refusal="finalize",
            cause=why,
            soc_model=soc_model,
        )
    if "Load model from" in message or "INVALID_GRAPH" in message or "NO_SUCHFILE" in message:
        return InvalidRequest(
            f"ONNX Runtime does not accept '{model}': {_without_prefix(message)}",
            reason="BAD_FILE",
        )
    return BackendError(
        f"compiling '{model}' failed: {_without_prefix(message)}", reason="INTERNAL"
    )


def setup_error(log: str, soc_model: int) -> InvalidRequest | None:
    """The device refused the SoC model; ONNX Runtime would report it as unsupported operators."""
    match = _SETUP_FAILED.search(log)
    if match is None:
        return None
    return InvalidRequest(
        f"the QNN library cannot compile for SoC model {soc_model}: {match['why'].strip()}",
        soc_model=soc_model,
    )


def _listed(refused: Sequence[Operator], log: str) -> str:
    codes = {m["name"]: m["code"] for m in _NODE_FAILED.finditer(log)}
    by_kind: dict[str, list[str]] = {}
    for op in refused:
        code = codes.get(op.name)
        name = f"'{op.name}'" if op.name else "unnamed"
        by_kind.setdefault(op.op_type, []).append(f"{name} (error {code})" if code else name)
    kinds = [f"{kind} {_shortened(names, _NAMES_SHOWN)}" for kind, names in by_kind.items()]
    return _shortened(kinds, _KINDS_SHOWN, separator="; ")


def _shortened(items: Sequence[str], shown: int, separator: str = ", ") -> str:
    rest = len(items) - shown
    text = separator.join(items[:shown])
    return f"{text} and {rest} more" if rest > 0 else text


def _failed_nodes(log: str) -> str:
    nodes: Iterable[str] = dict.fromkeys(
        f"{m['op']} '{m['name']}' (error {m['code']})"
        for m in _NODE_FAILED.finditer(log)
        if m["name"]
    )
    return _shortened(list(nodes), _NAMES_SHOWN)


def _without_prefix(message: str) -> str:
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", message.strip())[:600]
