# SPDX-License-Identifier: Apache-2.0
"""A client whose buffers pass for DMA buffers: `dmabuf_client.py RUNTIME_DIR MODEL`.

For each step it prints a line: its name, and the time on CLOCK_MONOTONIC in microseconds at its
end. What the step did to the caches is in the record of dmabuf_stub.c.
"""

import sys
import time

from qnnbroker.client import BackendError, connect


def done(step: str) -> None:
    print(step, time.monotonic_ns() // 1000, flush=True)


def main() -> None:
    with connect(sys.argv[1]) as session:
        graph = session.load(sys.argv[2]).graph
        done("load")
        binding = graph.bind(zero_copy="require")
        done("bind")
        binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
        binding.run()
        done("run")
        assert (binding.outputs["y"] == 3).all()
        binding.submit().result(20)
        done("submit")
        buffer = session.alloc(4096)
        done("alloc")
        with graph.bind({"a": buffer}) as second:
            done("bind over two")
            second.run()
            done("run over two")
        with buffer.cpu_access():
            pass
        done("access")
        with buffer.cpu_access(write=False):
            pass
        done("read")
        with buffer.cpu_access(read=False):
            pass
        done("write")
        binding.run(sync=False)
        done("run without")
        sys.stdin.readline()  # the next execute is made to fail
        try:
            binding.run()
        except BackendError:
            done("failed run")


if __name__ == "__main__":
    main()
