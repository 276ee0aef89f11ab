# SPDX-License-Identifier: Apache-2.0
"""Who speaks when: Silero VAD on a stream of 32 ms chunks, its state carried in shared memory.

    python examples/speech_stream.py [--runtime-dir DIR] [--seconds N] [FILE.wav]

The model takes a state and gives the next one. An output may not overlap an input, so there are two
state buffers and two bindings: one reads the first and writes the second, the other the reverse.
They take turns, and the state never leaves the memory that the NPU uses. Prints a line a second;
the recording is one of somebody talking unless a file (16 kHz, 16 bits, one channel) is given.
"""

import argparse
import contextlib
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import with_broker
import zoo
from qnnbroker.client import Binding, Graph, connect
from zoo.model import Array
from zoo.silero import RATE, STEP, chunks

_LEVELS = " .:-=+*#"
_CHUNKS_A_LINE = RATE // STEP


@contextlib.contextmanager
def ping_pong(graph: Graph) -> Iterator[tuple[Binding, Binding]]:
    """Two bindings of `graph` between two state buffers, the first of them zeroed."""
    session, size = graph.session, graph.inputs["state"].size_bytes
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(session.alloc(size)) for _ in range(2))
        pair = (
            stack.enter_context(graph.bind({"state": here}, {"stateN": there})),
            stack.enter_context(graph.bind({"state": there}, {"stateN": here})),
        )
        yield pair


def probabilities(graph: Graph, heard: Array) -> Iterator[float]:
    """Of speech, for each chunk as it comes."""
    with ping_pong(graph) as bindings:
        for number, chunk in enumerate(heard):
            binding = bindings[number % 2]
            binding.inputs["input"][...] = chunk
            binding.run()
            yield float(binding.outputs["output"].item())


def recording(path: Path | None, seconds: float) -> Array:
    """The first `seconds` of a recording, in chunks.

    Raises:
        ZooError: not a recording that the model understands.
    """
    sound: Array | None = None
    if path is not None:
        try:
            with wave.open(str(path)) as file:
                form = (file.getframerate(), file.getsampwidth(), file.getnchannels())
                sound = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
        except (OSError, EOFError, wave.Error) as error:
            raise zoo.ZooError(
                f"cannot read {path}: {str(error) or 'it is no WAVE file'}"
            ) from error
        if form != (RATE, 2, 1) or sound.size < 2 * STEP:
            raise zoo.ZooError(
                f"{path} has {form[0]} Hz, {8 * form[1]} bits, {form[2]} channels, {sound.size} "
                f"bytes; wanted are {RATE} Hz, 16 bits, 1 channel and at least {2 * STEP} bytes"
            )
        sound = sound.view(np.int16)
    return chunks(sound)[: int(seconds * RATE / STEP)]


def spoken(line: list[float]) -> str:
    """A character for each probability, darker for speech."""
    return "".join(_LEVELS[min(int(p * len(_LEVELS)), len(_LEVELS) - 1)] for p in line)


def main() -> int:
    """Print the timeline; 0 if it went through."""
    parser = argparse.ArgumentParser(description="A timeline of speech.")
    with_broker.add_options(parser)
    parser.add_argument("--seconds", type=float, default=20.0, help="of it (%(default)s)")
    parser.add_argument("file", nargs="?", type=Path, help="a recording")
    arguments = parser.parse_args()
    heard = recording(arguments.file, arguments.seconds)
    with (
        with_broker.broker(arguments.runtime_dir) as directory,
        connect(directory, name="speech stream") as session,
        session.load(zoo.compiled("silero_vad")) as model,
    ):
        print(f"each character is {1000 * STEP / RATE:.0f} ms")
        said: list[float] = []
        for probability in probabilities(model.graph, heard):
            said.append(probability)
            if len(said) % _CHUNKS_A_LINE == 0:
                show(said, _CHUNKS_A_LINE)
        if rest := len(said) % _CHUNKS_A_LINE:
            show(said, rest)
    speech = sum(p > 0.5 for p in said) * STEP / RATE
    print(f"{speech:.1f} s of speech in {len(said) * STEP / RATE:.1f} s")
    return 0


def show(said: list[float], count: int) -> None:
    """The last `count` probabilities as a line, with the second at which it begins."""
    at = (len(said) - count) * STEP / RATE
    print(f"{at:6.1f} s |{spoken(said[-count:]):{_CHUNKS_A_LINE}}|", flush=True)


if __name__ == "__main__":
    sys.exit(with_broker.run(main))
