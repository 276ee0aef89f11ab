# SPDX-License-Identifier: Apache-2.0
"""The QNN libraries that a test is for: the fake, and the real one where it is installed."""

import pytest
from tests.native.qnn_models import INSTALLED

FAKE_AND_REAL = [
    "fake",
    pytest.param(
        "real",
        marks=[
            pytest.mark.qnn,
            pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed"),
        ],
    ),
]
