# SPDX-License-Identifier: Apache-2.0
"""One short-lived client of the soak: loads a model, runs it, unloads it, some times over.

    python -m tests.soak_client RUNTIME_DIR MODEL ROUNDS

Says a line at each stage, so that whoever started it can end it at any of them.
"""

import sys

from qnnbroker.client import connect

#: What a client says, in this order; all but the first two once a round.
STAGES = ("started", "attached", "loaded", "bound", "ran", "ran the simple way", "unloaded")
RUNS = 1


def main(runtime_dir: str, path: str, rounds: int) -> None:
    """All rounds of one client."""
    say("started")
    with connect(runtime_dir, timeout=60, name="soak") as session:
        say("attached")
        for _ in range(rounds):
            model = session.load(path)
            say("loaded")
            graph = next(iter(model.graphs.values()))
            binding = graph.bind()
            for array in binding.inputs.values():
                array[...] = 1
            say("bound")
            for _ in range(RUNS):
                binding.run()
            say("ran")
            outputs = graph.run({name: array.copy() for name, array in binding.inputs.items()})
            for name, array in outputs.items():
                assert (array == binding.outputs[name]).all(), f"{name} differs between runs"
            say("ran the simple way")
            del array  # a view would keep the memory mapped
            model.unload()
            say("unloaded")


def say(stage: str) -> None:
    print(stage, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
