"""Notes for the user on ops that a policy does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from finecast.graph import Graph, Node
from finecast.naming import listed
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECISION, UNFIT, Reason
from finecast.rules.draws import varying_values
from finecast.rules.policy import Policy
from finecast.rules.unseen import UNSEEN

_NAMED: Final = 3
"""The most ops that a note names."""
_OWN_TYPES: Final = ("fp64", "fp16", "bf16")
"""Types of ops that no policy changes, because they are not fp32."""
NOTHING_CONVERTED: Final = "nothing was converted"
_NOTHING_PERMITTED: Final = f"{NOTHING_CONVERTED}: the rules leave every op in its type"
NOTHING_GAINS: Final = (
    f"{NOTHING_CONVERTED}: of the ops that the rules permit none gains by its time here"
    " (--auto-cast all converts them all the same)"
)


def nothing_converted(plan: Plan) -> str:
    """A note that ``plan`` lowers nothing, with the commonest verdict."""
    whose, text = commonest_verdict(plan)
    return f"{_NOTHING_PERMITTED}, {whose}: {text}" if text else _NOTHING_PERMITTED


def commonest_verdict(plan: Plan) -> tuple[str, str]:
    """The ops and rule of the verdict that most products have, and its text.

    Of the model's other ops where no product has one; empty where no op has.
    """
    verdicts = _verdicts(d for d in plan.decisions if by_name(d.op).kind is OpKind.MATMUL)
    whose = "product" if verdicts else "op"
    verdicts = verdicts or _verdicts(plan.decisions)
    if not verdicts:
        return "", ""
    rule, count = Counter(reason.rule for reason in verdicts).most_common(1)[0]
    whose += "s" if count > 1 else ""
    text = next(reason.text for reason in verdicts if reason.rule == rule)
    return f"{count} {whose} by the rule {rule!r}", text


def _verdicts(decisions: Iterable[Decision]) -> list[Reason]:
    """The verdicts of rules that leave an op no other format than it has."""
    return [
        reason
        for decision in decisions
        for reason in decision.deciding
        if reason.permits == (decision.format.label,) and reason.rule != DECISION
    ]


def plan_notes(plan: Plan) -> list[str]:
    """Notes on what engine and data keep ops of a plan from."""
    return [*_unfit_notes(plan), *_unseen_notes(plan)]


def _unfit_notes(plan: Plan) -> list[str]:
    """Notes on ops that were taken out of a format in which the engine does not run them."""
    names: dict[tuple[str, str], list[str]] = {}
    for decision in plan.decisions:
        for reason in (r for r in decision.reasons if UNFIT in r.evidence):
            key = decision.format.label, reason.text
            names.setdefault(key, []).append(repr(decision.node))
    return [
        f"{listed(ops, _NAMED)} {'keeps' if len(ops) == 1 else 'keep'} {label}: {text}"
        for (label, text), ops in names.items()
    ]


def _unseen_notes(plan: Plan) -> list[str]:
    """Notes on ops of which the data shows nothing: those that keep fp32, and others."""
    verdicts = [(d, r) for d in plan.counted for r in d.reasons if r.rule == UNSEEN.name]
    kept = [repr(d.node) for d, r in verdicts if r in d.deciding and _decides(r, d)]
    waived = (d for d, r in verdicts if r.waived and d.format is not Format.FP32)
    forced = [(d.format.label, repr(d.node)) for d in waived]
    notes: list[str] = []
    if kept:
        keep, runs = ("keeps", "it") if len(kept) == 1 else ("keep", "them")
        notes.append(f"{listed(kept, _NAMED)} {keep} fp32: no sample of the data runs {runs}")
    for label in dict.fromkeys(label for label, _ in forced):
        names = [name for low, name in forced if low == label]
        be, runs = ("is", "it") if len(names) == 1 else ("are", "them")
        notes.append(
            f"{listed(names, _NAMED)} {be} in {label}, as was asked, and no sample of the data"
            f" runs {runs}: the error on data that do is not known"
        )
    return notes


def _decides(reason: Reason, decision: Decision) -> bool:
    """Whether the op could have another format than fp32 without the verdict."""
    others = [r for r in decision.reasons if r is not reason and not r.waived]
    permits = [set(r.permits) for r in others if r.rule != DECISION]
    return not permits or set.intersection(*permits) > {Format.FP32.label}


def kept_types(graph: Graph, policy: Policy) -> dict[str, str]:
    """Notes on ops that are not in fp32 and keep their type under any policy, by the type.

    Ops on constants alone, which take stored weights to floats as a model is loaded, are not
    counted: NNCF states them in fp16.
    """
    varying = varying_values(graph)
    asked = {f.label for f in (*policy.formats, *policy.op_formats.values())}
    counts = Counter(
        label
        for n in graph.nodes
        if (label := _own_type(graph, n)) in _OWN_TYPES and varying.intersection(n.outputs)
    )
    return {
        label: f"{count} ops compute in {label} and keep it"
        if count > 1
        else f"1 op computes in {label} and keeps it"
        for label, count in counts.items()
        if label not in asked
    }


def _own_type(graph: Graph, node: Node) -> str:
    """The type that an op computes in; empty for a cast."""
    made = (graph.values[i].dtype for i in node.output_ids)
    return "" if node.op == "cast" else next(made, "")
