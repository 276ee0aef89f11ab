# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker compile --share-weights`: one binary for several models, equal weights once."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.cli.driver import CommandLine
from tests.tiny_wrappers import parts

from qnnbroker.broker.epcontext import read_wrapper
from qnnbroker.broker.manifest import parse
from qnnbroker.cli.problems import FAILED, USAGE

pytestmark = pytest.mark.qnn

WEIGHTS = 256 * 256 * 2  # in 16-bit floats


def matmul(path: Path, seed: int, rows: int) -> Path:
    weights = np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float32)

    def rows_of(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 256])

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        path.stem,
        [rows_of("x")],
        [rows_of("y")],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def test_equal_weights_are_stored_once_and_each_model_has_its_wrapper(
    cli: CommandLine, tmp_path: Path
) -> None:
    a, b = matmul(tmp_path / "a.onnx", 1, 1), matmul(tmp_path / "b.onnx", 1, 2)
    out = tmp_path / "out"
    document = cli("compile", a, b, "--share-weights", "-o", f"{out}/", "--json").document()
    assert sorted(os.listdir(out)) == [
        "a_ctx.manifest.json",
        "a_ctx.onnx",
        "a_ctx_qnn.bin",
        "b_ctx.manifest.json",
        "b_ctx.onnx",
    ]
    binary = out / "a_ctx_qnn.bin"
    assert document["binary"] == str(binary)
    assert document["size_bytes"] == binary.stat().st_size
    assert document["saved_bytes"] == document["separate_bytes"] - document["size_bytes"]
    assert WEIGHTS * 0.9 < document["saved_bytes"] < WEIGHTS * 1.5
    chosen = set()
    for name in ("a", "b"):
        (node,) = read_wrapper((out / f"{name}_ctx.onnx").read_bytes()).nodes
        assert (node.main_context, node.cache_context) == (True, "a_ctx_qnn.bin")
        chosen.add(node.partition_name)
        manifest = out / f"{name}_ctx.manifest.json"
        assert parse(manifest.name, manifest.read_bytes()).binary_name == "a_ctx_qnn.bin"
    graphs = cli("inspect", binary, "--json").document()["binary"]["graphs"]
    assert {g["name"] for g in graphs} == chosen
    assert all(g["shared_weight_bytes"] >= WEIGHTS for g in graphs)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a.onnx", "--share-weights"], "at least two models, found 1"),
        (["a.onnx", "b.onnx"], "with --share-weights only"),
        (["a.onnx", "b.onnx", "--share-weights", "--embed"], "--embed"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    cli: CommandLine, tmp_path: Path, arguments: list[str], says: str
) -> None:
    for name in ("a", "b"):
        matmul(tmp_path / f"{name}.onnx", 1, 1)
    assert says in cli("compile", *arguments, cwd=tmp_path).failed(USAGE)


def test_a_model_that_does_not_run_there_is_named_and_nothing_is_left(
    cli: CommandLine, tmp_path: Path
) -> None:
    good, bad = matmul(tmp_path / "good.onnx", 1, 1), tmp_path / "bad.onnx"
    bad.write_bytes(parts().SerializeToString())
    before = sorted(os.listdir(tmp_path))
    error = cli("compile", good, bad, "--share-weights", "--json").error(FAILED)
    assert "bad.onnx" in error["message"]
    assert "Erf" in error["message"]
    assert sorted(os.listdir(tmp_path)) == before
