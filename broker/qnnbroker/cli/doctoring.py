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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"
CHILD_SECONDS = 60.0
#: A broker of many sessions takes several fds for each.
WANTED_FDS = 4096
WANTED_BYTES = 1 << 30
#: What 16-bit floats may be off.
TINY_ERROR = 1e-3
DEVICE_NODES = ("/dev/fastrpc-cdsp", "/dev/fastrpc-cdsp-secure", "/dev/dma_heap/system")
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
    yield Finding("QNN libraries", OK, report.steps["libraries"])
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
    with tempfile.TemporaryDirectory(prefix="qnnbroker-doctor-") as folder:
        try:
            binary = compile_tiny(options, Path(folder), device)
        except Exception as error:
            yield Finding(
                "tiny graph compiled",
                WARNING,
                str(error) or type(error).__name__,
                "pip install 'qnnbroker[server]'; needed on machines that compile models only",
            )
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
        yield Finding(
            name.replace("_", " "),
            OK if supported or not options.hardware else WARNING,
            f"{'yes' if supported else 'no'}: {evidence}",
            "" if supported or not options.hardware else "expected on a device; check the SDK",
        )


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
    """FastRPC's device nodes and who may use them."""
    for path in DEVICE_NODES:
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            status = WARNING if options.hardware else OK
            advice = "the kernel's FastRPC driver, or its node, is missing" if status != OK else ""
            yield Finding(path, status, error.strerror or str(error), advice)
            continue
        usable = os.access(path, os.R_OK) and (os.access(path, os.W_OK) or "dma_heap" in path)
        yield Finding(
            path,
            OK if usable else ERROR,
            f"{stat.filemode(mode)}, {'usable' if usable else 'no access for this user'}",
            "" if usable else "a udev rule or a group that lets this user read and write it",
        )


def check_search_path(options: Options) -> Iterator[Finding]:
    """Where the DSP looks for its half of the library."""
    if not options.hardware:
        yield Finding("DSP search path", OK, "not needed here: no DSP")
        return
    name = "DSP_LIBRARY_PATH" if os.environ.get("DSP_LIBRARY_PATH") else "ADSP_LIBRARY_PATH"
    places = [p for p in os.environ.get(name, "").split(";") if p]
    skels = [
        str(found)
        for place in (*places, options.qnn_lib_dir, *DSP_DIRECTORIES)
        if place
        for found in sorted(Path(place).glob("**/libQnnHtpV*Skel.so"))
    ]
    if skels:
        yield Finding("DSP search path", OK, f"{skels[0]} ({len(skels)} skel libraries)")
    else:
        yield Finding(
            "DSP search path",
            WARNING,
            f"no libQnnHtpV*Skel.so in {name}={';'.join(places) or '(empty)'} or the defaults",
            "put the skel of this device's arch beside libQnnHtp.so, or name its directory in "
            "ADSP_LIBRARY_PATH; entries are parted by ';'",
        )


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
            yield Finding("broker", OK, "one listens here")


def examine(options: Options) -> Iterator[Finding]:
    """Everything, in the order in which a start would meet it."""
    yield from check_backend(options)
    yield from check_rpcmem(options)
    yield from check_nodes(options)
    yield from check_search_path(options)
    yield from check_limits(options)
    yield from check_runtime_dir(options)
