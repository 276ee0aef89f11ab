# SPDX-License-Identifier: Apache-2.0
"""The installed version of the distribution."""

from importlib.metadata import PackageNotFoundError, version


def broker_version() -> str:
    """E.g. "0.1.0"; "unknown" when run from a tree that was never installed."""
    try:
        return version("qnnbroker")
    except PackageNotFoundError:
        return "unknown"
