# SPDX-License-Identifier: Apache-2.0
"""Handles, arguments and life cycles of the fake library: the real one's answers, or stricter."""

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.fake_client import (
    Adder,
    RawFake,
    Refused,
    Tensor,
    adder,
    check,
    config_list,
    floats,
    pointer,
)

from qnnbroker.native.fake import FakeGraph, binary_bytes

OK, BAD_TENSOR, BAD_GRAPH, BAD_CONTEXT = 0, 6004, 6001, 5002


@pytest.fixture
def raw(tmp_path: Path) -> RawFake:
    return RawFake(tmp_path / "fake").open()


@pytest.fixture
def execute(raw: RawFake) -> Adder:
    return Adder(raw, raw.graph(raw.context(binary_bytes([adder()])), "add"))


def entry(option: int, value: int) -> Any:
    return ctypes.create_string_buffer(struct.pack("<IxxxxQ", option, value), 16)


def test_handles_are_small_and_used_again(raw: RawFake) -> None:
    data = binary_bytes([adder()])
    contexts = [raw.context(data) for _ in range(3)]
    assert contexts == [1, 2, 3]
    assert raw.free_context(2) == OK
    assert raw.context(data) == 2
    assert raw.free_context(2) == OK
    assert raw.free_context(2) == BAD_CONTEXT


def test_bogus_handles_are_errors(raw: RawFake) -> None:
    name = ctypes.c_char_p(b"add")
    for bogus in (0, 77, 1 << 40, (1 << 64) - 1):
        out = ctypes.c_void_p()
        assert raw.free_context(bogus) == BAD_CONTEXT
        assert raw.core(20, pointer(bogus), name, ctypes.pointer(out)) == BAD_CONTEXT
        assert raw.core(17, pointer(bogus), pointer(0)) == BAD_GRAPH
        assert Adder(raw, bogus)() == BAD_GRAPH
        assert raw.core(8, pointer(bogus)) == 4011
        assert raw.core(43, pointer(bogus)) == 14000
        assert raw.core(27, pointer(bogus)) == 11004
        with pytest.raises(Refused) as caught:
            raw.context(binary_bytes([adder()]), backend=bogus)
        assert caught.value.code == BAD_CONTEXT


def test_a_device_is_not_needed(raw: RawFake) -> None:
    raw.device = 0
    assert Adder(raw, raw.graph(raw.context(binary_bytes([adder()])), "add"))() == OK


def test_a_graph_has_one_handle(raw: RawFake) -> None:
    context = raw.context(binary_bytes([adder("one"), adder("two")]))
    assert raw.graph(context, "one") == raw.graph(context, "one") != raw.graph(context, "two")
    with pytest.raises(Refused) as caught:
        raw.graph(context, "three")
    assert caught.value.code == 6003
    assert raw.free_context(context) == OK
    assert raw.set_priority(1, 5) == BAD_GRAPH


def test_empty_and_broken_binaries_are_refused(raw: RawFake) -> None:
    for data, code in ((b"", 5000), (b"x", 30010), (binary_bytes([adder()])[:-1], 30010)):
        with pytest.raises(Refused) as caught:
            raw.context(data)
        assert caught.value.code == code


def test_tensors_are_matched_by_id_in_any_order(execute: Adder) -> None:
    e = execute
    e.b[:] = 1
    code = e.library.execute(e.graph, [Tensor(2, e.b), Tensor(1, e.a)], [Tensor(3, e.c)])
    assert code == OK
    assert np.array_equal(e.c, e.a + 1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "code"),
    [
        ([], [3], 6000),
        ([1, 2], [], 6000),
        ([1], [3], BAD_TENSOR),
        ([1, 2, 2], [3], BAD_TENSOR),
        ([1, 1], [3], BAD_TENSOR),
        ([1, 0], [3], BAD_TENSOR),
        ([1, 3], [3], BAD_TENSOR),
        ([1, 2], [2], BAD_TENSOR),
        ([1, 2], [99], BAD_TENSOR),
        ([1, 2], [3, 3], BAD_TENSOR),
    ],
)
def test_wrong_ids_and_counts_are_refused(
    execute: Adder, inputs: list[int], outputs: list[int], code: int
) -> None:
    arrays = {number: np.zeros(4, np.float32) for number in (*inputs, 3)}
    sides = [
        [Tensor(i, arrays.get(i, np.zeros(4, np.float32))) for i in s] for s in (inputs, outputs)
    ]
    assert execute.library.execute(execute.graph, *sides) == code
    assert execute() == OK


def test_memory_that_is_missing_or_short_is_refused(execute: Adder) -> None:
    e = execute
    wrong = [Tensor(2, None), Tensor(2, e.b, size=0), Tensor(2, e.b, size=15), Tensor(2, handle=5)]
    for tensor in wrong:
        assert e.library.execute(e.graph, [Tensor(1, e.a), tensor], [Tensor(3, e.c)]) == BAD_TENSOR
    large = np.zeros(100, np.float32)
    assert e.library.execute(e.graph, [Tensor(1, e.a), Tensor(2, large)], [Tensor(3, e.c)]) == OK


def test_memory_need_not_be_aligned(execute: Adder) -> None:
    e = execute
    room = np.zeros(17, np.uint8)
    room[1:] = e.b.view(np.uint8)
    assert e.library.execute(e.graph, [Tensor(1, e.a), Tensor(2, room[1:])], [Tensor(3, e.c)]) == OK
    assert np.array_equal(e.c, e.a + e.b)


def test_an_output_over_another_tensor_is_refused(execute: Adder) -> None:
    e = execute
    both = np.zeros(7, np.float32)
    inputs = [Tensor(1, both[:4]), Tensor(2, e.b)]
    assert e.library.execute(e.graph, inputs, [Tensor(3, both[3:])]) == BAD_TENSOR
    inputs = [Tensor(1, e.a), Tensor(2, e.a)]
    assert e.library.execute(e.graph, inputs, [Tensor(3, e.c)]) == OK


def test_what_a_record_says_has_to_be_right(execute: Adder) -> None:
    e = execute
    first, out = Tensor(1, e.a).record(), Tensor(3, e.c).record()
    dims = (ctypes.c_uint32 * 2)(4, 4)

    def code(record: bytes) -> int:
        return e.library.execute_records(e.graph, [first, record], [out])

    def with_shape(rank: int, address: int) -> bytes:
        record = bytearray(Tensor(2, e.b).record())
        struct.pack_into("<I", record, 8 + 72, rank)
        struct.pack_into("<Q", record, 8 + 80, address)
        return bytes(record)

    assert code(Tensor(2, e.b).record(version=2)) == OK
    assert code(Tensor(2, e.b).record(version=3)) == BAD_TENSOR
    assert code(Tensor(2, e.b).record(dtype=0x0232)) == OK
    assert code(Tensor(2, e.b).record(dtype=0x0032)) == BAD_TENSOR
    assert code(with_shape(1, ctypes.addressof(dims))) == OK
    assert code(with_shape(2, ctypes.addressof(dims))) == BAD_TENSOR
    dims[0] = 5
    assert code(with_shape(1, ctypes.addressof(dims))) == BAD_TENSOR


def test_context_options_are_answered_like_the_emulation(raw: RawFake) -> None:
    data = binary_bytes([adder()])

    def code(*entries: Any) -> int:
        try:
            raw.context(data, config_list(*entries))
        except Refused as error:
            return error.code
        return OK

    assert [code(entry(1, p)) for p in (0, 500, 501)] == [OK, OK, 5005]
    assert [code(entry(o, 0)) for o in (2, 3, 4, 6, 7, 8, 9, 10, 11)] == [
        *(OK, 1000, OK, 1000, 1000, 1000, OK, 1000, 1000)
    ]
    assert code(entry(2, 0), entry(1, 50)) == OK


def test_only_enabled_graphs_execute(raw: RawFake) -> None:
    data = binary_bytes([adder("one"), adder("two")])
    name = ctypes.c_char_p(b"two")
    names = (ctypes.c_char_p * 2)(b"two", None)
    context = raw.context(data, config_list(entry(5, ctypes.addressof(names))))
    assert Adder(raw, raw.graph(context, "one"))() == 1100
    assert Adder(raw, raw.graph(context, "two"))() == OK
    many = (ctypes.c_char_p * 4)(name.value, b"a", b"b", None)
    with pytest.raises(Refused) as caught:
        raw.context(data, config_list(entry(5, ctypes.addressof(many))))
    assert caught.value.code == 5005


def test_a_priority_given_at_creation_holds(raw: RawFake) -> None:
    context = raw.context(binary_bytes([adder()]), config_list(entry(1, 321)))
    assert Adder(raw, raw.graph(context, "add"))() == OK
    assert raw.calls("graphExecute")[-1].number("priority") == 321


@pytest.mark.parametrize(("slot", "attribute"), [(8, "backend"), (43, "device")])
def test_freeing_below_live_contexts_destroys_them_and_is_recorded(
    raw: RawFake, execute: Adder, slot: int, attribute: str
) -> None:
    assert raw.core(slot, pointer(getattr(raw, attribute))) == OK
    assert raw.errors() == ["freed_with_live_contexts"]
    assert execute() == BAD_GRAPH
    assert raw.free_context(1) == BAD_CONTEXT


def test_freeing_in_order_leaves_no_error(raw: RawFake, execute: Adder) -> None:
    assert raw.free_context(1) == OK
    assert raw.core(43, pointer(raw.device)) == OK
    assert raw.core(8, pointer(raw.backend)) == OK
    assert raw.core(8, pointer(raw.backend)) == 4011
    assert raw.errors() == []


def test_what_is_not_there_gives_not_supported(raw: RawFake) -> None:
    for slot in (5, 6, 9, 12, 15, 22, 28, 41, 44, 54, 55, 56, 63, 66, 68, 74):
        assert raw.core(slot, pointer(0), pointer(0)) == 1000
    assert raw.calls("graphExecuteAsync")[0].result == 1000


def test_messages_of_codes(raw: RawFake) -> None:
    text = ctypes.c_char_p()
    assert raw.core(48, ctypes.c_uint64(1007), ctypes.pointer(text)) == OK
    assert text.value is not None
    assert b"restart" in text.value
    assert raw.core(48, ctypes.c_uint64(987654), ctypes.pointer(text)) == 10001


def test_power_votes_are_recorded(raw: RawFake) -> None:
    infrastructure = raw.new(39)
    create, destroy, vote = (
        ctypes.c_uint64.from_address(infrastructure + offset).value for offset in (8, 16, 24)
    )
    power = ctypes.c_uint32()
    word = ctypes.c_uint32
    make = ctypes.CFUNCTYPE(ctypes.c_uint64, word, word, ctypes.POINTER(word))(create)
    setter = ctypes.CFUNCTYPE(ctypes.c_uint64, word, ctypes.c_void_p)(vote)
    check(make(0, 0, ctypes.pointer(power)))
    assert make(1, 0, ctypes.pointer(word())) == 13001
    dcvs = ctypes.create_string_buffer(struct.pack("<17I", 1, power.value, *range(2, 17)), 68)
    polling = ctypes.create_string_buffer(struct.pack("<II", 3, 9999), 68)
    check(setter(power.value, config_list(dcvs, polling)))
    assert setter(99, config_list()) == 13001
    assert setter(power.value, None) == 13001
    remove = ctypes.CFUNCTYPE(ctypes.c_uint64, word)(destroy)
    check(remove(power.value))
    assert remove(power.value) == 13001
    recorded = raw.calls("setPowerConfig")[0].arguments
    assert recorded["dcvs"] == "1:" + ":".join(map(str, range(2, 17)))
    assert recorded["option"] == "3:9999"


def test_a_restart_takes_the_clients_of_the_infrastructure_away(raw: RawFake) -> None:
    infrastructure = raw.new(39)
    word = ctypes.c_uint32
    create, destroy, vote = (
        ctypes.c_uint64.from_address(infrastructure + offset).value for offset in (8, 16, 24)
    )
    make = ctypes.CFUNCTYPE(ctypes.c_uint64, word, word, ctypes.POINTER(word))(create)
    setter = ctypes.CFUNCTYPE(ctypes.c_uint64, word, ctypes.c_void_p)(vote)
    remove = ctypes.CFUNCTYPE(ctypes.c_uint64, word)(destroy)
    before, after = word(), word()
    check(make(0, 0, ctypes.pointer(before)))
    raw.control("restart")
    check(make(0, 0, ctypes.pointer(after)))
    assert after.value != before.value
    assert setter(before.value, config_list()) == 13001
    assert remove(before.value) == 13001
    check(setter(after.value, config_list()))
    check(remove(after.value))


def test_device_options_are_checked_like_the_emulation(raw: RawFake) -> None:
    def code(*numbers: int) -> int:
        custom = ctypes.create_string_buffer(struct.pack("<IIII", *numbers), 128)
        out = ctypes.c_void_p()
        config = config_list(entry(0, ctypes.addressof(custom)))
        return raw.core(40, pointer(0), config, ctypes.pointer(out))

    assert code(0, 0, 43, 0) == OK
    assert code(0, 43, 0, 0) == 14001
    assert code(1, 0, 0, 73) == OK
    assert code(4, 0, 0, 1) == 14001


def test_the_logger_gets_messages_with_their_arguments(raw: RawFake) -> None:
    libc = ctypes.CDLL(None)
    lines: list[tuple[int, str]] = []

    def collect(text: bytes, level: int, _time: int, arguments: int) -> None:
        room = ctypes.create_string_buffer(300)
        libc.vsnprintf(
            room, ctypes.c_size_t(300), ctypes.c_char_p(text), ctypes.c_void_p(arguments)
        )
        lines.append((level, room.value.decode()))

    kind = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    )
    callback = kind(collect)
    logger = raw.new(25, callback, ctypes.c_uint32(1))
    assert raw.free_context(44) == BAD_CONTEXT
    assert lines == [(1, " <E> contextFree failed with 5002: refused\n")]
    assert raw.core(26, pointer(logger), ctypes.c_uint32(4)) == OK
    raw.context(binary_bytes([adder()]))
    assert (4, " <V> contextCreateFromBinary gives 0\n") in lines
    seen = len(lines)
    assert raw.core(27, pointer(logger)) == OK
    assert raw.free_context(44) == BAD_CONTEXT
    assert len(lines) == seen
    for level in (0, 6):
        with pytest.raises(Refused) as caught:
            raw.new(25, callback, ctypes.c_uint32(level))
        assert caught.value.code == 11003


def test_a_graph_of_a_thousand_tensors_executes(raw: RawFake) -> None:
    inputs = tuple(floats(f"i{n}", 1, tensor_id=n + 1) for n in range(1000))
    graph = FakeGraph(
        "wide", inputs, (floats("o", 1, tensor_id=5000),), (("add", "i3", "i4", "o"),)
    )
    handle = raw.graph(raw.context(binary_bytes([graph])), "wide")
    values, out = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    tensors = [Tensor(n + 1, values[n : n + 1]) for n in range(1000)]
    assert raw.execute(handle, tensors, [Tensor(5000, out)]) == OK
    assert out[0] == 7
