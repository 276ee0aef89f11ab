# SPDX-License-Identifier: Apache-2.0
"""Real models that run whole on the HTP, with inputs whose right answers are known.

    import zoo

    wrapper = zoo.compiled("magika_fused")       # fetched, made static, compiled on first use
    for case in zoo.model("magika_fused").cases():
        ok, answer = case.check(run(case.feeds))

Nothing is vendored: packages are fetched by name and pinned version, and every file is checked.
Importing this package is cheap; onnx, onnxruntime and Pillow are loaded only by what needs them.
"""

from zoo.build import compiled, reference
from zoo.errors import MissingTool, ZooError
from zoo.model import Case, Feeds, Model, Outputs
from zoo.names import NAMES, model

__all__ = [
    "NAMES",
    "Case",
    "Feeds",
    "MissingTool",
    "Model",
    "Outputs",
    "ZooError",
    "compiled",
    "model",
    "reference",
]
