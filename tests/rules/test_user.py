"""Users' rules in Python: their answers, and errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.rules import NodeView, Ruling, UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.user_rules import USER

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4]
constant %1 w fp32[4] size=4 largest=2.0 smallest_nonzero=1.0
node mul mul onnx::Mul fp32 (%0, %1, _) -> (%2 a fp32[4])
node relu relu onnx::Relu fp32 (%2) -> (%3 y fp32[4])
"""


def rules(*functions: UserRule) -> tuple[tuple[str, UserRule], ...]:
    return tuple((f"rule{i}", f) for i, f in enumerate(functions))


def test_what_functions_may_answer(judged: Judged) -> None:
    answers: dict[str, str | list[str] | None] = {"mul": ["fp32", "bf16"], "relu": "bf16"}
    found = judged(USER, GRAPH, user_rules=rules(lambda node: answers[node.name]))
    mul, relu = found["mul"], found["relu"]
    assert mul is not None
    assert relu is not None
    assert mul.permits == {Format.FP32, Format.BF16}
    assert relu.permits == {Format.BF16}
    assert relu.waives
    assert "rule0" in relu.text


def test_no_opinion(judged: Judged) -> None:
    assert judged(USER, GRAPH, user_rules=rules(lambda _: None))["mul"] is None
    assert judged(USER, GRAPH)["mul"] is None


def test_several_functions_all_count(judged: Judged) -> None:
    both = rules(lambda _: ["fp32", "bf16"], lambda _: None, lambda _: "fp32")
    verdict = judged(USER, GRAPH, user_rules=both)["mul"]
    assert verdict is not None
    assert verdict.permits == {Format.FP32}
    assert "rule0, rule2" in verdict.text


def test_what_a_function_sees(judged: Judged) -> None:
    seen: dict[str, object] = {}

    def look(node: NodeView) -> None:
        if node.name == "mul":
            x = node.inputs[0]
            assert x is not None
            seen.update(op=node.op, native=node.native, kind=node.info.kind.label)
            seen.update(inputs=[v.name if v else None for v in node.inputs])
            seen.update(outputs=[v.name for v in node.outputs if v], facts=node.facts(x))

    facts = {0: ValueFacts.of(np.ones(4, np.float32))}
    judged(USER, GRAPH, user_rules=rules(look), facts=facts)
    assert seen == {
        "op": "mul",
        "native": "onnx::Mul",
        "kind": "elementwise",
        "inputs": ["x", "w", None],
        "outputs": ["a"],
        "facts": facts[0],
    }


@pytest.mark.parametrize("answer", [3, ["fp32", 3], "bf17"])
def test_answers_that_mean_nothing(judged: Judged, answer: object) -> None:
    with pytest.raises(UsageError, match=r"rule0 returned|rule0: unknown format 'bf17'"):
        judged(USER, GRAPH, user_rules=(("rule0", lambda _: answer),))


def test_a_function_that_fails_is_named_with_its_node(judged: Judged) -> None:
    def broken(node: NodeView) -> str:
        return {}[node.name]

    with pytest.raises(UsageError, match=r"rule0 failed: KeyError: 'mul' \(mul\)"):
        judged(USER, GRAPH, user_rules=rules(broken))
