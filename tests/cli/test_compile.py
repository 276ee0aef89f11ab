# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker compile` and the manifest beside its output."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.cli.driver import CommandLine, interrupt
from tests.tiny_wrappers import add
from tests.waiting import wait_until

from qnnbroker.cli.compile import SOC_MODEL
from qnnbroker.cli.compiling import DEFAULT_SOC_MODEL
from qnnbroker.cli.manifest import manifest_path
from qnnbroker.cli.problems import FAILED, USAGE

pytestmark = pytest.mark.qnn


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "ein Modell ü.onnx"
    path.write_bytes(add().SerializeToString())
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_wrapper_binary_and_manifest_are_written(cli: CommandLine, source: Path) -> None:
    document = cli("compile", source, "--json").document()
    wrapper, binary = Path(document["wrapper"]), Path(document["binary"])
    assert wrapper == source.with_name("ein Modell ü_ctx.onnx")
    assert Path(document["manifest"]) == manifest_path(wrapper)
    manifest = json.loads(manifest_path(wrapper).read_text())
    assert manifest["format"] == 1
    assert manifest["source"]["sha256"] == sha256(source)
    assert manifest["wrapper"]["sha256"] == sha256(wrapper)
    assert (manifest["binary"]["name"], manifest["binary"]["sha256"]) == (
        binary.name,
        sha256(binary),
    )
    assert (manifest["soc_model"], manifest["binary"]["embedded"]) == (60, False)
    assert manifest["dsp_arch"] > 0
    assert manifest["sdk_build_id"] == document["sdk_version"]
    assert manifest["options"] == {"fp16": None, "soc_model": 60, "embed": False}
    (graph,) = manifest["graphs"]
    assert [t["name"] for t in graph["inputs"]] == ["a", "b"]
    assert sorted(os.listdir(source.parent)) == sorted(
        [source.name, wrapper.name, binary.name, manifest_path(wrapper).name]
    )


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_is_asked_for_when_the_files_have_their_names_waits_for_the_manifest(
    source: Path, number: signal.Signals, share: bool
) -> None:
    script = (
        "import os, sys\n"
        "from qnnbroker.cli import main, manifest\n"
        "real = manifest.make_manifest\n"
        "number = int(sys.argv.pop())\n"
        "def make(*arguments):\n"
        "    os.kill(os.getpid(), number)\n"
        "    return real(*arguments)\n"
        "manifest.make_manifest = make\n"
        "main.main()\n"
    )
    models, options = [source], []
    if share:
        options.append("--share-weights")
        models.append(source.with_name("other.onnx"))
        models[1].write_bytes(source.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", script, "compile", *models, *options, str(int(number))],
        capture_output=True,
    )
    assert done.returncode == 128 + number, done.stderr
    for model in models:
        wrapper = model.with_name(f"{model.stem}_ctx.onnx")
        manifest = json.loads(manifest_path(wrapper).read_text())
        assert manifest["wrapper"]["sha256"] == sha256(wrapper)


def test_the_output_can_be_named_and_the_binary_embedded(cli: CommandLine, source: Path) -> None:
    (cli.home / "out").mkdir()
    text = cli("compile", source, "-o", "out/m.onnx", "--embed", "--no-fp16").ok()
    assert "inside the wrapper" in text
    assert sorted(os.listdir(cli.home / "out")) == ["m.manifest.json", "m.onnx"]
    manifest = json.loads((cli.home / "out/m.manifest.json").read_text())
    assert (manifest["binary"]["name"], manifest["binary"]["embedded"]) == (None, True)
    assert manifest["options"]["fp16"] is False


def test_what_was_compiled_runs_on_a_broker_over_the_real_library(
    cli: CommandLine, source: Path, serve: object
) -> None:
    from tests.cli.driver import finish

    compiled = cli("compile", source, "--json").document()["wrapper"]
    process = cli.start("serve")
    wait_until(lambda: cli("status").code == 0, "the broker is ready")
    a = np.arange(8, dtype=np.float32).reshape(1, 8)
    np.savez(cli.home / "in.npz", a=a, b=a)
    np.savez(cli.home / "good.npz", c=a + a)
    arguments = ["run", compiled, "--input", "in.npz", "--compare", "good.npz", "--json"]
    document = cli(*arguments, "--tolerance", "0.01").document()
    assert document["equal"] is True
    assert cli("status", "--json").document()["backend"]["name"] == "qnn"
    cli("stop").ok()
    assert finish(process).code == 0


def test_unsupported_operators_are_named_and_nothing_is_left(cli: CommandLine) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Erf", ["x"], ["y"], name="curve")],
        "g",
        [value("x", TensorProto.FLOAT, [2, 3])],
        [value("y", TensorProto.FLOAT, [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, cli.home / "erf.onnx")
    ended = cli("compile", "erf.onnx")
    assert "Erf 'curve'" in ended.failed(FAILED)
    assert [line.split() for line in ended.out.splitlines()[1:]] == [
        ["operator", "Erf"],
        ["node", "curve"],
    ]
    error = cli("compile", "erf.onnx", "--json").error(FAILED)
    assert (error["type"], error["ids"]["operators"]) == ("Unsupported", "Erf")
    assert os.listdir(cli.home) == ["erf.onnx"]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["none.onnx"], FAILED, "none.onnx"),
        (["."], FAILED, "directory"),
        (["empty.onnx"], FAILED, "empty.onnx"),
        (["text.onnx"], FAILED, "text.onnx"),
        (["fine.onnx", "-o", "out.bin"], FAILED, "out.bin"),
        (["fine.onnx", "-o", "none/out.onnx"], FAILED, "none"),
        (["fine.onnx", "-o", "fine.onnx"], FAILED, "overwrite"),
        (["fine.onnx", "--soc-model", "0"], USAGE, "--soc-model"),
        (["fine.onnx", "--soc-model", "x"], USAGE, "--soc-model"),
        ([], USAGE, "MODEL"),
    ],
)
def test_bad_arguments_and_files_are_one_line(
    cli: CommandLine, arguments: list[str], code: int, part: str
) -> None:
    (cli.home / "empty.onnx").touch()
    (cli.home / "text.onnx").write_text("no model\n")
    (cli.home / "fine.onnx").write_bytes(add().SerializeToString())
    before = sorted(os.listdir(cli.home))
    assert part in cli("compile", *arguments).failed(code)
    cli("compile", *arguments, "--json").error(code)
    assert sorted(os.listdir(cli.home)) == before


def test_ctrl_c_leaves_nothing_behind(cli: CommandLine, source: Path) -> None:
    process = cli.start("compile", source)
    wait_until(lambda: len(os.listdir(source.parent)) > 1, "the compilation is under way")
    interrupt(process).failed(130)
    assert os.listdir(source.parent) == [source.name]


def test_the_default_chip_is_that_of_the_pipeline() -> None:
    assert SOC_MODEL == DEFAULT_SOC_MODEL
