# SPDX-License-Identifier: Apache-2.0
"""Compiling: what comes out, what is refused and in which words, and that nothing stays behind."""

import _thread
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qnnbroker.broker.epcontext import read_wrapper
from qnnbroker.cli.compiling import CompileResult, compile_model, default_output
from qnnbroker.protos.errors import (
    BackendError,
    DeadlineExpired,
    InvalidRequest,
    NotFound,
    Unsupported,
)

pytestmark = pytest.mark.qnn

Shape = list[int | str | None] | None


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    shapes: dict[str, Shape],
    outputs: list[str],
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    elem_type: int = TensorProto.FLOAT,
) -> Path:
    """A model with the given inputs; output shapes are left to inference."""
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(n, elem_type, s) for n, s in shapes.items()],
        [helper.make_tensor_value_info(n, elem_type, None) for n in outputs],
        [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


WEIGHT = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def linear(path: Path, shape: Shape | None = None) -> Path:
    """A matrix product and a Relu: all of it runs on the HTP."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Relu", ["y"], ["z"], name="relu"),
    ]
    return write(path, nodes, {"x": shape or [1, 8]}, ["z"], {"w": WEIGHT})


def with_erf(path: Path) -> Path:
    """Erf is not on the HTP; what is around it is."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Erf", ["y"], ["e"], name="the error function"),
        helper.make_node("Relu", ["e"], ["z"], name="relu"),
    ]
    return write(path, nodes, {"x": [1, 8]}, ["z"], {"w": WEIGHT})


def without_end(path: Path) -> Path:
    """A product so large that compiling takes minutes: to be interrupted."""
    node = helper.make_node("MatMul", ["x", "y"], ["z"], name="huge")
    return write(path, [node], {"x": [1, 1, 40000, 64], "y": [1, 1, 64, 40000]}, ["z"])


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def check_wrapper(result: CompileResult) -> None:
    wrapper = read_wrapper(result.wrapper.read_bytes())
    assert [node.partition_name for node in wrapper.nodes] == list(result.graphs)


def test_a_float_model_becomes_a_wrapper_with_its_binary_beside_it(tmp_path: Path) -> None:
    stages: list[str] = []
    source = linear(tmp_path / "linear.onnx")
    result = compile_model(source, default_output(source), progress=stages.append)
    assert result.wrapper == tmp_path / "linear_ctx.onnx"
    assert result.binary == tmp_path / "linear_ctx_qnn.bin"
    assert names_in(tmp_path) == {"linear.onnx", "linear_ctx.onnx", "linear_ctx_qnn.bin"}
    assert result.size_bytes == result.binary.stat().st_size > 0
    assert result.precision == "fp16"
    assert [(t.name, t.dtype, t.shape) for t in result.inputs] == [("x", "float", (1, 8))]
    assert [(t.name, t.dtype, t.shape) for t in result.outputs] == [("z", "float", (1, 8))]
    assert stages == ["checking", "compiling", "verifying", "writing"]
    node = onnx.load(result.wrapper).graph.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["ep_cache_context"] == b"linear_ctx_qnn.bin"
    check_wrapper(result)


def test_an_embedded_binary_makes_one_file(tmp_path: Path) -> None:
    source = linear(tmp_path / "linear.onnx")
    result = compile_model(source, tmp_path / "one.onnx", embed=True)
    assert result.binary is None
    assert names_in(tmp_path) == {"linear.onnx", "one.onnx"}
    assert 0 < result.size_bytes < result.wrapper.stat().st_size
    check_wrapper(result)


def test_a_quantised_model_is_compiled_as_it_is(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zp"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "zp"], ["xd"]),
        helper.make_node("Add", ["xd", "xd"], ["y"]),
        helper.make_node("QuantizeLinear", ["y", "s", "zp"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "s", "zp"], ["z"]),
    ]
    scale: dict[str, np.ndarray[Any, Any]] = {
        "s": np.array(0.05, np.float32),
        "zp": np.array(128, np.uint8),
    }
    source = write(tmp_path / "q.onnx", nodes, {"x": [1, 8]}, ["z"], scale)
    assert compile_model(source, tmp_path / "q_ctx.onnx").precision == "quantised"


def test_weights_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    source = linear(tmp_path / "plain.onnx")
    (tmp_path / "deep").mkdir()
    apart = tmp_path / "deep" / "apart.onnx"
    onnx.save(
        onnx.load(source), apart, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    result = compile_model(apart, tmp_path / "apart_ctx.onnx")
    assert result.size_bytes > 0
    (tmp_path / "deep" / "w.bin").unlink()
    with pytest.raises(NotFound, match=r"weight 'w' .* in the file 'w.bin'"):
        compile_model(apart, tmp_path / "again_ctx.onnx")


def test_compiling_again_replaces_both_files(tmp_path: Path) -> None:
    source, output = linear(tmp_path / "m.onnx"), tmp_path / "m_ctx.onnx"
    first = compile_model(source, output)
    assert first.binary is not None
    before = first.binary.read_bytes()
    linear(source, [4, 8])
    second = compile_model(source, output)
    assert second.inputs[0].shape == (4, 8)
    assert first.binary.read_bytes() != before
    check_wrapper(second)
    assert names_in(tmp_path) == {"m.onnx", "m_ctx.onnx", "m_ctx_qnn.bin"}


def test_unsupported_operators_are_named(tmp_path: Path) -> None:
    source = with_erf(tmp_path / "erf.onnx")
    with pytest.raises(Unsupported, match=r"1 of its 3 operators, Erf 'the error function'") as e:
        compile_model(source, tmp_path / "erf_ctx.onnx")
    assert e.value.ids == {
        "refusal": "operators",
        "operators": "Erf",
        "nodes": "the error function",
    }
    assert names_in(tmp_path) == {"erf.onnx"}


def test_a_model_of_unsupported_operators_only_is_refused_by_name(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "x"], ["z"], name="wide")
    source = write(
        tmp_path / "f64.onnx", [node], {"x": [1, 8]}, ["z"], elem_type=TensorProto.DOUBLE
    )
    with pytest.raises(Unsupported, match=r"1 of its 1 operator, Add 'wide' \(error 3110\)"):
        compile_model(source, tmp_path / "f64_ctx.onnx")


def test_a_function_that_was_taken_apart_does_not_hide_the_unsupported_operator(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("Erf", ["x"], ["e"], name="erf"),
        helper.make_node("Mish", ["e"], ["z"], name="mish"),
    ]
    source = write(tmp_path / "mish.onnx", nodes, {"x": [1, 8]}, ["z"])
    with pytest.raises(Unsupported, match="Erf 'erf'") as e:
        compile_model(source, tmp_path / "mish_ctx.onnx")
    assert e.value.ids["refusal"] == "operators"


def test_a_graph_that_cannot_be_composed_is_told_apart(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["z"], name="of nothing")
    source = write(tmp_path / "empty.onnx", [node], {"x": [2, 0]}, ["z"])
    with pytest.raises(Unsupported, match="being built, at Relu 'of nothing'") as e:
        compile_model(source, tmp_path / "empty_ctx.onnx")
    assert e.value.ids["refusal"] == "compose"


def test_a_graph_that_cannot_be_finalised_is_told_apart(tmp_path: Path) -> None:
    node = helper.make_node("Softmax", ["x"], ["z"], name="wide", axis=-1)
    source = write(tmp_path / "wide.onnx", [node], {"x": [1, 4_000_000]}, ["z"])
    with pytest.raises(Unsupported, match=r"finalised its graph \(.*1002\)") as e:
        compile_model(source, tmp_path / "wide_ctx.onnx")
    assert e.value.ids["refusal"] == "finalize"


def test_a_dynamic_shape_is_refused_by_tensor_and_dimension(tmp_path: Path) -> None:
    source = linear(tmp_path / "dynamic.onnx", ["batch", 8])
    with pytest.raises(InvalidRequest, match=r"dynamic dimensions: 'x' \[<batch>, 8\]") as e:
        compile_model(source, tmp_path / "dynamic_ctx.onnx")
    assert e.value.ids["tensors"] == "'x' [<batch>, 8]"


def test_a_compiled_model_is_not_compiled_again(tmp_path: Path) -> None:
    once = compile_model(linear(tmp_path / "m.onnx"), tmp_path / "m_ctx.onnx").wrapper
    with pytest.raises(InvalidRequest, match="compiled already"):
        compile_model(once, tmp_path / "twice.onnx")


@pytest.mark.parametrize("content", [b"", b"not a model at all", os.urandom(4096), b"\x08\x09"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(InvalidRequest, match="is not an ONNX model"):
        compile_model(tmp_path / "x.onnx", tmp_path / "x_ctx.onnx")


def test_wrong_paths_are_refused_before_any_work(tmp_path: Path) -> None:
    source = linear(tmp_path / "m.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(NotFound, match="there is no file"):
        compile_model(tmp_path / "missing.onnx", tmp_path / "o.onnx")
    with pytest.raises(NotFound, match="there is no directory"):
        compile_model(source, tmp_path / "missing" / "o.onnx")
    with pytest.raises(InvalidRequest, match="is a directory"):
        compile_model(tmp_path / "folder.onnx", tmp_path / "o.onnx")
    with pytest.raises(InvalidRequest, match="is a directory"):
        compile_model(source, tmp_path / "folder.onnx")
    with pytest.raises(InvalidRequest, match=r"named \*\.onnx"):
        compile_model(source, tmp_path / "o.bin")
    with pytest.raises(InvalidRequest, match="would overwrite the model"):
        compile_model(source, source)
    with pytest.raises(InvalidRequest, match="positive number"):
        compile_model(source, tmp_path / "o.onnx", soc_model=0)
    assert names_in(tmp_path) == {"m.onnx", "folder.onnx"}


def test_an_unknown_chip_is_not_reported_as_unsupported_operators(tmp_path: Path) -> None:
    source = linear(tmp_path / "m.onnx")
    with pytest.raises(InvalidRequest, match="cannot compile for SoC model 999"):
        compile_model(source, tmp_path / "o.onnx", soc_model=999)


def test_a_failure_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "m_ctx.onnx"
    compile_model(linear(tmp_path / "m.onnx"), output)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(Unsupported):
        compile_model(with_erf(tmp_path / "m2.onnx"), output)
    (tmp_path / "m2.onnx").unlink()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_wrapper_that_cannot_be_put_in_place_takes_the_binary_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "m_ctx.onnx"
    binary = compile_model(linear(tmp_path / "m.onnx"), output).binary
    assert binary is not None
    before = binary.read_bytes()
    linear(tmp_path / "m.onnx", [4, 8])
    replace = os.replace

    def refuse_the_wrapper(source: Path, target: Path) -> None:
        if target == output:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_the_wrapper)
    with pytest.raises(OSError, match="No space left"):
        compile_model(tmp_path / "m.onnx", output)
    assert binary.read_bytes() == before
    assert names_in(tmp_path) == {"m.onnx", "m_ctx.onnx", "m_ctx_qnn.bin"}


def test_an_attempt_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    source = without_end(tmp_path / "huge.onnx")
    with pytest.raises(DeadlineExpired, match="took longer than allowed"):
        compile_model(source, tmp_path / "huge_ctx.onnx", timeout=2)
    assert names_in(tmp_path) == {"huge.onnx"}


def children() -> set[int]:
    """Process ids of our children."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    source, before = without_end(tmp_path / "huge.onnx"), children()

    def interrupt(stage: str) -> None:
        if stage == "compiling":
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        compile_model(source, tmp_path / "huge_ctx.onnx", progress=interrupt, timeout=60)
    assert names_in(tmp_path) == {"huge.onnx"}
    assert children() == before


def test_a_compiler_that_dies_is_reported_with_its_end(tmp_path: Path) -> None:
    source, before = without_end(tmp_path / "huge.onnx"), children()

    def kill(stage: str) -> None:
        if stage == "compiling":
            (log,) = tmp_path.glob(".huge_ctx.*/log")
            with log.open("a") as file:
                file.write("\x1b[0;93mone warning\x1b[m\n\nand\tanother \x1b[2J\r\n")
            (child,) = children() - before
            os.kill(child, 9)

    with pytest.raises(BackendError, match="was killed by SIGKILL") as caught:
        compile_model(source, tmp_path / "huge_ctx.onnx", progress=kill, timeout=60)
    message = str(caught.value)
    assert "one warning and another" in message
    assert message.endswith("(while compiling)")
    # The log of libraries is many coloured lines; the message is one, whatever they wrote.
    assert message.isprintable()
    assert names_in(tmp_path) == {"huge.onnx"}


def test_the_compiler_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    source = without_end(tmp_path / "huge.onnx")
    # The child holds the write end of this pipe (inherited through the asking process), so its
    # end of file says that the child is gone too.
    read_fd, write_fd = os.pipe()
    code = (
        "import os, sys; from pathlib import Path\n"
        "from qnnbroker.cli import compiling\n"
        "real = compiling.subprocess.Popen\n"
        "def popen(*a, pass_fds, **k):\n"
        "    return real(*a, pass_fds=(*pass_fds, int(sys.argv[3])), **k)\n"
        "compiling.subprocess.Popen = popen\n"
        "stop = lambda stage: os.kill(os.getpid(), 9) if stage == 'compiling' else None\n"
        "compiling.compile_model(Path(sys.argv[1]), Path(sys.argv[2]), progress=stop)\n"
    )
    args = [str(source), str(tmp_path / "o.onnx"), str(write_fd)]
    asking = subprocess.run([sys.executable, "-c", code, *args], pass_fds=(write_fd,), timeout=60)
    os.close(write_fd)
    assert asking.returncode == -9
    with open(read_fd, "rb") as pipe:
        assert pipe.read() == b""
