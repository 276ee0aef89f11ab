# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker ls`, `load`, `unload` and `describe`, over the fake library."""

import os
import threading
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine
from tests.fake_models import MakeModel, adder, mixed, quantised

from qnnbroker.cli.models import keep_alive_seconds, show_quantization, show_state
from qnnbroker.cli.problems import FAILED, WrongUsage
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.client import connect
from qnnbroker.v1 import control_pb2 as pb


def test_a_model_is_loaded_listed_described_and_given_back(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("adder", adder(), mixed())
    loaded = cli("load", path, "--name", "ocr", "--keep-alive", "forever", "--json").document()
    assert loaded["shared"] is False
    assert loaded["model"]["name"] == "ocr"
    assert loaded["model"]["source_path"] == str(path)
    (row,) = cli("ls", "--json").document()["models"]
    assert (row["names"], row["graph_names"]) == (["ocr"], ["add", "mixed"])
    assert (row["size_bytes"], row["run_count"]) == (path.stat().st_size, 0)
    assert row["idle_seconds"] < 0
    heading, line = cli("ls").ok().splitlines()
    assert heading.startswith("Name")
    assert "never" in line
    described = cli("describe", "ocr", "--json").document()
    graph = {g["name"]: g for g in described["graphs"]}["mixed"]
    assert [(t["name"], t["dtype"], t["shape"]) for t in graph["inputs"]] == [
        ("x", "uint8", [3]),
        ("h", "float16", [5]),
        ("l", "int64", [2]),
    ]
    assert "graph mixed" in cli("describe", "ocr").ok()
    by_hash = cli("describe", described["content_hash"][:8], "--json").document()
    assert by_hash["name"] == "ocr"
    assert cli("unload", "ocr").ok() == "ocr: unloaded\n"
    assert cli("ls").ok() == "No models\n"
    assert cli("unload", "ocr", "--json").error(FAILED)["reason"] == "MODEL_UNKNOWN"
    assert "'ocr'" in cli("describe", "ocr").failed(FAILED)


def test_a_model_that_is_gone_is_listed_with_its_runs(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    cli("run", make_model("adder"), "--input", "*=zeros", "--repeat", "3").ok()
    broker.wait_counters(contexts=0)
    (row,) = cli("ls", "--all", "--json").document()["models"]
    assert (row["state"], row["run_count"]) == ("known", 3)
    assert row["idle_seconds"] >= 0
    assert "ago" in cli("ls", "--all").ok().splitlines()[1]
    assert cli("describe", "adder").failed(FAILED).endswith("; none is resident")
    with connect(broker.runtime_dir) as session, session.load(make_model("adder")):
        (row,) = cli("ls", "--all", "--json").document()["models"]
        assert row["state"] == "ready", "one line: it is resident"


def test_loading_twice_shares_and_a_relative_path_is_ours_not_the_brokers(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model("m")
    assert "loaded" in cli("load", "m.bin", cwd=tmp_path).ok()
    assert "resident already" in cli("load", "./m.bin", cwd=tmp_path).ok()


def test_a_name_is_taken_from_another_model_only_on_demand(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    first, second = make_model("a", adder("a"), adder("b")), make_model("b", adder("c"))
    cli("load", first, "--name", "m", "--keep-alive", "forever").ok()
    for other in ((second,), (first, "--graph", "a")):
        error = cli("load", *other, "--name", "m", "--json").error(FAILED)
        assert (error["type"], error["reason"]) == ("AlreadyExists", "NAME_TAKEN")
        for part in (str(first), str(other[0]), "--replace", "--name"):
            assert part in error["message"]
        assert cli("describe", "m", "--json").document()["source_path"] == str(first)
    assert broker.counters()["contexts"] == 1
    cli("load", second, "--name", "m", "--replace").ok()
    assert cli("describe", "m", "--json").document()["source_path"] == str(second)
    broker.wait_counters(models=1, contexts=1)


def test_a_failure_is_cut_in_the_table_and_whole_as_json(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    broker.accidents_expected = True
    path = tmp_path / f"{'long ' * 20}name.bin"
    path.write_bytes(b"\xff" * 100)
    cli("load", path).failed(FAILED)
    (failed,) = cli("ls", "--all", "--json").document()["models"]
    assert path.name in failed["state_detail"]
    _, line = cli("ls", "--all").ok().splitlines()
    assert "failed" in line
    assert "BAD_FILE" in line
    assert len(show_state(pb.ContextInfo(state="failed", state_detail="x" * 500))) == 60
    assert failed["state_detail"] not in line


def test_the_keep_alive_ends_a_model_that_is_not_used(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    cli("load", make_model(), "--keep-alive", "0.2").ok()
    broker.wait_counters(models=0, contexts=0)


def test_a_model_that_a_client_holds_is_not_the_operators_to_unload(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(cli.runtime_dir) as session, session.load(make_model(), name="held"):
        error = cli("unload", "held", "--json").error(FAILED)
        assert error["type"] == "NotAllowed"
        assert "session" in cli("unload", "held").failed(FAILED)


def bad_files(folder: Path) -> dict[str, Path]:
    """Paths that are no model, by what they are."""
    files = {
        "missing": folder / "none.bin",
        "directory": folder / "directory",
        "empty": folder / "empty.bin",
        "random": folder / "random.bin",
        "text": folder / "text.txt",
        "fifo": folder / "fifo",
        "device": Path("/dev/zero"),
        "below a file": folder / "text.txt" / "x.bin",
        "odd name": folder / "leer und übel \n.bin",
        "long name": folder / ("x" * 300),
    }
    files["directory"].mkdir()
    files["empty"].touch()
    files["random"].write_bytes(bytes(range(7, 256)) * 40)
    files["text"].write_text("not a model\n" * 100)
    files["odd name"].write_bytes(b"\xff" * 100)
    os.mkfifo(files["fifo"])
    return files


@pytest.mark.parametrize("command", ["load", "run", "inspect"])
def test_every_bad_file_is_one_line_that_names_it(
    cli: CommandLine, broker: BrokerProcess, tmp_path: Path, command: str
) -> None:
    broker.accidents_expected = True
    for what, path in bad_files(tmp_path).items():
        ended = cli(command, path)
        message = ended.failed(FAILED)
        assert path.name.split(" ")[0][:50] in message, what
        assert ended.out == ""
        assert cli(command, path, "--json").error(FAILED)["type"] in (
            "NotFound",
            "InvalidRequest",
        )
    broker.wait_counters(models=0, contexts=0, sessions=0)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model()
    path.chmod(0)
    for command in ("load", "run", "inspect"):
        assert cli(command, path, "--json").error(FAILED)["reason"] == "FILE_UNREADABLE"


def test_paths_with_spaces_and_other_scripts_work(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model("ein Modell für 模型 %41 'x'")
    assert "loaded" in cli("load", path).ok()
    assert cli("run", path, "--input", "*=zeros", "--json").document()["model"]["path"] == str(path)
    assert cli("inspect", path, "--json").document()["file"]["path"] == str(path)


def test_a_truncated_binary_is_refused(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    broker.accidents_expected = True
    path = make_model()
    path.write_bytes(path.read_bytes()[:-1000])
    for command in ("load", "run", "inspect"):
        assert cli(command, path, "--json").error(FAILED)["reason"] == "BAD_FILE"


def test_many_loads_at_a_time_end_with_one_context(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("big", create_us=300_000)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: codes.append(cli("load", path, "--name", f"m{i}").code))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0]
    (row,) = cli("ls", "--json").document()["models"]
    assert row["names"] == ["m0", "m1", "m2"]


def test_some_graphs_of_a_model_are_loaded_and_shown_as_such(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("three", adder("one"), adder("two"), mixed())
    loaded = cli("load", path, "--graph", "one", "--graph", "mixed", "--json").document()
    assert [g["name"] for g in loaded["model"]["graphs"]] == ["mixed", "one"]
    (row,) = cli("ls", "--json").document()["models"]
    assert row["enabled_graphs"] == ["mixed", "one"]
    assert "2 of 3" in cli("ls").ok()
    described = cli("describe", "three").ok()
    assert "mixed, one" in described
    assert "graph two" not in described
    other = ("--name", "other", "--json")
    error = cli("load", path, "--graph", "four", *other).error(FAILED)
    assert error["reason"] == "GRAPH_UNKNOWN"


def test_what_a_wrapper_was_compiled_for_is_shown_and_what_it_says_wrongly(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    binary = make_model("m", adder(), arch=73, soc=43)
    wrapper = tmp_path / "m_ctx.onnx"
    tensors = [Tensor(n, "float32", (4, 8)) for n in "aby"]
    content = wrapper_bytes("add", tensors[:2], tensors[2:], Place(binary.name), "v2")
    for soc, differs in ((43, False), (60, True)):
        said = f"v2:6:2.51.0:5.51.0:73:{soc}:0:0"
        key = b"ep_compatibility_info.QNNExecutionProvider"
        entry = bytes([0x0A, len(key)]) + key + bytes([0x12, len(said)]) + said.encode()
        wrapper.write_bytes(content + bytes([0x72, len(entry)]) + entry)  # metadata_props
        model = cli("load", wrapper, "--json").document()["model"]
        assert model["compatibility"] == said
        text = cli("describe", "m").ok()
        assert said in text
        assert ("the wrapper says SoC 60, its binary 43" in text) == differs
        assert "compiled for DSP arch 73, SoC 43; the emulation" in text


def test_quantisation_is_shown(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    cli("load", make_model("q", quantised())).ok()
    assert "(stored - 10) * 0.5" in cli("describe", "q").ok()
    assert show_quantization(None) == ""
    several = {"scales": [1.0, 2.0], "offsets": [0, 0], "axis": 1, "encoding": 1}
    assert show_quantization(several) == "2 scales along axis 1"
    assert show_quantization({**several, "scales": [], "encoding": 9}) == "encoding 9"


def test_keep_alive_texts_become_seconds() -> None:
    assert [keep_alive_seconds(t) for t in ("forever", "0", "1.5", "1e3")] == [-1, 0, 1.5, 1000]
    for text in ("", "-1", "inf", "nan", "long"):
        with pytest.raises(WrongUsage, match="--keep-alive wants"):
            keep_alive_seconds(text)
