# SPDX-License-Identifier: Apache-2.0
"""What a run costs beside its execute: a graph that does nothing, every way of running it.

The yardstick is what two processes need to tell one another anything: a round trip over two
eventfds, in C.

With spin off both are measured on one core as well. There a wake-up is a switch of threads; on two
cores it first has to get one out of its sleep. Left alone, the yardstick's two processes stay on
one core while a client and its broker are on one or on two, as the scheduler happens to put them:
only on one core is one thing compared with its like.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qnnbroker.client import Session, connect
from qnnbroker.client.control import Control
from qnnbroker.protos.paths import GRPC_SOCKET
from qnnbroker.v1 import control_pb2, types_pb2

from ..brokers import Broker, broker, fake_model
from ..rows import Mode, Row, Target, against, spread
from ..timing import Measure, Way, interleave, timed
from ..yardstick import Yardstick

ORDER = 1
TENSOR_BYTES = 4096
TARGETS = [
    Target("null_run_p50_us", "null graph, binding.run(), spin auto, p50", "<=", 5, "us"),
    Target("null_run_p99_us", "null graph, binding.run(), spin auto, p99", "<=", 100, "us"),
    Target(
        "null_run_nospin_over_yardstick_us",
        "null graph, binding.run(), spin off, on one core, p50",
        "<=",
        8,
        "us",
        over_vs=True,
    ),
    Target(
        "null_run_vs_grpc_inline",
        "gRPC Infer of 4 KiB inline / binding.run(), p50",
        ">=",
        40,
        use_ratio=True,
    ),
]
YARDSTICK = "eventfd round trip between two processes, in C"
SPIN, NO_SPIN = "binding.run(), spin auto", "binding.run(), spin off"
ONE_CORE = "both on one core"
SUBMIT = "binding.submit() + result(), spin auto"
EXECUTE = "gRPC Execute on shared memory"
INFER = "gRPC Infer, 4 KiB inline each way"


def run(mode: Mode) -> list[Row]:
    """All ways in turns in one run; times in us."""
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(fake_model("null", TENSOR_BYTES, TENSOR_BYTES))
        spinning = stack.enter_context(broker("fake"))
        sleeping = stack.enter_context(broker("fake", spin_us=0))
        yardstick = stack.enter_context(Yardstick())
        with _on_one_core():  # and so are all their processes and threads, for good
            close_yardstick = stack.enter_context(Yardstick())
            close = stack.enter_context(broker("fake", spin_us=0))
        fast = mode.pick(20, 200, 200)
        slow = mode.pick(2, 10, 10)
        ways = {
            YARDSTICK: Way(yardstick.eventfd, fast),
            SPIN: Way(timed(_bound(stack, spinning, model).run), fast),
            NO_SPIN: Way(timed(_bound(stack, sleeping, model, spin=False).run), fast),
            f"{YARDSTICK}, {ONE_CORE}": Way(_close(close_yardstick.eventfd), fast),
            f"{NO_SPIN}, {ONE_CORE}": Way(
                _close(timed(_bound(stack, close, model, spin=False).run)), fast
            ),
            SUBMIT: Way(_submitting(_bound(stack, spinning, model)), fast),
            EXECUTE: Way(timed(_bound(stack, spinning, model, ring=False).run), slow),
            INFER: Way(_inferring(stack, spinning, model), slow),
        }
        times = interleave(ways, mode.pick(2, 50, 250))
    rows = {name: spread(name, values, "us", scale=1e-3) for name, values in times.items()}
    spin, sleep = rows[SPIN], against(rows[NO_SPIN], rows[YARDSTICK])
    close_rows = rows[f"{YARDSTICK}, {ONE_CORE}"]
    close_sleep = against(rows[f"{NO_SPIN}, {ONE_CORE}"], close_rows)
    infer = against(rows[INFER], rows[SPIN])
    return [
        *rows[YARDSTICK],
        spin[0].against(rows[YARDSTICK][0]).decides("null_run_p50_us"),
        spin[1].against(rows[YARDSTICK][1]).decides("null_run_p99_us"),
        *sleep,
        *close_rows,
        close_sleep[0].decides("null_run_nospin_over_yardstick_us"),
        close_sleep[1],
        *against(rows[SUBMIT], rows[SPIN]),
        *against(rows[EXECUTE], rows[SPIN]),
        infer[0].decides("null_run_vs_grpc_inline"),
        infer[1],
    ]


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """This thread, and what it starts meanwhile."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _close(measure: Measure) -> Measure:
    """The same, on the one core."""

    def measured(count: int) -> list[int]:
        with _on_one_core():
            return measure(count)

    return measured


def _bound(
    stack: contextlib.ExitStack, where: Broker, model: Path, *, spin: bool = True, ring: bool = True
) -> Any:
    """A binding of a session of its own."""
    session: Session = stack.enter_context(connect(where.directory, ring=ring))
    if not spin:
        session.hot_path().ring.set_spin(0)
    return session.load(model).graph.bind()


def _submitting(binding: Any) -> Measure:
    return timed(lambda: binding.submit().result())


def _inferring(stack: contextlib.ExitStack, where: Broker, model: Path) -> Measure:
    """gRPC as any client would use it, without shared memory."""
    session = stack.enter_context(connect(where.directory, ring=False))
    name = session.load(model).name
    control = Control(str(where.directory / GRPC_SOCKET))
    stack.callback(control.close)
    return timed(lambda: control.infer(inline_request(name, TENSOR_BYTES), 60.0))


def inline_request(model: str, size_bytes: int) -> control_pb2.InferRequest:
    """A request with the input `x` of the fakes, which is part of what it costs to make."""
    tensor = types_pb2.InlineTensor(
        name="x",
        dtype=types_pb2.DATA_TYPE_UINT8,
        shape=[size_bytes],
        data=bytes(size_bytes),
    )
    return control_pb2.InferRequest(name=model, inputs=[tensor])
