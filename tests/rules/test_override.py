"""Overrides hold for a block, and the inner one wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.graph_text import from_text
from finecast.rules.base import NodeView
from finecast.rules.override import active, find_override, override

SOFTMAX = from_text(
    "input %0 x fp32\nnode s softmax aten::softmax fp32 (%0) -> (%1 y fp32)\noutput %1\n"
).nodes[0]


def says(word: str) -> Callable[[NodeView], str]:
    return lambda _node: word


def held() -> dict[str, object]:
    """What each active override answers."""
    return {name: rule.__name__ for name, rule in active()}


def casting(word: str) -> Callable[[object, object, str], list[str]]:
    return lambda _args, _result, _low: [word]


def answer() -> list[str] | None:
    rule = find_override(SOFTMAX)
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
