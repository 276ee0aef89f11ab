# SPDX-License-Identifier: Apache-2.0
"""A client for process tests: loads the adder model, runs it again and again, checks every result.

    python client_process.py RUNTIME_DIR MODEL SEED COUNT

Says "running" after the first good run, then goes on until COUNT runs are done (0: for ever) or its
stdin ends. The last line is "done N", or "wrong" and the arrays' difference; the exit code says so
too.
"""

import select
import sys

import numpy as np

from qnnbroker.client import connect


def main() -> int:
    runtime_dir, path, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rng = np.random.default_rng(seed)
    with connect(runtime_dir, name=f"client {seed}") as session, session.load(path) as model:
        with model.graph.bind() as binding:
            done = 0
            while not count or done < count:
                a = rng.standard_normal((4, 8)).astype(np.float32)
                b = rng.standard_normal((4, 8)).astype(np.float32)
                binding.inputs["a"][...] = a
                binding.inputs["b"][...] = b
                binding.run()
                if not np.array_equal(binding.outputs["y"], a + b):
                    print("wrong", binding.outputs["y"] - (a + b), flush=True)
                    return 3
                done += 1
                if done == 1:
                    print("running", flush=True)
                if not count and select.select([sys.stdin], [], [], 0)[0]:
                    break
    print("done", done, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
