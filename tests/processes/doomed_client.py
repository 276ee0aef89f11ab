# SPDX-License-Identifier: Apache-2.0
"""A client that binds, runs without end and is killed: `doomed_client.py RUNTIME_DIR MODEL`."""

import sys

from qnnbroker.client import connect


def main() -> None:
    with connect(sys.argv[1]) as session:
        graph = session.load(sys.argv[2]).graph
        bindings = [graph.bind() for _ in range(3)]
        buffer = session.alloc(5000)
        bindings.append(graph.bind({"a": buffer}))
        print("running", flush=True)
        while True:
            for submission in [b.submit() for b in bindings]:
                submission.result()


if __name__ == "__main__":
    main()
