# SPDX-License-Identifier: Apache-2.0
"""The committed protobuf code is what the .proto files of this tree give."""

import subprocess
import sys
from pathlib import Path

import pytest

from qnnbroker.protos import attach

PROTOS = Path(attach.__file__).parents[2]


def generated_below(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*_pb2*.py*")
            if "__pycache__" not in p.parts}  # fmt: skip


def test_generated_code_is_current(tmp_path: Path) -> None:
    """`make proto` regenerates it. A child: protoc keeps state, and changes PATH."""
    command = [sys.executable, "-W", "ignore", str(PROTOS / "regenerate.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    fresh, committed = generated_below(tmp_path), generated_below(PROTOS)
    assert fresh.keys() == committed.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert stale == []


@pytest.mark.parametrize("proto", sorted(PROTOS.rglob("*.proto")), ids=lambda p: str(p.name))
def test_every_proto_follows_the_rules_that_keep_it_compatible(proto: Path) -> None:
    text = proto.read_text()
    assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n")
    assert "package qnnbroker.v1;" in text
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("enum "):
            first = next(x for x in lines[number + 1 :] if "=" in x)
            assert first.strip().endswith("_UNSPECIFIED = 0;")
        if line.startswith("service "):
            assert line.split()[1].endswith("Service")
        if line.strip().startswith("rpc "):
            name = line.split()[1].split("(")[0]
            assert f"rpc {name}({name}Request) returns (" in line
            assert f"{name}Response)" in line
