# SPDX-License-Identifier: Apache-2.0
"""Compile an ONNX model to a context binary and its wrapper, all of it on the HTP, or say why not.

The work is done by a child process per model (see compile_child.py); this side needs neither onnx
nor onnxruntime. Nothing appears under the final names until everything is there.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    DeadlineExpired,
    InvalidRequest,
    NotAllowed,
    NotFound,
    all_error_types,
)

from .compile_refusals import plain_log
from .problems import one_line
from .temporary import temporary_directory

DEFAULT_SOC_MODEL = 60
#: The stage in which the files get their names, the last one.
INSTALLING = "writing"
#: Characters of a dead compiler's log that its error quotes.
_LOG_TAIL_LENGTH = 2000

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledTensor:
    """An input or output of the compiled model, as its wrapper declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CompileResult:
    """What a compilation made.

    Attributes:
        wrapper: the ONNX file to load.
        binary: the context binary beside it; None when it is embedded in the wrapper.
        seconds: wall time, process start included.
        size_bytes: of the context binary.
        graphs: names of the QNN graphs in it.
        precision: "fp16", "quantised" (as the model says) or "as written".
        node_count: of the source model.
        soc_model: the SoC it is for.
        sdk_version: of the QNN SDK that compiled it.
        versions: of the packages that took part.
    """

    wrapper: Path
    binary: Path | None
    seconds: float
    size_bytes: int
    graphs: tuple[str, ...]
    inputs: tuple[CompiledTensor, ...]
    outputs: tuple[CompiledTensor, ...]
    precision: str
    node_count: int
    soc_model: int
    sdk_version: str
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The same in types that JSON knows."""
        content = dataclasses.asdict(self)
        content["wrapper"] = str(self.wrapper)
        content["binary"] = None if self.binary is None else str(self.binary)
        return content


def default_output(source: Path) -> Path:
    """`model.onnx` compiles to `model_ctx.onnx` beside it."""
    return source.with_name(f"{source.stem}_ctx.onnx")


def compile_model(
    source: Path,
    output: Path,
    *,
    fp16: bool | None = None,
    soc_model: int = DEFAULT_SOC_MODEL,
    embed: bool = False,
    progress: Progress | None = None,
    timeout: float | None = None,
) -> CompileResult:
    """Compile the ONNX model `source` for the HTP; the wrapper goes to `output`.

    The context binary is written beside the wrapper as `<stem>_qnn.bin`, unless `embed`. Both are
    made in a temporary directory beside `output` and renamed into place. On any failure, and on
    KeyboardInterrupt, nothing is left behind and an existing output is as it was.

    Args:
        source: an ONNX file with static shapes; external data beside it is found.
        output: path of the wrapper, ending in `.onnx`.
        fp16: compute in 16-bit floats; None means: if the model is not quantised.
        soc_model: the SoC, by Qualcomm's number. One broker loads binaries of one kind only.
        embed: put the context binary inside the wrapper.
        progress: called with a few words at each stage, in the calling thread.
        timeout: seconds until the attempt is given up.

    Raises:
        Unsupported: the model does not run on the HTP as a whole. `ids["refusal"]` says which way:
            "operators" (`ids["operators"]`, `ids["nodes"]` name them), "compose" or "finalize".
        InvalidRequest: not an ONNX model, compiled already, dynamic shapes, or a bad argument.
        NotFound: the model, its external data or the output's directory is missing.
        NotAllowed: a file or directory that this user may not use.
        DeadlineExpired: `timeout` went by.
        BackendError: the compiler failed or crashed.
    """
    source, output = Path(source).absolute(), Path(output).absolute()
    _check_arguments(source, output, soc_model)
    started = time.monotonic()
    deadline = None if timeout is None else started + timeout
    with work_directory(output) as work:
        job = {
            "source": str(source),
            "wrapper": str(work / output.name),
            "log": str(work / "log"),
            "fp16": fp16,
            "soc_model": soc_model,
            "embed": embed,
        }
        report = run_child(job, source.name, progress, deadline)
        binary_name = report["binary"]
        if progress is not None:
            progress(INSTALLING)
        _install(work, output, binary_name)
    return CompileResult(
        wrapper=output,
        binary=None if binary_name is None else output.with_name(binary_name),
        seconds=time.monotonic() - started,
        size_bytes=report["size_bytes"],
        graphs=tuple(report["graphs"]),
        inputs=compiled_tensors(report["inputs"]),
        outputs=compiled_tensors(report["outputs"]),
        precision=report["precision"],
        node_count=report["node_count"],
        soc_model=soc_model,
        sdk_version=report["sdk_version"],
        versions={name: report[name] for name in ("onnxruntime", "onnxruntime_qnn")},
    )


def _check_arguments(source: Path, output: Path, soc_model: int) -> None:
    if output.suffix != ".onnx":
        raise InvalidRequest(f"the output is a wrapper named *.onnx, not '{output.name}'")
    if output.is_dir():
        raise InvalidRequest(f"the output '{output}' is a directory; name a file in it")
    if not output.parent.is_dir():
        raise NotFound(
            f"there is no directory '{output.parent}' for the output", reason="FILE_MISSING"
        )
    if not source.exists():
        raise NotFound(f"there is no file '{source}'", reason="FILE_MISSING", path=source)
    if output.exists() and output.samefile(source):
        raise InvalidRequest(f"the output would overwrite the model '{source}'")
    if soc_model <= 0:
        raise InvalidRequest(f"a SoC model is a positive number, not {soc_model}")


@contextlib.contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """A temporary directory beside `output`, from which results are renamed into place."""
    with contextlib.ExitStack() as stack:
        folder = temporary_directory(f".{output.stem}.", ".compiling", output.parent)
        try:
            work = stack.enter_context(folder)
        except PermissionError as exc:
            raise NotAllowed(
                f"this user may not write to '{output.parent}'", reason="FILE_UNREADABLE"
            ) from exc
        yield work


def run_child(
    job: dict[str, Any],
    model: str,
    progress: Progress | None,
    deadline: float | None,
    module: str = "qnnbroker.cli.compile_child",
) -> dict[str, Any]:
    """The child's report. Whatever happens, the child is gone when this returns."""
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            # -P: a file of the current directory must not stand in for a package.
            [sys.executable, "-P", "-m", module, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_fd,),
            cwd=Path(job["log"]).parent,
            # Ctrl-C is for this process, which ends the child.
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    with child, open(read_fd, "rb", buffering=0) as pipe:
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died; its end is reported below
                child.stdin.write(json.dumps(job).encode() + b"\n")
                child.stdin.flush()
            return _follow(child, pipe.fileno(), job, model, progress, deadline)
        finally:
            child.kill()


def _follow(
    child: subprocess.Popen[bytes],
    fd: int,
    job: dict[str, Any],
    model: str,
    progress: Progress | None,
    deadline: float | None,
) -> dict[str, Any]:
    stage, refused = "starting", None
    for line in _lines(fd, model, deadline):
        event = json.loads(line)
        if "stage" in event:
            stage = event["stage"]
            if progress is not None:
                progress(stage)
        elif "refused" in event:
            refused = _rebuilt(event["refused"])
        elif "error" in event:
            raise _rebuilt(event["error"])
        else:
            result: dict[str, Any] = event["result"]
            return result
    if refused is not None:
        raise refused
    code = child.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    with contextlib.suppress(OSError):
        log = plain_log(Path(job["log"]).read_text(errors="replace"))
        tail = one_line(log[-_LOG_TAIL_LENGTH:])
        how += f"; its last words: {tail}" if tail else ""
    raise BackendError(
        f"the process compiling '{model}' {how} (while {stage})", reason="INTERNAL", stage=stage
    )


def _lines(fd: int, model: str, deadline: float | None) -> Iterator[bytes]:
    """Lines from the pipe until its end, or DeadlineExpired."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or not selector.select(left):
                raise DeadlineExpired(
                    f"compiling '{model}' took longer than allowed and was given up",
                    reason="RUNNING",
                )
            data = os.read(fd, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines


def _rebuilt(described: dict[str, Any]) -> BrokerError:
    types = {cls.__name__: cls for cls in all_error_types()}
    # Messages quote libraries, which write many lines.
    message = one_line(described["message"])
    return types[described["type"]](message, reason=described["reason"], **described["ids"])


def _install(work: Path, output: Path, binary_name: str | None) -> None:
    """Rename the binary, then the wrapper that names it; put an older binary back if that fails."""
    if binary_name is None:
        os.replace(work / output.name, output)
        return
    binary, older = output.with_name(binary_name), work / "older"
    with contextlib.suppress(FileNotFoundError):
        os.link(binary, older)
    try:
        os.replace(work / binary_name, binary)
        os.replace(work / output.name, output)
    except BaseException:
        if older.exists():
            os.replace(older, binary)
        else:
            binary.unlink(missing_ok=True)
        raise


def compiled_tensors(described: list[dict[str, Any]]) -> tuple[CompiledTensor, ...]:
    """Tensors as the child described them."""
    return tuple(CompiledTensor(d["name"], d["dtype"], tuple(d["shape"])) for d in described)
