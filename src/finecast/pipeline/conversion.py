"""A converted model, and notes for the user on ops that a policy does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from finecast.graph import Graph, Node
from finecast.naming import number_of
from finecast.ops import OpKind, by_name
from finecast.pipeline.adjusting import Gain
from finecast.pipeline.artefact import Verified
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECISION, Reason
from finecast.rules.policy import Policy, conversion_stays
from finecast.terminal import one_line

_OWN_TYPES: Final = ("fp64", "fp16", "bf16")
"""Types of ops that no policy changes, because they are not fp32."""
NOTHING_CONVERTED: Final = "nothing was converted"
_NOTHING_PERMITTED: Final = f"{NOTHING_CONVERTED}: the rules leave every op in its type"
NOTHING_GAINS: Final = (
    f"{NOTHING_CONVERTED}: of the ops that the rules permit none gains by its time here"
    " (--auto-cast all converts them all the same)"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion:
    """A converted model and what was done to it; printed it is a few lines.

    Attributes:
        plan: The format of every op, and why.
        ops: Number of ops by the format that they compute in; ops that another tool quantized
            are counted apart.
        nodes: Nodes of the graph before the conversion.
        casts: Casts in the converted model.
        size_bytes: Of the model before and after.
        seconds: How long the conversion took.
        verified: How the result was verified.
        warnings: Notes for the user.
        model: The native model where it was not written to a file: an onnx.ModelProto, for
            example, or an exported program.
        restated: Low ops that were rewritten as the engine's matchers know them, and why.
        gains: What each adjustment of operands that was asked for does to the error; the
            model has those that gain.
    """

    plan: Plan
    ops: Mapping[str, int]
    nodes: int
    casts: int
    size_bytes: tuple[int, int]
    seconds: float
    verified: Verified
    warnings: tuple[str, ...] = ()
    model: Any = None
    restated: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()

    def __repr__(self) -> str:
        """What the model is made of, how it was verified, and what was warned of."""
        ops = ", ".join(f"{count} {label}" for label, count in self.ops.items())
        before, after = (size / 1e6 for size in self.size_bytes)
        casts, seconds = number_of(self.casts, "cast"), f"{self.seconds:.1f} s"
        lines = [f"converted by {self.plan.policy}: {ops or 'no op in fp32'}; {casts}"]
        lines.append(f"{before:.2f} MB before, {after:.2f} MB after, in {seconds}")
        checked = self.verified
        if checked.engine is None:
            lines.append("not run in an engine")
        elif checked.relative_error is not None:
            error = f"relative error {checked.relative_error:.3g} against {checked.reference}"
            lines.append(f"verified in {checked.engine}: {error}")
        lines += [f"note: {checked.note}"] if checked.note else []
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n  ".join(one_line(line) for line in lines)


def nothing_converted(plan: Plan) -> str:
    """A note that ``plan`` lowers nothing, with the commonest verdict."""
    whose, text = commonest_verdict(plan)
    return f"{_NOTHING_PERMITTED}, {whose}: {text}" if text else _NOTHING_PERMITTED


def commonest_verdict(plan: Plan) -> tuple[str, str]:
    """The ops and rule of the verdict that most products have, and its text.

    Of the model's other ops where no product has one; empty where no op has.
    """
    found = _verdicts(d for d in plan.decisions if by_name(d.op).kind is OpKind.MATMUL)
    whose = "product" if found else "op"
    found = found or _verdicts(plan.decisions)
    if not found:
        return "", ""
    rule, count = Counter(reason.rule for reason in found).most_common(1)[0]
    whose += "s" if count > 1 else ""
    text = next(reason.text for reason in found if reason.rule == rule)
    return f"{count} {whose} by the rule {rule!r}", text


def _verdicts(decisions: Iterable[Decision]) -> list[Reason]:
    """The verdicts of rules that leave an op no other format than it has."""
    return [
        reason
        for decision in decisions
        for reason in decision.deciding
        if reason.permits == (decision.format.label,) and reason.rule != DECISION
    ]


def earlier_conversion(was: str, policy: Policy) -> list[str]:
    """Notes on what becomes of a conversion to the policy ``was``; none if that is empty."""
    if not was:
        return []
    if conversion_stays(was, policy.label):
        return [f"an earlier conversion to {was} stays: for fp32 give the model of before it"]
    return [f"an earlier conversion to {was} was taken back"]


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
