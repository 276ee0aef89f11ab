# SPDX-License-Identifier: Apache-2.0
"""Timing: what one run took inside the broker."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Nanoseconds that a run waited and executed in the broker, and bytes that it had to copy."""

    queue_ns: int
    execute_ns: int
    copied_bytes: int
