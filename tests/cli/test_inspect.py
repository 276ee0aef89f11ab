# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker inspect`: wrappers and binaries, real and fake, whole and damaged; no broker."""

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.cli.driver import CommandLine, interrupt
from tests.fake_models import MakeModel, adder, quantised
from tests.tiny_wrappers import compile_wrapper, ep_node, model_of
from tests.waiting import wait_exit, wait_until

from qnnbroker.cli import inspection
from qnnbroker.cli.inspection import inspect_file
from qnnbroker.cli.problems import FAILED, Failure
from qnnbroker.native.fake import FakeGraph, FakeTensor, binary_bytes
from qnnbroker.protos.errors import DeadlineExpired, InvalidRequest


def fake_graph(name: str = "part_0") -> FakeGraph:
    """The graph that `ep_node` stands for."""
    return FakeGraph(
        name,
        (FakeTensor("x", "float32", (1, 2)),),
        (FakeTensor("y", "float16", (1, 2)),),
        weight_bytes=1000,
        spill_fill_bytes=2000,
        vtcm_bytes=1 << 20,
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_binary_is_described(cli: CommandLine, make_model: MakeModel) -> None:
    path = make_model("m", adder(), quantised(), arch=73, soc=43, build_id="v9.9")
    document = cli("inspect", path, "--json").document()
    assert (document["kind"], document["wrapper"], document["problem"]) == ("binary", None, None)
    assert document["file"]["sha256"] == sha256(path)
    binary = document["binary"]
    assert (binary["dsp_arch"], binary["soc_model"], binary["build_id"]) == (73, 43, "v9.9")
    add, quantised_graph = binary["graphs"]
    assert [(t["name"], t["dtype"], t["shape"]) for t in add["inputs"]] == [
        ("a", "float32", [4, 8]),
        ("b", "float32", [4, 8]),
    ]
    assert quantised_graph["inputs"][0]["quantization"]["scales"] == [0.5]
    text = cli("inspect", path).ok()
    for part in ("context binary", "SoC 43", "arch v73", "v9.9", "graph add", "VTCM"):
        assert part in text


def test_a_wrapper_and_the_binary_beside_it_are_described(cli: CommandLine, tmp_path: Path) -> None:
    binary = tmp_path / "model_qnn.bin"
    binary.write_bytes(binary_bytes([fake_graph()], soc=60))
    wrapper = tmp_path / "model.onnx"
    wrapper.write_bytes(model_of(ep_node()))
    document = cli("inspect", wrapper, "--json").document()
    assert (document["kind"], document["problem"]) == ("wrapper", None)
    assert document["file"]["sha256"] == sha256(wrapper)
    assert document["binary"]["sha256"] == sha256(binary)
    assert document["binary"]["embedded"] is False
    assert document["wrapper"]["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": [1, "batch", ""]}
    ]
    (graph,) = document["binary"]["graphs"]
    assert graph["inputs"][0]["offered_as"] == "x"
    assert (graph["weight_bytes"], graph["spill_fill_bytes"]) == (1000, 2000)
    assert "EPContext wrapper" in cli("inspect", wrapper).ok()


def test_an_embedded_binary_is_described_where_it_lies(cli: CommandLine, tmp_path: Path) -> None:
    data = binary_bytes([fake_graph()])
    wrapper = tmp_path / "model.onnx"
    wrapper.write_bytes(model_of(ep_node(embed_mode=1, ep_cache_context=data)))
    binary = cli("inspect", wrapper, "--json").document()["binary"]
    assert (binary["embedded"], binary["size_bytes"]) == (True, len(data))
    assert binary["sha256"] == hashlib.sha256(data).hexdigest()
    assert wrapper.read_bytes()[binary["offset"] :].startswith(data)
    assert "embedded" in cli("inspect", wrapper).ok()


@pytest.mark.qnn
@pytest.mark.parametrize("embed", [0, 1])
def test_a_real_wrapper_is_described_with_what_it_was_compiled_for(
    cli: CommandLine, tmp_path: Path, embed: int
) -> None:
    wrapper = compile_wrapper("add", embed, tmp_path / "add_ctx.onnx")
    document = cli("inspect", wrapper, "--json").document()
    binary = document["binary"]
    assert (binary["soc_model"], binary["backend_id"]) == (60, 6)
    assert binary["dsp_arch"] > 0
    assert binary["build_id"].startswith("v")
    assert ":60:" in document["wrapper"]["compatibility"]["QNNExecutionProvider"]
    (graph,) = binary["graphs"]
    assert [t["offered_as"] for t in (*graph["inputs"], *graph["outputs"])] == ["a", "b", "c"]
    assert document["problem"] is None
    assert "compatibility QNNExecutionProvider" in cli("inspect", wrapper).ok()


@pytest.mark.qnn
def test_a_model_of_which_a_part_runs_on_the_cpu_has_a_problem(
    cli: CommandLine, tmp_path: Path
) -> None:
    wrapper = compile_wrapper("parts", 0, tmp_path / "parts_ctx.onnx")
    document = cli("inspect", wrapper, "--json").document()
    assert "Erf" in document["problem"]
    assert document["wrapper"]["other_operators"] == [{"type": "Erf", "name": "middle"}]
    assert "would refuse" in cli("inspect", wrapper).ok()


@pytest.mark.qnn
def test_real_binaries_that_are_damaged_are_refused_whatever_the_library_does(
    cli: CommandLine, tmp_path: Path
) -> None:
    compile_wrapper("add", 0, tmp_path / "add_ctx.onnx")
    (binary,) = tmp_path.glob("*.bin")
    whole = binary.read_bytes()
    noise = random.Random(1)
    bad = tmp_path / "bad.bin"
    for data in (
        whole[:100],
        whole[: len(whole) // 2],
        whole[:-4096],
        whole[:4] + b"\xff" * 200 + whole[204:],
        whole[:64] + noise.randbytes(len(whole) - 64),
    ):
        bad.write_bytes(data)
        ended = cli("inspect", bad, "--json")
        if ended.code:  # damage that the description does not show is no business of ours
            assert ended.error(FAILED)["reason"] in ("BAD_FILE", "CRASHED")
    bad.write_bytes(whole[:100])
    assert "bad.bin" in cli("inspect", bad).failed(FAILED)


def test_a_plain_model_is_told_to_be_compiled(cli: CommandLine, tmp_path: Path) -> None:
    from tests.tiny_wrappers import add

    (tmp_path / "add.onnx").write_bytes(add().SerializeToString())
    message = cli("inspect", "add.onnx").failed(FAILED)
    assert "qnnbroker compile" in message
    assert "not compiled" in message


def test_a_missing_binary_is_named(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model_of(ep_node()))
    error = cli("inspect", "m.onnx", "--json").error(FAILED)
    assert error["reason"] == "FILE_MISSING"
    assert "'model_qnn.bin'" in error["message"]
    (tmp_path / "out.onnx").write_bytes(model_of(ep_node(ep_cache_context="../up.bin")))
    assert "'../up.bin'" in cli("inspect", "out.onnx").failed(FAILED)


def test_a_wrapper_of_another_provider_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model_of(ep_node(source="OpenVINOExecutionProvider")))
    assert "OpenVINOExecutionProvider" in cli("inspect", "m.onnx").failed(FAILED)


def test_wrapper_and_binary_that_do_not_belong_together_have_a_problem(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model_of(ep_node()))
    (tmp_path / "model_qnn.bin").write_bytes(binary_bytes([fake_graph("another")]))
    found = inspect_file(tmp_path / "m.onnx")
    assert "do not belong together" in found["problem"]
    (tmp_path / "model_qnn.bin").write_bytes(binary_bytes([adder("part_0")]))
    assert "no edge for tensor 'a'" in inspect_file(tmp_path / "m.onnx")["problem"]


@pytest.mark.parametrize(("how", "name"), [("segv", "SIGSEGV"), ("abort", "SIGABRT")])
def test_a_crash_of_the_library_is_one_line_that_names_the_signal(
    cli: CommandLine, make_model: MakeModel, how: str, name: str
) -> None:
    env = {"QNNBROKER_FAKE": f"crash=systemContextGetBinaryInfo:1:{how}"}
    path = make_model()
    message = cli("inspect", path, env=dict(env)).failed(FAILED)
    assert name in message
    assert str(path) in message
    assert cli("inspect", path, "--json", env=dict(env)).error(FAILED)["reason"] == "CRASHED"


def test_a_library_that_hangs_is_given_up(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNBROKER_FAKE", "hang=systemContextGetBinaryInfo:1")
    monkeypatch.setattr(inspection, "PARSE_SECONDS", 1.0)
    with pytest.raises(DeadlineExpired, match="given up"):
        inspect_file(make_model())
    assert children() == []


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_ctrl_c_ends_the_parser_too(cli: CommandLine, make_model: MakeModel) -> None:
    env: dict[str, Any] = {"QNNBROKER_FAKE": "hang=systemContextGetBinaryInfo:1"}
    process = cli.start("inspect", make_model(), env=env)
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: listing.read_text().split(), "the parser runs")
    child = int(listing.read_text().split()[0])
    interrupt(process).failed(130)
    wait_exit(child, "the parser is gone")


def test_what_the_library_prints_does_not_reach_the_output(
    cli: CommandLine, make_model: MakeModel
) -> None:
    env: dict[str, Any] = {"QNNBROKER_FAKE": "noise=on"}
    assert cli("inspect", make_model(), "--json", env=env).document()["kind"] == "binary"


def test_without_the_server_extra_the_message_says_what_to_install(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "fake/onnxruntime_qnn").mkdir(parents=True)
    (tmp_path / "fake/onnxruntime_qnn/__init__.py").touch()
    (tmp_path / "m.bin").write_bytes((2).to_bytes(4, "big") + bytes(1000))
    error = cli("inspect", "m.bin", "--json", env={"PYTHONPATH": str(tmp_path / "fake")}).error(
        FAILED
    )
    assert error["reason"] == "NO_LIBRARY"
    assert "qnnbroker[server]" in error["message"]
    error = cli("inspect", "m.bin", "--json", "--qnn-lib-dir", "none").error(FAILED)
    assert "none" in error["message"]


def test_errors_are_typed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidRequest, match="neither a context binary nor an ONNX model"):
        inspect_file(tmp_path / "x")
    (tmp_path / "cut.onnx").write_bytes(model_of(ep_node())[:40])
    with pytest.raises(InvalidRequest, match="not a sound ONNX file"):
        inspect_file(tmp_path / "cut.onnx")
    (tmp_path / "like_a.bin").write_bytes((2).to_bytes(4, "big") + bytes(1000))
    with pytest.raises(Failure, match="needs the QNN libraries") as caught:
        inspect_file(tmp_path / "like_a.bin", qnn_lib_dir=str(tmp_path))
    assert caught.value.reason == "NO_LIBRARY"
