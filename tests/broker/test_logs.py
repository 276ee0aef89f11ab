# SPDX-License-Identifier: Apache-2.0
"""The log's writer: order, loss that is told, and nobody who waits."""

import fcntl
import io
import logging
import os
import threading

import pytest

from qnnbroker.broker.logs import LogWriter


def logger_of(writer: LogWriter) -> logging.Logger:
    """A logger that nobody else has."""
    logger = logging.Logger("alone", logging.DEBUG)
    logger.addHandler(writer)
    return logger


def test_lines_are_written_in_their_order_with_exceptions() -> None:
    out = io.StringIO()
    writer = LogWriter(out)
    logger = logger_of(writer)
    for n in range(100):
        logger.info("line %d", n)
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    assert writer.finish(60)
    lines = out.getvalue().splitlines()
    assert [line.rpartition("line ")[2] for line in lines[:100]] == [str(n) for n in range(100)]
    assert lines[100].endswith("ERROR alone: failed")
    assert lines[-1] == "ValueError: why"


def test_a_stream_that_takes_nothing_keeps_nobody_waiting_and_the_loss_is_told() -> None:
    reader, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)  # a few lines
    with open(end, "w") as stuck, open(reader) as readable:
        writer = LogWriter(stuck, max_lines=10)
        logger = logger_of(writer)
        for _ in range(5000):
            logger.info("%s", "x" * 100)
        assert not writer.finish(0.05)
        seen: list[str] = []

        def read() -> None:
            seen.extend(readable)

        thread = threading.Thread(target=read)
        thread.start()
        logger.info("the last")  # may be dropped as well, or not
        assert writer.finish(60)
        stuck.close()
        thread.join(60)
    assert any("lines before this were lost" in line for line in seen)


def test_a_line_has_its_heading_once_when_basic_config_takes_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    writer = LogWriter(out)
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    logging.basicConfig(level=logging.WARNING, handlers=[writer])
    root.warning("text")
    assert writer.finish(60)
    (line,) = out.getvalue().splitlines()
    assert line.endswith(" WARNING root: text")
    assert line.count("WARNING") == 1
