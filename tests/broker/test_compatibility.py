# SPDX-License-Identifier: Apache-2.0
"""What wrappers and binaries say they were made for, and where the two differ."""

from dataclasses import replace

import pytest

from qnnbroker.broker.compatibility import METADATA_KEY, Facts, differences, of_wrapper

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
