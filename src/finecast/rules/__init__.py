"""Rules: each judges one op and narrows the formats it may take. One rule, one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from finecast.errors import RuleConflictError
from finecast.graph import Node
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.plugin import imported_on_use
from finecast.rules.base import (
    ANY,
    UNFIT,
    WAIVED,
    Context,
    NodeView,
    Reason,
    Rule,
    Ruling,
    UserRule,
)
from finecast.rules.calibration import CALIBRATION, encodings_in
from finecast.rules.constants import CARRIED, CONSTANTS, GUARDED
from finecast.rules.coordinates import COORDINATES
from finecast.rules.ends import ENDS
from finecast.rules.equality import EQUALITY
from finecast.rules.exponentials import EXPONENTIALS
from finecast.rules.folded import FOLDED
from finecast.rules.observed import OBSERVED
from finecast.rules.override import override
from finecast.rules.quantized import QUANTIZED
from finecast.rules.state import STATE
from finecast.rules.stated import OWN_CASTS, STATED_FP32
from finecast.rules.support import DEFINITION, EINSUM, KERNEL
from finecast.rules.tier import DEPTH, TIER
from finecast.rules.unseen import UNSEEN
from finecast.rules.user_rules import NAMES, OP_FORMATS, SCOPE, USER

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.rules.base import KEEP as KEEP
    from finecast.rules.base import only as only
    from finecast.rules.facts import first_nonfinite as first_nonfinite
    from finecast.rules.guests import FINECAST as FINECAST
    from finecast.rules.guests import GUESTS as GUESTS
    from finecast.rules.guests import Guest as Guest
    from finecast.rules.guests import Override as Override
    from finecast.rules.guests import Overrides as Overrides
    from finecast.rules.guests import rule_set_of as rule_set_of
    from finecast.rules.override import current as current
    from finecast.rules.override import innermost as innermost
    from finecast.rules.override import names_biases as names_biases
    from finecast.rules.override import parameters as parameters
    from finecast.rules.override import unmatched as unmatched
    from finecast.rules.policy import DEFAULT_POLICY as DEFAULT_POLICY
    from finecast.rules.policy import Adjust as Adjust
    from finecast.rules.policy import low_format as low_format
    from finecast.rules.user_rules import check_names as check_names
    from finecast.rules.user_rules import op_names as op_names
else:
    __getattr__ = imported_on_use(__name__)

__all__ = [
    "RULES",
    "Context",
    "NodeView",
    "Permission",
    "Rule",
    "Ruling",
    "UserRule",
    "override",
    "permit",
]

RULES: Final[tuple[Rule, ...]] = (
    DEFINITION,
    EINSUM,
    KERNEL,
    CALIBRATION,
    SCOPE,
    TIER,
    NAMES,
    OP_FORMATS,
    CONSTANTS,
    CARRIED,
    GUARDED,
    FOLDED,
    ENDS,
    EQUALITY,
    EXPONENTIALS,
    STATE,
    COORDINATES,
    OWN_CASTS,
    STATED_FP32,
    QUANTIZED,
    OBSERVED,
    UNSEEN,
    DEPTH,
    USER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """The formats that the rules permit a node, and the reasons of all rules that judged it.

    ``encodings`` are those of its operands in each permitted format that has parameters.
    """

    formats: frozenset[Format]
    reasons: tuple[Reason, ...]
    encodings: Mapping[Format, Encodings] = field(default_factory=dict[Format, Encodings])

    def without(self, fmt: Format, why: str) -> Permission:
        """This permission without ``fmt``, because of what the engine does: ``why``."""
        formats = self.formats - {fmt}
        permits = tuple(sorted(f.label for f in formats))
        reason = Reason(
            rule=KERNEL.name, text=why, permits=permits, evidence={UNFIT: fmt.label}
        )
        return replace(
            self,
            formats=formats,
            reasons=(*self.reasons, reason),
            encodings={f: e for f, e in self.encodings.items() if f is not fmt},
        )


def permit(context: Context, rules: Sequence[Rule] = RULES) -> dict[int, Permission]:
    """Judge every float node: it may have the formats that all rules permit.

    Law: the order of rules does not matter. Each of the policy's low formats is judged by
    itself, beside fp32; the permitted formats are the union over these judgements.

    Raises:
        RuleConflictError: If a node has no permitted format; names the rules in conflict.
    """
    nodes = context.graph.float_nodes
    by_format = [
        [_judge(node, view, rules) for node in nodes]
        for view in (context.of_format(fmt) for fmt in context.policy.formats)
    ]
    return {
        node.id: _united(node, judgements, context.policy.formats)
        for node, judgements in zip(nodes, zip(*by_format, strict=True), strict=True)
    }


def _judge(node: Node, context: Context, rules: Sequence[Rule]) -> Permission:
    """The formats that ``rules`` permit one node; a node that is not fp32 keeps its format."""
    if node.format is not Format.FP32:
        rules = (DEFINITION,)  # the others decide between fp32 and the low format
    verdicts = [(r, v) for r in rules if (v := r.judge(node, context)) is not None]
    waived = any(v.waives for _, v in verdicts)
    formats = frozenset({Format.FP32, context.low}) if node.format is Format.FP32 else ANY
    for rule, verdict in verdicts:
        if rule.hard or verdict.waives or not waived:
            formats &= verdict.permits
    return Permission(
        formats=formats,
        reasons=tuple(_reason(r, v, waived=waived) for r, v in verdicts),
        encodings={
            fmt: encodings_in(context, node)
            for fmt in formats
            if fmt.has_scales and node.format is Format.FP32
        },
    )


def _united(node: Node, found: Sequence[Permission], lows: Sequence[Format]) -> Permission:
    """The union of the permissions ``found`` for each of ``lows``.

    A verdict on one low format permits the other ones. Verdicts of one rule with the same
    text become one reason, which permits the formats that all of them permit.
    """
    if len(found) == 1 and found[0].formats:
        return found[0]
    formats = frozenset[Format]().union(*(p.formats for p in found))
    reasons: dict[tuple[str, str], Reason] = {}
    for low, permission in zip(lows, found, strict=True):
        others = {f.label for f in lows if f is not low}
        for reason in permission.reasons:
            key = reason.rule, reason.text
            permits = {*reason.permits, *others}
            if key in reasons:
                permits &= set(reasons[key].permits)
            reasons[key] = replace(reason, permits=tuple(sorted(permits)))
    if not formats:
        raise RuleConflictError(
            f"no format is left to {node.name}",
            where="; ".join(f"{rule}: {text}" for rule, text in reasons),
            fix="drop one of the options that force a format",
        )
    encodings = {fmt: one for p in found for fmt, one in p.encodings.items()}
    return Permission(formats=formats, reasons=tuple(reasons.values()), encodings=encodings)


def _reason(rule: Rule, verdict: Ruling, *, waived: bool) -> Reason:
    dropped = waived and not rule.hard and not verdict.waives
    return Reason(
        rule=rule.name,
        text=f"{WAIVED}{verdict.text}" if dropped else verdict.text,
        permits=tuple(sorted(f.label for f in verdict.permits)),
        evidence=verdict.evidence,
    )
