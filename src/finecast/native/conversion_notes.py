"""Notes for the user on ops that a policy does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from finecast.graph import Graph, Node
from finecast.naming import listed
from finecast.ops import OpKind, by_name
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECISION, UNFIT, Reason
from finecast.rules.policy import Policy

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


def unfit_notes(plan: Plan) -> list[str]:
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


def kept_types(graph: Graph, policy: Policy) -> dict[str, str]:
    """Notes on ops that are not in fp32 and keep their type under any policy, by the type."""
    asked = {f.label for f in (*policy.formats, *policy.op_formats.values())}
    counts = Counter(
        label for n in graph.nodes if (label := _own_type(graph, n)) in _OWN_TYPES
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
    made = (graph.values[i].dtype for i in node.outputs if i is not None)
    return "" if node.op == "cast" else next(made, "")
