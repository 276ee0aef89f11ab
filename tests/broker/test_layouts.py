# SPDX-License-Identifier: Apache-2.0
"""Gathering the files of a model: which are wanted, and that a large one is not read for a name."""

import hashlib
import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.few_fds import few_fds
from tests.tiny_wrappers import around_embedded, ep_node, model_of

from qnnbroker.broker import files, layouts, leases
from qnnbroker.broker.epcontext import Wrapper, read_wrapper, read_wrapper_from
from qnnbroker.broker.files import FileBytes, ModelFile
from qnnbroker.broker.layouts import Gathering, open_path
from qnnbroker.broker.manifest import names_beside
from qnnbroker.broker.steady import holding
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.protos.errors import BrokerError, InvalidRequest, NotFound

pytestmark = pytest.mark.usefixtures("no_leaks")

TENSORS = [Tensor("x", "float32", (1,)), Tensor("y", "float32", (1,))]
GIB = 1 << 30


def wrapper_of(place: Place, graph: str = "g") -> bytes:
    return wrapper_bytes(graph, TENSORS[:1], TENSORS[1:], place, "v2")


def huge_wrapper(path: Path, size: int) -> int:
    """A wrapper with an embedded binary that is a hole of so many bytes; where it begins."""
    head, tail = around_embedded(size)
    with open(path, "wb") as file:
        file.write(head)
        file.seek(size, os.SEEK_CUR)
        file.write(tail)
    return len(head)


@pytest.mark.parametrize("lease", [True, False])
def test_three_gigabytes_inside_a_wrapper_are_not_read_to_find_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: bool
) -> None:
    """Neither where files can be held nor where they cannot, as in most containers."""
    if not lease:
        monkeypatch.setattr(leases, "LOCAL_FILE_SYSTEMS", frozenset[str]())
    path = tmp_path / "huge.onnx"
    begin = huge_wrapper(path, 3 * GIB)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before, read, copied = rss_kib(), read_bytes(), holding.copied
    gathering = Gathering(ModelFile.open(path))
    try:
        assert gathering.wanted() == [("huge.manifest.json", True)]
        gathering.add("huge.manifest.json", None)
        opened = gathering.finish()
    finally:
        gathering.close()
    try:
        identity = opened.binary.file.identity
        assert (identity.offset, identity.length) == (begin, 3 * GIB)
        assert opened.wrapper is not None
        assert [n.partition_name for n in opened.wrapper.nodes] == ["part_0"]
        assert rss_kib() - before < 16 * 1024
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 5000
        assert read_bytes() - read < 1 << 20
        assert holding.copied == copied
    finally:
        opened.close()


def rss_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def read_bytes() -> int:
    """What this process has read by system calls so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_a_large_wrapper_is_read_once_for_its_manifest_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOCAL_FILE_SYSTEMS", frozenset[str]())
    path = tmp_path / "m.onnx"
    begin = huge_wrapper(path, 4 << 20)
    content = path.read_bytes()
    manifest = {
        "format": 1,
        "wrapper": {"name": path.name, "sha256": hashlib.sha256(content).hexdigest()},
        "binary": {"sha256": hashlib.sha256(bytes(4 << 20)).hexdigest()},
    }
    path.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    copied = holding.copied
    opened = open_path(path)
    try:
        opened.check_manifest(manifest["binary"]["sha256"])  # type: ignore[index]
        assert holding.copied == copied
        with open(path, "r+b") as file:
            file.seek(begin - 1000 if begin > 1000 else 3)
            file.write(b"x")
        with pytest.raises(InvalidRequest, match="was changed"):
            opened.check_manifest(manifest["binary"]["sha256"])  # type: ignore[index]
    finally:
        opened.close()


@pytest.mark.parametrize("change", ["truncated", "written"])
def test_a_large_wrapper_that_changes_while_it_is_read_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "m.onnx"
    begin = huge_wrapper(path, 4 << 20)
    plain, done = ModelFile.read, list[int]()

    def read(self: ModelFile, offset: int, length: int) -> bytes:
        if offset > begin and not done:  # behind the binary: the head was read already
            done.append(offset)
            if change == "truncated":
                os.truncate(path, begin)
            else:
                with open(path, "r+b") as file:
                    file.write(b"x")
        return plain(self, offset, length)

    monkeypatch.setattr(ModelFile, "read", read)
    with pytest.raises(InvalidRequest, match="was changed") as refused:
        Gathering(ModelFile.open(path))
    assert refused.value.reason == "BAD_FILE"
    assert done


def test_a_range_of_a_file_that_changed_since_is_not_copied_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOCAL_FILE_SYSTEMS", frozenset[str]())
    path = tmp_path / "m.onnx"
    huge_wrapper(path, 2 << 20)
    opened = open_path(path)
    try:
        with open(path, "r+b") as file:
            file.write(b"x")
        with pytest.raises(InvalidRequest, match="was changed"):
            opened.binary.copy()
    finally:
        opened.close()


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


@settings(deadline=None, max_examples=150)
@given(data=st.data(), window=st.integers(1, 40))
def test_a_wrapper_read_piece_by_piece_is_what_it_is_in_memory(
    data: st.DataObject, window: int
) -> None:
    """Damaged ones too: the same wrapper, or the same refusal."""
    content = bytearray(model_of(ep_node(embed_mode=1, ep_cache_context=b"\x01" * 300), ep_node()))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content))) :]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "WINDOW_BYTES", window)
        path = Path(folder) / "w.onnx"
        path.write_bytes(content)
        with ModelFile.open(path) as file:
            pieces = FileBytes(file)
            assert outcome(lambda: read_wrapper_from(pieces)) == outcome(
                lambda: read_wrapper(bytes(content))
            )


def outcome(read: Callable[[], Wrapper]) -> object:
    """The wrapper, or what was wrong with it."""
    try:
        return read()
    except BrokerError as error:
        return type(error), error.reason, error.message


def test_without_an_fd_for_a_large_wrapper_nothing_of_it_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    huge_wrapper(path, 1 << 21)
    gathering = Gathering(ModelFile.open(path))
    gathering.add("large.manifest.json", None)
    with few_fds(0), pytest.raises(OSError, match="Too many open files"):
        gathering.finish()
