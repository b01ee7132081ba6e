"""Overrides hold for a block, and the inner one wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.graph.text import from_text
from finecast.ops import OP_TABLE
from finecast.rules.base import Context, NodeView
from finecast.rules.override import RAF_OPS, DType, active, find_override, ops_named, override
from finecast.rules.policy import Policy

GRAPH = from_text(
    "input %0 x fp32\nnode s softmax aten::softmax fp32 (%0) -> (%1 y fp32)\noutput %1\n"
)
SOFTMAX = GRAPH.nodes[0]


def says(word: str) -> Callable[[NodeView], str]:
    return lambda _node: word


def held() -> dict[str, object]:
    """Names of the functions of the active overrides, by name of the op."""
    return {name: rule.__name__ for name, rule in active()}


def casting(word: str) -> Callable[[object, object, str], list[str]]:
    return lambda _args, _result, _low: [word]


def answer() -> list[str] | None:
    rule = find_override(GRAPH, SOFTMAX)
    return None if rule is None else list(rule(["fp32"], ["fp32"], "bf16"))  # type: ignore[arg-type]


def test_the_inner_override_of_an_op_wins_and_others_stay() -> None:
    with override({"aten::softmax": casting("outer"), "aten::relu": casting("relu")}):
        assert answer() == ["outer"]
        with override({"aten::softmax": casting("inner")}):
            assert answer() == ["inner"]
            assert {name for name, _ in active()} == {"aten::softmax", "aten::relu"}
        assert answer() == ["outer"]
    assert answer() is None


@pytest.mark.parametrize(
    ("outer", "inner"), [("softmax", "aten::softmax"), ("aten::softmax", "softmax")]
)
def test_the_inner_one_wins_by_either_name(outer: str, inner: str) -> None:
    with override({outer: casting("outer")}), override({inner: casting("inner")}):
        assert answer() == ["inner"]


def test_what_held_before_holds_again_after_an_exception() -> None:
    with override({"softmax": casting("outer")}):
        with pytest.raises(KeyError), override({"softmax": casting("inner")}):
            raise KeyError
        assert answer() == ["outer"]


def test_the_inner_rule_of_nodes_wins_by_either_name() -> None:
    with override({"softmax": says("fp32")}), override({"aten::softmax": says("bf16")}):
        context = Context(graph=GRAPH, policy=Policy(), user_rules=active())
        answers = [rule(NodeView(node=SOFTMAX, context=context)) for _, rule in active()]
    assert answers == [None, "bf16"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raf.op.softmax", ("softmax",)),
        ("raf.op.bias_add", ("bias_add",)),
        ("raf.op.batch_matmul_nt", ("matmul",)),
        ("raf.op.conv2d_dw", ("conv_backward",)),
        ("raf.op.batch_norm_train_dxwb", ("batch_norm_backward",)),
        ("raf.op.layer_norm_train_dx", ("layer_norm_backward",)),
        ("aten::softmax", ("aten::softmax",)),
    ],
)
def test_raf_s_names_of_ops_are_translated(name: str, expected: tuple[str, ...]) -> None:
    assert ops_named(name) == expected


def test_every_name_in_the_table_of_raf_s_is_an_op() -> None:
    known = {info.name for info in OP_TABLE}
    assert {one for names in RAF_OPS.values() for one in names} <= known


def test_types_equal_their_other_names() -> None:
    kind = DType("bf16")
    assert kind == "bfloat16"
    assert kind.checked_type.dtype == "bf16"
    assert kind != "fp16"
    assert len({kind, DType("bfloat16"), DType("half")}) == 2
