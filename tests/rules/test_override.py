"""Overrides hold for a block, and the inner one wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.rules.base import Context, NodeView
from finecast.rules.override import active, override
from finecast.rules.policy import Policy
from tests.graph.text import from_text

GRAPH = from_text(
    "input %0 x fp32\nnode s softmax aten::softmax fp32 (%0) -> (%1 y fp32)\noutput %1\n"
)
SOFTMAX = GRAPH.nodes[0]


def says(word: str) -> Callable[[NodeView], str]:
    return lambda _node: word


def answer() -> object:
    """What the override that counts says of the softmax; None if there is none."""
    view = NodeView(node=SOFTMAX, context=Context(graph=GRAPH, policy=Policy()))
    said = [answer for _, rule in active() if (answer := rule(view)) is not None]
    assert len(said) <= 1
    return said[0] if said else None


def test_the_inner_override_of_an_op_wins_and_others_stay() -> None:
    with override({"aten::softmax": says("outer"), "aten::relu": says("relu")}):
        assert answer() == "outer"
        with override({"aten::softmax": says("inner")}):
            assert answer() == "inner"
            assert {name for name, _ in active()} == {"aten::softmax", "aten::relu"}
        assert answer() == "outer"
    assert answer() is None


@pytest.mark.parametrize(
    ("outer", "inner"), [("softmax", "aten::softmax"), ("aten::softmax", "softmax")]
)
def test_the_inner_one_wins_by_either_name(outer: str, inner: str) -> None:
    with override({outer: says("outer")}), override({inner: says("inner")}):
        assert answer() == "inner"


def test_what_held_before_holds_again_after_an_exception() -> None:
    with override({"softmax": says("outer")}):
        with pytest.raises(KeyError), override({"softmax": says("inner")}):
            raise KeyError
        assert answer() == "outer"
