# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker wrap`: a bare context binary gets the wrappers that ONNX Runtime loads it by."""

import re
from pathlib import Path
from typing import Any

import click

from .invocation import Command, invocation
from .problems import WrongUsage

#: What a file name keeps of a graph's name.
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 80


@click.command(
    cls=Command,
    broker=False,
    config=False,
    examples=[
        ("qnnbroker wrap model.bin", "model_ctx.onnx beside it, or one for each of its graphs"),
        ("qnnbroker wrap model.bin -o app/m.onnx --embed", "with the binary inside the wrapper"),
        ("qnnbroker wrap model.bin --graph encoder", "for one of its graphs"),
    ],
)
@click.argument("binary", metavar="FILE.bin")
@click.option("-o", "--output", metavar="FILE.onnx", help="The wrapper.  [default: FILE_ctx.onnx]")
@click.option("--graph", metavar="NAME", help="Only this graph.  [default: each]")
@click.option("--embed", is_flag=True, help="Put the context binary inside the wrapper.")
@click.option(
    "--qnn-lib-dir",
    default="",
    metavar="DIR",
    help="Directory of the QNN libraries that read the binary.  [default: onnxruntime-qnn's]",
)
def wrap(binary: str, output: str | None, graph: str | None, embed: bool, qnn_lib_dir: str) -> None:
    """Make ONNX wrappers for a bare context binary.

    A binary of several graphs gets a wrapper for each; with -o m.onnx they are m_GRAPH.onnx. A
    wrapper names its binary, which has to lie beside it or below.
    """
    from qnnbroker.protos.errors import InvalidRequest, NotFound

    from .inspection import inspect_file
    from .output import print_json, print_line
    from .temporary import whole_file
    from .wrapper_writing import Place, Tensor, wrapper_bytes

    call = invocation()
    source = Path(binary).absolute()
    found = inspect_file(source, qnn_lib_dir=qnn_lib_dir)
    if found["kind"] != "binary":
        raise InvalidRequest(f"{binary!r} is a wrapper already", reason="BAD_FILE")
    graphs: list[dict[str, Any]] = found["binary"]["graphs"]
    names = [g["name"] for g in graphs]
    if graph is not None and graph not in names:
        raise NotFound(f"{binary!r} has no graph {graph!r}; it has {names}", reason="GRAPH_UNKNOWN")
    chosen = [g for g in graphs if graph in (None, g["name"])]
    target = source.with_name(f"{source.stem}_ctx.onnx") if output is None else Path(output)
    if target.suffix != ".onnx":
        raise WrongUsage(f"the output is a wrapper named *.onnx, not {target.name!r}")
    target = target.absolute()
    if embed:
        place = Place(source.read_bytes())
    else:
        try:
            place = Place(source.relative_to(target.parent).as_posix())
        except ValueError:
            raise WrongUsage(
                f"a wrapper in {str(target.parent)!r} cannot name the binary {binary!r}, which is "
                "not beside it; write it there, or use --embed"
            ) from None
    written: list[tuple[Path, str]] = []
    for one in chosen:
        path = target if len(chosen) == 1 else target.with_name(named(target.stem, one["name"]))
        inputs, outputs = (
            [Tensor(t["name"], t["dtype"], tuple(t["shape"])) for t in one[kind]]
            for kind in ("inputs", "outputs")
        )
        content = wrapper_bytes(one["name"], inputs, outputs, place, found["binary"]["build_id"])
        if path in [p for p, _ in written]:
            raise WrongUsage(
                f"graph {one['name']!r} would go to {path.name!r}, like another; name it with "
                "--graph and -o"
            )
        with whole_file(path) as file:
            file.write(content)
        written.append((path, one["name"]))
    if call.json:
        print_json({"wrappers": [{"path": str(p), "graph": g} for p, g in written]})
        return
    for path, name in written:
        print_line(f"{path}: graph {name}")


def named(stem: str, graph: str) -> str:
    """The file name of a graph's wrapper."""
    return f"{stem}_{_UNSAFE.sub('_', graph)[-_MAX_NAME:]}.onnx"
