# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker wrap`: wrappers that the broker and ONNX Runtime itself load."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.cli.driver import CommandLine
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder, mixed, quantised
from tests.native.qnn_models import compiled

from qnnbroker.broker.epcontext import check_fully_offloaded, names_for, read_wrapper
from qnnbroker.cli.problems import FAILED, USAGE
from qnnbroker.client import connect

_RUN = """
import json, os, sys
import numpy as np
from zoo.inprocess import InProcessSession
wrapper, feeds, answers = sys.argv[1:]
with np.load(feeds) as arrays:
    outputs = InProcessSession(wrapper).run({k: arrays[k] for k in arrays.files})
np.savez(answers, **outputs)
os._exit(0)
"""


def run_by_onnxruntime(wrapper: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime, in a process of its own, answers."""
    given, answers = wrapper.with_suffix(".in.npz"), wrapper.with_suffix(".out.npz")
    np.savez(given, allow_pickle=False, **feeds)
    command = [sys.executable, "-c", _RUN, str(wrapper), str(given), str(answers)]
    examples = Path(__file__).parents[2] / "examples"
    done = subprocess.run(command, cwd=examples, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(answers) as found:
        return {k: found[k] for k in found.files}


@pytest.mark.qnn
@pytest.mark.parametrize("name", ["dense", "conv_u8", "conv_u16"])
@pytest.mark.parametrize("embed", [False, True])
def test_onnxruntime_itself_runs_what_was_wrapped(
    cli: CommandLine, tmp_path: Path, name: str, embed: bool
) -> None:
    model = compiled(name)
    binary = tmp_path / "model.bin"
    binary.write_bytes(model.binary)
    document = cli("wrap", binary, "--json", *(["--embed"] if embed else [])).document()
    (wrapper,) = (Path(w["path"]) for w in document["wrappers"])
    assert wrapper.name == "model_ctx.onnx"
    if embed:
        binary.unlink()
    onnx.load(wrapper)
    found = run_by_onnxruntime(wrapper, model.inputs)
    for key, wanted in model.outputs.items():
        np.testing.assert_array_equal(found[key], wanted)


@pytest.mark.qnn
def test_each_graph_of_a_binary_gets_a_wrapper(cli: CommandLine, tmp_path: Path) -> None:
    binary = tmp_path / "split.bin"
    binary.write_bytes(compiled("split").binary)
    written = cli("wrap", binary, "--json").document()["wrappers"]
    assert len(written) == 2
    x = np.arange(16, dtype=np.float32)[None] / 16
    for one in written:
        (node,) = read_wrapper(Path(one["path"]).read_bytes()).nodes
        assert (node.partition_name, node.cache_context) == (one["graph"], "split.bin")
        (answer,) = run_by_onnxruntime(Path(one["path"]), {node.inputs[0]: x}).values()
        assert answer.shape == (1, 16)


def test_the_broker_loads_what_was_wrapped_and_all_wrappers_share_one_context(
    cli: CommandLine, make_model: MakeModel, start_broker: StartBroker
) -> None:
    graphs = (adder(), mixed(), quantised())
    binary = make_model("many", *graphs)
    written = cli("wrap", binary, "--json").document()["wrappers"]
    assert [w["graph"] for w in written] == ["add", "mixed", "quantised"]
    broker = start_broker()
    with connect(broker.runtime_dir) as session:
        models = [session.load(w["path"]) for w in written]
        assert [m.graph.name for m in models] == ["add", "mixed", "quantised"]
        assert [m.shared for m in models] == [False, True, True]
        assert broker.counters()["contexts"] == 1
        for model, graph in zip(models, graphs, strict=True):
            assert list(model.graph.inputs) == [t.name for t in graph.inputs]
        with session.load(binary) as bare:
            assert set(bare.graphs) == {"add", "mixed", "quantised"}


def test_one_graph_can_be_chosen_and_the_output_named(
    cli: CommandLine, make_model: MakeModel, tmp_path: Path
) -> None:
    binary = make_model("many", adder(), mixed())
    cli("wrap", binary, "--graph", "mixed", "-o", tmp_path / "m.onnx").ok()
    wrapper = read_wrapper((tmp_path / "m.onnx").read_bytes())
    check_fully_offloaded(wrapper)
    assert set(names_for(wrapper.nodes[0])) == {"x", "h", "l", "z", "s"}
    assert [v.elem_type for v in wrapper.inputs] == [2, 10, 7]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--graph", "none"], FAILED, "no graph 'none'; it has ['add', 'mixed']"),
        (["-o", "model.bin"], USAGE, "named *.onnx"),
        (["-o", "/nonexistent/elsewhere/m.onnx"], USAGE, "not beside it"),
    ],
)
def test_what_cannot_be_wrapped_so_is_refused(
    cli: CommandLine, make_model: MakeModel, arguments: list[str], code: int, says: str
) -> None:
    binary = make_model("many", adder(), mixed())
    message = cli("wrap", binary, *arguments, "--json").error(code)["message"]
    assert says in message
    assert not list(binary.parent.glob("*.onnx"))


def test_a_wrapper_is_not_wrapped_again(cli: CommandLine, make_model: MakeModel) -> None:
    binary = make_model()
    cli("wrap", binary).ok()
    assert "a wrapper already" in cli("wrap", binary.with_name("adder_ctx.onnx")).failed(FAILED)
