# SPDX-License-Identifier: Apache-2.0
"""What the size of the tensors costs, each way: through shared memory nothing but the filling.

Yardstick: the same bytes there and back over a Unix socket, in C. The fake graph that sums its
input shows that the executor sees what the client wrote; its result is checked every time.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qnnbroker.client import Session, connect
from qnnbroker.client.control import Control
from qnnbroker.protos.paths import GRPC_SOCKET

from ..brokers import Broker, broker, fake_model
from ..rows import Mode, Row, Target, percentile
from ..timing import Way, interleave, timed
from ..yardstick import Yardstick
from .overhead import inline_request

ORDER = 2
TARGETS = [
    Target(
        "payload_64m_vs_4k",
        "binding.run() with 64 MiB each way / with 4 KiB, prefilled, null graph, p50",
        "<=",
        1.2,
        use_ratio=True,
    ),
]
KIB, MIB = 1024, 1024 * 1024
PREFILLED = "binding.run(), prefilled"
FILLED = "binding.run(), filled by the client"
SUMMED = "binding.run(), filled and summed by the graph"
INLINE = "gRPC Infer, inline"
SOCKET = "Unix socket, C"


def run(mode: Mode) -> list[Row]:
    """All ways and sizes in turns in one run; times in us."""
    sizes = mode.pick(
        [4 * KIB, 256 * KIB],
        [4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB],
        [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
    )
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(broker("fake"))
        yardstick = stack.enter_context(Yardstick())
        session = stack.enter_context(connect(where.directory))
        control = Control(str(where.directory / GRPC_SOCKET), max_message_bytes=256 * MIB)
        stack.callback(control.close)
        ways: dict[str, Way] = {}
        for size in sizes:
            ways |= {
                f"{way} {size}": made
                for way, made in _ways(stack, where, session, control, yardstick, size).items()
            }
        times = interleave(ways, mode.pick(2, 4, 25))
    return _rows(sizes, times)


def _ways(
    stack: contextlib.ExitStack,
    where: Broker,
    session: Session,
    control: Control,
    yardstick: Yardstick,
    size: int,
) -> dict[str, Way]:
    """Every way of moving so many bytes."""
    null = stack.enter_context(fake_model(f"null_{size}", size, size))
    total = stack.enter_context(fake_model(f"sum_{size}", size, sums=True))
    binding = session.load(null).graph.bind()
    data: npt.NDArray[np.uint8] = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    name = session.models[-1].name
    small = max(1, min(50, 16 * MIB // size))
    few = max(1, min(10, 2 * MIB // size))

    def filled() -> None:
        binding.inputs["x"][...] = data
        binding.run()

    return {
        PREFILLED: Way(timed(binding.run), 50),
        FILLED: Way(timed(filled), small, few),
        SUMMED: Way(timed(_summing(session, total, data)), small, few),
        SOCKET: Way(lambda count: yardstick.socket(size, count), small, few),
        INLINE: Way(timed(lambda: control.infer(inline_request(name, size), 60.0)), few, 1),
    }


def _summing(session: Session, model: Path, data: npt.NDArray[np.uint8]) -> Callable[[], None]:
    binding = session.load(model).graph.bind()
    wanted = int(data.sum(dtype=np.uint64))

    def call() -> None:
        binding.inputs["x"][...] = data
        binding.run()
        if int(binding.outputs["y"][0]) != wanted:
            raise RuntimeError(
                f"the graph summed {int(binding.outputs['y'][0])}, the input holds {wanted}"
            )

    return call


def _rows(sizes: list[int], times: dict[str, list[int]]) -> list[Row]:
    rows = []
    for way in (PREFILLED, FILLED, SUMMED, INLINE, SOCKET):
        for size in sizes:
            case = f"{way}, {_shown(size)}"
            for metric, percent in (("p50", 50), ("p99", 99)):

                def of(other: str, its_size: int, percent: int = percent) -> float:
                    return percentile(times[f"{other} {its_size}"], percent) / 1e3

                row = Row(case, metric, of(way, size), "us")
                if metric == "p50":
                    row = Row(case, metric, row.value, "us", series=way, x=size / KIB)
                if way == PREFILLED:
                    row = row.against(
                        Row(f"{way}, {_shown(sizes[0])}", metric, of(way, sizes[0]), "us")
                    )
                    if size == sizes[-1] and metric == "p50":
                        row = row.decides("payload_64m_vs_4k")
                elif way != SOCKET:
                    row = row.against(
                        Row(f"{SOCKET}, {_shown(size)}", metric, of(SOCKET, size), "us")
                    )
                rows.append(row)
    return rows


def _shown(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
