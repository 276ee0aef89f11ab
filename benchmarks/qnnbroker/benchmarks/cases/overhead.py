# SPDX-License-Identifier: Apache-2.0
"""What a run costs beside its execute: a graph that does nothing, every way of running it.

The yardstick is what two processes need to tell one another anything: a round trip over two
eventfds, in C.

With spin off both are also measured where we put them. On one core a wake-up is a switch of
threads; on two it first has to get one of them out of its sleep, which takes several times as long.
Left alone the two of either pair are where the scheduler happens to put them, and that need not be
the same.
"""

import contextlib
import itertools
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
        "null graph, binding.run(), spin off, p50",
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
#: Where the two sides are: on which of our cores.
PLACEMENTS = {"both on one core": (0, 0), "on two cores": (0, 1)}
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
        fast = mode.pick(20, 200, 200)
        slow = mode.pick(2, 10, 10)
        ways = {
            YARDSTICK: Way(yardstick.eventfd, fast),
            SPIN: Way(timed(_bound(stack, spinning, model).run), fast),
            NO_SPIN: Way(timed(_bound(stack, sleeping, model, spin=False).run), fast),
            SUBMIT: Way(_submitting(_bound(stack, spinning, model)), fast),
            EXECUTE: Way(timed(_bound(stack, spinning, model, ring=False).run), slow),
            INFER: Way(_inferring(stack, spinning, model), slow),
        }
        times = interleave(ways, mode.pick(2, 50, 250))
        # By themselves: they leave the cores in another state than the others find them in.
        cores = sorted(os.sched_getaffinity(0))
        placed = {}
        placements = [name for name, both in PLACEMENTS.items() if max(both) < len(cores)]
        for name in placements:
            here, there = (cores[i] for i in PLACEMENTS[name])
            for case, measure in _placed(stack, model, here, there).items():
                placed[f"{case}, {name}"] = Way(measure, fast)
        times |= interleave(placed, mode.pick(2, 50, 100))
    rows = {name: spread(name, values, "us", scale=1e-3) for name, values in times.items()}
    spin, sleep = rows[SPIN], against(rows[NO_SPIN], rows[YARDSTICK])
    infer = against(rows[INFER], rows[SPIN])
    return [
        *rows[YARDSTICK],
        spin[0].against(rows[YARDSTICK][0]).decides("null_run_p50_us"),
        spin[1].against(rows[YARDSTICK][1]).decides("null_run_p99_us"),
        sleep[0].decides("null_run_nospin_over_yardstick_us"),
        sleep[1],
        *itertools.chain.from_iterable(
            (*rows[f"{YARDSTICK}, {name}"], *against(*_pair(rows, name))) for name in placements
        ),
        *against(rows[SUBMIT], rows[SPIN]),
        *against(rows[EXECUTE], rows[SPIN]),
        infer[0].decides("null_run_vs_grpc_inline"),
        infer[1],
    ]


def _pair(
    rows: dict[str, tuple[Row, Row]], placement: str
) -> tuple[tuple[Row, Row], tuple[Row, Row]]:
    return rows[f"{NO_SPIN}, {placement}"], rows[f"{YARDSTICK}, {placement}"]


def _placed(stack: contextlib.ExitStack, model: Path, here: int, there: int) -> dict[str, Measure]:
    """The yardstick and a run with spin off, this side and the other each on a core of its own."""
    with _on(there):  # what starts meanwhile stays there
        other = stack.enter_context(broker("fake", spin_us=0))
        yardstick = stack.enter_context(Yardstick())
        yardstick.eventfd(1)  # so that both of its processes are there
    os.sched_setaffinity(yardstick.pid, {here})
    run = timed(_bound(stack, other, model, spin=False).run)

    def measured(count: int) -> list[int]:
        with _on(here):
            return run(count)

    return {YARDSTICK: yardstick.eventfd, NO_SPIN: measured}


@contextlib.contextmanager
def _on(core: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


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
