# SPDX-License-Identifier: Apache-2.0
"""What a file holds: a context binary, or a wrapper and the binary behind it; found out without a
broker, and without letting a bad file harm this process."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qnnbroker.broker.epcontext import (
    FAKE_MAGIC,
    ByteRange,
    Wrapper,
    binary_path,
    check_fully_offloaded,
    names_for,
    read_wrapper_from,
    sniff,
)
from qnnbroker.broker.files import CHUNK_BYTES, FileBytes, ModelFile
from qnnbroker.protos.errors import (
    BrokerError,
    DeadlineExpired,
    InvalidRequest,
    NotFound,
    Unsupported,
)

from .problems import Failure

#: Time for parsing one binary; the description of the biggest takes well under a second.
PARSE_SECONDS = 60.0
_SNIFF_BYTES = 4096
_COMPATIBILITY = "ep_compatibility_info."
#: ONNX's element types by number.
_ONNX_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}

HashProgress = Callable[[int, int], None]


def inspect_file(
    path: Path, *, qnn_lib_dir: str = "", hashing: HashProgress | None = None
) -> dict[str, Any]:
    """Everything about the file, in types that JSON knows.

    Keys: kind ("wrapper" or "binary"), file, wrapper (None for a binary), binary, and problem: why
    a broker would refuse it, or None.

    Raises:
        NotFound, NotAllowed: the file, or the binary that a wrapper names, cannot be opened.
        InvalidRequest: reason BAD_FILE; neither wrapper nor binary, damaged, not compiled.
        DeadlineExpired: parsing took too long.
        Failure: reason NO_LIBRARY or CRASHED.
    """
    with ModelFile.open(path) as file:
        head = file.read(0, _SNIFF_BYTES)
        kind = sniff(head)
        described = {"path": str(path), **identify(file, hashing)}
        if kind == "binary":
            binary = describe_binary(file, qnn_lib_dir)
            return {
                "kind": kind,
                "file": described,
                "wrapper": None,
                "binary": {**described, "embedded": False, **binary},
                "problem": None,
            }
        if kind == "unknown":
            raise InvalidRequest(
                f"{str(path)!r} is neither a context binary nor an ONNX model "
                f"({file.size_bytes} bytes, starting with {head[:8].hex(' ')})",
                reason="BAD_FILE",
            )
        wrapper = open_wrapper(file)
        binary = behind_wrapper(path, file, wrapper, qnn_lib_dir, hashing)
    add_offered_names(binary["graphs"], wrapper)
    return {
        "kind": kind,
        "file": described,
        "wrapper": describe_wrapper(wrapper),
        "binary": binary,
        "problem": problem_of(wrapper, binary),
    }


def identify(file: ModelFile, hashing: HashProgress | None = None) -> dict[str, Any]:
    """Size and sha256 of the file's range."""
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(done, CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        if hashing is not None:
            hashing(done, file.size_bytes)
    return {"size_bytes": done, "sha256": digest.hexdigest()}


def wrapper_in(file: ModelFile) -> Wrapper | None:
    """The wrapper in the file; None when it is another kind of file.

    Raises:
        InvalidRequest, Unsupported: as `open_wrapper`.
    """
    return open_wrapper(file) if sniff(file.read(0, _SNIFF_BYTES)) == "wrapper" else None


def open_wrapper(file: ModelFile) -> Wrapper:
    """The wrapper in the file.

    Raises:
        InvalidRequest: reason BAD_FILE; damaged, or a model that is not compiled.
        Unsupported: of another execution provider.
    """
    try:
        wrapper = read_wrapper_from(FileBytes(file))
        file.check_unchanged()
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{str(file.path)!r} is not a sound ONNX file: {error}", reason=error.reason
        ) from error
    if not wrapper.nodes:
        raise InvalidRequest(
            f"{str(file.path)!r} is an ONNX model of {len(wrapper.other_nodes)} operators that is "
            "not compiled: run `qnnbroker compile` on it first",
            reason="BAD_FILE",
        )
    if not wrapper.main_nodes:
        check_fully_offloaded(wrapper)  # says what is wrong
        raise InvalidRequest(f"{str(file.path)!r} names no context binary", reason="BAD_FILE")
    return wrapper


def behind_wrapper(
    path: Path,
    file: ModelFile,
    wrapper: Wrapper,
    qnn_lib_dir: str,
    hashing: HashProgress | None,
) -> dict[str, Any]:
    """The description of the binary that the wrapper's first main node carries or names."""
    main = wrapper.main_nodes[0]
    if isinstance(main.cache_context, ByteRange):
        span = main.cache_context
        file.narrow(span.offset, span.length)
        place: dict[str, Any] = {"path": str(path), "embedded": True, "offset": span.offset}
        return {
            **place,
            **identify(file, hashing),
            **describe_binary(file, qnn_lib_dir),
        }
    where = binary_path(path, main)
    try:
        binary = ModelFile.open(where)
    except NotFound as error:
        raise NotFound(
            f"the wrapper {str(path)!r} names the context binary {where.name!r}, which is not "
            "beside it",
            reason="FILE_MISSING",
            path=where,
        ) from error
    with binary:
        return {
            "path": str(where),
            "embedded": False,
            **identify(binary, hashing),
            **describe_binary(binary, qnn_lib_dir),
        }


def describe_binary(file: ModelFile, qnn_lib_dir: str) -> dict[str, Any]:
    """What the library's parser says about the file's range, in a process of its own.

    Raises:
        InvalidRequest: reason BAD_FILE; not sound. DeadlineExpired, Failure: see `inspect_file`.
    """
    span = file.identity.offset, file.size_bytes
    fake = file.read(0, len(FAKE_MAGIC)) == FAKE_MAGIC
    job = {
        "fd": file.fd,
        "offset": span[0],
        "length": span[1],
        "fake": fake,
        "qnn_lib_dir": qnn_lib_dir,
    }
    name = str(file.path)
    try:
        code, output = run_child(json.dumps(job), file.fd)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExpired(
            f"parsing the context binary in {name!r} took more than {PARSE_SECONDS:g} seconds "
            "and was given up; it is probably damaged",
            reason="RUNNING",
        ) from error
    try:
        answer = json.loads(output)
    except ValueError:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        raise Failure(
            f"the process that parsed the context binary in {name!r} {how}: "
            "the file is damaged, or of a kind that the library cannot read",
            reason="CRASHED",
        ) from None
    if "missing" in answer:
        raise Failure(
            f"reading a context binary needs the QNN libraries ({answer['missing']}): "
            "pip install 'qnnbroker[server]', or name their directory with --qnn-lib-dir",
            reason="NO_LIBRARY",
        )
    if "refused" in answer:
        raise InvalidRequest(
            f"{name!r} holds no sound context binary ({span[1]} bytes): {answer['refused']}",
            reason="BAD_FILE",
        )
    found: dict[str, Any] = answer["binary"]
    return found


def run_child(job: str, fd: int) -> tuple[int, bytes]:
    """Exit code and answer of the parser. It is gone when this returns or raises.

    Raises:
        subprocess.TimeoutExpired: it took more than PARSE_SECONDS.
    """
    # Its standard input: while we hold the other end, it lives. That ends it even when a Ctrl-C
    # comes before there is a Popen object to kill it by.
    alive, ours = os.pipe()
    try:
        with subprocess.Popen(
            # -P: a file of the current directory must not stand in for a package.
            [sys.executable, "-P", "-m", "qnnbroker.cli.inspect_child", job],
            stdin=alive,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            # Ctrl-C is for this process, which ends the child.
            start_new_session=True,
        ) as child:
            try:
                output, _ = child.communicate(timeout=PARSE_SECONDS)
            finally:
                child.kill()
                child.wait()  # `with` would not, after a Ctrl-C
        return child.returncode, output
    finally:
        os.close(alive)
        os.close(ours)


def describe_wrapper(wrapper: Wrapper) -> dict[str, Any]:
    """The wrapper in types that JSON knows."""
    return {
        "ir_version": wrapper.ir_version,
        "graph_name": wrapper.graph_name,
        "metadata": wrapper.metadata,
        "compatibility": {
            key.removeprefix(_COMPATIBILITY): value
            for key, value in wrapper.metadata.items()
            if key.startswith(_COMPATIBILITY)
        },
        "inputs": [value_json(v) for v in wrapper.inputs],
        "outputs": [value_json(v) for v in wrapper.outputs],
        "nodes": [
            {
                "name": node.name,
                "graph": node.partition_name,
                "main": node.main_context,
                "embedded": node.embed_mode == 1,
                "source": node.source,
                "sdk_version": node.sdk_version,
            }
            for node in wrapper.nodes
        ],
        "other_operators": [{"type": op, "name": name} for op, name in wrapper.other_nodes],
    }


def value_json(value: Any) -> dict[str, Any]:
    dtype = _ONNX_DTYPES.get(value.elem_type, f"ONNX type {value.elem_type}")
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": dtype, "shape": shape}


def add_offered_names(graphs: list[dict[str, Any]], wrapper: Wrapper) -> None:
    """Gives each tensor the name under which the wrapper offers it; None where it does not."""
    by_graph = {node.partition_name: names_for(node) for node in wrapper.nodes}
    for graph in graphs:
        names = by_graph.get(graph["name"], {})
        for tensor in (*graph["inputs"], *graph["outputs"]):
            tensor["offered_as"] = names.get(tensor["name"])


def problem_of(wrapper: Wrapper, binary: dict[str, Any]) -> str | None:
    """Why a broker would refuse the wrapper, as far as the file alone tells."""
    try:
        check_fully_offloaded(wrapper)
    except (BrokerError, Unsupported) as error:
        return str(error)
    if len({node.cache_context for node in wrapper.main_nodes}) > 1:
        return f"the wrapper names {len(wrapper.main_nodes)} context binaries; one is taken"
    held = {graph["name"]: graph for graph in binary["graphs"]}
    for node in wrapper.nodes:
        if node.partition_name not in held:
            return (
                f"the wrapper names graph {node.partition_name!r}, its binary has "
                f"{', '.join(map(repr, held))}: the two do not belong together"
            )
        graph = held[node.partition_name]
        for tensor in (*graph["inputs"], *graph["outputs"]):
            if tensor["offered_as"] is None:
                return f"the wrapper has no edge for tensor {tensor['name']!r} of its binary"
    return None
