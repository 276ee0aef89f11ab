# SPDX-License-Identifier: Apache-2.0
"""Silero VAD: is somebody speaking? One chunk of 32 ms at a time, with a state carried along."""

import wave
from pathlib import Path

import numpy as np

from zoo.fetch import Member, Package
from zoo.model import Array, Case, Feeds, Model, Outputs

SILERO = Package(
    name="silero-vad",
    version="6.2.3",
    kind="sdist",
    licence="MIT",
    sha256="d7a23b09202be4953915cb9173089bb307eed0418a9bd4794d9ec5af07fa1996",
    members={
        "model.onnx": Member(
            "silero_vad-6.2.3/src/silero_vad/data/silero_vad_openvino_16k.onnx",
            "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
        ),
        # A minute of somebody talking, with pauses; 16 kHz, one channel.
        "speech.wav": Member(
            "silero_vad-6.2.3/tests/data/test.wav",
            "89f17d9c94c4b31eb320f424628bcbc920abaddbee6e2760fd868bfb1d9a2e47",
        ),
    },
)

RATE = 16000
#: New samples in a chunk, 32 ms.
STEP = 512
#: Samples of the chunk before that the model sees again.
_CONTEXT = 64
#: Chunks of the recording: in the middle of a word, and in the first pause.
_IN_SPEECH, _IN_PAUSE = 31, 72
#: Runs of chunks that are surely speech (True) or surely not, when the state is carried along.
STREAM_CHUNKS = 104
_STREAM_ANSWERS = ((3, 60, True), (67, 82, False), (85, 104, True))


class SileroVad(Model):
    """Inputs: `input` [1, 576], `state` [2, 1, 128]. Outputs: `output` [1, 1], `stateN`."""

    name = "silero_vad"
    task = "voice activity detection (16 kHz, chunks of 32 ms, state carried)"
    precision = "fp16"
    packages = (SILERO,)

    def write_float(self, path: Path) -> None:
        import onnx

        from zoo.onnx_tools import fix_shapes

        model = onnx.load(str(SILERO.file("model.onnx")))
        fix_shapes(model, path, {"input": [1, _CONTEXT + STEP], "state": [2, 1, 128]})

    def cases(self) -> list[Case]:
        heard = chunks()

        def case(label: str, index: int, speech: bool) -> Case:
            def check(outputs: Outputs) -> tuple[bool, str]:
                p = probability(outputs)
                return (p > 0.7) if speech else (p < 0.2), f"speech with probability {p:.2f}"

            feeds = {"input": heard[index], "state": first_state()}
            return Case(f"{label} (chunk {index})", feeds, check)

        return [case("a word", _IN_SPEECH, True), case("a pause", _IN_PAUSE, False)]

    def stream(self) -> list[Array]:
        """The recording's first chunks, to be run in order with the state carried along."""
        return list(chunks()[:STREAM_CHUNKS])


def chunks(samples: Array | None = None) -> Array:
    """A whole recording as float32 [chunk, 1, 576], each beginning with the end of the last.

    `samples` are int16 at `RATE`; without them it is the recording of the package.
    """
    if samples is None:
        with wave.open(str(SILERO.file("speech.wav"))) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    sound = np.concatenate([np.zeros(_CONTEXT, np.float32), samples.astype(np.float32) / 32768])
    windows = np.lib.stride_tricks.sliding_window_view(sound, _CONTEXT + STEP)[::STEP]
    return np.ascontiguousarray(windows[:, None, :])


def first_state() -> Array:
    """The state before the first chunk."""
    return np.zeros((2, 1, 128), np.float32)


def next_feeds(chunk: Array, outputs: Outputs | None) -> Feeds:
    """Inputs for `chunk`, after the outputs of the chunk before it."""
    return {"input": chunk, "state": first_state() if outputs is None else outputs["stateN"]}


def probability(outputs: Outputs) -> float:
    """Of speech, 0 to 1."""
    return float(outputs["output"].reshape(-1)[0])


def check_stream(probabilities: list[float]) -> tuple[bool, str]:
    """Whether the probabilities of `SileroVad.stream()` are right, and the answer in words.

    Chunks around the change from speech to pause and back are not judged.
    """
    wrong = [
        index
        for first, last, speech in _STREAM_ANSWERS
        for index in range(first, last)
        if (probabilities[index] > 0.5) is not speech
    ]
    spoken = sum(p > 0.5 for p in probabilities) * STEP / RATE
    text = f"{spoken:.1f} s of speech in {len(probabilities) * STEP / RATE:.1f} s"
    return not wrong, text + (f", wrong at chunks {wrong}" if wrong else "")
