# SPDX-License-Identifier: Apache-2.0
"""One application of the demo: asks Magika for the types of files, through the broker or alone.

Started by demo.py. Events go to standard output as JSON lines; a line on standard input lets it go
on after its first answer, the end of standard input ends it.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from zoo.magika import best, file_features, labels
from zoo.model import Array, Outputs

Run = Callable[[Array], Outputs]


def import_what_is_needed(way: str) -> None:
    """What an application has imported before it looks for its model."""
    if way == "broker":
        import qnnbroker.client  # noqa: F401
    else:
        import onnxruntime  # noqa: F401
        import onnxruntime_qnn  # noqa: F401


@contextlib.contextmanager
def through_the_broker(wrapper: Path, runtime_dir: Path, name: str) -> Iterator[Run]:
    """The model in the broker; inputs are written where the NPU reads them."""
    from qnnbroker.client import connect

    with (
        connect(runtime_dir, name=name) as session,
        session.load(wrapper) as model,
        model.graph.bind() as binding,
    ):

        def run(tokens: Array) -> Outputs:
            binding.inputs["bytes"][...] = tokens
            binding.run()
            return binding.outputs

        yield run


@contextlib.contextmanager
def alone(wrapper: Path) -> Iterator[Run]:
    """The model in an ONNX Runtime session of this process."""
    from zoo.inprocess import InProcessSession

    session = InProcessSession(wrapper)
    yield lambda tokens: session.run({"bytes": tokens})


def opened(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Run]:
    """The way that was asked for."""
    way: Literal["broker", "alone"] = arguments.way
    if way == "broker":
        return through_the_broker(arguments.wrapper, arguments.runtime_dir, arguments.name)
    return alone(arguments.wrapper)


def main() -> None:
    """Run the files in turn until there were enough runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("broker", "alone"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--wrapper", type=Path, required=True)
    parser.add_argument("--runtime-dir", type=Path)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()

    # The QNN library prints on standard output when it is loaded in this process.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(kind: str, **content: Any) -> None:
        print(json.dumps({"kind": kind, "at": time.monotonic(), **content}), file=events)

    names = labels()
    import_what_is_needed(arguments.way)
    emit("begun")
    with opened(arguments) as run:
        emit("ready")
        for index in range(arguments.runs):
            path = arguments.files[index % len(arguments.files)]
            label, probability = best(run(file_features(path)), names)
            emit("answer", file=str(path), label=label, probability=probability)
            if index == 0 and not sys.stdin.readline():
                return
        emit("done")
        sys.stdin.read()


if __name__ == "__main__":
    main()
