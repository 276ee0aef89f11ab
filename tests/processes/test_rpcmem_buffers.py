# SPDX-License-Identifier: Apache-2.0
"""Buffers of rpcmem through a broker: chosen, asked for, refused, shown, and freed once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel

from qnnbroker.client import InvalidRequest, LimitExceeded, Unsupported, connect
from qnnbroker.native.fake import fake_qnn_dir
from qnnbroker.v1 import attach_pb2
from qnnbroker.v1 import control_pb2 as pb

StartBroker = Callable[..., BrokerProcess]
NEW = str(fake_qnn_dir() / "rpcmem" / "libcdsprpc.so")
OLD = str(fake_qnn_dir() / "rpcmem_old" / "libcdsprpc.so")


def info(broker: BrokerProcess) -> pb.GetServerInfoResponse:
    return broker.stub.GetServerInfo(pb.GetServerInfoRequest())


def test_rpcmem_is_used_where_it_is_and_every_allocation_is_freed(
    start_broker: StartBroker,
    make_model: MakeModel,
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = tmp_path / "rpcmem"
    monkeypatch.setenv("QNNBROKER_FAKE_RPCMEM", str(record))
    broker = start_broker(rpcmem_library=NEW, switch_words=["mem_register=on"])
    assert info(broker).buffer_kind == attach_pb2.BUFFER_KIND_RPCMEM
    assert NEW in info(broker).buffer_detail
    with connect(runtime_dir) as session:
        graph = session.load(make_model()).graph
        with graph.bind(zero_copy="require") as binding, session.alloc(5000) as given:
            assert given.kind == "rpcmem"
            assert binding.memory == "registered"
            binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
            binding.run()
            assert (binding.outputs["y"] == 3).all()
            assert not np.any(given.numpy(np.uint8, 5000))
            (told,) = broker.stub.ListSessions(pb.ListSessionsRequest()).sessions
            assert told.rpcmem_bytes == told.buffer_bytes == 8192 + (1 << 16)
            counters = broker.counters()
            assert counters["rpcmem_bytes"] == told.rpcmem_bytes
            assert counters["native_rpcmem"] == 2
            with session.alloc(100, kind="memfd") as plain:
                assert plain.kind == "memfd"
                assert broker.counters()["native_rpcmem"] == 2
    broker.wait_counters(native_rpcmem=0, native_registrations=0, buffers=0)
    assert broker.stop() == 0
    calls = Counter(line.split()[1] for line in record.read_text().splitlines())
    assert calls["alloc"] == calls["free"] > 2
    assert set(calls) == {"alloc", "free"}


def test_memfds_where_there_is_none_and_rpcmem_is_refused(
    start_broker: StartBroker, runtime_dir: Path
) -> None:
    broker = start_broker(rpcmem_library="/nowhere/libcdsprpc.so")
    assert info(broker).buffer_kind == attach_pb2.BUFFER_KIND_MEMFD
    assert info(broker).buffer_detail.startswith("no rpcmem: /nowhere/libcdsprpc.so")
    with connect(runtime_dir) as session:
        assert session.alloc(100).kind == "memfd"
        with pytest.raises(Unsupported, match="no rpcmem"):
            session.alloc(100, kind="rpcmem")
        with pytest.raises(InvalidRequest, match="'heap'"):
            session.alloc(100, kind="heap")  # type: ignore[arg-type]


def test_a_kind_can_be_the_operators_choice(start_broker: StartBroker, runtime_dir: Path) -> None:
    broker = start_broker(rpcmem_library=NEW, buffer_memory="memfd")
    assert info(broker).buffer_kind == attach_pb2.BUFFER_KIND_MEMFD
    with connect(runtime_dir) as session:
        assert session.alloc(100).kind == "memfd"
        assert session.alloc(100, kind="rpcmem").kind == "rpcmem"


def test_a_broker_that_must_have_rpcmem_does_not_start_without(
    start_broker: StartBroker, runtime_dir: Path
) -> None:
    broker = start_broker(
        rpcmem_library="/nowhere/libcdsprpc.so", buffer_memory="rpcmem", wait_ready=False
    )
    assert broker.wait_exit() == 1
    assert "buffer_memory is rpcmem, but there is none" in broker.log()


def test_an_old_library_refuses_two_gigabytes_in_words(
    start_broker: StartBroker, runtime_dir: Path
) -> None:
    broker = start_broker(rpcmem_library=OLD, max_buffer_bytes=1 << 32, max_session_bytes=1 << 33)
    assert "without rpcmem_alloc2" in info(broker).buffer_detail
    with connect(runtime_dir) as session:
        with pytest.raises(LimitExceeded, match="has no rpcmem_alloc2") as refused:
            session.alloc(1 << 31)
        assert refused.value.reason == "MEMORY"
        session.alloc(1 << 20).release()


def test_a_library_that_has_no_more_is_a_limit(
    start_broker: StartBroker,
    make_model: MakeModel,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNBROKER_FAKE_RPCMEM_LIMIT", str(1 << 17))
    start_broker(rpcmem_library=NEW, switch_words=["mem_register=on"])
    with connect(runtime_dir) as session:
        kept = session.alloc(1 << 16)
        graph = session.load(make_model()).graph
        binding = graph.bind()
        with pytest.raises(LimitExceeded) as refused:
            session.alloc(4096)
        assert refused.value.reason == "MEMORY"
        binding.run()
        kept.release()
        session.alloc(4096).release()
