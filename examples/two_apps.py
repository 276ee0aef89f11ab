# SPDX-License-Identifier: Apache-2.0
"""Two processes use one model: the second finds the context in memory, and both get their answers.

    python examples/two_apps.py [--runtime-dir DIR] [--model NAME]

Exits with 1 when an answer is wrong, or when the second did not get the context of the first.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import with_broker
import zoo
from qnnbroker.client import connect


def application(name: str, wrapper: Path, model_name: str, runtime_dir: Path) -> bool:
    """What each of the two processes does; whether its answers were right."""
    started = time.monotonic()
    with connect(runtime_dir, name=name) as session, session.load(wrapper) as model:
        how = "found it in memory" if model.shared else "loaded it"
        milliseconds = (time.monotonic() - started) * 1000
        print(f"{name}: {how}, {milliseconds:.0f} ms after it began to attach", flush=True)
        right = name == "first" or model.shared
        for case in zoo.model(model_name).cases():
            is_right, answer = case.check(model.graph.run(case.feeds))
            print(f"{name}: {case.label} -> {answer}{'' if is_right else '  WRONG'}", flush=True)
            right = right and is_right
        if name == "first":
            print("first: keeps its session open", flush=True)
            sys.stdin.read()  # until the other is done
    return right


def main() -> int:
    """Start a broker if none is named, then the two; 0 if all went right."""
    parser = argparse.ArgumentParser(description="Two processes, one context.")
    with_broker.add_options(parser)
    parser.add_argument("--model", choices=zoo.NAMES, default="silero_vad", help="of the zoo")
    parser.add_argument("--application", choices=("first", "second"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wrapper = zoo.compiled(arguments.model)
    if arguments.application:
        right = application(arguments.application, wrapper, arguments.model, arguments.runtime_dir)
        return 0 if right else 1

    with with_broker.broker(arguments.runtime_dir) as directory:
        command = [sys.executable, __file__, "--model", arguments.model]
        command += ["--runtime-dir", str(directory), "--application"]
        with subprocess.Popen(
            [*command, "first"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            for line in first.stdout:
                print(line, end="", flush=True)
                if "keeps its session open" in line:
                    break
            else:
                return 1
            second = subprocess.run([*command, "second"], check=False)
            with connect(directory, name="observer") as session:
                counters = session.statistics().counters
            print(f"contexts in the broker: {counters['contexts']}")
            # The end of this block is the end of its standard input, and so of the first.
    return 0 if first.returncode == 0 and second.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(with_broker.run(main))
