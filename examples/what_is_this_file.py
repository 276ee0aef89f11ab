# SPDX-License-Identifier: Apache-2.0
"""What type are these files? Google's Magika on the NPU, whatever the files are called.

    python examples/what_is_this_file.py [--runtime-dir DIR] FILE...

Inputs are written where the NPU reads them. Exits with 1 when a file could not be read.
"""

import argparse
import sys
from pathlib import Path

import with_broker
import zoo
from qnnbroker.client import connect
from zoo.magika import best, file_features, labels


def main() -> int:
    """Say a line for each file; 0 if all could be read."""
    parser = argparse.ArgumentParser(description="What type are these files?")
    with_broker.add_options(parser)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    names = labels()
    code = 0
    with (
        with_broker.broker(arguments.runtime_dir) as directory,
        connect(directory, name="what is this file") as session,
        session.load(zoo.compiled("magika_fused")) as model,
        model.graph.bind() as binding,
    ):
        for path in arguments.files:
            if not path.is_file():  # nor anything that a read could hang on
                print(f"{path}: a regular file wanted, found none", file=sys.stderr)
                code = 1
                continue
            try:
                binding.inputs["bytes"][...] = file_features(path)
            except OSError as error:
                print(f"{path}: {error.strerror}", file=sys.stderr)
                code = 1
                continue
            timing = binding.run()
            label, probability = best(binding.outputs, names)
            milliseconds = timing.execute_ns / 1e6
            print(f"{path}: {label} ({probability:.0%}, {milliseconds:.0f} ms)", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(with_broker.run(main))
