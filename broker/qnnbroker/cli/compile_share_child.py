# SPDX-License-Identifier: Apache-2.0
"""The process that compiles several models into one binary with their common weights stored once.

`python -m qnnbroker.cli.compile_share_child FD`; see compile_child.py, whose protocol it speaks. It
compiles each model alone first: that says what is wrong with which model, and what sharing saves.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from qnnbroker.cli.compile_child import Child, describe, end_with_parent
from qnnbroker.protos.errors import BackendError, BrokerError


def share(children: list[Child], directory: Path) -> list[dict[str, Any]]:
    """Compiles all into one binary in `directory`; a report for each.

    Raises:
        BrokerError: ONNX Runtime refuses.
    """
    from qnnbroker.cli.compile_refusals import other_error, plain_log

    sessions = []  # all have to live until the last one writes the binary
    for index, child in enumerate(children):
        child.emit("stage", f"sharing ({index + 1} of {len(children)})")
        child.wrapper = directory / child.wrapper.name
        entries = {
            "session.disable_cpu_ep_fallback": "1",
            "ep.context_enable": "1",
            "ep.context_file_path": str(child.wrapper),
            "ep.context_embed_mode": "0",
            "ep.share_ep_contexts": "1",
        }
        if child is children[-1]:
            entries["ep.stop_share_ep_contexts"] = "1"
        try:
            sessions.append(child.session(entries))
        except Exception as exc:  # ONNX Runtime has one class per status, without a common base
            log = plain_log(child.log.read_text(errors="replace"))
            raise other_error(child.source.name, str(exc), log, child.soc_model) from exc
    reports = [child.report() for child in children]
    if len(binaries := {report["binary"] for report in reports}) != 1:
        raise BackendError(
            f"one binary for all was wanted, ONNX Runtime wrote {sorted(map(str, binaries))}",
            reason="INTERNAL",
        )
    return reports


def run(job: dict[str, Any], events_fd: int) -> tuple[Child, dict[str, Any]]:
    """The whole job."""
    directory = Path(job["directory"])
    alone = directory / "alone"
    alone.mkdir()
    children = []
    for source, name in job["models"]:
        options = {**job, "source": source, "wrapper": str(alone / name), "embed": False}
        children.append(Child(options, events_fd))
    separate = [child.run() for child in children]
    shared = share(children, directory)
    return children[0], {
        "models": [{**a, **b} for a, b in zip(separate, shared, strict=True)],
        "separate_bytes": sum(report["size_bytes"] for report in separate),
    }


def main() -> None:
    """Do the one job of this process."""
    events_fd = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.readline())
    log_fd = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        child, result = run(job, events_fd)
    except BrokerError as error:
        os.write(events_fd, json.dumps({"error": describe(error)}).encode() + b"\n")
    else:
        child.emit("result", result)
    # Not the interpreter's exit: the libraries' own threads and destructors race with it.
    os._exit(0)


if __name__ == "__main__":
    main()
