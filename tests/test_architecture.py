# SPDX-License-Identifier: Apache-2.0
"""The rules that hold the tree together: who may import whom, and what every source file is like.

Cython files are read as well as Python ones, and imports inside functions count like any other.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Package -> packages of ours that it may import besides itself.
ARROWS: dict[str, set[str]] = {
    "cli": {"benchmarks", "broker", "client", "native", "protos", "v1"},
    "benchmarks": {"client", "native", "protos", "v1"},
    "broker": {"native", "protos", "v1"},
    "client": {"native", "protos", "v1"},
    "native": set(),
    "protos": {"v1"},
    "v1": set(),
}
SOURCES = {
    "benchmarks": ROOT / "benchmarks/qnnbroker/benchmarks",
    "cli": ROOT / "broker/qnnbroker/cli",
    "broker": ROOT / "broker/qnnbroker/broker",
    "client": ROOT / "client/qnnbroker/client",
    "native": ROOT / "native/qnnbroker/native",
    "protos": ROOT / "protos/qnnbroker/protos",
    "v1": ROOT / "protos/qnnbroker/v1",
}
MAX_LINES = 400
CODE = {".py", ".pyi", ".pyx", ".pxd"}
SKIPPED = {"build", "dist", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and where."""

    module: str
    line: int


def package_of(path: Path) -> list[str]:
    """The dotted package that holds `path`, as a list."""
    for name, folder in SOURCES.items():
        if path.is_relative_to(folder):
            return ["qnnbroker", name, *path.relative_to(folder).parts[:-1]]
    return []


def absolute(module: str, level: int, package: list[str]) -> str:
    """What `from <level dots><module> import` means inside `package`."""
    if level == 0:
        return module
    return ".".join([*package[: len(package) - level + 1], *filter(None, [module])])


def python_imports(text: str, package: list[str]) -> Iterator[Import]:
    """Imports anywhere in Python code, import_module and __import__ of a constant among them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node.module or "", node.level, package)
            # `from qnnbroker import broker` names the package in the second half.
            yield from (Import(f"{module}.{a.name}", node.lineno) for a in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__", "find_spec") and isinstance(
                first, ast.Constant
            ):
                yield Import(str(first.value), node.lineno)


_FROM = re.compile(r"^\s*from\s+(\.*)([\w.]*)\s+c?import\s+(.+)")
_IMPORT = re.compile(r"^\s*c?import\s+(.+)")


def cython_imports(text: str, package: list[str]) -> Iterator[Import]:
    """Imports and cimports of Cython code, line by line: a parenthesis may go on over lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _FROM.match(line):
            dots, module, names = match.groups()
            base = absolute(module, len(dots), package)
            for name in re.findall(r"[\w*]+", re.sub(r"\s+as\s+\w+|#.*", "", names)) or [""]:
                yield Import(f"{base}.{name}", number)
        elif match := _IMPORT.match(line):
            for part in match[1].split("#")[0].split(","):
                yield Import(part.split(" as ")[0].strip(), number)


def imports_of(path: Path) -> list[Import]:
    read = cython_imports if path.suffix in (".pyx", ".pxd") else python_imports
    return list(read(path.read_text(), package_of(path)))


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def files(*suffixes: str, below: Path = ROOT) -> list[Path]:
    """Files of the project, sorted; nothing that is built, hidden or installed."""
    found = []
    for path in below.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if any(p in SKIPPED or p.startswith(".") for p in parts[:-1]):
            continue
        if path.is_file() and (not suffixes or path.suffix in suffixes):
            found.append(path)
    return sorted(found)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("package", list(ARROWS))
def test_imports_follow_the_arrows(package: str) -> None:
    allowed = ARROWS[package] | {package}
    wrong = [
        f"{shown(path)}:{i.line} imports {i.module}"
        for path in files(*CODE, below=SOURCES[package])
        for i in imports_of(path)
        if i.module.split(".")[0] == "qnnbroker" and i.module.split(".")[1] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("suffix", "code", "modules"),
    [
        (".py", "def f():\n    from qnnbroker.broker import app", ["qnnbroker.broker.app"]),
        (".py", "from qnnbroker import broker", ["qnnbroker.broker"]),
        (".py", "from ..broker import app", ["qnnbroker.broker.app"]),
        (".py", "from . import hot", ["qnnbroker.client.hot"]),
        (".py", "import qnnbroker.broker.app as a, os", ["qnnbroker.broker.app", "os"]),
        (".py", "importlib.import_module('qnnbroker.broker')", ["qnnbroker.broker"]),
        (".pyx", "from qnnbroker.broker cimport x", ["qnnbroker.broker.x"]),
        (".pyx", "cimport qnnbroker.broker.x as y", ["qnnbroker.broker.x"]),
        (".pxd", "    from ..broker.x import (", ["qnnbroker.broker.x."]),
        (".pyx", "from .ring cimport A as B, C  # why", ["qnnbroker.client.ring.A"]),
    ],
)
def test_every_way_to_import_is_seen(suffix: str, code: str, modules: list[str]) -> None:
    package = ["qnnbroker", "client"]
    read = cython_imports if suffix in (".pyx", ".pxd") else python_imports
    assert [i.module for i in read(code, package)][: len(modules)] == modules


def test_the_packages_are_those_of_the_arrows() -> None:
    """A new package is a decision: it gets an arrow first."""
    found = {p.name for root in ("benchmarks", "broker", "client", "native", "protos")
             for p in (ROOT / root / "qnnbroker").iterdir()
             if p.is_dir() and p.name not in SKIPPED}  # fmt: skip
    assert found == set(ARROWS)


def test_qnnbroker_is_a_namespace_package() -> None:
    """One __init__.py there would hide the other roots."""
    assert [shown(p) for p in files() if p.parts[-2:] == ("qnnbroker", "__init__.py")] == []


HEAVY = {"onnx", "onnxruntime", "onnxruntime_qnn"}


def test_the_client_tree_neither_imports_nor_loads_what_belongs_to_the_broker() -> None:
    wrong = []
    for path in files(*CODE, below=SOURCES["client"]):
        for found in imports_of(path):
            parts = found.module.split(".")
            if parts[0] in HEAVY or (
                parts[:2] == ["qnnbroker", "native"] and "".join(parts[2:3]).startswith("qnn")
            ):
                wrong.append(f"{shown(path)}:{found.line} imports {found.module}")
        with tokenize.open(path) as source:
            for token in tokenize.generate_tokens(source.readline):
                prose = token.type in (tokenize.COMMENT, tokenize.STRING) and (
                    token.type == tokenize.COMMENT or token.string.lstrip("rbf").startswith('"""')
                )
                if not prose and re.search(
                    r"libQnn|libcdsprpc|dlopen|CDLL|LoadLibrary", token.string
                ):
                    wrong.append(f"{shown(path)}:{token.start[0]} says {token.string}")
    assert wrong == []


def loaded_by(code: str) -> tuple[set[str], str]:
    """Top-level modules and file mappings of a fresh interpreter after `code`."""
    script = (
        f"{code}\nimport sys\n"
        "print(' '.join(sorted({m.split('.')[0] for m in sys.modules})))\n"
        "print(open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    modules, _, maps = done.stdout.partition("\n")
    return set(modules.split()), maps


def modules_below(package: str, *, without: str = "") -> list[str]:
    folder = SOURCES[package]
    names = []
    for path in files(".py", below=folder):
        dotted = ".".join(["qnnbroker", package, *path.relative_to(folder).with_suffix("").parts])
        if not (without and without in dotted):
            names.append(dotted.removesuffix(".__init__"))
    return names


def test_the_client_stays_light_in_a_real_process() -> None:
    code = "\n".join(f"import {m}" for m in modules_below("client"))
    modules, maps = loaded_by(code)
    assert modules & (HEAVY | {"click", "rich"}) == set()
    assert "libQnn" not in maps


def test_the_worker_imports_nothing_that_only_others_need() -> None:
    """Neither onnx nor onnxruntime (but for the backend of that name) nor the CLI's libraries, and
    nothing large for a small service."""
    code = "\n".join(f"import {m}" for m in modules_below("broker", without="backends.ort"))
    modules, maps = loaded_by(code)
    assert modules & (HEAVY | {"click", "rich", "numpy", "tempfile", "email"}) == set()
    assert "libQnn" not in maps


SOURCE_SUFFIXES = (*CODE, ".c", ".h", ".proto")


def test_every_source_file_is_short_enough_to_read() -> None:
    lengths = {
        shown(p): len(p.read_text().splitlines())
        for p in files(*SOURCE_SUFFIXES)
        if not is_generated(p)
    }
    assert {p: n for p, n in lengths.items() if n > MAX_LINES} == {}


def test_every_source_file_names_its_licence_first() -> None:
    line = re.compile(r"(#|//|/\*) SPDX-License-Identifier: Apache-2\.0( \*/)?")
    missing = []
    for path in files(*SOURCE_SUFFIXES):
        first = [x for x in path.read_text().splitlines() if not x.startswith("#!")][:1]
        if not is_generated(path) and not (first and line.fullmatch(first[0])):
            missing.append(shown(path))
    assert missing == []


def test_every_module_says_in_its_docstring_what_it_owns() -> None:
    silent = [
        shown(path)
        for name in ("benchmarks", "cli", "broker", "client", "native", "protos")
        for path in files(".py", below=SOURCES[name])
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_every_package_is_marked_as_typed() -> None:
    assert [n for n, folder in SOURCES.items() if not (folder / "py.typed").is_file()] == []


def test_no_file_names_a_directory_of_somebodys_machine() -> None:
    # Written so that this file does not name one itself.
    names = "|".join(["home", "root", "work", "Users"])
    place = re.compile(rf"(?<![\w.}}>])/(?:{names})/\w")
    found = []
    for path in files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, row in enumerate(text.splitlines(), 1):
            if place.search(row):
                found.append(f"{shown(path)}:{number}: {row.strip()[:80]}")
    assert found == []
