# SPDX-License-Identifier: Apache-2.0
"""PP-OCR's direction classifier: does this line of text stand upright or upside down?"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zoo.fetch import Member, Package
from zoo.model import Case, Feeds, Model, Outputs
from zoo.photographs import PHOTOGRAPHS, photograph

if TYPE_CHECKING:
    from PIL.Image import Image

RAPIDOCR = Package(
    name="rapidocr-onnxruntime",
    version="1.4.4",
    kind="wheel",
    licence="Apache-2.0",
    sha256="971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    members={
        "direction.onnx": Member(
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
    },
)

_HEIGHT, _WIDTH = 48, 192
_OUTPUT = "save_infer_model/scale_0.tmp_1"
#: Where lines of text are on the scanned page.
_LINES = {"the title": (0, 4, 300, 40), "the last line": (0, 118, 178, 140)}
_WORDS = (
    "one process owns the device and many clients share it; weights are read once, 12.5 ms later "
    "(see page 7) a reply: 0.98 Ring buffer, doorbell & ticket #2048 Graph [1,3,48,192] OK? "
    "https://example.org user@example.org EUR 19,90 Total = 3/4"
).split()


class OcrOrientation(Model):
    """Input: `x` [1, 3, 48, 192] in -1..1. Output: probabilities of 0 and 180 degrees, [1, 2]."""

    name = "ocr_cls"
    task = "text direction, 0 or 180 degrees (PP-OCR mobile v2)"
    precision = "u8"
    packages = (RAPIDOCR, PHOTOGRAPHS)

    def write_float(self, path: Path) -> None:
        import onnx

        from zoo.onnx_tools import fix_shapes

        model = onnx.load(str(RAPIDOCR.file("direction.onnx")))
        fix_shapes(model, path, {"x": [1, 3, _HEIGHT, _WIDTH]}, opset=13)

    def calibration(self) -> list[Feeds]:
        """Lines of words in seeded sizes, greys and noise, every other one upside down."""
        rng = np.random.default_rng(5)
        found: list[Feeds] = []
        for index in range(24):
            text = " ".join(rng.choice(_WORDS, int(rng.integers(1, 4))))
            line = _drawn(text, rng)
            found.append(features(line.rotate(180) if index % 2 else line))
        return found

    def cases(self) -> list[Case]:
        page = photograph("page.png")

        def case(label: str, line: "Image", degrees: int) -> Case:
            def check(outputs: Outputs) -> tuple[bool, str]:
                probabilities = outputs[_OUTPUT].reshape(-1)
                found = 180 * int(probabilities.argmax())
                return found == degrees, f"{found} degrees ({probabilities.max():.2f})"

            return Case(f"{label} of a page, {degrees} degrees", features(line), check)

        return [
            case(label, page.crop(box).rotate(degrees), degrees)
            for label, box in _LINES.items()
            for degrees in (0, 180)
        ]


def features(line: "Image") -> Feeds:
    """A picture of one line as the model's input: scaled to its height, padded at the right."""
    from PIL import Image

    width = min(_WIDTH, round(_HEIGHT * line.width / line.height + 0.5))
    scaled = line.resize((width, _HEIGHT), Image.Resampling.BILINEAR)
    pixels = np.asarray(scaled, np.float32)[:, :, ::-1].transpose(2, 0, 1)  # BGR, channels first
    padded = np.zeros((1, 3, _HEIGHT, _WIDTH), np.float32)
    padded[0, :, :, :width] = pixels / 127.5 - 1
    return {"x": padded}


def _drawn(text: str, rng: np.random.Generator) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    size = int(rng.integers(18, 40))
    ink, paper = int(rng.integers(0, 90)), int(rng.integers(150, 256))
    font = ImageFont.load_default(size)
    grey = Image.new("L", (int(font.getlength(text)) + 12, size + 14), paper)
    ImageDraw.Draw(grey).text((6, 3), text, fill=ink, font=font)
    noise = rng.normal(0, float(rng.integers(0, 12)), (grey.height, grey.width))
    noisy = np.clip(np.asarray(grey, np.float32) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert("RGB")
