# SPDX-License-Identifier: Apache-2.0
"""Gathering the files of a model: which are wanted, and that a large one is not read for a name."""

import os
import resource
from pathlib import Path

import pytest
from tests.tiny_wrappers import ep_node, model_of, varint

from qnnbroker.broker import layouts
from qnnbroker.broker.files import ModelFile
from qnnbroker.broker.layouts import Gathering, open_path
from qnnbroker.broker.manifest import names_beside
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.protos.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.usefixtures("no_leaks")

TENSORS = [Tensor("x", "float32", (1,)), Tensor("y", "float32", (1,))]
GIB = 1 << 30


def wrapper_of(place: Place, graph: str = "g") -> bytes:
    return wrapper_bytes(graph, TENSORS[:1], TENSORS[1:], place, "v2")


def test_three_gigabytes_inside_a_wrapper_are_not_read_to_find_its_name(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    head = wrapper_of(Place("beside.bin"))
    # A wrapper whose last field nobody knows is as good, and simpler to make: 3 GiB of hole.
    with open(path, "wb") as file:
        file.write(head + b"\xfa\x07" + varint(3 * GIB))  # field 127, bytes
        file.truncate(file.tell() + 3 * GIB)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = _rss_kib()
    gathering = Gathering(ModelFile.open(path))
    try:
        assert gathering.wanted()[0] == ("beside.bin", False)
    finally:
        gathering.close()
    assert _rss_kib() - before < 16 * 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 5000


def _rss_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_a_large_binary_inside_is_a_range_of_the_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(300_000)
    path = tmp_path / "m.onnx"
    path.write_bytes(wrapper_of(Place(content)))
    for limit in (1 << 20, 1000):  # read, and mapped
        monkeypatch.setattr(layouts, "READ_BYTES", limit)
        opened = open_path(path)
        try:
            with opened.binary.map() as region:
                assert bytes(region.view(0, region.size_bytes)) == content
            assert (opened.whole is None) == (limit > 1000)
        finally:
            opened.close()


def test_the_binary_has_to_be_there_and_the_manifest_need_not(tmp_path: Path) -> None:
    path = tmp_path / "m_ctx.onnx"
    path.write_bytes(wrapper_of(Place("below/m.bin")))
    with pytest.raises(NotFound, match="names the context binary 'below/m.bin'"):
        open_path(path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "m.bin").write_bytes(b"binary")
    opened = open_path(path)
    assert opened.manifest is None
    opened.close()


def test_a_manifest_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"binary")
    os.mkfifo(tmp_path / "m.manifest.json")
    with pytest.raises(InvalidRequest, match="is there but cannot be read"):
        open_path(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["../m.bin", "/etc/passwd", "a/../../m.bin", "..", "C:\\m.bin"])
def test_a_binary_elsewhere_is_refused_before_anything_is_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of(ep_node(ep_cache_context=name)))
    with pytest.raises(InvalidRequest, match="without '\\.\\.'"):
        Gathering(ModelFile.open(path))


def test_which_manifests_may_be_about_a_file() -> None:
    assert names_beside("m_ctx.onnx", wrapper=True) == ["m_ctx.manifest.json"]
    assert names_beside("m_ctx_qnn.bin", wrapper=False) == [
        "m_ctx_qnn.manifest.json",
        "m_ctx.manifest.json",
    ]
