# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker run` against a broker over the fake library, which computes exactly."""

import importlib.util
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.broker_process import BrokerProcess
from tests.cli.driver import PROGRAM, CommandLine, finish, wait_running
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder, mixed, numbers
from tests.tiny_wrappers import add, ep_node, model_of

from qnnbroker.cli.problems import FAILED, USAGE
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes

pytestmark = pytest.mark.processes


@pytest.fixture
def model(broker: BrokerProcess, make_model: MakeModel) -> Path:
    return make_model("adder")


def test_outputs_are_right_and_written(cli: CommandLine, model: Path) -> None:
    a, b = numbers(1)
    np.save(cli.home / "a.npy", a)
    (cli.home / "b.raw").write_bytes(b.tobytes())
    arguments = ["run", str(model), "--input", "a=a.npy", "--input", "b=b.raw"]
    document = cli(*arguments, "--output", "out.npz", "--json").document()
    with np.load(cli.home / "out.npz") as found:
        assert np.array_equal(found["y"], a + b)
    (output,) = document["outputs"]
    assert (output["name"], output["dtype"], output["shape"]) == ("y", "float32", [4, 8])
    assert output["file"] == "out.npz"
    assert document["model"]["path"] == str(model)
    text = cli(*arguments, "--output", "results/").ok()
    assert "results/y.npy" in text
    assert np.array_equal(np.load(cli.home / "results/y.npy"), a + b)


def test_runs_are_repeated_and_timed(cli: CommandLine, broker: BrokerProcess, model: Path) -> None:
    document = cli(
        *("run", model, "--input", "*=random", "--repeat", "20", "--warmup", "5", "--json")
    ).document()
    assert document["runs"] == 20
    for kind in ("queue", "execute", "total"):
        spread = document["timings"][kind]
        assert 0 <= spread["min_ns"] <= spread["p50_ns"] <= spread["p99_ns"] <= spread["max_ns"]
    assert document["timings"]["total"]["min_ns"] >= document["timings"]["execute"]["min_ns"]
    broker.wait_counters(sessions=0, bindings=0, buffers=0)
    assert "20 runs" in cli("run", model, "--input", "*=random", "--repeat", "20").ok()


def test_outputs_are_compared(cli: CommandLine, model: Path) -> None:
    a, b = numbers(2)
    np.savez(cli.home / "in.npz", a=a, b=b)
    np.savez(cli.home / "good.npz", y=a + b)
    bad = a + b
    bad[2, 3] += 0.5
    np.savez(cli.home / "bad.npz", y=bad)
    same = ["run", str(model), "--input", "in.npz", "--compare"]
    assert cli(*same, "good.npz", "--json").document()["equal"] is True
    assert cli(*same, "bad.npz", "--tolerance", "0.6", "--json").document()["equal"] is True
    ended = cli(*same, "bad.npz", "--tolerance", "0.1")
    message = ended.failed(FAILED)
    assert "output 'y' differs in 1 of 32 elements" in message
    assert "differs" not in ended.out
    assert "at [2, 3]" in message
    assert "timings" not in ended.out
    assert "execute" in ended.out
    assert cli(*same, "bad.npz", "--json").error(FAILED)["reason"] == "DIFFERENT"


def test_each_difference_is_told_once(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("two outputs", mixed())
    np.savez(cli.home / "ones.npz", z=np.ones(3, np.uint8), s=np.ones(1, np.int64))
    ended = cli("run", path, "--input", "*=zeros", "--compare", "ones.npz")
    assert "and 1 more output" in ended.failed(FAILED)
    for name in "zs":
        assert (ended.out + ended.err).count(f"output '{name}' differs") == 1


def test_a_comparison_file_that_is_none_is_refused_before_anything_runs(
    cli: CommandLine, broker: BrokerProcess, model: Path
) -> None:
    (cli.home / "no.npz").write_bytes(b"no")
    for name in ("missing.npz", "no.npz"):
        assert name in cli("run", model, "--input", "*=zeros", "--compare", name).failed(FAILED)
    assert broker.counters()["sessions_opened_total"] == 0


def test_a_resident_model_is_run_by_its_name_or_hash(
    cli: CommandLine, broker: BrokerProcess, model: Path
) -> None:
    loaded = cli("load", model, "--name", "sum", "--keep-alive", "forever", "--json").document()
    for name in ("sum", loaded["model"]["content_hash"][:10]):
        document = cli("run", name, "--input", "*=zeros", "--json").document()
        assert document["model"]["shared"] is True
        assert document["model"]["sha256"] == loaded["model"]["content_hash"]
    assert broker.counters()["contexts"] == 1


def test_a_resident_model_whose_file_changed_is_not_taken_for_it(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("m")
    cli("load", path, "--name", "m", "--keep-alive", "forever").ok()
    fresh = make_model("fresh", adder("other"))
    os.replace(fresh, path)
    assert "has changed" in cli("run", "m", "--input", "*=zeros").failed(FAILED)
    path.unlink()
    assert "no file" in cli("run", "m", "--input", "*=zeros").failed(FAILED)
    broker.wait_counters(sessions=0, models=1)


def test_neither_a_file_nor_a_resident_model_says_both(
    cli: CommandLine, broker: BrokerProcess
) -> None:
    message = cli("run", "nothing", "--input", "*=zeros").failed(FAILED)
    assert "no file 'nothing'" in message
    assert "no resident model" in message


def test_the_graph_is_chosen_by_name_when_there_are_several(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    two = make_model("two", adder(), mixed())
    message = cli("run", two, "--input", "*=zeros").failed(FAILED)
    assert "'add', 'mixed'" in message
    document = cli("run", two, "--graph", "mixed", "--input", "*=random", "--json").document()
    assert [o["name"] for o in document["outputs"]] == ["z", "s"]
    error = cli("run", two, "--graph", "none", "--input", "*=zeros", "--json").error(FAILED)
    assert error["reason"] == "GRAPH_UNKNOWN"
    assert "it has 'add', 'mixed'" in error["message"]


def test_the_only_graph_of_a_wrapper_has_the_name_of_the_onnx_graph_too(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    tensors = [Tensor(n, "float32", (4, 8)) for n in "aby"]
    wrapper = cli.home / "m_ctx.onnx"
    place = Place(make_model("m", adder("Provider_QNN_17_1_0")).name)
    content = wrapper_bytes("Provider_QNN_17_1_0", tensors[:2], tensors[2:], place, "v2")
    model = onnx.load_from_string(content)
    model.graph.name = "small"
    wrapper.write_bytes(model.SerializeToString())
    same = ("run", wrapper, "--input", "*=zeros", "--json", "--graph")
    for name in ("small", "Provider_QNN_17_1_0"):
        assert cli(*same, name).document()["graph"] == "Provider_QNN_17_1_0"
    message = cli(*same, "other").error(FAILED)["message"]
    assert "it has 'Provider_QNN_17_1_0', which the wrapper calls 'small'" in message


def test_what_the_broker_cannot_load_says_what_it_is(
    cli: CommandLine, broker: BrokerProcess
) -> None:
    broker.accidents_expected = True
    (cli.home / "README.md").write_text("# Not a model\n" * 10)
    (cli.home / "real.bin").write_bytes(bytes([0, 0, 0, 2]) + bytes(4096))
    (cli.home / "add.onnx").write_bytes(add().SerializeToString())
    (cli.home / "odd.onnx").write_bytes(model_of(ep_node(ep_cache_context="README.md")))
    for name, part in (
        ("README.md", "'README.md' is neither a context binary nor an ONNX model (140 bytes"),
        ("odd.onnx", "README.md' is neither a context binary"),
        ("real.bin", "is no context binary of the fake QNN library"),
        ("add.onnx", "'add', of 1 operator, is not compiled: run `qnnbroker compile` on it first"),
    ):
        for command in ("run", "load"):
            message = cli(command, name).failed(FAILED)
            assert part.lstrip("'") in message, message
            assert name in message


@pytest.mark.qnn
def test_a_binary_of_the_fake_library_says_so_to_a_broker_on_the_real_one(
    cli: CommandLine, start_broker: StartBroker, make_model: MakeModel
) -> None:
    start_broker(backend="qnn").accidents_expected = True
    message = cli("run", make_model("m"), "--input", "*=zeros").failed(FAILED)
    assert "is a context binary of the fake QNN library" in message
    assert "--backend fake" in message


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        (["a=a.npy"], "wants the input b: float32[4, 8]"),
        (["a=f64.npy", "*=zeros"], "'a' wants float32[4, 8], found float64[4, 8]"),
        (["a=flat.npy", "*=zeros"], "'a' wants float32[4, 8], found float32[32]"),
        (["q=zeros", "*=zeros"], "no input 'q'; its inputs are 'a', 'b'"),
        (["a=short.raw", "*=zeros"], "'short.raw' has 127"),
        (["a=fifo", "*=zeros"], "'fifo' is a FIFO"),
        (["a=.", "*=zeros"], "is a directory"),
        (["a=none.npy", "*=zeros"], "'none.npy' cannot be used: No such file"),
        (["a=text.npy", "*=zeros"], "text.npy"),
        ([], "wants the input a: float32[4, 8]"),
    ],
)
def test_a_bad_input_says_wanted_and_found_in_one_line(
    cli: CommandLine, model: Path, inputs: list[str], part: str
) -> None:
    a, _ = numbers(3)
    np.save(cli.home / "a.npy", a)
    np.save(cli.home / "f64.npy", a.astype(np.float64))
    np.save(cli.home / "flat.npy", a.reshape(32))
    (cli.home / "short.raw").write_bytes(a.tobytes()[:-1])
    (cli.home / "text.npy").write_text("not an array")
    os.mkfifo(cli.home / "fifo")
    arguments = [word for text in inputs for word in ("--input", text)]
    ended = cli("run", model, *arguments, "--output", "out.npz")
    assert part in ended.failed(FAILED)
    assert not (cli.home / "out.npz").exists()
    assert cli("run", model, *arguments, "--json").error(FAILED)["reason"] == "INPUT"


def test_an_input_that_no_graph_could_take_is_wrong_usage(cli: CommandLine, model: Path) -> None:
    for inputs in (["a=zeros", "a=zeros"], ["a=random:x"], ["a"]):
        arguments = [word for text in inputs for word in ("--input", text)]
        assert cli("run", model, *arguments, "--json").error(USAGE)["reason"] == "INPUT"


def test_an_execute_that_fails_is_one_line(
    cli: CommandLine, broker: BrokerProcess, model: Path
) -> None:
    broker.set_faults("fail=graphExecute:1+:1100")
    broker.accidents_expected = True
    error = cli("run", model, "--input", "*=zeros", "--json", "--output", "o.npz").error(FAILED)
    assert error["type"] == "BackendError"
    assert not (cli.home / "o.npz").exists()


def test_a_run_that_takes_too_long_is_given_up(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    slow = make_model("slow", adder(execute_us=60_000_000))
    error = cli("run", slow, "--input", "*=zeros", "--timeout", "0.2", "--json").error(FAILED)
    assert error["type"] == "DeadlineExpired"
    broker.kill()  # it would wait for the execute


def test_a_broker_that_dies_during_a_run_is_a_failure(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    slow = make_model("slow", adder(execute_us=60_000_000))
    process = cli.start("run", slow, "--input", "*=zeros", "--json")
    wait_running(broker)
    broker.kill()
    assert finish(process).error(FAILED)["type"] == "BrokerLost"


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(
    cli: CommandLine, broker: BrokerProcess, model: Path
) -> None:
    assert "*.png" in cli("run", model, "--plot", "x.txt").failed(USAGE)
    assert "no directory" in cli("run", model, "--plot", "none/x.png").failed(USAGE)
    if importlib.util.find_spec("matplotlib") is None:
        message = cli("run", model, "--plot", "x.png").failed(FAILED)
        assert "pip install 'qnnbroker[plot]'" in message
    assert broker.counters()["sessions_opened_total"] == 0


def test_progress_and_colours_stay_off_the_pipes(cli: CommandLine, model: Path) -> None:
    main, other = os.openpty()
    environment = cli.environment(TERM="xterm-256color")
    process = subprocess.Popen(
        [*PROGRAM, "run", model, "--input", "*=zeros", "--repeat", "50", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=other,
        env=environment,
    )
    os.close(other)
    out, _ = process.communicate(timeout=60)
    os.close(main)
    assert process.returncode == 0
    assert out.startswith(b"{")
    assert b"\x1b" not in out
