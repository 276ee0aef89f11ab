# SPDX-License-Identifier: Apache-2.0
"""Resident models: `qnnbroker ls`, `load`, `unload` and `describe`."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from .invocation import Command, invocation
from .problems import WrongUsage

if TYPE_CHECKING:
    from qnnbroker.client.control import Control
    from qnnbroker.v1 import control_pb2

    from .output import Progress

#: Deadline of a load: a big context takes its time.
_LOAD_SECONDS = 600.0
#: Of a cell in the table; --json has the whole reason of a failure.
_STATE_WIDTH = 60
_STAGES = {1: "hashing", 2: "mapping", 3: "creating the context", 4: "ready", 5: "trying it out"}


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker ls", "what is in memory"),
        ("qnnbroker ls --all", "also what was, and the loads that failed"),
        ("qnnbroker ls --json | jq -r '.models[].names[]'", "the names alone"),
    ],
)
@click.option(
    "--all", "everything", is_flag=True, help="Also models that were resident, and failed loads."
)
def ls(everything: bool) -> None:
    """List the resident models."""
    from .operator import CALL_SECONDS, broker_control
    from .output import message_json, print_json

    call = invocation()
    with broker_control(call.directory()) as control:
        contexts = control.list_models(CALL_SECONDS, all=everything).contexts
    if call.json:
        print_json({"models": [message_json(c) for c in contexts]})
    else:
        print_models(contexts)


def print_models(contexts: "Sequence[control_pb2.ContextInfo]") -> None:
    """A table, or a line that says that there are none."""
    from .output import print_line, print_table, show_bytes, show_seconds

    if not contexts:
        print_line("No models")
        return
    print_table(
        ["Name", "Hash", "State", "Graphs>", "Sessions>", "Bytes>", "Runs>", "Last use"],
        [
            (
                ", ".join(c.names) or "-",
                c.content_hash[:12],
                show_state(c),
                show_graphs(c),
                c.session_count,
                show_bytes(c.size_bytes),
                c.run_count,
                "never" if c.idle_seconds < 0 else f"{show_seconds(c.idle_seconds)} ago",
            )
            for c in contexts
        ],
    )


def show_graphs(context: "control_pb2.ContextInfo") -> str:
    """How many there are; and how many of them can be executed, if not all."""
    count = len(context.graph_names)
    return f"{len(context.enabled_graphs)} of {count}" if context.enabled_graphs else str(count)


def show_state(context: "control_pb2.ContextInfo") -> str:
    """The state; of one that failed or was lost, with the reason and since when, cut to a cell."""
    from .output import show_seconds

    if context.state not in ("failed", "lost"):
        return context.state
    age = show_seconds(context.state_seconds)
    text = f"{context.state} {age} ago, {context.state_reason}: {context.state_detail}"
    return text if len(text) <= _STATE_WIDTH else f"{text[: _STATE_WIDTH - 3]}..."


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker load model_ctx.onnx", "keep it for the broker's default time after each use"),
        ("qnnbroker load model_ctx.onnx --name ocr --keep-alive forever", "until it is unloaded"),
        ("qnnbroker load model.bin --keep-alive 3600", "for an hour after the last use"),
        ("qnnbroker load model.bin --graph small --graph large", "two of its graphs"),
        ("qnnbroker load newer_ctx.onnx --name ocr --replace", "instead of what has the name"),
    ],
)
@click.argument("path", metavar="PATH")
@click.option("--name", default="", metavar="NAME", help="Name for people; the file's by default.")
@click.option(
    "--keep-alive",
    metavar="SECONDS",
    default="0",
    help="How long it stays after its last use, or 'forever'.  [default: the broker's]",
)
@click.option(
    "--graph",
    "graphs",
    metavar="NAME",
    multiple=True,
    help="Make only this graph executable; may be given several times.  [default: all]",
)
@click.option(
    "--replace", is_flag=True, help="Once it is ready, unload the other model that has its name."
)
def load(path: str, name: str, keep_alive: str, graphs: tuple[str, ...], replace: bool) -> None:
    """Load a model and keep it resident.

    PATH is a context binary or the wrapper that `qnnbroker compile` wrote. Loading what is resident
    already is quick, and sets the keep-alive anew. A name that was given to another model, of other
    content or with other graphs, is refused without --replace; models of clients do not count.
    """
    from qnnbroker.protos.errors import AlreadyExists
    from qnnbroker.v1 import control_pb2

    from .operator import broker_control
    from .output import message_json, print_json, print_line, progress, show_bytes

    call = invocation()
    request = control_pb2.LoadModelRequest(
        path=text_path(path),
        name=name,
        keep_alive_seconds=keep_alive_seconds(keep_alive),
        enable_graphs=graphs,
        replace=replace,
    )
    with broker_control(call.directory()) as control:
        with progress(f"loading {os.path.basename(path)}", silent=call.json) as bar:
            try:
                last = follow_load(control, request, bar)
            except AlreadyExists as error:
                error.message += " (--name NAME, or --replace)"
                raise
    model = last.model
    if call.json:
        print_json({"model": message_json(model), "shared": last.shared})
    else:
        offered = ", ".join(g.name for g in model.graphs)
        how = "was resident already" if last.shared else "loaded"
        print_line(f"{model.name}: {how}, {show_bytes(model.size_bytes)}, graphs {offered}")


def text_path(path: str) -> str:
    """The absolute path, as a message to the broker can carry it.

    Raises:
        WrongUsage: its bytes are not UTF-8.
    """
    absolute = os.path.abspath(path)
    try:
        absolute.encode()
    except UnicodeEncodeError as error:
        raise WrongUsage(f"the path {absolute!r} is not UTF-8 text") from error
    return absolute


def keep_alive_seconds(text: str) -> float:
    """Seconds as the broker takes them: negative is for ever, 0 its default."""
    if text == "forever":
        return -1.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise WrongUsage(f"--keep-alive wants seconds from 0 up or 'forever', found {text!r}")
    return seconds


@contextlib.contextmanager
def about_file(path: str) -> Iterator[None]:
    """Lets an error of loading name the file: what the library says about its bytes does not."""
    from qnnbroker.protos.errors import BrokerError, BrokerLost, BrokerUnavailable

    try:
        yield
    except (BrokerLost, BrokerUnavailable):
        raise
    except BrokerError as error:
        if repr(path) not in error.message:
            error.message = f"{path!r}: {error.message}"
        raise


def follow_load(
    control: "Control", request: "control_pb2.LoadModelRequest", bar: "Progress"
) -> "control_pb2.LoadModelResponse":
    """Loads; the last report, which carries the model. Leaving early gives the load up."""
    from qnnbroker.protos.errors import ProtocolError

    last = None
    reports = control.load_model(request, _LOAD_SECONDS)
    with about_file(request.path), contextlib.closing(reports):
        for last in reports:
            stage = _STAGES.get(last.stage, "loading")
            bar.update(stage, last.bytes_done, last.bytes_total or None)
    if last is None or not last.HasField("model"):
        raise ProtocolError(f"the load of {request.path!r} ended without a model")
    return last


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker unload ocr", "by the name that `qnnbroker ls` shows"),
        ("qnnbroker unload 3f9ac21b", "by the start of its hash, 8 digits or more"),
    ],
)
@click.argument("name", metavar="NAME")
def unload(name: str) -> None:
    """Give a resident model back.

    Only what `qnnbroker load` (or a call without a session) loaded can be given back so; a model
    that a client holds goes with that client. Runs under way are finished.
    """
    from qnnbroker.v1 import control_pb2

    from .operator import CALL_SECONDS, broker_control
    from .output import print_json, print_line

    call = invocation()
    with broker_control(call.directory()) as control:
        control.unload_model(control_pb2.UnloadModelRequest(name=name), CALL_SECONDS)
    if call.json:
        print_json({"name": name, "unloaded": True})
    else:
        print_line(f"{name}: unloaded")


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker describe ocr", "its graphs and tensors"),
        ("qnnbroker describe ocr --json", "the same with quantisation and ids"),
    ],
)
@click.argument("name", metavar="NAME")
def describe(name: str) -> None:
    """Show the graphs and tensors of a resident model."""
    from qnnbroker.v1 import control_pb2

    from .operator import CALL_SECONDS, broker_control
    from .output import print_fields, print_json, show_bytes

    call = invocation()
    with broker_control(call.directory()) as control:
        request = control_pb2.DescribeModelRequest(name=name)
        model = control.describe_model(request, CALL_SECONDS)
    document = model_json(model)
    if call.json:
        print_json(document)
        return
    print_fields(
        model.name,
        [
            ("file", model.source_path),
            ("sha256", model.content_hash),
            ("size", show_bytes(model.size_bytes)),
            ("compiled for", f"SoC {model.soc_model}, arch v{model.dsp_arch}"),
            ("SDK", model.sdk_build_id),
            ("wrapper", model.compatibility or "-"),
            ("executable", ", ".join(model.enabled_graphs) or "all graphs"),
            *(("warning", warning) for warning in model.warnings),
        ],
    )
    print_graphs(document["graphs"])


def model_json(model: "control_pb2.Model") -> dict[str, Any]:
    """A Model message with dtypes by their numpy names."""
    from qnnbroker.protos.tensors import numpy_dtype

    from .output import message_json

    document = message_json(model)
    for graph in document["graphs"]:
        for tensor in (*graph["inputs"], *graph["outputs"]):
            tensor["dtype"] = str(numpy_dtype(tensor["dtype"]))
    return document


def print_graphs(graphs: Sequence[dict[str, Any]]) -> None:
    """One table per graph: its inputs, then its outputs."""
    from .output import print_line, print_table, show_bytes

    for graph in graphs:
        print_line()
        print_line(f"graph {graph['name']}")
        print_table(
            ["", "Tensor", "Dtype", "Shape", "Bytes>", "Quantisation"],
            [
                (
                    kind,
                    tensor["name"],
                    tensor["dtype"],
                    "x".join(map(str, tensor["shape"])) or "scalar",
                    show_bytes(tensor["size_bytes"]),
                    show_quantization(tensor["quantization"]),
                )
                for kind, tensors in (("in", graph["inputs"]), ("out", graph["outputs"]))
                for tensor in tensors
            ],
        )


def show_quantization(quantization: dict[str, Any] | None) -> str:
    """How stored integers become real values."""
    if not quantization:
        return ""
    scales, offsets = quantization["scales"], quantization["offsets"]
    if len(scales) == 1:
        return f"(stored + {offsets[0]}) * {scales[0]:.6g}".replace("+ -", "- ")
    if scales:
        return f"{len(scales)} scales along axis {quantization['axis']}"
    return f"encoding {quantization['encoding']}"
