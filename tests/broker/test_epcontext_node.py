# SPDX-License-Identifier: Apache-2.0
"""epcontext_node: attributes, their defaults, and where a node may have its binary."""

from pathlib import Path

import pytest
from tests.tiny_wrappers import ep_node, model_of

from qnnbroker.broker.epcontext import (
    ByteRange,
    EPContextNode,
    binary_path,
    embedded_binary,
    names_for,
    read_wrapper,
)
from qnnbroker.protos.errors import InvalidRequest, Unsupported


def only_node(data: bytes) -> EPContextNode:
    (node,) = read_wrapper(data).nodes
    return node


def test_defaults_are_those_of_onnx_runtime() -> None:
    node = only_node(model_of(ep_node(embed_mode=None, main_context=None, ep_cache_context="abc")))
    assert node.main_context
    assert node.embed_mode == 1
    assert isinstance(node.cache_context, ByteRange)
    assert node.cache_context.length == 3
    assert only_node(model_of(ep_node(partition_name=None))).partition_name == "node_0"


@pytest.mark.parametrize("source", ["QNN", "qnn", "QnnExecutionProvider"])
def test_the_source_is_qnn_in_any_case(source: str) -> None:
    assert only_node(model_of(ep_node(source=source))).source == source


@pytest.mark.parametrize("source", ["OpenVINOExecutionProvider", "", None])
def test_a_context_of_another_provider_is_refused(source: str | None) -> None:
    with pytest.raises(Unsupported, match="QNNExecutionProvider is wanted"):
        read_wrapper(model_of(ep_node(source=source)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"embed_mode": 2}, "is 2; 0 or 1 is wanted"),
        ({"main_context": -1}, "is -1; 0 or 1 is wanted"),
        ({"embed_mode": "0"}, "should be an integer"),
        ({"source": 5}, "should be a string"),
        ({"ep_cache_context": 5}, "should be a string"),
        ({"ep_cache_context": None}, "is empty; its file name is wanted"),
        ({"ep_cache_context": "", "embed_mode": 1}, "is empty; the binary is wanted"),
        ({"ep_cache_context": b"\xff\xfe"}, "UTF-8"),
        ({"io_name_overrides": "x"}, "'edge=name' is wanted"),
        ({"io_name_overrides": "=x;"}, "'edge=name' is wanted"),
        ({"io_name_overrides": "x=a;x=b;"}, "twice"),
    ],
)
def test_a_wrong_attribute_is_refused_with_what_was_found(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_wrapper(model_of(ep_node(**changes)))
    assert caught.value.reason == "BAD_FILE"


def test_an_attribute_that_is_there_twice_is_refused() -> None:
    node = ep_node()
    node.attribute.append(node.attribute[0])
    with pytest.raises(InvalidRequest, match="is there twice"):
        read_wrapper(model_of(node))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x.bin", "a/../../x.bin", "a/..", "a\\..\\x", "\\x", "C:\\x", "a\0b"]
    + [".", "a/", "./", "c:x"],
)  # fmt: skip
def test_a_binary_elsewhere_is_refused(name: str) -> None:
    node = only_node(model_of(ep_node(ep_cache_context=name)))
    with pytest.raises(InvalidRequest, match="wanted a file beside the wrapper"):
        binary_path(Path("models/m.onnx"), node)


@pytest.mark.parametrize("name", ["m.bin", "sub/m.bin", "..m.bin", "m..bin", "./m.bin", "ü .bin"])
def test_a_binary_beside_or_below_the_wrapper_is_found(name: str) -> None:
    node = only_node(model_of(ep_node(ep_cache_context=name)))
    assert binary_path(Path("models/m.onnx"), node) == Path("models") / name


def test_asking_for_the_wrong_kind_of_binary_is_refused() -> None:
    beside = only_node(model_of(ep_node()))
    inside = only_node(model_of(ep_node(embed_mode=1)))
    with pytest.raises(InvalidRequest, match="holds no embedded binary"):
        embedded_binary(memoryview(b""), beside)
    with pytest.raises(InvalidRequest, match="holds its binary itself"):
        binary_path(Path("m.onnx"), inside)
    with pytest.raises(InvalidRequest, match="the file has 3"):
        embedded_binary(memoryview(b"abc"), inside)


def test_two_edges_with_one_tensor_name_are_refused() -> None:
    node = only_node(model_of(ep_node(io_name_overrides="x=t;y=t;z=q;")))
    assert node.io_name_overrides == {"x": "t", "y": "t"}
    with pytest.raises(InvalidRequest, match="the same QNN tensor name 't'"):
        names_for(node)
