# SPDX-License-Identifier: Apache-2.0
"""How much of a stress: some in the suite, all of it with QNNBROKER_STRESS=1 (`make stress`)."""

import os

FULL = os.environ.get("QNNBROKER_STRESS", "0") not in ("", "0")


def scaled(little: int, much: int) -> int:
    """What this run wants."""
    return much if FULL else little
