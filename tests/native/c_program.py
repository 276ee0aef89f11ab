# SPDX-License-Identifier: Apache-2.0
"""C programs of the tests, compiled with our C sources and, if wanted, with a sanitizer."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "native/qnnbroker/native/csrc"


#: Naps of a client that last until somebody ends them: a lost wake-up does not go unnoticed.
ENDLESS_NAPS = "-DNAP_NS=UINT64_MAX"


def compiled(folder: Path, program: str, sources: list[str], sanitizer: str = "") -> Path:
    """`program`.c of this folder with `sources` of ours; once per folder and sanitizer.

    Args:
        sanitizer: "thread", "address", or "" for none. A test whose sanitizer this compiler does
            not have is skipped.
    """
    output = folder / f"{program}_{sanitizer}"
    if output.exists():
        return output
    options = [f"-fsanitize={sanitizer}", "-O1"] if sanitizer else ["-O2"]
    done = subprocess.run(
        # GCC says that ThreadSanitizer does not know fences: no report depends on them.
        ["gcc", "-std=gnu11", "-g", *options, "-Wall", "-Wextra", "-Werror", "-Wno-tsan"]
        + [ENDLESS_NAPS]
        + ["-Wno-unused-parameter", f"-I{CSRC}", "-o", str(output)]
        + [str(HERE / f"{program}.c"), *(str(CSRC / s) for s in sources), "-lpthread"],
        capture_output=True,
        text=True,
    )
    if sanitizer and "cannot find" in done.stderr:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer")
    assert done.returncode == 0, done.stderr
    return output


def said(program: Path, *arguments: object) -> str:
    """What the program printed; it must succeed, and a sanitizer must have nothing to say."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
