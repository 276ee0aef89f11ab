# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while a model is fetched or made."""


class ZooError(Exception):
    """A model could not be fetched or made; the text says which and why."""


class MissingTool(ZooError):
    """A program that fetching needs is not installed on this machine."""
