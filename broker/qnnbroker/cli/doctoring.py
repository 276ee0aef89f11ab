# SPDX-License-Identifier: Apache-2.0
"""The checks of `qnnbroker doctor`, each a list of findings; libraries are touched in children."""

import json
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .temporary import temporary_directory

OK, WARNING, ERROR = "ok", "warning", "error"
CHILD_SECONDS = 60.0
#: For a call that only asks.
ANSWER_SECONDS = 5.0
#: A broker of many sessions takes several fds for each.
WANTED_FDS = 4096
WANTED_BYTES = 1 << 30
#: What 16-bit floats may be off.
TINY_ERROR = 1e-3
#: One of them is enough.
FASTRPC_NODES = ("/dev/fastrpc-cdsp", "/dev/fastrpc-cdsp-secure")
HEAP_NODE = "/dev/dma_heap/system"
#: What FastRPC searches besides the variables, where a device has it.
DSP_DIRECTORIES = ("/usr/lib/rfsa/adsp", "/vendor/lib/rfsa/adsp", "/vendor/dsp", "/usr/lib/dsp")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, what was found, and what to do about it."""

    name: str
    status: str
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "status": self.status,
            "found": self.found,
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class Options:
    """What is examined, as the broker would be started."""

    directory: Path
    fake: bool = False
    qnn_lib_dir: str = ""
    rpcmem_library: str = ""

    @property
    def hardware(self) -> bool:
        """Whether this machine could have an NPU; x86_64 has QNN's emulation only."""
        return platform.machine() in ("aarch64", "arm64") and not self.fake


@dataclass(frozen=True, slots=True)
class ChildReport:
    """The steps that a child told of, and how it ended."""

    steps: dict[str, Any]
    problem: str


def ask_child(job: dict[str, Any]) -> ChildReport:
    """Runs doctor_child; its death and its silence are findings as well."""
    command = [sys.executable, "-P", "-m", "qnnbroker.cli.doctor_child", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHILD_SECONDS, check=False)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = late.stdout or b"", None
    steps: dict[str, Any] = {}
    problem = ""
    for line in output.splitlines():
        told = json.loads(line)
        if "error" in told:
            problem = told["error"]
        else:
            steps[told["step"]] = told["content"]
    if code is None:
        problem = f"no answer within {CHILD_SECONDS:g} s"
    elif code < 0:
        problem = f"the process died of {signal.Signals(-code).name}"
    elif code:
        problem = problem or f"the process ended with code {code}"
    return ChildReport(steps, problem)


def job_of(options: Options, kind: str, binary: str = "") -> dict[str, Any]:
    return {
        "kind": kind,
        "fake": options.fake,
        "qnn_lib_dir": options.qnn_lib_dir,
        "rpcmem_library": options.rpcmem_library,
        "binary": binary,
    }


def check_backend(options: Options) -> Iterator[Finding]:
    """Libraries, backend and device, and then a tiny graph, compiled and executed."""
    report = ask_child(job_of(options, "backend"))
    if "libraries" not in report.steps:
        yield Finding(
            "QNN libraries",
            ERROR,
            report.problem,
            "install onnxruntime-qnn, or name a directory with libQnnHtp.so by --qnn-lib-dir",
        )
        return
    libraries = report.steps["libraries"]
    yield Finding(
        "QNN libraries",
        OK,
        "{directory}: {provider}, core API {core_api_version}, backend API {backend_api_version}, "
        "system API {system_api_version}".format(**libraries),
    )
    device = report.steps.get("device")
    if device is None:
        yield Finding(
            "backend and device",
            ERROR,
            report.problem,
            "use host, stub and skel libraries of one SDK; see the DSP's own log",
        )
        return
    kind = "emulation" if device["emulated"] else "hardware"
    yield Finding(
        "backend and device",
        OK,
        f"{device['provider']} {device['build_id']}, API {device['core_api_version']}, SoC "
        f"{device['soc_model']}, arch {device['dsp_arch']}, {device['vtcm_mb']} MiB VTCM, {kind}",
    )
    yield from check_tiny_graph(options, device)


def check_tiny_graph(options: Options, device: dict[str, Any]) -> Iterator[Finding]:
    """Compiles y = x + x for this device, and runs it in a child."""
    with temporary_directory("qnnbroker-doctor-") as folder:
        try:
            binary = compile_tiny(options, folder, device)
        except Exception as error:
            found = str(error) or type(error).__name__
            advice = "pip install 'qnnbroker[server]'; needed on machines that compile models only"
            yield Finding("tiny graph compiled", WARNING, found, advice)
            return
        yield Finding("tiny graph compiled", OK, f"{os.path.getsize(binary)} bytes")
        report = ask_child(job_of(options, "backend", str(binary)))
    off_by = report.steps.get("run")
    if off_by is not None and off_by <= TINY_ERROR:
        yield Finding("tiny graph executed", OK, f"y = x + x, off by {off_by:.1e} at most")
    else:
        found = report.problem or f"wrong results: off by {off_by}"
        yield Finding("tiny graph executed", ERROR, found, "see the log of the library and the DSP")
    for name, supported, evidence in report.steps.get("capabilities", []):
        yield capability(name.replace("_", " "), supported, evidence, options)


def capability(name: str, supported: bool, evidence: str, options: Options) -> Finding:
    """What the library can do; what an emulation lacks is no fault of this machine."""
    if supported or options.hardware:
        word, status = ("yes", OK) if supported else ("no", WARNING)
        advice = "" if supported else "expected on a device; check the SDK"
        return Finding(name, status, f"{word}: {evidence}", advice)
    here = "the fake library" if options.fake else "the emulation"
    return Finding(name, OK, f"this is {here}, without it; expected on a device ({evidence})")


def compile_tiny(options: Options, folder: Path, device: dict[str, Any]) -> Path:
    """A context binary of y = x + x over float32[4]."""
    if options.fake:
        from qnnbroker.native.fake import FakeGraph, FakeTensor, write_binary

        x, y = (FakeTensor(n, "float32", (4,)) for n in "xy")
        return write_binary(folder / "tiny.bin", [FakeGraph("tiny", (x,), (y,), ("add x x y",))])
    from .compiling import DEFAULT_SOC_MODEL, compile_model

    source = folder / "tiny.onnx"
    source.write_bytes(tiny_model())
    soc = DEFAULT_SOC_MODEL if device["emulated"] else device["soc_model"] or DEFAULT_SOC_MODEL
    result = compile_model(source, folder / "tiny_ctx.onnx", soc_model=soc, timeout=CHILD_SECONDS)
    assert result.binary is not None
    return result.binary


def tiny_model() -> bytes:
    """The ONNX model y = Add(x, x), encoded by hand: onnx is not needed for so little."""

    def field(number: int, content: bytes | int) -> bytes:
        if isinstance(content, int):
            return bytes([number << 3, content])
        return bytes([number << 3 | 2, len(content)]) + content

    def value(name: bytes) -> bytes:
        shape = field(1, field(1, 1)) + field(1, field(1, 4))  # [1, 4]
        return field(1, name) + field(2, field(1, field(1, 1) + field(2, shape)))

    node = field(1, b"x") + field(1, b"x") + field(2, b"y") + field(4, b"Add")
    graph = field(1, node) + field(2, b"tiny") + field(11, value(b"x")) + field(12, value(b"y"))
    return field(1, 10) + field(7, graph) + field(8, field(2, 21))


def check_rpcmem(options: Options) -> Iterator[Finding]:
    """Shared memory of the DSP."""
    report = ask_child(job_of(options, "rpcmem"))
    library, memory = report.steps.get("library"), report.steps.get("memory")
    if library is not None and memory is not None:
        found = f"{library['path']}{'' if library['alloc2'] else ' (less than 2 GiB at a time)'}"
        kind = "a DMA buffer" if memory["dma_buf"] else "not a DMA buffer"
        yield Finding("rpcmem", OK, f"{found}, allocates {kind}")
    elif options.hardware:
        yield Finding(
            "rpcmem",
            ERROR if library else WARNING,
            report.problem,
            "install FastRPC's libcdsprpc.so and give this user access to the nodes below; "
            "until then buffers are memfds, which the device may not take",
        )
    else:
        yield Finding("rpcmem", OK, f"none ({report.problem}); not needed here, buffers are memfds")


def check_nodes(options: Options) -> Iterator[Finding]:
    """FastRPC's device nodes and the heap of DMA buffers, and who may use them."""
    nodes = [look_at_node(path, os.R_OK | os.W_OK) for path in FASTRPC_NODES]
    yield node_finding("FastRPC node", nodes, options)
    yield node_finding("DMA heap", [look_at_node(HEAP_NODE, os.R_OK)], options)


@dataclass(frozen=True, slots=True)
class Node:
    """A device node: whether it is there, whether we may use it, and both in words."""

    there: bool
    usable: bool
    found: str


def look_at_node(path: str, access: int) -> Node:
    try:
        mode = stat.filemode(os.stat(path).st_mode)
    except OSError as error:
        return Node(False, False, f"{path}: {error.strerror or error}")
    usable = os.access(path, access)
    return Node(True, usable, f"{path}: {mode}, {'usable' if usable else 'no access for us'}")


def node_finding(name: str, nodes: list[Node], options: Options) -> Finding:
    """About nodes of which one is enough."""
    found = "; ".join(n.found for n in nodes)
    if any(n.usable for n in nodes):
        return Finding(name, OK, found)
    if any(n.there for n in nodes):
        advice = "a udev rule or a group that lets this user read and write it"
        return Finding(name, ERROR, found, advice)
    if not options.hardware:
        return Finding(name, OK, f"not needed here: {found}")
    return Finding(name, WARNING, found, "the kernel's driver, or its node, is missing")


def check_search_path(options: Options) -> Iterator[Finding]:
    """Where the DSP looks for its half of the library."""
    if not options.hardware:
        yield Finding("DSP search path", OK, "not needed here: no DSP")
        return
    name = "DSP_LIBRARY_PATH" if os.environ.get("DSP_LIBRARY_PATH") else "ADSP_LIBRARY_PATH"
    places = [p for p in os.environ.get(name, "").split(";") if p]
    skels = [
        str(found)
        for place in (*library_dirs(options), *places, *DSP_DIRECTORIES)
        for found in sorted(Path(place).glob("**/libQnnHtpV*Skel.so"))
    ]
    if skels:
        yield Finding("DSP search path", OK, f"{skels[0]} ({len(skels)} skel libraries)")
    else:
        yield Finding(
            "DSP search path",
            WARNING,
            f"no libQnnHtpV*Skel.so beside the libraries, in {name}="
            f"{';'.join(places) or '(empty)'}, or in the defaults",
            "put the skel of this device's arch beside libQnnHtp.so, or name its directory in "
            "ADSP_LIBRARY_PATH; entries are parted by ';'",
        )


def library_dirs(options: Options) -> list[str]:
    """The directory of the libraries, which the broker puts first in the search path; or none."""
    from qnnbroker.native.qnn_library import default_qnn_dir

    if options.qnn_lib_dir:
        return [options.qnn_lib_dir]
    try:
        return [str(default_qnn_dir())]
    except FileNotFoundError:
        return []


def check_limits(options: Options) -> Iterator[Finding]:
    """Open files, locked memory, memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= WANTED_FDS
    yield Finding(
        "open files",
        OK if enough else WARNING,
        f"at most {hard}",
        "" if enough else f"raise the hard limit to {WANTED_FDS}: a session takes several",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Finding(
        "locked memory", OK, "no limit" if unlimited else f"{soft} bytes; the broker locks none"
    )
    available = available_bytes()
    yield Finding(
        "memory",
        OK if available >= WANTED_BYTES else WARNING,
        f"{available >> 20} MiB available",
        "" if available >= WANTED_BYTES else "contexts of large models will not fit",
    )


def available_bytes() -> int:
    """What can be allocated without swapping, as the kernel estimates it."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def check_runtime_dir(options: Options) -> Iterator[Finding]:
    """The directory of the sockets, and who listens there."""
    from qnnbroker.protos.errors import BrokerError
    from qnnbroker.protos.paths import ATTACH_SOCKET, check_private, check_socket_path

    directory = options.directory
    try:
        check_socket_path(directory)
        check_private(directory)
    except FileNotFoundError:
        yield Finding("runtime directory", OK, f"{directory}: not there yet; serve makes it")
        return
    except BrokerError as error:
        yield Finding("runtime directory", ERROR, str(error), "choose another by --runtime-dir")
        return
    yield Finding("runtime directory", OK, str(directory))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5)
        try:
            client.connect(str(directory / ATTACH_SOCKET))
        except FileNotFoundError:
            yield Finding("broker", OK, "none is running here")
        except ConnectionRefusedError:
            yield Finding("broker", WARNING, "a socket is left over", "start one: qnnbroker serve")
        except OSError as error:
            yield Finding("broker", ERROR, str(error), "see the broker's log")
        else:
            yield ask_broker(directory)


def ask_broker(directory: Path) -> Finding:
    """Whether the broker that takes clients here answers calls, too."""
    from qnnbroker.protos.errors import BrokerError, BrokerUnavailable

    from .operator import broker_control

    try:
        with broker_control(directory) as control:
            info = control.server_info(ANSWER_SECONDS)
    except BrokerUnavailable as error:
        found = f"one takes clients, but not yet calls over gRPC: {error}"
        return Finding("broker", WARNING, found, "it starts, or hangs at it; see its log")
    except BrokerError as error:
        found = f"one takes clients, but does not answer calls: {error}"
        return Finding("broker", ERROR, found, "see the broker's log")
    found = f"{info.broker_version} runs here, pid {info.pid}, on {info.backend.provider}"
    return Finding("broker", OK, found)


def examine(options: Options) -> Iterator[Finding]:
    """Everything, in the order in which a start would meet it."""
    yield from check_backend(options)
    yield from check_rpcmem(options)
    yield from check_nodes(options)
    yield from check_search_path(options)
    yield from check_limits(options)
    yield from check_runtime_dir(options)
