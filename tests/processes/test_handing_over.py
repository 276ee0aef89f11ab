# SPDX-License-Identifier: Apache-2.0
"""Model files that the client opens: LOADFD, what it asks for, what must not fool it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, adder, mixed
from tests.raw_peer import RawPeer, error_of
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.client import InvalidRequest, NotAllowed, NotFound, connect
from qnnbroker.client.loading import open_beside
from qnnbroker.protos.attach import Kind, pack
from qnnbroker.protos.errors import BrokerError, LeaseRevoked, ProtocolError
from qnnbroker.v1 import attach_pb2
from qnnbroker.v1 import control_pb2 as pb

Attach = Callable[[], RawPeer]
TENSORS = [Tensor(n, "float32", (4, 8)) for n in ("a", "b", "y")]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wrapper(make_model: MakeModel) -> Path:
    """A wrapper with its binary beside it, of the adder."""
    binary = make_model("adder_ctx_qnn")
    path = binary.with_name("adder_ctx.onnx")
    path.write_bytes(wrapper_bytes("add", TENSORS[:2], TENSORS[2:], Place(binary.name), "v2"))
    return path


def write_manifest(wrapper: Path, **changes: object) -> Path:
    binary = wrapper.with_name("adder_ctx_qnn.bin")
    manifest = wrapper.with_suffix(".manifest.json")
    content = {
        "format": 1,
        "wrapper": {"name": wrapper.name, "sha256": sha256(wrapper)},
        "binary": {"name": binary.name, "sha256": sha256(binary)},
    }
    manifest.write_text(json.dumps(content | changes))
    return manifest


def hand(
    peer: RawPeer, path: str | Path, fds: list[int], file_id: int = 0
) -> attach_pb2.LoadFdResponse | BrokerError:
    """One LOADFD frame; the fds are closed afterwards."""
    body = attach_pb2.LoadFdRequest(file_id=file_id, path=str(path)).SerializeToString()
    peer.send(pack(Kind.LOADFD, 4711, body), fds)
    for fd in fds:
        os.close(fd)
    answer = peer.receive()
    assert answer is not None
    if answer.is_error:
        return error_of(answer)
    assert (answer.kind, answer.request, peer.fds) == (Kind.LOADFD, 4711, [])
    return attach_pb2.LoadFdResponse.FromString(answer.body)


def handed(answer: attach_pb2.LoadFdResponse | BrokerError) -> attach_pb2.LoadFdResponse:
    assert isinstance(answer, attach_pb2.LoadFdResponse), answer
    return answer


def read_only(path: Path) -> list[int]:
    return [os.open(path, os.O_RDONLY)]


def load(peer: RawPeer, path: Path, file_id: int) -> pb.LoadModelResponse:
    return peer.load(path, file_id=file_id)


def test_a_binary_is_loaded_by_its_descriptor_alone(attach: Attach, make_model: MakeModel) -> None:
    peer, path = attach(), make_model()
    first = handed(hand(peer, path, read_only(path)))
    assert [(w.name, w.optional) for w in first.wanted] == [("adder.manifest.json", True)]
    last = handed(hand(peer, "adder.manifest.json", [], first.file_id))
    assert (last.file_id, list(last.wanted)) == (first.file_id, [])
    content = path.read_bytes()
    path.unlink()  # the broker has no need of the name
    model = load(peer, path, first.file_id).model
    assert model.content_hash == hashlib.sha256(content).hexdigest()
    refused = peer.refused_load(path, file_id=first.file_id)
    assert isinstance(refused, LeaseRevoked)


def test_a_wrapper_wants_its_binary_and_its_manifest(attach: Attach, wrapper: Path) -> None:
    peer, manifest = attach(), write_manifest(wrapper)
    first = handed(hand(peer, wrapper, read_only(wrapper)))
    assert [(w.name, w.optional) for w in first.wanted] == [
        ("adder_ctx_qnn.bin", False),
        ("adder_ctx.manifest.json", True),
    ]
    refused = peer.refused_load(
        wrapper, file_id=handed(hand(peer, wrapper, read_only(wrapper))).file_id
    )
    assert "not handed over" in str(refused)
    binary = wrapper.with_name("adder_ctx_qnn.bin")
    handed(hand(peer, binary.name, read_only(binary), first.file_id))
    handed(hand(peer, manifest.name, read_only(manifest), first.file_id))
    assert [g.name for g in load(peer, wrapper, first.file_id).model.graphs] == ["add"]


def test_a_file_id_is_the_sessions_own(
    attach: Attach, shared_broker: BrokerProcess, make_model: MakeModel
) -> None:
    owner, other, path = attach(), attach(), make_model()
    file_id = handed(hand(owner, path, read_only(path))).file_id
    handed(hand(owner, "adder.manifest.json", [], file_id))
    assert isinstance(other.refused_load(path, file_id=file_id), NotFound)
    with pytest.raises(Exception, match="belongs to an attached session"):
        list(shared_broker.stub.LoadModel(pb.LoadModelRequest(path=str(path), file_id=file_id)))
    assert load(owner, path, file_id).HasField("model")


def test_what_is_handed_over_and_never_loaded_is_bounded_and_goes_with_the_session(
    attach: Attach, make_model: MakeModel
) -> None:
    peer, path = attach(), make_model()
    ids = [handed(hand(peer, path, read_only(path))).file_id for _ in range(40)]
    assert isinstance(hand(peer, "adder.manifest.json", [], ids[0]), LeaseRevoked)
    handed(hand(peer, "adder.manifest.json", [], ids[-1]))
    # The fixture sees that no fd stays.


def a_directory(folder: Path) -> list[int]:
    return [os.open(folder, os.O_RDONLY)]


def a_fifo(folder: Path) -> list[int]:
    os.mkfifo(folder / "fifo")
    return [os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)]


def a_device(folder: Path) -> list[int]:
    return [os.open("/dev/zero", os.O_RDONLY)]


def a_pipe(folder: Path) -> list[int]:
    read, write = os.pipe()
    os.close(write)
    return [read]


def write_only(folder: Path) -> list[int]:
    return [os.open(folder / "new", os.O_WRONLY | os.O_CREAT)]


def path_only(folder: Path) -> list[int]:
    return [os.open(__file__, os.O_PATH)]


def nothing(folder: Path) -> list[int]:
    return []


@pytest.mark.parametrize(
    ("made", "kind", "says"),
    [
        (a_directory, InvalidRequest, "a directory"),
        (a_fifo, InvalidRequest, "a FIFO"),
        (a_device, InvalidRequest, "a device"),
        (a_pipe, InvalidRequest, "a FIFO"),
        (write_only, NotAllowed, "not open for reading"),
        (path_only, NotAllowed, "not open for reading"),
        (nothing, InvalidRequest, "found none"),
    ],
)
def test_a_descriptor_that_is_no_model_file_is_refused_and_the_session_goes_on(
    attach: Attach,
    tmp_path: Path,
    made: Callable[[Path], list[int]],
    kind: type[BrokerError],
    says: str,
) -> None:
    peer = attach()
    refused = hand(peer, "/some/where", made(tmp_path))
    assert isinstance(refused, kind)
    assert says in str(refused)
    peer.release(peer.alloc(4096)[0])


def test_two_descriptors_or_one_with_another_kind_end_the_session(
    attach: Attach, make_model: MakeModel
) -> None:
    path = make_model()
    for kind, count in ((Kind.LOADFD, 2), (Kind.ALLOC, 1)):
        peer = attach()
        fds = [os.open(path, os.O_RDONLY) for _ in range(count)]
        peer.send(pack(kind, 1, b""), fds)
        for fd in fds:
            os.close(fd)
        error = peer.thrown_out()
        assert isinstance(error, ProtocolError)
        assert error.reason == "FD_COUNT"


def test_a_name_that_nobody_wants_is_refused(attach: Attach, wrapper: Path) -> None:
    peer = attach()
    file_id = handed(hand(peer, wrapper, read_only(wrapper))).file_id
    refused = hand(peer, "/etc/passwd", read_only(wrapper), file_id)
    assert isinstance(refused, InvalidRequest)
    assert "no file '/etc/passwd' is wanted" in str(refused)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../b", ""])
def test_the_client_opens_nothing_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError, match="not beside the model"):
        open_beside(str(tmp_path / "model.onnx"), name)


def test_the_client_package_hands_over_all_that_belongs_to_a_model(
    broker: BrokerProcess, wrapper: Path
) -> None:
    with connect(broker.runtime_dir) as session:
        write_manifest(wrapper)
        with (
            session.load(wrapper) as model,
            session.load(wrapper.with_name("adder_ctx_qnn.bin")) as bare,
        ):
            assert bare.shared
            assert model.content_hash == bare.content_hash
        wrapper.with_name("adder_ctx_qnn.bin").rename(wrapper.with_name("away"))
        with pytest.raises(NotFound, match="names the context binary 'adder_ctx_qnn.bin'"):
            session.load(wrapper)


def damage_binary(wrapper: Path) -> None:
    binary = wrapper.with_name("adder_ctx_qnn.bin")
    binary.write_bytes(binary.read_bytes() + b"\n")


def damage_wrapper(wrapper: Path) -> None:
    wrapper.write_bytes(wrapper.read_bytes().replace(b"v2", b"v3"))


def of_another_format(wrapper: Path) -> None:
    write_manifest(wrapper, format=2)


def without_hashes(wrapper: Path) -> None:
    write_manifest(wrapper, binary={"name": "adder_ctx_qnn.bin"})


def no_json(wrapper: Path) -> None:
    wrapper.with_suffix(".manifest.json").write_bytes(b"{")


def nested(wrapper: Path) -> None:
    wrapper.with_suffix(".manifest.json").write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damage_binary, "the context binary is not the one that"),
        (damage_wrapper, "the wrapper is not the one that"),
        (of_another_format, "has the format '2'"),
        (without_hashes, "a sha256 of the binary that is none"),
        (no_json, "not JSON"),
        (nested, "not JSON"),
    ],
)
def test_what_the_manifest_does_not_agree_with_is_refused(
    broker: BrokerProcess, wrapper: Path, spoil: Callable[[Path], None], says: str, by_path: bool
) -> None:
    write_manifest(wrapper)
    spoil(wrapper)
    if by_path:
        request = pb.LoadModelRequest(path=str(wrapper))
        with pytest.raises(Exception, match=says):
            list(broker.stub.LoadModel(request, timeout=PATIENCE_SECONDS))
    else:
        with connect(broker.runtime_dir) as session, pytest.raises(InvalidRequest, match=says):
            session.load(wrapper)
    broker.wait_counters(contexts=0)


def test_a_manifest_of_another_model_in_the_directory_does_not_count(
    broker: BrokerProcess, wrapper: Path
) -> None:
    write_manifest(wrapper, binary={"name": "another.bin", "sha256": "0" * 64})
    with connect(broker.runtime_dir) as session:
        session.load(wrapper.with_name("adder_ctx_qnn.bin")).unload()


def test_only_the_wanted_graphs_are_executable_and_that_is_another_context(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("two", adder(), mixed())
    with connect(broker.runtime_dir) as session:
        session.load(path)
        request = pb.LoadModelRequest(path=str(path), enable_graphs=["mixed"], name="part")
        model = list(broker.stub.LoadModel(request, timeout=PATIENCE_SECONDS))[-1].model
        assert [g.name for g in model.graphs] == ["mixed"]
        assert list(model.enabled_graphs) == ["mixed"]
        contexts = broker.stub.ListModels(pb.ListModelsRequest()).contexts
        assert [list(c.enabled_graphs) for c in contexts] == [[], ["mixed"]]
        assert {c.backend.split()[0] for c in contexts} == {"fake"}
        assert len({c.content_hash for c in contexts}) == 1
        request = pb.LoadModelRequest(path=str(path), enable_graphs=["none"])
        with pytest.raises(Exception, match="no graph 'none'"):
            list(broker.stub.LoadModel(request, timeout=PATIENCE_SECONDS))
