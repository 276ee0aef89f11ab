# SPDX-License-Identifier: Apache-2.0
"""Compile several ONNX models into one context binary, in which equal weights are stored once."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qnnbroker.protos.errors import InvalidRequest, NotFound

from .compiling import (
    DEFAULT_SOC_MODEL,
    INSTALLING,
    CompileResult,
    Progress,
    compiled_tensors,
    default_output,
    run_child,
    work_directory,
)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedResult:
    """What was made: a wrapper for each model, and the binary that all name.

    Attributes:
        models: of each model, in the order given; `size_bytes` is that of the common binary.
        separate_bytes: of the binaries that the models would have had alone.
    """

    models: tuple[CompileResult, ...]
    binary: Path
    size_bytes: int
    separate_bytes: int
    seconds: float

    @property
    def saved_bytes(self) -> int:
        """What sharing saves, on disk and on the device. Below 0 when nothing was equal."""
        return self.separate_bytes - self.size_bytes

    def as_json(self) -> dict[str, Any]:
        """The same in types that JSON knows."""
        return {
            "wrappers": [str(model.wrapper) for model in self.models],
            "binary": str(self.binary),
            "size_bytes": self.size_bytes,
            "separate_bytes": self.separate_bytes,
            "saved_bytes": self.saved_bytes,
            "seconds": self.seconds,
            "models": [model.as_json() for model in self.models],
        }


def compile_shared(
    sources: Sequence[Path],
    directory: Path,
    *,
    fp16: bool | None = None,
    soc_model: int = DEFAULT_SOC_MODEL,
    progress: Progress | None = None,
    timeout: float | None = None,
) -> SharedResult:
    """Compiles the models; the files go to `directory`, `x.onnx` to `x_ctx.onnx`.

    The binary has the name of the first model. On any failure nothing is left behind and existing
    files are as they were. Each model is compiled twice: alone, to know what sharing saves.

    Raises:
        InvalidRequest: fewer than two models, or two of one name.
        NotFound: a model or the directory is missing.
        BrokerError: see `compile_model`.
    """
    sources = [Path(s).absolute() for s in sources]
    directory = Path(directory).absolute()
    outputs = [directory / default_output(s).name for s in sources]
    if len(sources) < 2:
        raise InvalidRequest(f"weights are shared by at least two models, found {len(sources)}")
    if len(set(outputs)) != len(outputs):
        raise InvalidRequest(
            f"models that share weights need different names, found {[s.name for s in sources]}"
        )
    if not directory.is_dir():
        raise NotFound(f"there is no directory {str(directory)!r}", reason="FILE_MISSING")
    for source in sources:
        if not source.exists():
            raise NotFound(f"there is no file '{source}'", reason="FILE_MISSING", path=source)
    started = time.monotonic()
    deadline = None if timeout is None else started + timeout
    with work_directory(outputs[0]) as work:
        job = {
            "models": [(str(s), o.name) for s, o in zip(sources, outputs, strict=True)],
            "directory": str(work),
            "log": str(work / "log"),
            "fp16": fp16,
            "soc_model": soc_model,
        }
        names = ", ".join(s.name for s in sources)
        report = run_child(job, names, progress, deadline, "qnnbroker.cli.compile_share_child")
        binary = report["models"][0]["binary"]
        if progress is not None:
            progress(INSTALLING)
        install_all(work, directory, [binary, *(o.name for o in outputs)])
    seconds = time.monotonic() - started
    return SharedResult(
        models=tuple(
            CompileResult(
                wrapper=output,
                binary=directory / binary,
                seconds=seconds,
                size_bytes=model["size_bytes"],
                graphs=tuple(model["graphs"]),
                inputs=compiled_tensors(model["inputs"]),
                outputs=compiled_tensors(model["outputs"]),
                precision=model["precision"],
                node_count=model["node_count"],
                soc_model=soc_model,
                sdk_version=model["sdk_version"],
                versions={n: model[n] for n in ("onnxruntime", "onnxruntime_qnn")},
            )
            for model, output in zip(report["models"], outputs, strict=True)
        ),
        binary=directory / binary,
        size_bytes=report["models"][0]["size_bytes"],
        separate_bytes=report["separate_bytes"],
        seconds=seconds,
    )


def install_all(work: Path, directory: Path, names: Sequence[str]) -> None:
    """Renames the files into place, in that order; if one fails, all are as they were."""
    done: list[str] = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.link(directory / name, work / f"older-{name}")
    try:
        for name in names:
            os.replace(work / name, directory / name)
            done.append(name)
    except BaseException:
        for name in done:
            older = work / f"older-{name}"
            if older.exists():
                os.replace(older, directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
        raise
