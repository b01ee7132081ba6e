"""An Einsum may be bf16 if it is a MatMul; else the reason says why it is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.rules import Context, permit
from finecast.rules.policy import Policy
from tests.graph.text import from_text


def graph(equation: str) -> Graph:
    return from_text(
        "input %0 x fp32[4, 4]\ninput %1 w fp32[4, 4]\n"
        "node sum einsum onnx::Einsum fp32 (%0, %1) -> (%2 y fp32)"
        f' {{"equation": "{equation}"}}\noutput %2\n'
    )


def judged(equation: str, policy: Policy) -> tuple[frozenset[Format], str]:
    permission = permit(Context(graph=graph(equation), policy=policy))[0]
    return permission.formats, " ".join(r.text for r in permission.reasons)


ALL = Policy.parse("all:bf16")


def test_a_product_may_be_low() -> None:
    formats, _ = judged("ij,jk->ik", ALL)
    assert Format.BF16 in formats


@pytest.mark.parametrize(
    ("equation", "policy", "why"),
    [
        ("ij,kj->k", ALL, "no MatMul: it sums over an axis of one operand alone"),
        ("ij,ij->ij", ALL, "no MatMul: it sums over no axis of both operands"),
        ("ij,jk->ik", replace(ALL, keep_ops=True), "to be kept"),
    ],
)
def test_what_is_none_stays(equation: str, policy: Policy, why: str) -> None:
    formats, reasons = judged(equation, policy)
    assert formats == {Format.FP32}
    assert why in reasons


def test_fp16_is_in_the_definition() -> None:
    formats, _ = judged("ij,kj->k", Policy.parse("all:fp16"))
    assert Format.FP16 in formats
