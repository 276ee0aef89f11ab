# SPDX-License-Identifier: Apache-2.0
"""Real compiled models for the benchmarks, made once per machine and kept."""

import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from . import graphs
from .processes import Child
from .rows import MissingPart, Mode

_CACHE_ENV = "QNNBROKER_BENCH_CACHE"
_TOOLS = ("onnx", "onnxruntime", "onnxruntime-qnn")


@dataclass(frozen=True)
class RealModel:
    """A compiled model: the wrapper that ONNX Runtime loads, and the context binary beside it."""

    wrapper: Path

    @property
    def binary(self) -> Path:
        return self.wrapper.with_name(f"{self.wrapper.stem}_qnn.bin")

    @property
    def label(self) -> str:
        """What it is called in rows: by the size of its context binary."""
        size = self.binary.stat().st_size / 1e6
        return f"{size:.{0 if size >= 10 else 1}f} MB context"


def graph(name: str) -> RealModel:
    """A model of `graphs`, compiled by `qnnbroker compile` on first use.

    Raises:
        MissingPart: what compiling needs is not installed.
        RuntimeError: it failed.
    """
    check_server_parts()
    digest = hashlib.sha256(Path(graphs.__file__).read_bytes())
    digest.update(repr([(tool, version(tool)) for tool in _TOOLS]).encode())
    folder = _cache() / f"{name}-{digest.hexdigest()[:12]}"
    wrapper = folder / f"{name}_ctx.onnx"
    if not wrapper.is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            source, made = Path(work) / f"{name}.onnx", Path(work) / "made"
            made.mkdir()
            with Child() as child:
                child.ask("graphs:write", name=name, path=str(source))
            command = [sys.executable, "-P", "-m", "qnnbroker.cli.main", "compile", str(source)]
            command += ["--output", str(made / wrapper.name)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"compiling {name!r} failed: {done.stderr.strip()[-500:]}")
            try:
                made.rename(folder)
            except OSError:
                if not wrapper.is_file():  # else somebody was faster
                    raise
    return RealModel(wrapper)


def small(mode: Mode) -> RealModel:
    """A small context: a network for speech of 0.8 MB; a tiny one for the smoke mode."""
    return graph("cnn") if mode is Mode.SMOKE else zoo_model("silero_vad")


def large(mode: Mode) -> RealModel:
    """A large context: 61 million weights, 122 MB; a tiny one for the smoke mode."""
    return graph("dense") if mode is Mode.SMOKE else zoo_model("light_alexnet")


def zoo_model(name: str) -> RealModel:
    """A model of the zoo (`examples/zoo` of the source tree), made on first use.

    Raises:
        MissingPart: the source tree is not there, or what the model is made from cannot be had.
    """
    check_server_parts()
    spec = importlib.util.find_spec("zoo")
    if spec is None or spec.origin is None:  # a directory of that name is not it
        examples = Path(__file__).parents[3] / "examples"
        if not (examples / "zoo").is_dir():
            raise MissingPart(
                f"the model {name!r} is made by examples/zoo of qnnbroker's source tree, which is "
                "not here: run this from a checkout, or put its `examples` on PYTHONPATH"
            )
        sys.path.insert(0, str(examples))
    zoo = importlib.import_module("zoo")
    try:
        wrapper: Path = zoo.compiled(name)
    except zoo.ZooError as error:
        raise MissingPart(f"the model {name!r} cannot be made here: {error}") from error
    return RealModel(wrapper)


def check_server_parts() -> None:
    """Refuses a machine that can neither compile nor run models without a broker.

    Raises:
        MissingPart
    """
    for package in _TOOLS:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise MissingPart(
                f"this needs the package {package}, which is not installed: "
                "pip install 'qnnbroker[server]'"
            )


def _cache() -> Path:
    configured = os.environ.get(_CACHE_ENV)
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qnnbroker" / "benchmarks"
