# SPDX-License-Identifier: Apache-2.0
"""The manifest beside a compiled model: what it was made from, with what, and for which chip."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qnnbroker.broker.files import ModelFile

from .compiling import CompileResult
from .inspection import identify, inspect_file

#: Raised when a field changes its meaning or goes; new fields do not raise it.
FORMAT = 1


def manifest_path(wrapper: Path) -> Path:
    """`model_ctx.onnx` has `model_ctx.manifest.json` beside it."""
    return wrapper.with_suffix(".manifest.json")


def make_manifest(source: Path, result: CompileResult, options: dict[str, Any]) -> dict[str, Any]:
    """The manifest's content. Reads the source, and the output as a broker would find it.

    `source.sha256` is of the ONNX file itself, not of external data beside it.

    Raises:
        BrokerError, Failure: what was compiled cannot be read back.
    """
    found = inspect_file(result.wrapper)
    binary = found["binary"]
    with ModelFile.open(source) as file:
        described = {"name": source.name, **identify(file)}
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": described,
        "wrapper": {
            "name": result.wrapper.name,
            "size_bytes": found["file"]["size_bytes"],
            "sha256": found["file"]["sha256"],
        },
        "binary": {
            "name": None if result.binary is None else result.binary.name,
            "embedded": binary["embedded"],
            "size_bytes": binary["size_bytes"],
            "sha256": binary["sha256"],
        },
        "sdk_build_id": binary["build_id"],
        "sdk_version": result.sdk_version,
        "dsp_arch": binary["dsp_arch"],
        "soc_model": binary["soc_model"],
        "compatibility": found["wrapper"]["compatibility"],
        "options": options,
        "precision": result.precision,
        "versions": result.versions,
        "graphs": [
            {
                "name": graph["name"],
                **{
                    kind: [
                        {
                            "name": t["offered_as"] or t["name"],
                            "dtype": t["dtype"],
                            "shape": t["shape"],
                            "size_bytes": t["size_bytes"],
                        }
                        for t in graph[kind]
                    ]
                    for kind in ("inputs", "outputs")
                },
            }
            for graph in binary["graphs"]
        ],
    }


def write_manifest(wrapper: Path, content: dict[str, Any]) -> Path:
    """Writes it beside the wrapper, whole or not at all; returns its path."""
    from .temporary import whole_file

    path = manifest_path(wrapper)
    with whole_file(path, "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    return path
