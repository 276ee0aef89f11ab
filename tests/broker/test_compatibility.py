# SPDX-License-Identifier: Apache-2.0
"""What wrappers and binaries say they were made for, and where the two differ."""

from dataclasses import replace

import pytest

from qnnbroker.broker.compatibility import (
    METADATA_KEY,
    ONE_SOC_MODEL,
    Facts,
    check,
    differences,
    of_wrapper,
)
from qnnbroker.cli.compile import SOC_MODEL
from qnnbroker.protos.errors import VersionMismatch
from qnnbroker.v1 import control_pb2 as pb

SAID = "v2:6:2.51.0:5.51.0:73:43:0:0"
BINARY = Facts(6, "v2.51.0.260929181845", (2, 40, 0), (5, 51, 0), 73, 43, 0)


def test_what_a_wrapper_says_is_read() -> None:
    facts = of_wrapper({METADATA_KEY: SAID, "other": "v2:1:1.0.0:1.0.0:1:1"})
    assert facts == Facts(6, "2.51.0", (), (5, 51, 0), 73, 43, 0)


@pytest.mark.parametrize(
    "text",
    ["", "v2", "v1:6:2.51.0:5.51.0:73:43:0:0", "v3:6", "v2:6:2.51.0:5.51.0:73", "v2:a:b:c:d:e"],
)
def test_what_nobody_knows_says_nothing(text: str) -> None:
    assert of_wrapper({METADATA_KEY: text}) is None
    assert of_wrapper({}) is None


def test_a_wrapper_that_agrees_or_does_not_say_differs_in_nothing() -> None:
    said = of_wrapper({METADATA_KEY: SAID})
    assert said is not None
    assert differences(said, BINARY) == []
    assert differences(replace(said, dsp_arch=0, soc_model=0), BINARY) == []
    assert differences(said, replace(BINARY, dsp_arch=0, build_id="")) == []


def test_each_difference_is_told_with_both_values() -> None:
    said = of_wrapper({METADATA_KEY: "v2:5:2.40.0:4.1.0:75:60:0:0"})
    assert said is not None
    assert differences(said, BINARY) == [
        "the wrapper says QNN backend 5, its binary 6",
        "the wrapper says SDK build 2.40.0, its binary 2.51.0",
        "the wrapper says backend API 4.1.0, its binary 5.51.0",
        "the wrapper says DSP arch 75, its binary 73",
        "the wrapper says SoC 60, its binary 43",
    ]


def test_an_emulation_asks_nobody_to_compile_for_the_chip_it_claims_to_be() -> None:
    emulation = pb.BackendInfo(
        backend_id=6, build_id="v2.51.0", dsp_arch=68, soc_model=30, emulated=True
    )
    (said,) = check(BINARY, emulation)
    assert said.startswith("compiled for DSP arch 73, SoC 43; the emulation")
    assert said.endswith("runs it all the same: there is nothing to do")
    assert "wanted" not in said
    newer = replace(BINARY, build_id="v2.99.0")
    assert check(newer, emulation) == [
        "the binary has SDK build 2.99.0, wanted 2.x up to 2.51.0",
        said,
    ]
    assert check(replace(BINARY, dsp_arch=68, soc_model=30), emulation) == []
    emulation.emulated = False
    with pytest.raises(VersionMismatch, match="SoC 43, wanted 30"):
        check(BINARY, emulation)


def test_the_advice_names_the_soc_model_that_compile_takes_by_itself() -> None:
    assert f"takes {SOC_MODEL} where none" in ONE_SOC_MODEL
