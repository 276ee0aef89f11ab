# SPDX-License-Identifier: Apache-2.0
"""The broker process proper: `python -m qnnbroker.broker CONFIG_JSON`.

`qnnbroker serve` becomes this process by exec, so that neither click nor rich stays in memory. It
leaves with os._exit: the QNN library's own teardown races with `exit` (SIGSEGV in 1 of 10 runs).
"""

import asyncio
import logging
import os
import signal
import sys

from qnnbroker.protos.errors import AlreadyExists, BrokerError, InvalidRequest, NotAllowed

from .app import Broker
from .config import BrokerConfig
from .logs import LogWriter

log = logging.getLogger("qnnbroker.broker")

#: How long the end waits for the last lines of the log.
LOG_SECONDS = 1.0

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Runs a broker until it is stopped; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m qnnbroker.broker CONFIG_JSON", file=sys.stderr)
        return EXIT_USAGE
    try:
        config = BrokerConfig.from_json(arguments[0])
    except BrokerError as error:
        print(f"qnnbroker: {error}", file=sys.stderr)
        return EXIT_USAGE
    logging.basicConfig(level=logging.WARNING, handlers=[LogWriter()])
    logging.getLogger("qnnbroker").setLevel(config.log_level.upper())
    prepare_process()
    try:
        return asyncio.run(serve(config))
    except (AlreadyExists, NotAllowed, InvalidRequest) as error:
        print(f"qnnbroker: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (BrokerError, OSError) as error:
        print(f"qnnbroker: cannot start: {error}", file=sys.stderr)
        return EXIT_FAILED


def prepare_process() -> None:
    """What holds for the whole life of the process.

    Nothing that a library prints may reach our stdout, and no file of the directory we were started
    in may configure one.
    """
    os.dup2(2, 1)
    os.chdir("/")
    os.umask(0o077)
    for variable in ("LIBNATIVE_CONFIG",):
        os.environ.pop(variable, None)


async def serve(config: BrokerConfig) -> int:
    """Starts, runs until SIGINT, SIGTERM or StopServer, stops."""
    broker = Broker(config)
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if asked:
            log.warning("%s again: leaving at once", number.name)
            leave(128 + number)
        asked.append(number)
        broker.request_stop(number.name)

    asked: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await broker.start()
    tell_ready(config.ready_fd)
    await broker.wait_stopped()
    try:
        async with asyncio.timeout(config.stop_timeout_seconds):
            await broker.stop()
    except TimeoutError:
        log.error(
            "something still runs after %g s; leaving without it", config.stop_timeout_seconds
        )
        broker.remove_sockets()
        leave(EXIT_FAILED)  # at once: closing the event loop would wait for what runs
    log.info("stopped")
    return EXIT_DONE


def tell_ready(fd: int) -> None:
    """One line to whoever waits for us, and the service manager's own way of being told."""
    if fd < 0:
        return
    try:
        os.write(fd, b"ready\n")
        os.close(fd)
    except OSError as error:
        log.warning("nobody hears that we are ready (fd %d): %s", fd, error)


def leave(code: int) -> None:
    """Ends the process without the libraries' teardown, and though nobody reads our stderr."""
    writers = [h for h in logging.getLogger().handlers if isinstance(h, LogWriter)]
    if all([writer.finish(LOG_SECONDS) for writer in writers]):
        sys.stderr.flush()
    os._exit(code)
