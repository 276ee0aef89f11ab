# SPDX-License-Identifier: Apache-2.0
"""The version that the broker tells."""

from qnnbroker.protos.version import VERSION


def broker_version() -> str:
    """E.g. "0.1.0"."""
    return VERSION
