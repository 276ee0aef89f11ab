# SPDX-License-Identifier: Apache-2.0
"""Which models there are, by name; each is imported when asked for."""

import importlib

from zoo.errors import ZooError
from zoo.model import Model

_PLACES = {
    "magika_fused": ("zoo.magika", "MagikaFused"),
    "silero_vad": ("zoo.silero", "SileroVad"),
    "blazeface": ("zoo.blazeface", "BlazeFace"),
    "ocr_cls": ("zoo.ocr", "OcrOrientation"),
    "light_alexnet": ("zoo.alexnet", "LightAlexNet"),
}

#: Every model, the demo's first.
NAMES = tuple(_PLACES)


def model(name: str) -> Model:
    """The model of that name. Raises ZooError for a name that is not in NAMES."""
    if name not in _PLACES:
        raise ZooError(f"there is no model '{name}'; there are: {', '.join(NAMES)}")
    module, cls = _PLACES[name]
    found: Model = getattr(importlib.import_module(module), cls)()
    return found
