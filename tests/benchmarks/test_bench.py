# SPDX-License-Identifier: Apache-2.0
"""Every benchmark goes through, and says what it promised to say; the numbers mean nothing here."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qnnbroker.benchmarks import plots, suite
from qnnbroker.benchmarks.machine import Machine
from qnnbroker.benchmarks.rows import Mode, Row
from qnnbroker.cli.process import run as run_line

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-P", "-m", "qnnbroker.cli.main", "bench"]
CATALOGUE = suite.catalogue()
NEEDS_QNN = {"real", "attach", "memory", "scale"}
ROW_KEYS = {"case", "metric", "value", "unit", "vs", "ratio"}


def bench(*arguments: str, code: int = 0, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=240, cwd=cwd
    )
    assert done.returncode == code, done.stderr
    return done


def smoke(name: str) -> dict[str, Any]:
    done = bench(name, "--smoke", "--json", "--targets", "--no-plots")
    assert done.stderr == ""
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.qnn] if n in NEEDS_QNN else []) for n in CATALOGUE]
)
def test_a_benchmark_prints_one_object_with_its_rows_and_targets(name: str) -> None:
    document = smoke(name)
    assert set(document) == {"machine", "mode", "benchmarks", "targets"}
    assert {"cpu", "cores", "kernel", "load_average", "python", "packages"} <= set(
        document["machine"]
    )
    (benchmark,) = document["benchmarks"]
    assert benchmark["name"] == name
    assert benchmark["rows"]
    for row in benchmark["rows"]:
        assert set(row) >= ROW_KEYS
        assert math.isfinite(row["value"])
        assert (row["vs"] == "") == ("vs_value" not in row)
    wanted = [target.id for target in CATALOGUE[name].targets]
    assert [verdict["id"] for verdict in document["targets"]] == wanted
    for verdict in document["targets"]:
        assert set(verdict) >= {"id", "value", "target", "limit", "met"}
        decided_by = [r for r in benchmark["rows"] if r.get("target") == verdict["id"]]
        assert [r["case"] for r in decided_by] == [verdict["case"]]


def test_every_target_has_a_name_of_its_own() -> None:
    ids = [target.id for target in suite.targets()]
    assert len(ids) == len(set(ids))


def test_the_list_names_every_benchmark_and_target() -> None:
    document = json.loads(bench("--list", "--json").stdout)
    assert [b["name"] for b in document["benchmarks"]] == list(CATALOGUE)
    listed = [t["id"] for b in document["benchmarks"] for t in b["targets"]]
    assert listed == [t.id for t in suite.targets()]
    text = bench("--list").stdout
    assert all(name in text for name in [*CATALOGUE, *listed])


def test_a_checkout_runs_them_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--list"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == bench("--list").stdout


def test_an_unknown_benchmark_is_wrong_usage_that_names_the_known_ones() -> None:
    done = bench("speed", code=2)
    assert all(name in done.stderr for name in ["'speed'", *CATALOGUE])


def test_tables_and_pictures_come_from_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = bench("overhead", "--smoke", "--plots", str(tmp_path / "pictures"))
    assert "binding.run(), spin auto" in done.stdout
    assert "null_run_p50_us" in done.stdout
    assert [p.name for p in (tmp_path / "pictures").iterdir()] == ["overhead.png"]


def test_without_matplotlib_a_named_folder_is_an_error_and_no_folder_is_none(
    tmp_path: Path,
) -> None:
    if plots.available():
        pytest.skip("matplotlib is installed")
    done = bench("overhead", "--smoke", "--plots", str(tmp_path), code=1)
    assert "qnnbroker[plot]" in done.stderr
    bench("overhead", "--smoke", "--json", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_markdown_of_a_run_has_a_line_for_every_target() -> None:
    out = bench("overhead", "--smoke", "--markdown", "--targets", "--no-plots").stdout
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(CATALOGUE["overhead"].targets)
    assert {line.count(" | ") for line in lines} == {4}


@pytest.mark.parametrize(("load", "said"), [(0.2, 0), (2.0, 1)])
def test_a_busy_machine_is_said_to_be_no_judge_of_absolute_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: float, said: int
) -> None:
    machine = replace(Machine.look(), load_average=load, cores=2)
    monkeypatch.setattr(suite, "run", lambda *_: suite.Report(machine, Mode.SMOKE))
    assert run_line(["bench", "idle", "--no-plots"]) == 0
    assert capsys.readouterr().err.count("too busy to judge absolute targets: load 2.0") == said
    assert run_line(["bench", "idle", "--no-plots", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["machine"]["load_average"] == load
    assert printed.err == ""


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([], "rows for"),
        ([Row("a", "p50", 1, "us", target="other")], "other"),
        ([Row("a", "p50", 1, "us"), Row("a", "p50", 2, "us")], "rows for"),
    ],
)
def test_a_benchmark_that_leaves_a_target_undecided_is_refused(
    row: list[Row], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        suite.judge(CATALOGUE["payload"], row)


def test_the_document_explains_every_benchmark_and_target() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    missing = [n for n in [*CATALOGUE, *(t.id for t in suite.targets())] if f"`{n}`" not in text]
    assert missing == []


def test_our_bytecode_is_in_the_cache_whatever_the_environment_says(tmp_path: Path) -> None:
    program = (
        "import importlib.util, os, sys\n"
        "from qnnbroker.benchmarks import suite\n"
        "suite.as_installed()\n"
        "import qnnbroker.client, qnnbroker.broker.app\n"
        "ours = [m.__spec__.origin for n, m in sys.modules.items() if n.startswith('qnnbroker.')]\n"
        "sources = [origin for origin in ours if origin and origin.endswith('.py')]\n"
        "cached = [importlib.util.cache_from_source(source) for source in sources]\n"
        "print(len(cached) > 50, [name for name in cached if not os.path.exists(name)])\n"
    )
    environment = os.environ | {
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=environment,
    )
    assert done.stdout.split() == ["True", "[]"]
    assert done.stderr == ""
