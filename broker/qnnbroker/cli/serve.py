# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker serve` becomes the broker process; `qnnbroker stop` ends it."""

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, Never

import click

from .invocation import Command, invocation
from .options import Option, Setting, all_options, broker_config, effective
from .problems import Failure, WrongUsage

#: Between two looks at the lock file, when the broker's process cannot be waited for.
_LOOK_SECONDS = 0.05


def flags() -> list[click.Option]:
    """A flag for every option of the broker but the runtime directory, which all commands have."""
    return [flag_of(o) for o in all_options().values() if o.name != "runtime_dir"]


def flag_of(option: Option) -> click.Option:
    if option.length:
        shown = ",".join(map(str, option.default))
        metavar = ",".join(["N"] * option.length)
    else:
        shown = str(option.default) if option.default != "" else "none"
        if option.unit == "bytes" and option.default % (1 << 20) == 0:
            shown = f"{option.default >> 20}MiB"
        if option.kind is bool:
            return click.Option(
                [f"{option.flag}/--no-{option.flag[2:]}", option.name],
                default=None,
                help=f"{option.help}.  [default: {'yes' if option.default else 'no'}]",
            )
        metavar = {str: "TEXT", int: "N", float: "X"}[option.kind]
        metavar = "BYTES" if option.unit == "bytes" else metavar
    unit = f", in {option.unit}" if option.unit and option.unit != "bytes" else ""
    return click.Option(
        [option.flag, option.name],
        metavar=metavar,
        help=f"{option.help}{unit}.  [default: {shown}]",
    )


@click.command(
    cls=Command,
    params=flags(),
    examples=[
        ("qnnbroker serve", "run the broker on the NPU of this machine"),
        ("qnnbroker serve --qnn-lib-dir /opt/qnn/lib", "with another set of QNN libraries"),
        ("qnnbroker serve --max-sessions 16 --max-buffer-bytes 512MiB", "with tighter limits"),
        ("qnnbroker serve --backend fake --runtime-dir /tmp/qb", "without an NPU, for tests"),
        ("qnnbroker serve --ready-fd 3 3>ready", "tell a script when clients may come"),
    ],
)
def serve(**given: str | bool | None) -> Never:
    """Run the broker in the foreground.

    Every option can also be set in the configuration file (see `qnnbroker config`) or by an
    environment variable QNNBROKER_<OPTION>; a flag wins over the environment, the environment over
    the file. Ctrl-C and SIGTERM stop it in order; a second one at once.

    The process replaces itself by the broker, with the same pid. With --json it first prints its
    pid, its sockets and its configuration. It is ready when --ready-fd gets its line.
    """
    call = invocation()
    texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in given.items()}
    if call.runtime_dir is not None:
        texts["runtime_dir"] = call.runtime_dir
    _, settings = effective(call.config_file, texts)
    config = broker_config(settings)
    check_start(config.directory, settings)
    if call.json:
        import dataclasses

        from qnnbroker.protos.paths import ATTACH_SOCKET, GRPC_SOCKET

        from .output import print_json

        print_json(
            {
                "pid": os.getpid(),
                "attach_socket": str(config.directory / ATTACH_SOCKET),
                "grpc_socket": str(config.directory / GRPC_SOCKET),
                "config": dataclasses.asdict(config),
            }
        )
    become([sys.executable, "-P", "-m", "qnnbroker.broker", config.to_json()])


def become(command: list[str]) -> Never:
    """Replaces this process. Signals go back to what they were before Python came, and a Ctrl-C
    waits until the new program can take it: what starts it is Python once more."""
    import signal

    from qnnbroker.broker.interrupts import hold_back

    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    hold_back()
    os.execv(command[0], command)


def check_start(directory: Path, settings: dict[str, Setting]) -> None:
    """What can be said before the broker is started, in better words than it could.

    Raises:
        WrongUsage: a descriptor that is not open.
        Failure: reason NO_LIBRARY.
        BrokerError: the runtime directory is no good, or a broker is there already.
    """
    from qnnbroker.protos.errors import AlreadyExists
    from qnnbroker.protos.paths import check_private, check_socket_path

    from .presence import lock_holder

    check_socket_path(directory)
    with contextlib.suppress(FileNotFoundError):
        check_private(directory)
    if (pid := lock_holder(directory)) is not None:
        raise AlreadyExists(
            f"a broker (pid {pid}) is already running on {str(directory)!r}; use it, stop it with "
            "`qnnbroker stop`, or choose another --runtime-dir",
            reason="BROKER_RUNNING",
            pid=pid,
        )
    for name in ("attach_fd", "ready_fd"):
        check_descriptor(settings[name])
    if settings["backend"].value == "qnn":
        check_library(settings["qnn_lib_dir"].value)


def check_descriptor(setting: Setting) -> None:
    """Refuses a descriptor that is not open, and lets a good one through the exec."""
    if setting.value >= 0:
        try:
            os.set_inheritable(setting.value, True)
        except OSError as error:
            raise WrongUsage(
                f"{setting.place}: an open file descriptor wanted, {setting.value} is none: "
                f"{error.strerror}"
            ) from error


def check_library(named: str) -> None:
    """Refuses a start without QNN libraries."""
    from qnnbroker.native.qnn_library import LIBRARY_NAMES, default_qnn_dir

    if named:
        missing = [name for name in LIBRARY_NAMES if not os.path.isfile(os.path.join(named, name))]
        if missing:
            raise Failure(
                f"a directory with {' and '.join(LIBRARY_NAMES)} wanted, {named!r} has no "
                f"{' and no '.join(missing)}",
                reason="NO_LIBRARY",
            )
        return
    try:
        default_qnn_dir()
    except FileNotFoundError as error:
        raise Failure(
            "the QNN libraries are not installed: pip install 'qnnbroker[server]', or name a "
            "directory that has them with --qnn-lib-dir",
            reason="NO_LIBRARY",
        ) from error


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker stop", "stop the broker; returns when it is gone"),
        ("qnnbroker stop --timeout 5", "wait 5 seconds at most"),
    ],
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until it is gone.",
)
def stop(timeout: float) -> None:
    """Stop the broker and wait until it is gone.

    What runs on the NPU is finished and answered; what is queued fails. Fails when the broker is
    still there after the timeout; it goes on stopping then.
    """
    from .operator import CALL_SECONDS, broker_control
    from .output import print_json, print_line

    call = invocation()
    directory = call.directory()
    started = time.monotonic()
    with broker_control(directory) as control:
        pid = control.server_info(CALL_SECONDS).pid
        with process_of(pid) as process:
            control.stop_server(CALL_SECONDS)
            gone = wait_gone(process, directory, pid, started + timeout)
    seconds = time.monotonic() - started
    if not gone:
        raise Failure(
            f"the broker (pid {pid}) was still there after {timeout:g} seconds; it is stopping",
            reason="STILL_STOPPING",
        )
    if call.json:
        print_json({"pid": pid, "stopped": True, "seconds": seconds})
    else:
        print_line(f"broker (pid {pid}) stopped after {seconds:.1f} s")


@contextlib.contextmanager
def process_of(pid: int) -> Any:
    """A pidfd of the broker, or None when it lives in another pid namespace."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def wait_gone(process: int | None, directory: Path, pid: int, deadline: float) -> bool:
    """Until the process has ended, or nobody holds the lock; False when it takes too long."""
    from .presence import lock_holder

    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    while lock_holder(directory) == pid:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
