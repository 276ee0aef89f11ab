# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker run`: one graph on given inputs, over shared memory, timed and compared."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .invocation import Command, Invocation, invocation

if TYPE_CHECKING:
    from qnnbroker.client import Graph, Model, Session

    from .output import Progress
    from .run_timings import Timings

#: Between two updates of the progress line, in seconds: drawing it costs more than a short run.
_UPDATE_SECONDS = 0.1


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker run model_ctx.onnx --input x=photo.npy --output out.npz", "one run"),
        ("qnnbroker run ocr --input '*=random:7' --repeat 1000 --warmup 10", "time a resident one"),
        ("qnnbroker run model.bin --input all.npz --graph g2 --output results/", "a certain graph"),
        ("qnnbroker run m_ctx.onnx --input x=x.bin --compare good.npz --tolerance 1e-3", "a check"),
    ],
)
@click.argument("model", metavar="MODEL")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=SOURCE",
    help="SOURCE is FILE.npy, FILE.npz, a file of raw bytes, 'zeros' or 'random[:SEED]'. "
    "The name '*' means every input not named. FILE.npz alone gives several. May be repeated.",
)
@click.option(
    "--graph",
    metavar="NAME",
    help="The graph; needed when the model has several. The ONNX graph's own name does for a "
    "wrapper with one.",
)
@click.option(
    "--output", metavar="PATH", help="Where outputs go: FILE.npz, or a directory (ends in '/')."
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Runs.  [default: 1]")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=0, help="Runs before them, not timed."
)
@click.option("--compare", metavar="FILE.npz", help="Fail unless the outputs are like these.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How far an element may be from the compared one.  [default: 0]",
)
@click.option("--plot", metavar="FILE.png", help="Draw the times (needs matplotlib).")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Seconds for one run.  [default: 60]",
)
def run(
    model: str,
    inputs: tuple[str, ...],
    graph: str | None,
    output: str | None,
    repeat: int,
    warmup: int,
    compare: str | None,
    tolerance: float,
    plot: str | None,
    timeout: float,
) -> None:
    """Run a graph on given inputs; time it, compare its outputs.

    MODEL is the path of a context binary or of its wrapper, or the name of a resident model. The
    inputs are copied into shared memory once; the runs then copy nothing. Times are of the last
    --repeat runs: waiting in the broker, executing, and all of it as this program sees it.
    """
    # First of all: it keeps gRPC quiet.
    from . import operator  # noqa: F401, I001
    from qnnbroker.client import connect

    from .output import progress
    from .run_inputs import gather, parse_arguments, read_npz
    from .run_outputs import Destination
    from .run_outputs import compare as compare_outputs
    from .run_outputs import raise_if_different
    from .run_timings import check_plot
    from .run_timings import plot as draw

    call = invocation()
    arguments = parse_arguments(inputs)
    destination = None if output is None else Destination.parse(output)
    picture = None if plot is None else check_plot(plot)
    expected = None if compare is None else read_npz(compare)
    with connect(call.directory(), name="qnnbroker run") as session:
        with (
            progress("loading", silent=call.json) as bar,
            open_model(session, call, model, bar) as opened,
        ):
            chosen = choose(opened, graph)
            arrays = gather(arguments, chosen.inputs, chosen.name)
            outputs, timings = execute(chosen, arrays, warmup, repeat, timeout, bar)
        identity = {
            "name": opened.name,
            "path": opened.source_path,
            "sha256": opened.content_hash,
            "shared": opened.shared,
        }
    files = {} if destination is None else destination.write(outputs)
    if picture is not None:
        draw(timings, f"{opened.name}, graph {chosen.name}", picture)
    differences = None if expected is None else compare_outputs(outputs, expected, tolerance)
    if not differences or not call.json:
        show(call, identity, chosen.name, outputs, files, timings, differences)
    if differences:
        raise_if_different(differences)


def open_model(session: "Session", call: Invocation, model: str, bar: "Progress") -> "Model":
    """The model at a path, or the resident one of that name, held by this session.

    Raises:
        NotFound: neither.
        InvalidRequest: the resident model's file has changed since it was loaded.
    """
    from qnnbroker.client import InvalidRequest, LoadProgress, NotFound
    from qnnbroker.v1 import control_pb2

    from .models import about_file, text_path
    from .operator import CALL_SECONDS, broker_control

    def follow(report: LoadProgress) -> None:
        bar.update(report.stage.name.lower(), report.bytes_done, report.bytes_total or None)

    if os.path.lexists(model) or os.sep in model:
        path = text_path(model)
        with about_file(path):
            return session.load(path, progress=follow)
    with broker_control(call.directory()) as control:
        try:
            request = control_pb2.DescribeModelRequest(name=model)
            resident = control.describe_model(request, CALL_SECONDS)
        except NotFound as error:
            raise NotFound(
                f"there is no file {model!r} here, and {error.message}", reason=error.reason
            ) from error
    with about_file(resident.source_path):
        opened = session.load(resident.source_path, name=resident.name, progress=follow)
    if opened.content_hash != resident.content_hash:
        raise InvalidRequest(
            f"the file {resident.source_path!r} of the resident model {model!r} has changed since "
            "it was loaded; unload it, or run the file by its path",
            reason="BAD_FILE",
        )
    return opened


def choose(model: "Model", name: str | None) -> "Graph":
    """The graph of that name, or the only one.

    Raises:
        NotFound: reason GRAPH_UNKNOWN. InvalidRequest: no name, and several graphs.
    """
    from qnnbroker.client import InvalidRequest, NotFound

    names = ", ".join(repr(n) for n in model.graphs)
    if len(model.graphs) == 1 and name not in (None, *model.graphs):
        known = name_in_wrapper(model.source_path)
        if known and name == known:
            return model.graph
        names += f", which the wrapper calls {known!r}" if known else ""
    if name is None:
        if len(model.graphs) == 1:
            return model.graph
        raise InvalidRequest(
            f"model {model.name!r} has {len(model.graphs)} graphs, choose one with --graph: {names}"
        )
    if name not in model.graphs:
        raise NotFound(
            f"model {model.name!r} has no graph {name!r}; it has {names}", reason="GRAPH_UNKNOWN"
        )
    return model.graphs[name]


def name_in_wrapper(path: str) -> str:
    """The name of the ONNX graph in the wrapper at `path`; "" where there is no such file."""
    from qnnbroker.broker.files import ModelFile
    from qnnbroker.protos.errors import BrokerError

    from .inspection import wrapper_in

    try:
        with ModelFile.open(Path(path)) as file:
            wrapper = wrapper_in(file)
    except BrokerError:  # it was loaded all the same, so that is nobody's trouble here
        return ""
    return "" if wrapper is None else wrapper.graph_name


def execute(
    graph: "Graph",
    arrays: dict[str, Any],
    warmup: int,
    repeat: int,
    timeout: float,
    bar: "Progress",
) -> tuple[dict[str, Any], "Timings"]:
    """Runs it; copies of the last run's outputs, and the times."""
    import numpy as np

    from .run_timings import Timings

    timings, shown = Timings(), 0.0
    with graph.bind() as binding:
        for name, view in binding.inputs.items():
            np.copyto(view, arrays[name], casting="no")
        for number in range(-warmup, repeat):
            before = time.perf_counter_ns()
            timing = binding.run(timeout=timeout)
            after = time.perf_counter_ns()
            if number >= 0:
                timings.add(timing.queue_ns, timing.execute_ns, after - before)
            if after - shown > _UPDATE_SECONDS * 1e9:
                shown = after
                what = "warming up" if number < 0 else "running"
                bar.update(what, number % (warmup or 1) if number < 0 else number, repeat)
        return {name: view.copy() for name, view in binding.outputs.items()}, timings


def show(
    call: Invocation,
    identity: dict[str, Any],
    graph: str,
    outputs: dict[str, Any],
    files: dict[str, str],
    timings: "Timings",
    differences: list[Any] | None,
) -> None:
    """What came out and how long it took."""
    from .output import print_json, print_line, print_table, show_ns
    from .run_outputs import summary

    runs = len(timings.total_ns)
    described = {name: summary(array) for name, array in outputs.items()}
    if call.json:
        document = {
            "model": identity,
            "graph": graph,
            "outputs": [
                {"name": name, **found, "file": files.get(name)}
                for name, found in described.items()
            ],
            "runs": runs,
            "timings": timings.spreads(),
        }
        if differences is not None:
            document["equal"] = not differences
        print_json(document)
        return
    print_table(
        ["Output", "Dtype", "Shape", "Min>", "Mean>", "Max>", "File"],
        [
            (
                name,
                found["dtype"],
                "x".join(map(str, found["shape"])) or "scalar",
                *(_number(found.get(key)) for key in ("min", "mean", "max")),
                files.get(name, "-"),
            )
            for name, found in described.items()
        ],
    )
    print_line()
    print_table(
        [f"{runs} run{'s' if runs > 1 else ''}", "Min>", "P50>", "P99>", "Max>"],
        [
            (kind, *(show_ns(found[k]) for k in ("min_ns", "p50_ns", "p99_ns", "max_ns")))
            for kind, found in timings.spreads().items()
        ],
    )
    for difference in (differences or ())[1:]:  # the first one is the error
        print_line(str(difference))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
