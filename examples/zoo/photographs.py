# SPDX-License-Identifier: Apache-2.0
"""Photographs and scans to look at: test images of scikit-image."""

from typing import TYPE_CHECKING

from zoo.fetch import Member, Package

if TYPE_CHECKING:
    from PIL.Image import Image

_DIGESTS = {
    "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "brick.png": "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
    "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "coins.png": "f8d773fc9cfa6f4d8e5942dc34d0a0788fcaed2a4fefbbed0aef5398d7ef4cba",
    "lfw_subset.npy": "9560ec2f5edfac01973f63a8a99d00053fecd11e21877e18038fbe500f8e872c",
    "moon.png": "78739619d11f7eb9c165bb5d2efd4772cee557812ec847532dbb1d92ef71f577",
    "motorcycle_left.png": "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179",
    "page.png": "341a6f0a61557662b02734a9b6e56ec33a915b2c41886b97509dedf2a43b47a3",
    "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
}

PHOTOGRAPHS = Package(
    name="scikit-image",
    version="0.26.0",
    kind="wheel",
    licence="BSD-3-Clause (the images have terms of their own; they are fetched, not shipped)",
    sha256="7df650e79031634ac90b11e64a9eedaf5a5e06fcd09bcd03a34be01745744466",
    members={name: Member(f"skimage/data/{name}", digest) for name, digest in _DIGESTS.items()},
)


def photograph(name: str) -> "Image":
    """One of the images, as RGB."""
    from PIL import Image

    with Image.open(PHOTOGRAPHS.file(name)) as image:
        return image.convert("RGB")
