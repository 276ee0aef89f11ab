# SPDX-License-Identifier: Apache-2.0
"""The manifest that `qnnbroker compile` writes beside a model: read, and held against the files."""

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from qnnbroker.protos.errors import InvalidRequest

#: Raised when a field changes its meaning or goes; new fields do not raise it.
FORMAT = 1
#: Nobody's manifest is larger.
MAX_BYTES = 4 * 1024 * 1024
SUFFIX = ".manifest.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What has to be true of the files it is about. Empty: it does not say."""

    name: str
    wrapper_sha256: str
    binary_name: str
    binary_sha256: str


def names_beside(file_name: str, *, wrapper: bool) -> list[str]:
    """File names of the manifests that may be about a model file, the likeliest first.

    `m.onnx` has `m.manifest.json`. The binary of that wrapper is `m_qnn.bin`, which has the same.
    """
    stem = PurePath(file_name).stem
    names = [stem + SUFFIX]
    if not wrapper and stem.endswith("_qnn"):
        names.append(stem.removesuffix("_qnn") + SUFFIX)
    return names


def parse(name: str, data: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        InvalidRequest: reason BAD_FILE; it is there, so it has to make sense.
    """

    def bad(why: str) -> InvalidRequest:
        return InvalidRequest(f"the manifest {name!r} is damaged: {why}", reason="BAD_FILE")

    if len(data) > MAX_BYTES:
        raise bad(f"it has more than {MAX_BYTES} bytes")
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad("it is not JSON") from error
    if not isinstance(content, dict):
        raise bad("it is no object")
    if content.get("format") != FORMAT:
        raise InvalidRequest(
            f"the manifest {name!r} has the format {str(content.get('format'))[:40]!r}, this "
            f"broker knows {FORMAT}",
            reason="BAD_FILE",
        )
    wrapper, binary = content.get("wrapper") or {}, content.get("binary")
    if not isinstance(wrapper, dict) or not isinstance(binary, dict):
        raise bad("it does not describe a wrapper and a binary")
    of_wrapper, of_binary = (str(part.get("sha256") or "") for part in (wrapper, binary))
    if (wrapper or of_wrapper) and not _SHA256.fullmatch(of_wrapper):
        raise bad("a sha256 of the wrapper that is none")
    if not _SHA256.fullmatch(of_binary):
        raise bad("a sha256 of the binary that is none")
    binary_name = binary.get("name") or ""
    if not isinstance(binary_name, str):
        raise bad("the name of the binary is no text")
    return Manifest(name, of_wrapper, binary_name, of_binary)


def check(manifest: Manifest, binary_sha256: str, wrapper_sha256: str) -> None:
    """Holds it against what was found. `wrapper_sha256` is "" for a bare binary.

    Raises:
        InvalidRequest: reason BAD_FILE; says both hashes.
    """
    for what, wanted, found in (
        ("wrapper", manifest.wrapper_sha256 if wrapper_sha256 else "", wrapper_sha256),
        ("context binary", manifest.binary_sha256, binary_sha256),
    ):
        if wanted and wanted != found:
            raise InvalidRequest(
                f"the {what} is not the one that {manifest.name!r} was written for: wanted sha256 "
                f"{wanted}, found {found}; it was damaged or replaced",
                reason="BAD_FILE",
                wanted=wanted,
                found=found,
            )
