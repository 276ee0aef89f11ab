# SPDX-License-Identifier: Apache-2.0
"""Reading context binaries with the real library."""

import pickle

import numpy as np
import pytest
from tests.native.qnn_models import INSTALLED, compiled

from qnnbroker.native.qnn_error import BINARY_MALFORMED, QnnError
from qnnbroker.native.qnn_info import BinaryInfo, GraphInfo, element_bits, parse_binary
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir

pytestmark = [
    pytest.mark.qnn,
    pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed"),
]


@pytest.fixture(scope="module")
def library() -> QnnLibrary:
    return QnnLibrary(default_qnn_dir())


def test_a_float_model_is_described(library: QnnLibrary) -> None:
    model = compiled("dense")
    info = parse_binary(library, model.binary)
    assert info.backend_id == 6
    assert info.build_id.startswith("v2.")
    assert info.core_api_version == library.core_api_version
    assert info.backend_api_version == library.backend_api_version
    assert (info.soc_model, info.dsp_arch > 0, info.soc_name) == (60, True, "")
    assert info.blob_bytes + 4096 == len(model.binary)
    (graph,) = info.graphs
    ((x,), (y,)) = graph.inputs, graph.outputs
    assert (x.name, x.shape, x.dtype, x.size_bytes, x.tensor_type) == ("x", (1, 32), 0x232, 128, 0)
    assert (y.name, y.shape, y.dtype, y.size_bytes, y.tensor_type) == ("y", (1, 32), 0x232, 128, 1)
    assert x.quantization is None
    assert y.quantization is None
    assert x.tensor_id != y.tensor_id
    assert graph.vtcm_bytes > 0
    assert graph.io_bytes > 0
    assert graph.weight_bytes >= 32 * 32 * 2
    assert (graph.spill_fill_bytes, graph.shared_weight_bytes) == (0, 0)


@pytest.mark.parametrize(("name", "dtype"), [("conv_u8", 0x0408), ("conv_u16", 0x0416)])
def test_quantised_inputs_and_outputs_have_scale_and_offset(
    library: QnnLibrary, name: str, dtype: int
) -> None:
    model = compiled(name)
    (graph,) = parse_binary(library, model.binary).graphs
    ((x,), (y,)) = graph.inputs, graph.outputs
    half = 128 if dtype == 0x0408 else 32768
    in_, out = model.inputs["x"], model.outputs["y"]
    for tensor, scale, array in ((x, 4 / half, in_), (y, 8 / half, out)):
        assert tensor.dtype == dtype
        assert tensor.shape == array.shape
        assert tensor.size_bytes == array.nbytes
        assert tensor.quantization is not None
        assert tensor.quantization.encoding == 0
        assert tensor.quantization.scales == (float(np.float32(scale)),)
        assert tensor.quantization.offsets == (-half,)  # the zero point with the other sign
        assert (tensor.quantization.axis, tensor.quantization.bits) == (None, None)


def test_a_binary_of_two_graphs_lists_both(library: QnnLibrary) -> None:
    info = parse_binary(library, compiled("split").binary)
    first, second = info.graphs
    assert first.name != second.name
    assert info.graph(second.name) is second
    with pytest.raises(ValueError, match="no graph 'other' in the binary; there are"):
        info.graph("other")
    assert (len(first.inputs), len(first.outputs)) == (1, 1)


def test_a_description_outlives_the_binary_and_survives_pickling(library: QnnLibrary) -> None:
    data = bytearray(compiled("dense").binary)
    info = parse_binary(library, data)
    data[:] = bytes(len(data))
    data.clear()  # nothing exports it any more
    again = parse_binary(library, compiled("split").binary)
    assert info == parse_binary(library, compiled("dense").binary)
    assert again != info
    copy = pickle.loads(pickle.dumps(info))
    assert copy == info
    assert isinstance(copy, BinaryInfo)
    assert isinstance(copy.graphs[0], GraphInfo)


@pytest.mark.parametrize("damage", ["short", "long", "text", "zeros"])
def test_a_damaged_binary_is_refused(library: QnnLibrary, damage: str) -> None:
    whole = compiled("dense").binary
    data = {
        "short": whole[:-1],
        "long": whole + bytes(4096),
        "text": b"certainly not a context binary" * 100,
        "zeros": bytes(len(whole)),
    }[damage]
    with pytest.raises(QnnError, match="malformed or truncated") as caught:
        parse_binary(library, data)
    assert caught.value.code == BINARY_MALFORMED


def test_an_empty_or_scattered_binary_is_refused(library: QnnLibrary) -> None:
    with pytest.raises(ValueError, match="empty"):
        parse_binary(library, b"")
    with pytest.raises(BufferError):
        parse_binary(library, memoryview(compiled("dense").binary)[::2])


@pytest.mark.parametrize(
    ("dtype", "bits"), [(0x0232, 32), (0x0064, 64), (0x0416, 16), (0x0508, 8), (0x0404, 4)]
)
def test_the_width_of_a_type_is_in_its_low_byte(dtype: int, bits: int) -> None:
    assert element_bits(dtype) == bits


def test_a_type_of_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="0x0299 has an unknown width"):
        element_bits(0x0299)
