# SPDX-License-Identifier: Apache-2.0
"""One command line in its process: standard streams, signals, errors as one line and a code."""

import contextlib
import os
import signal
import sys
from types import FrameType


def guarded(arguments: list[str]) -> int:
    """One command line; returns the exit code. Raises nothing but KeyboardInterrupt."""
    fill_standard_streams()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _no_reader()
    except SystemExit as end:  # a signal, by _end
        return end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        code = report(error, arguments)
    return code


def run(arguments: list[str]) -> int:
    """Parses and runs; click's own ways to end become return values and exceptions of ours."""
    import click

    from qnnbroker.broker.interrupts import raise_exception

    from .group import COMPLETION_VARIABLE, cli, complete
    from .problems import DONE, WrongUsage

    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return complete(instruction)
    try:
        with cli.make_context("qnnbroker", list(arguments)) as context:
            raise_exception()  # a command may have to clean up
            cli.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "qnnbroker"
        raise WrongUsage(f"{error.format_message()} (see `{where} --help`)") from error
    except click.ClickException as error:
        raise WrongUsage(error.format_message()) from error
    return DONE


def report(error: BaseException, arguments: list[str]) -> int:
    """Says what went wrong: a line on standard error, with --json also an object on the output."""
    from .problems import describe

    if os.environ.get("QNNBROKER_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    problem = describe(error)
    with contextlib.suppress(OSError, ValueError):
        print(f"qnnbroker: {problem.message}", file=sys.stderr, flush=True)
    if wants_json(arguments):
        from .output import print_json

        with contextlib.suppress(OSError, ValueError):
            print_json(problem.as_json())
            sys.stdout.flush()
            return problem.exit_code
        _no_reader()
    return problem.exit_code


def wants_json(arguments: list[str]) -> bool:
    """Whether --json was given, also on a command line that could not be parsed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def fill_standard_streams() -> None:
    """Standard streams that were closed when we started lead to /dev/null: else the next file or
    socket that we open would get their numbers, and with them what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        # A name that is not text, or a terminal that is not UTF-8, is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _no_reader() -> int:
    """Whoever read our output is gone: be quiet, and let the interpreter's last flush succeed."""
    from .problems import NO_READER

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
    return NO_READER


def _end(number: int, _: FrameType | None) -> None:
    """SIGTERM and SIGHUP unwind like an exception, so that temporary files go."""
    raise SystemExit(128 + number)
