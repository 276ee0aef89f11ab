# SPDX-License-Identifier: Apache-2.0
"""Runs protoc for every .proto of the project. `python protos/regenerate.py [OUT_DIR]`.

The output is committed; tests/protos/test_generated.py regenerates into a temporary folder and
compares, so that it can never be stale.
"""

import os
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

HERE = Path(__file__).resolve().parent


def regenerate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py(i) below `out`.

    Raises:
        RuntimeError: protoc refused a file; its message is on stderr.
    """
    sources = sorted(str(p.relative_to(HERE)) for p in HERE.rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    # protoc looks its plugins up on PATH; they lie beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    includes = ["protoc", f"-I{HERE}", f"-I{well_known}"]
    messages = [f"--python_out={out}", f"--mypy_out=quiet:{out}"]
    services = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
    with_service = [s for s in sources if "\nservice " in (HERE / s).read_text()]
    for arguments in ([*messages, *sources], [*services, *with_service]):
        if code := protoc.main([*includes, *arguments]):
            raise RuntimeError(f"protoc ended with {code}")


if __name__ == "__main__":
    regenerate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
