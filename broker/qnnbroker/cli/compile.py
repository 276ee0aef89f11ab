# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker compile`: an ONNX model becomes a context binary, a wrapper and a manifest."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .invocation import Command, invocation
from .problems import WrongUsage

if TYPE_CHECKING:
    from qnnbroker.protos.errors import Unsupported

    from .compiling import CompileResult

#: The SoC that is compiled for when none is named; a test holds it to the pipeline's own.
SOC_MODEL = 60


@click.command(
    "compile",
    cls=Command,
    broker=False,
    config=False,
    examples=[
        ("qnnbroker compile model.onnx", "to model_ctx.onnx and model_ctx_qnn.bin beside it"),
        ("qnnbroker compile model.onnx -o out/m.onnx --soc-model 88", "for a certain chip"),
        ("qnnbroker compile model.onnx --embed", "with the binary inside the wrapper"),
        ("qnnbroker compile a.onnx b.onnx --share-weights -o out/", "equal weights stored once"),
        ("qnnbroker compile model.onnx --json | jq -r .wrapper", "for a script"),
    ],
)
@click.argument("models", metavar="MODEL.onnx...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE.onnx",
    help="The wrapper; with --share-weights a directory.  [default: MODEL_ctx.onnx]",
)
@click.option(
    "--fp16/--no-fp16",
    default=None,
    help="Compute in 16-bit floats.  [default: yes, unless the model is quantised]",
)
@click.option(
    "--soc-model",
    type=click.IntRange(min=1),
    default=SOC_MODEL,
    help="The chip, by its number in the QNN SDK's list of supported devices; `qnnbroker doctor` "
    "shows that of a device. All models of one broker on the emulation want the same.  "
    f"[default: {SOC_MODEL}]",
)
@click.option("--embed", is_flag=True, help="Put the context binary inside the wrapper.")
@click.option(
    "--share-weights",
    is_flag=True,
    help="Make one binary of several models, with equal weights once, and a wrapper for each.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds after which to give up.  [default: none]",
)
def compile_command(
    models: tuple[str, ...],
    output: str | None,
    fp16: bool | None,
    soc_model: int,
    embed: bool,
    share_weights: bool,
    timeout: float | None,
) -> None:
    """Compile an ONNX model for the NPU.

    Writes a wrapper, the context binary beside it, and a manifest (JSON) that says what they were
    made from and with. A model of which any operator would have to run on the CPU is refused, and
    the operators are named. On failure nothing is left behind, nor on Ctrl-C: one that comes when
    the files get their names lets them all have theirs.
    """
    from qnnbroker.broker.interrupts import deferred
    from qnnbroker.protos.errors import InvalidRequest, Unsupported

    from .compiling import INSTALLING, compile_model, default_output
    from .manifest import make_manifest, write_manifest
    from .output import print_json, progress

    call = invocation()
    if share_weights:
        from .compile_share import compile_share

        compile_share(models, output, fp16, soc_model, embed, timeout)
        return
    if len(models) > 1:
        raise WrongUsage(f"{len(models)} models are compiled together with --share-weights only")
    model = models[0]
    source = Path(model)
    if source.is_dir():
        raise InvalidRequest(f"an ONNX file wanted, {model!r} is a directory", reason="BAD_FILE")
    target = default_output(source) if output is None else Path(output)
    with ExitStack() as whole, progress(f"compiling {source.name}", silent=call.json) as bar:

        def update(stage: str) -> None:
            if stage == INSTALLING:
                whole.enter_context(deferred())  # the manifest comes with the files, or nothing
            bar.update(stage)

        try:
            result = compile_model(
                source,
                target,
                fp16=fp16,
                soc_model=soc_model,
                embed=embed,
                progress=update,
                timeout=timeout,
            )
        except Unsupported as error:
            if not call.json:
                bar.close()
                report_refusal(error)
            raise
        bar.update("writing the manifest")
        options = {"fp16": fp16, "soc_model": soc_model, "embed": embed}
        manifest = write_manifest(result.wrapper, make_manifest(source, result, options))
    if call.json:
        print_json({**result.as_json(), "manifest": str(manifest)})
    else:
        show(result, manifest)


def report_refusal(error: "Unsupported") -> None:
    """The refused operators, one a line, on standard output."""
    from .output import print_table

    kinds = error.ids.get("operators", "").split(",")
    nodes = error.ids.get("nodes", "").split(",")
    rows: list[tuple[str, str]] = [("operator", kind) for kind in kinds if kind]
    rows += [("node", node) for node in nodes if node]
    if rows:
        print_table(["Not supported", "Name"], rows)


def show(result: "CompileResult", manifest: Path) -> None:
    """What was made."""
    from .output import print_fields, show_bytes

    def tensors(found: Any) -> str:
        return ", ".join(f"{t.name}: {t.dtype}{list(t.shape)}" for t in found)

    print_fields(
        "Compiled",
        [
            ("wrapper", result.wrapper),
            ("binary", result.binary or "inside the wrapper"),
            ("manifest", manifest),
            ("size", show_bytes(result.size_bytes)),
            ("graphs", ", ".join(result.graphs)),
            ("inputs", tensors(result.inputs)),
            ("outputs", tensors(result.outputs)),
            ("precision", result.precision),
            ("nodes", result.node_count),
            ("SoC", result.soc_model),
            ("SDK", result.sdk_version),
            ("time", f"{result.seconds:.1f} s"),
        ],
    )
