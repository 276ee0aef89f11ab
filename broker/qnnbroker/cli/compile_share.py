# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker compile --share-weights`: several models become one binary and a wrapper each."""

from contextlib import ExitStack
from pathlib import Path

from .invocation import invocation
from .problems import WrongUsage


def compile_share(
    models: tuple[str, ...],
    output: str | None,
    fp16: bool | None,
    soc_model: int,
    embed: bool,
    timeout: float | None,
) -> None:
    """Compiles, writes the manifests, and tells what sharing saved.

    Raises:
        WrongUsage: options that do not go together.
        BrokerError, Failure: see `compile_shared`.
    """
    from qnnbroker.broker.interrupts import deferred
    from qnnbroker.protos.errors import Unsupported

    from .compile import report_refusal
    from .compiling import INSTALLING
    from .compiling_shared import compile_shared
    from .manifest import make_manifest, write_manifest
    from .output import print_fields, print_json, progress, show_bytes

    call = invocation()
    if embed:
        raise WrongUsage("--embed puts the binary into one wrapper; --share-weights is for several")
    if len(models) < 2:
        raise WrongUsage(f"--share-weights is for at least two models, found {len(models)}")
    sources = [Path(model) for model in models]
    directory = sources[0].parent if output is None else Path(output)
    if output is not None and output.endswith("/"):
        directory.mkdir(parents=True, exist_ok=True)
    with (
        ExitStack() as whole,
        progress(f"compiling {len(sources)} models", silent=call.json) as bar,
    ):

        def update(stage: str) -> None:
            if stage == INSTALLING:
                whole.enter_context(deferred())  # the manifests come with the files, or nothing
            bar.update(stage)

        try:
            result = compile_shared(
                sources,
                directory,
                fp16=fp16,
                soc_model=soc_model,
                progress=update,
                timeout=timeout,
            )
        except Unsupported as error:
            if not call.json:
                bar.close()
                report_refusal(error)
            raise
        bar.update("writing the manifests")
        options = {"fp16": fp16, "soc_model": soc_model, "embed": False, "share_weights": True}
        manifests = [
            write_manifest(one.wrapper, make_manifest(source, one, options))
            for source, one in zip(sources, result.models, strict=True)
        ]
    if call.json:
        print_json({**result.as_json(), "manifests": [str(m) for m in manifests]})
        return
    print_fields(
        "Compiled together",
        [
            *(("wrapper", model.wrapper) for model in result.models),
            ("binary", result.binary),
            ("size", show_bytes(result.size_bytes)),
            ("alone", show_bytes(result.separate_bytes)),
            ("saved", show_bytes(max(0, result.saved_bytes))),
            ("graphs", ", ".join(g for m in result.models for g in m.graphs)),
            ("SoC", result.models[0].soc_model),
            ("time", f"{result.seconds:.1f} s"),
        ],
    )
