"""What each precision group of a plan costs: its share of the output error, and its time.

Law: whoever says which op costs accuracy, or which op in fp32 would be faster in a lower
format, reads it here from the plan. Ops in reduced precision and ops in fp32 are never ranked
together: the ones cause the error that the plan has, the others one that it does not have.

A precision group is the ops that were decided together, as they run in one kernel. It is named
by its product, where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from finecast.naming import percents
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECISION, Reason

OPS_IN_KERNEL: Final = "ops in one kernel"
"""Names of evidence: how many ops a group has, the plan's error if the group has a format,
the time of its kernel in a format and of the casts that change with it; and the plan's output
error as it was measured, with the group as planned and in fp32."""
ERROR_IF: Final = "error if {}"
TIME_IN: Final = "{} us"
CASTS_IF: Final = "casts if {} us"
MEASURED: Final = "measured error"
MEASURED_IN_FP32: Final = "measured error if fp32"

SHARES_OF: Final = "shares of the squared output error"
"""What a line on the ops that cost the most accuracy starts with."""
_PRODUCTS: Final = frozenset({OpKind.MATMUL, OpKind.CONV})
_FP32: Final = Format.FP32.label
_NAMED: Final = 3
"""Ops that are named."""
_MOST_ALONE: Final = 0.5
"""Shares of single ops that add up to less leave most of the error without an op."""
_LEAST_PART: Final = 0.01
"""What has less than this part of the largest figure is not named, nor what would save less
than this part of the time of all kernels."""


def shared_rest(shares: Iterable[float]) -> str:
    """The part of the error that no single op causes; empty unless it is the larger part.

    A value stays rounded while the op that makes it or an op that reads it is in reduced
    precision: engines that plan each op by itself, as PyTorch's, have such values.

    Law: the shares that are named and this part are at most 100% together. A negative share is
    of an op whose error cancels that of others, and takes nothing from what is named.

    Args:
        shares: Those of all groups in reduced precision.
    """
    alone = sum(share for share in shares if share > 0)
    if alone >= _MOST_ALONE:
        return ""
    return f"the other {1 - alone:.0%} goes only if neighbouring ops return to fp32 together"


def error_share(own: str, errors: Mapping[str, float]) -> float:
    """The share of a plan's squared error that goes if one group alone is computed in fp32.

    Law: whoever ranks the low ops of a plan by what they cost ranks them by this share. Errors
    of independent roundings add up, so the shares of all groups add up to about 1.

    Args:
        own: The label of the group's format in the plan.
        errors: The plan's relative error by the label of the format that the group has.

    Returns:
        0 of a group in fp32 and where an error is not known; negative if the group's error
        cancels others.
    """
    exact, low = errors.get(_FP32), errors.get(own)
    if exact is None or not low or not math.isfinite(exact):
        return 0.0
    return 1 - (exact / low) ** 2


def _by_format(evidence: Mapping[str, float | str], name: str) -> dict[str, float]:
    figures = {fmt.label: evidence.get(name.format(fmt.label)) for fmt in Format}
    return {label: figure for label, figure in figures.items() if isinstance(figure, float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionGroup:
    """Ops that were decided together, and what other formats would change.

    Attributes:
        ops: Their names.
        main: The name of the product among them, or of the first one.
        kind: What the main op computes.
        format: The label of their format.
        reason: Why they have it, with all figures.
    """

    ops: tuple[str, ...]
    main: str
    kind: str
    format: str
    reason: Reason

    @property
    def is_low(self) -> bool:
        """Whether the ops are in reduced precision."""
        return self.format != _FP32

    @property
    def errors(self) -> dict[str, float]:
        """The plan's predicted error by the format that the group has."""
        return _by_format(self.reason.evidence, ERROR_IF)

    @property
    def times_us(self) -> dict[str, float]:
        """The time of the kernel by format."""
        return _by_format(self.reason.evidence, TIME_IN)

    @property
    def casts_us(self) -> dict[str, float]:
        """The time of the casts that a change to or from a format adds, negative if fewer."""
        return _by_format(self.reason.evidence, CASTS_IF)

    @property
    def share(self) -> float:
        """The share of the plan's squared error that goes if the group is in fp32."""
        return error_share(self.format, self.errors)

    @property
    def measured(self) -> tuple[float, float] | None:
        """The plan's output error as measured, and with the group in fp32, if that was run."""
        evidence = self.reason.evidence
        own, returned = evidence.get(MEASURED), evidence.get(MEASURED_IN_FP32)
        if not (isinstance(own, float) and isinstance(returned, float)):
            return None
        return own, returned

    @property
    def measured_share(self) -> float | None:
        """``share``, as measured; None if it was not."""
        if self.measured is None:
            return None
        own, returned = self.measured
        return error_share(self.format, {self.format: own, _FP32: returned})

    @property
    def known_share(self) -> float:
        """``measured_share`` where there is one, and else ``share``."""
        return self.share if self.measured_share is None else self.measured_share

    @property
    def saved_us(self) -> dict[str, float]:
        """By lower format what it saves beside fp32, casts included, the most first.

        Formats that save nothing, or that the ops may not have, are left out. Empty where
        costs are bytes.
        """
        times, casts = self.times_us, self.casts_us
        if _FP32 not in times:
            return {}
        saved = {
            label: times[_FP32] - times[label] - cost
            for label, cost in casts.items()
            if label in times and label != _FP32
        }
        gains = [(label, gain) for label, gain in saved.items() if gain > 0]
        return dict(sorted(gains, key=lambda one: -one[1]))

    @property
    def share_text(self) -> str:
        """The op, its format and its share."""
        return f"{self.main} ({self.format}) {self.known_share:.0%}"

    @property
    def gain_text(self) -> str:
        """The op in fp32, what its fastest format saves, and what that does to the error."""
        label, saved_us = next(iter(self.saved_us.items()))
        errors = self.errors
        text = f"{self.main} ({label} would save {duration(saved_us * 1e-6)}"
        if _FP32 in errors and label in errors:
            before, after = percents(errors[_FP32], errors[label])
            text += f"; output error {before} -> {after}"
        return f"{text})"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "op": self.main,
            "ops": list(self.ops),
            "format": self.format,
            "share": self.share,
            "measured_share": self.measured_share,
            "error_if": self.errors,
            "saves_us": self.saved_us,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """The groups of a plan that cost the most accuracy, and those that would gain time.

    Attributes:
        low: Groups in reduced precision, those with the largest shares of the squared error
            first: as measured, where that was done.
        kept: Groups in fp32 that would be faster in a lower format, those that would save the
            most time first.
        shares: The shares of all groups in reduced precision.
    """

    low: tuple[PrecisionGroup, ...] = field(default=())
    kept: tuple[PrecisionGroup, ...] = field(default=())
    shares: tuple[float, ...] = field(default=())

    @classmethod
    def of(cls, plan: Plan) -> Contributions:
        """Those of a plan; none where its decisions have no figures."""
        return cls.among(precision_groups(plan))

    @classmethod
    def among(cls, groups: Sequence[PrecisionGroup]) -> Contributions:
        """Those of ``groups``, all of one plan."""
        total_us = sum(one.times_us.get(one.format, 0.0) for one in groups)
        gains = [(g, max(g.saved_us.values(), default=0.0)) for g in groups if not g.is_low]
        kept = [(g, saved_us) for g, saved_us in gains if saved_us > _LEAST_PART * total_us]
        return cls(
            low=_most([(g, g.known_share) for g in groups if g.is_low]),
            kept=_most(kept),
            shares=tuple(one.known_share for one in groups if one.is_low),
        )

    @property
    def lines(self) -> list[str]:
        """A line on the ops in reduced precision, one on those in fp32; none if unknown."""
        lines: list[str] = []
        if self.low:
            told = filter(None, (self._shares, shared_rest(self.shares)))
            lines.append(f"{SHARES_OF}: {'; '.join(told)}")
        if self.kept:
            named = ", ".join(one.gain_text for one in self.kept)
            lines.append(f"ops in fp32 that would gain the most time: {named}")
        return lines

    @property
    def _shares(self) -> str:
        measured = [one.share_text for one in self.low if one.measured_share is not None]
        predicted = [one.share_text for one in self.low if one.measured_share is None]
        each = "it" if len(measured) == 1 else "each"
        texts = [f"{', '.join(measured)}, measured by putting {each} back into fp32"]
        if predicted:
            texts.append(f"{', '.join(predicted)}, as predicted")
        return "; ".join(texts if measured else texts[1:])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "reduced_precision": [one.to_dict() for one in self.low],
            "fp32": [one.to_dict() for one in self.kept],
        }


def _most(ranked: Sequence[tuple[PrecisionGroup, float]]) -> tuple[PrecisionGroup, ...]:
    """The few groups of the largest figures; small ones beside the largest are left out."""
    ordered = sorted(ranked, key=lambda one: -one[1])[:_NAMED]
    least = _LEAST_PART * max((figure for _, figure in ordered), default=0.0)
    return tuple(group for group, figure in ordered if figure > least)


def precision_groups(
    plan: Plan, numbers: Mapping[str, int] | None = None
) -> list[PrecisionGroup]:
    """The groups that costs decided, in the plan's order.

    Args:
        plan: The plan, whose decisions have the figures.
        numbers: By op's name a number of its group, which tells groups of equal figures apart.
            Without it that is known only of groups of one op.
    """
    members: dict[tuple[Any, ...], list[Decision]] = {}
    reasons: dict[tuple[Any, ...], Reason] = {}
    for decision in plan.decisions:
        for reason in decision.reasons:
            if reason.rule != DECISION or OPS_IN_KERNEL not in reason.evidence:
                continue
            is_single = reason.evidence[OPS_IN_KERNEL] == 1
            number = (numbers or {}).get(decision.node, decision.node if is_single else None)
            key = number, reason.text, *reason.evidence.items()
            members.setdefault(key, []).append(decision)
            reasons[key] = reason
    made: list[PrecisionGroup] = []
    for key, decisions in members.items():
        products = (d for d in decisions if by_name(d.op).kind in _PRODUCTS)
        main = next(products, decisions[0])
        made.append(
            PrecisionGroup(
                ops=tuple(d.node for d in decisions),
                main=main.node,
                kind=main.op,
                format=main.format.label,
                reason=reasons[key],
            )
        )
    return made


def in_fp32(plan: Plan, group: PrecisionGroup) -> Plan | None:
    """``plan`` with a group back in fp32; None if operands of the group are adjusted."""
    names = frozenset(group.ops)
    if any(one.node in names for one in plan.adjustments):
        return None
    return replace(
        plan,
        decisions=tuple(
            replace(d, format=Format.FP32, encodings=Encodings()) if d.node in names else d
            for d in plan.decisions
        ),
    )


def confirmed(plan: Plan, group: PrecisionGroup, own: float, returned: float) -> Plan:
    """``plan`` with what was measured of a group: the output error, and with it in fp32."""
    evidence = {**group.reason.evidence, MEASURED: own, MEASURED_IN_FP32: returned}
    reason = replace(group.reason, evidence=evidence)
    return plan.explained(dict.fromkeys(group.ops, reason))


def told_shares(shares: Mapping[str, float]) -> list[str]:
    """A line on the ops with most of a squared error; none where no share is known."""
    told = ", ".join(f"{node} {share:.0%}" for node, share in shares.items())
    return [f"{SHARES_OF}: {told}"] if told else []


def duration(time_s: float) -> str:
    """``12.3 us`` or ``1.23 ms``."""
    return f"{time_s * 1e3:.3g} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.3g} us"
