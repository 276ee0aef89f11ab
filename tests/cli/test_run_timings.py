# SPDX-License-Identifier: Apache-2.0
"""Times of many runs: percentiles by nearest rank, and the picture."""

import importlib.util
from pathlib import Path

import pytest

from qnnbroker.cli.problems import Failure, WrongUsage
from qnnbroker.cli.run_timings import Timings, check_plot, plot, spread

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_percentiles_are_measured_values() -> None:
    assert spread([5]) == {"min_ns": 5, "p50_ns": 5, "p99_ns": 5, "max_ns": 5}
    assert spread([4, 1, 3, 2]) == {"min_ns": 1, "p50_ns": 2, "p99_ns": 4, "max_ns": 4}
    values = list(range(1000, 0, -1))
    assert spread(values) == {"min_ns": 1, "p50_ns": 500, "p99_ns": 990, "max_ns": 1000}


def test_each_kind_of_time_has_its_spread() -> None:
    timings = Timings()
    timings.add(1, 10, 100)
    timings.add(2, 20, 200)
    assert {k: v["max_ns"] for k, v in timings.spreads().items()} == {
        "queue": 2,
        "execute": 20,
        "total": 200,
    }


def test_a_picture_needs_a_suffix_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match=r"\*\.png"):
        check_plot(str(tmp_path / "x.txt"))
    with pytest.raises(WrongUsage, match="no directory"):
        check_plot(str(tmp_path / "none/x.png"))


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> None:
        assert name == "matplotlib"

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(Failure, match=r"pip install 'qnnbroker\[plot\]'") as caught:
        check_plot(str(tmp_path / "x.png"))
    assert caught.value.reason == "NO_PLOT"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the extra [plot] is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_picture_is_written_whole(tmp_path: Path) -> None:
    timings = Timings()
    for i in range(1, 50):
        timings.add(i, i * 1000, i * 1100)
    path = check_plot(str(tmp_path / "x.png"))
    plot(timings, "a model", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]
