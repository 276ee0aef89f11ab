# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker inspect`: what a compiled file holds, for people and for programs."""

from pathlib import Path
from typing import Any

import click

from .invocation import Command, invocation


@click.command(
    cls=Command,
    broker=False,
    config=False,
    examples=[
        ("qnnbroker inspect model_ctx.onnx", "a wrapper and the binary behind it"),
        ("qnnbroker inspect model_ctx_qnn.bin", "a context binary alone"),
        ("qnnbroker inspect model_ctx.onnx --json | jq .binary.soc_model", "for a script"),
    ],
)
@click.argument("file", metavar="FILE")
@click.option(
    "--qnn-lib-dir",
    default="",
    metavar="DIR",
    help="QNN libraries to read the binary with.  [default: the installed onnxruntime-qnn]",
)
def inspect(file: str, qnn_lib_dir: str) -> None:
    """Show what a compiled file holds, without a broker.

    FILE is a context binary or the ONNX wrapper of one. Its graphs and tensors are shown, what it
    was compiled for and with, and how much memory it states to need. The binary is parsed by the
    QNN library in a process of its own, so that a damaged file harms nothing.
    """
    from .inspection import inspect_file
    from .output import print_json, progress

    call = invocation()
    with progress(f"reading {Path(file).name}", silent=call.json) as bar:
        found = inspect_file(
            Path(file),
            qnn_lib_dir=qnn_lib_dir,
            hashing=lambda done, total: bar.update("hashing", done, total),
        )
    if call.json:
        print_json(found)
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """The findings as text."""
    from .models import print_graphs
    from .output import print_fields, print_line, show_bytes

    file, binary, wrapper = found["file"], found["binary"], found["wrapper"]
    what = "EPContext wrapper" if wrapper else "context binary"
    print_fields(
        file["path"],
        [
            ("kind", what),
            ("size", show_bytes(file["size_bytes"])),
            ("sha256", file["sha256"]),
        ],
    )
    if wrapper:
        show_wrapper(wrapper, binary)
    print_fields(
        "Context binary",
        [
            ("SDK build", binary["build_id"] or "not stated"),
            ("compiled for", compiled_for(binary)),
            ("backend id", binary["backend_id"]),
            (
                "API",
                f"core {binary['core_api_version']}, backend {binary['backend_api_version']}, "
                f"blob {binary['blob_version']}",
            ),
            ("content", show_bytes(binary["blob_bytes"])),
        ],
    )
    print_graphs(
        [
            {
                **graph,
                "inputs": [named(t) for t in graph["inputs"]],
                "outputs": [named(t) for t in graph["outputs"]],
            }
            for graph in binary["graphs"]
        ]
    )
    print_line()
    for graph in binary["graphs"]:
        print_fields(
            f"Memory of graph {graph['name']}",
            [
                ("weights", stated(graph["weight_bytes"])),
                ("shared weights", stated(graph["shared_weight_bytes"])),
                ("inputs and outputs", stated(graph["io_bytes"])),
                ("spill-fill", stated(graph["spill_fill_bytes"])),
                ("VTCM", stated(graph["vtcm_bytes"])),
            ],
        )
    if found["problem"]:
        print_line()
        print_line(f"A broker would refuse this file: {found['problem']}")


def show_wrapper(wrapper: dict[str, Any], binary: dict[str, Any]) -> None:
    """The wrapper's own part."""
    from .output import print_fields, show_bytes

    where = "embedded" if binary["embedded"] else binary["path"]
    rows = [
        ("graph", wrapper["graph_name"]),
        ("binary", f"{where}, {show_bytes(binary['size_bytes'])}"),
        ("binary sha256", binary["sha256"]),
        ("SDK", next((n["sdk_version"] for n in wrapper["nodes"] if n["main"]), "")),
    ]
    rows += [(f"compatibility {ep}", text) for ep, text in wrapper["compatibility"].items()]
    print_fields("Wrapper", rows)


def compiled_for(binary: dict[str, Any]) -> str:
    """The chip, by all that the binary says about it."""
    soc, arch, name = binary["soc_model"], binary["dsp_arch"], binary["soc_name"]
    parts = [
        f"SoC {soc}" if soc else "",
        f"arch v{arch}" if arch else "",
        f"({name})" if name else "",
    ]
    return " ".join(p for p in parts if p) or "not stated"


def named(tensor: dict[str, Any]) -> dict[str, Any]:
    """The tensor under both its names, where they differ."""
    offered = tensor.get("offered_as")
    if offered in (None, tensor["name"]):
        return tensor
    return {**tensor, "name": f"{offered} ({tensor['name']} in the binary)"}


def stated(count: int) -> str:
    """A size that the binary states, or not."""
    from .output import show_bytes

    return show_bytes(count) if count else "none stated"
