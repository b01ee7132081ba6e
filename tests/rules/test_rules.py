"""All rules together: order does not matter, waivers are recorded, conflicts are named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import RuleConflictError
from finecast.numbers.formats import Format
from finecast.rules import RULES, Context, Permission, permit
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from tests.graph.text import from_text

GRAPH = from_text("""\
graph rules
input %0 x fp32[2, 512]
constant %1 w fp32[512, 512] size=262144 largest=0.5 smallest_nonzero=1e-9
constant %2 mask fp32[1] size=1 largest=3.4028234663852886e+38 smallest_nonzero=1.0
node l0/mm matmul onnx::MatMul fp32 (%0, %1) -> (%3 a fp32[2, 512])
node l0/mask add onnx::Add fp32 (%3, %2) -> (%4 b fp32[2, 512])
node l1/exp exp onnx::Exp fp32 (%4) -> (%5 c fp32[2, 512])
node l1/sum reduce_sum onnx::ReduceSum fp32 (%5) -> (%6 d fp32[2, 1])
node l1/cumsum cumsum onnx::CumSum fp32 (%6) -> (%7 e fp32[2, 1]) admits=(fp32)
node l1/odd unknown my::Op fp32 (%7) -> (%8 y fp32[2, 1])
node l1/done relu onnx::Relu bf16 (%9) -> (%10 z bf16[2, 1])
input %9 h bf16[2, 1]
output %8
output %10
""")
IDS = {n.name: n.id for n in GRAPH.nodes}
LOW = st.sampled_from([Format.BF16, Format.FP16])
MAYBE = st.sampled_from(["exp", "relu", "add"])
LARGE = {3: ValueFacts.of(np.full((2, 512), 1e5, np.float32))}


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    low = draw(LOW)
    names = [(re.compile(p),) for p in ("l0", "mm", "l1")]
    policy = Policy(
        scope=draw(st.sampled_from(Scope)),
        formats=(low,),
        include=draw(st.sampled_from([(), *names])),
        exclude=draw(st.sampled_from([(), *names])),
        op_formats=draw(
            st.dictionaries(MAYBE, st.sampled_from([Format.FP32, low]), max_size=2)
        ),
    )
    refused = draw(st.sets(st.sampled_from([n.native for n in GRAPH.nodes]), max_size=2))
    return Context(
        graph=GRAPH,
        policy=policy,
        facts=LARGE if draw(st.booleans()) else {},
        kernels=lambda node, _: False if node.native in refused else None,
        measured=draw(st.booleans()),
        user_rules=(("mine", lambda n: "fp32" if n.op == "exp" else None),),
    )


@given(contexts(), st.permutations([Format.BF16, Format.FP16, Format.FP8_E5M2]))
def test_each_format_is_judged_by_itself(context: Context, formats: list[Format]) -> None:
    asked = replace(context, policy=replace(context.policy, formats=(*formats,)))
    alone = [outcome(asked.of_format(f), list(range(len(RULES)))) for f in formats]
    found = outcome(asked, list(range(len(RULES))))
    known = [a for a in alone if not isinstance(a, str)]
    if len(known) < len(formats):  # a forced format leaves nothing where it is not asked for
        return
    assert isinstance(found, dict)
    for node, left in found.items():
        assert left == frozenset[Format]().union(*(a[node] for a in known))


def test_what_several_formats_share_is_said_once() -> None:
    policy = Policy(formats=(Format.BF16, Format.FP16), exclude=(re.compile("l0"),))
    reasons = permit(Context(graph=GRAPH, policy=policy))[IDS["l0/mm"]].reasons
    assert [r.rule for r in reasons].count("names") == 1


def test_a_merged_reason_permits_what_all_of_its_verdicts_do() -> None:
    policy = Policy(formats=(Format.BF16, Format.FP16), exclude=(re.compile("l0"),))
    found = permit(Context(graph=GRAPH, policy=policy))
    both = next(r for r in found[IDS["l0/mm"]].reasons if r.rule == "names")
    assert both.permits == ("fp32",)
    # A verdict on one low format permits the other.
    one = next(r for r in found[IDS["l0/mask"]].reasons if r.rule == "constants")
    assert one.permits == ("bf16", "fp32")


def outcome(context: Context, order: list[int]) -> dict[int, frozenset[Format]] | str:
    try:
        found = permit(context, [RULES[i] for i in order])
    except RuleConflictError as error:
        return error.what
    return {i: p.formats for i, p in found.items()}


@given(contexts(), st.permutations(range(len(RULES))))
def test_the_order_of_rules_does_not_matter(context: Context, order: list[int]) -> None:
    assert outcome(context, order) == outcome(context, list(range(len(RULES))))


@given(contexts(), st.sets(st.integers(0, len(RULES) - 1)))
def test_hard_rules_are_never_waived(context: Context, others: set[int]) -> None:
    hard = {i for i, r in enumerate(RULES) if r.hard}
    some, facts = outcome(context, sorted(others | hard)), outcome(context, sorted(hard))
    assert not isinstance(facts, str)
    if not isinstance(some, str):
        assert all(some[i] <= facts[i] for i in some)


def permission(name: str, policy: Policy, **more: object) -> Permission:
    return permit(Context(graph=GRAPH, policy=policy, **more))[IDS[name]]  # type: ignore[arg-type]


def test_a_users_force_waives_rules_of_thumb_and_is_recorded() -> None:
    free = permission("l1/exp", Policy())
    assert free.formats == {Format.FP32}
    forced = permission("l1/exp", Policy(op_formats={"exp": Format.BF16}))
    assert forced.formats == {Format.BF16}
    texts = {r.rule: r.text for r in forced.reasons}
    assert texts["tier"].startswith("(waived) ")
    assert texts["op_formats"] == "the user chose exp=bf16"


def test_what_is_low_already_stays_so_under_every_scope() -> None:
    for scope in Scope:
        policy = Policy(scope=Scope.ALL if scope is Scope.AUTO else Scope.AUTO)
        assert permission("l1/done", policy).formats == {Format.BF16}


@pytest.mark.parametrize("scope", [Scope.NONE, Scope.MATMULT])
def test_what_is_low_already_is_no_conflict_with_the_scope(scope: Scope) -> None:
    assert permission("l1/done", Policy(scope=scope)).formats == {Format.BF16}


def test_a_conflict_names_both_rules() -> None:
    policy = Policy(op_formats={"cumsum": Format.BF16})
    with pytest.raises(RuleConflictError, match="no format is left to l1/cumsum") as caught:
        permission("l1/cumsum", policy)
    assert "definition" in caught.value.where
    assert "op_formats" in caught.value.where


def test_two_users_words_conflict() -> None:
    policy = Policy(op_formats={"relu": Format.BF16, "exp": Format.BF16})
    user_rules = (("mine", lambda n: "fp32" if n.op == "exp" else None),)
    with pytest.raises(RuleConflictError) as caught:
        permission("l1/exp", policy, user_rules=user_rules)
    assert "op_formats" in caught.value.where
    assert "user" in caught.value.where


def test_names_of_rules_are_unique() -> None:
    assert len({r.name for r in RULES}) == len(RULES)


def test_reasons_carry_what_each_rule_leaves() -> None:
    reasons = permission("l0/mask", Policy(formats=(Format.FP16,))).reasons
    assert [(r.rule, r.permits) for r in reasons] == [("constants", ("fp32",))]
    assert "largest" in reasons[0].evidence
