# SPDX-License-Identifier: Apache-2.0
"""Post-training quantisation to 8 bits, as the QNN execution provider wants it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.model import Array, Feeds


def quantise(source: Path, target: Path, calibration: Sequence[Feeds]) -> None:
    """Write `source`, a static float model, to `target` with quantise/dequantise pairs.

    Activations and weights are unsigned 8-bit; ranges come from the `calibration` inputs.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import (
        get_qnn_qdq_config,
        qnn_preprocess_model,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not typed
        """Hands the inputs out one by one, for one pass."""

        def __init__(self) -> None:
            self._left: Iterator[Feeds] = iter(calibration)

        def get_next(self) -> dict[str, Array] | None:
            feeds = next(self._left, None)
            return None if feeds is None else dict(feeds)

    prepared = source.with_name(f"{source.stem}_prepared.onnx")
    changed = qnn_preprocess_model(str(source), str(prepared))
    config = get_qnn_qdq_config(
        str(prepared if changed else source),
        Reader(),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QUInt8,
    )
    quantize(str(prepared if changed else source), str(target), config)
