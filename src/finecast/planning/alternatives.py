"""Why each unit has its format: what another format for this unit alone would have changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from finecast.naming import percents
from finecast.numbers.formats import Format
from finecast.planning.contributions import (
    CASTS_IF,
    ERROR_IF,
    OPS_IN_KERNEL,
    TIME_IN,
    duration,
)
from finecast.planning.free_rows import free_outputs
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced
from finecast.planning.units import deciding
from finecast.rules.base import DECIDED_BY, DECISION, Reason
from finecast.solver.assignment import Floats, Ints
from finecast.solver.flips import Flips, flips
from finecast.solver.labelling import LabelProblem, evaluate

# Costs below these count as none. A cast takes about a thousand times as long.
_LEAST_S: Final = 1e-8
_LEAST_BYTES: Final = 1.0
_FIGURES: Final = ": "
"""Between why a plan has a format and what another format would have changed."""


class Decider(Enum):
    """What decided the format of a unit: its own costs, those around it, or the whole plan."""

    TIME = "time"
    CASTS = "casts"
    ERROR = "error"
    BYTES = "bytes"
    KERNEL = "kernel"
    NEIGHBOURS = "neighbours"
    WHOLE = "whole plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A low format beside a higher one for one unit, with all other units as they are.

    Attributes:
        fmt: The low format.
        beside: The higher format.
        saved: Cost of the unit that ``fmt`` saves, negative if it costs more.
        casts: Cost of the additional casts, negative if there are fewer.
        error: The predicted relative output error with the higher format; NaN where the
            errors of single ops were not measured.
        low_error: The same with ``fmt``.
        priced: What costs count.
    """

    fmt: Format
    beside: Format
    saved: float
    casts: float
    error: float
    low_error: float
    priced: Priced

    @property
    def gain(self) -> float:
        """Cost that ``fmt`` saves, casts included."""
        return self.saved - self.casts

    @property
    def from_fp32(self) -> bool:
        """Whether the higher format is fp32."""
        return self.beside is Format.FP32

    @property
    def gains_nothing(self) -> bool:
        """Whether ``fmt`` costs as much as the higher format, or more."""
        return self.gain < self._least

    @property
    def _least(self) -> float:
        return _LEAST_S if self.priced is Priced.TIME else _LEAST_BYTES

    @property
    def saves(self) -> str:
        """What the unit saves by ``fmt``, which it has."""
        if self.priced is not Priced.TIME:
            return self._bytes
        saved, casts = self._amount(self.saved), self._amount(self.casts)
        more = self.saved < 0 and saved
        own = f"takes {saved} more" if more else f"saves {saved or 'no time'}"
        if not casts:
            return f"{self._named} {own}"
        if self.casts > 0:
            return f"{self._named} {own}, its casts cost {casts}"
        also = " and" if saved and not more else ", but"
        return f"{self._named} {own}{also} spares casts of {casts}"

    @property
    def would_save(self) -> str:
        """What the unit would save by ``fmt``, in place of the format that it has."""
        if self.priced is not Priced.TIME:
            return self._bytes
        saved, casts = self._amount(self.saved), self._amount(self.casts)
        if not self.gains_nothing:
            net = " net" if casts else ""
            return f"{self._named} would save {self._amount(self.gain)}{net}"
        more = self.saved < 0 and saved
        own = f"would take {saved} more" if more else f"would save {saved or 'no time'}"
        if not casts:
            return f"{self._named} {own}"
        if self.casts > 0:
            word = "and" if more or not saved else "but"
            return f"{self._named} {own}, {word} its casts would cost {casts}"
        return f"{self._named} {own}, but spare casts of {casts}"

    @property
    def _bytes(self) -> str:
        amount = self._amount(self.gain)
        change = "adds" if amount and self.gain < 0 else "saves"
        return f"{self._named} {change} {amount or 'nothing'}"

    @property
    def _named(self) -> str:
        of = "" if self.from_fp32 else f" instead of {self.beside.label}"
        return f"{self.fmt.label}{of}"

    def _amount(self, cost: float) -> str:
        """A cost without its sign; empty where it counts as none."""
        if abs(cost) < self._least:
            return ""
        timed = self.priced is Priced.TIME
        return duration(abs(cost)) if timed else self.priced.say(abs(cost))

    @property
    def against(self) -> Decider:
        """What speaks against ``fmt``."""
        if not self.gains_nothing:
            return Decider.ERROR
        if self.priced is not Priced.TIME:
            return Decider.BYTES
        return Decider.CASTS if self.saved >= self._least else Decider.TIME

    @property
    def in_favour(self) -> Decider:
        """What speaks for ``fmt``; what is beside the unit, if it gains nothing by itself."""
        if self.gains_nothing:
            return Decider.NEIGHBOURS
        if self.priced is not Priced.TIME:
            return Decider.BYTES
        return Decider.TIME if self.saved >= self._least else Decider.CASTS

    @property
    def tells_errors(self) -> bool:
        """Whether it is known what ``fmt`` does to the error."""
        return not math.isnan(self.error)

    @property
    def trade(self) -> str:
        """What ``fmt`` would save, and what it would do to the predicted error, if known."""
        if not self.tells_errors:
            return self.would_save
        before, after = percents(self.error, self.low_error)
        change = "reduce" if self.low_error < self.error else "raise"
        return f"{self.would_save}, and {change} the predicted error from {before} to {after}"


def explained(planner: Planner, analysis: Analysis, plan: Plan) -> Plan:
    """``plan``, in which each op of a unit says what decided its format, with the figures.

    Law: a reason compares the plan with those in which this unit alone has another permitted
    format. What several units would change together is not said. Words of the plan's own,
    where something other than costs chose the format, stand in front; figures of an earlier
    analysis are replaced.
    """
    graph, units = planner.graph, analysis.units
    problem = analysis.problem(graph, planner.permissions)
    label = labels_of(planner, analysis, problem, plan)
    compared = _Compared(
        analysis=analysis,
        label=label,
        flips=flips(problem, label),
        errors=evaluate(problem, label).errors,
        adds_up=not free_outputs(graph),
    )
    own = {d.node: r for d in plan.decisions for r in d.reasons if r.rule == DECISION}
    reasons: dict[str, Reason] = {}
    for unit, members in enumerate(units.members):
        names = [name for n in members if (name := graph.nodes[n].name) in own]
        words = {name: _own_words(own[name]) for name in names}
        for because in {*words.values()}:
            reason = compared.reason(unit, because)
            for name in (n for n in names if words[n] == because):
                fits = own[name].permits == reason.permits
                reasons[name] = reason if fits else _beside(own[name], reason)
    return plan.explained(reasons)


def _own_words(reason: Reason) -> str:
    """Why a plan has a format, without the figures that an earlier analysis gave it."""
    if OPS_IN_KERNEL not in reason.evidence:
        return reason.text
    chosen = reason.evidence.get(DECIDED_BY) == Decider.WHOLE.value
    return reason.text.partition(_FIGURES)[0] if chosen else ""


def _beside(own: Reason, of_unit: Reason) -> Reason:
    """The reason of an op that has another format than others in its kernel."""
    if own.text:
        return own
    others = " or ".join(of_unit.permits)
    text = f"it is part of a kernel in {others}, and has no {others} form of its own"
    return replace(own, text=text, evidence={DECIDED_BY: Decider.KERNEL.value})


def labels_of(planner: Planner, analysis: Analysis, problem: LabelProblem, plan: Plan) -> Ints:
    """The formats of units in a plan, as numbers of the formats of ``analysis``.

    A plan of an engine's hint may lower a unit in part: its lowest permitted format counts.
    """
    numbers = {fmt: number for number, fmt in enumerate(analysis.times)}
    named, nodes = plan.formats, planner.graph.nodes
    permitted = np.isfinite(problem.time)
    unit_labels: list[int] = []
    for unit, members in enumerate(analysis.units.members):
        formats = [named.get(nodes[n].name, Format.FP32) for n in members]
        labels = [numbers[fmt] for fmt in deciding([f for f in formats if f in numbers])]
        allowed = [n for n in labels if permitted[unit, n]]
        unit_labels.append(max(allowed) if allowed else int(permitted[unit].argmax()))
    return np.array(unit_labels, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """The formats of all units, and what each change of one of them makes.

    Attributes:
        errors: The squared errors of roundings to each format, fp32 first.
        adds_up: Whether the errors of units add up. They do not in outputs that are compared
            as sets of rows, where a unit in fp32 may cross a threshold that its error hid.
    """

    analysis: Analysis
    label: Ints
    flips: Flips
    errors: Floats
    adds_up: bool

    def reason(self, unit: int, because: str) -> Reason:
        """Why a unit has its format; costs decided where ``because`` is empty."""
        own = self._own(unit)
        alternatives = sorted(self._alternatives(unit), key=lambda a: -a.gain)
        is_low = own is not Format.FP32
        decider, text = _lowered(alternatives) if is_low else _kept(alternatives)
        if because:
            decider = Decider.WHOLE
        elif decider is Decider.NEIGHBOURS:
            because = "in reduced precision like the ops around it"
        elif not is_low:
            because = "kept fp32"
        return Reason(
            rule=DECISION,
            text=f"{because}{_FIGURES}{text}" if because and text else f"{because}{text}",
            permits=(own.label,),
            evidence={DECIDED_BY: decider.value, **self._evidence(unit, alternatives)},
        )

    def _own(self, unit: int) -> Format:
        return (*self.analysis.times,)[self.label[unit]]

    def _alternatives(self, unit: int) -> Iterator[Alternative]:
        """The unit's format beside each other one whose cost is known."""
        own = self._own(unit)
        for number, fmt in enumerate(self.analysis.times):
            more, casts = self.flips.time_s[unit, number], self.flips.casts_s[unit, number]
            if fmt is own or not np.isfinite(more + casts):
                continue
            changed = self.errors.copy()
            changed[self.label[unit]] -= self.flips.errors[unit, self.label[unit]]
            changed[number] += self.flips.errors[unit, number]
            errors = [math.sqrt(self.analysis.together(e[1:])) for e in (self.errors, changed)]
            if self._is_even(own) or self._is_even(fmt):
                errors = [math.nan, math.nan]
            low, high = fmt, own
            if fmt is Format.FP32:
                low, high, more, casts = own, fmt, -more, -casts
                errors.reverse()
            yield Alternative(
                fmt=low,
                beside=high,
                saved=-float(more),
                casts=float(casts),
                error=errors[0],
                low_error=errors[1],
                priced=self.analysis.priced,
            )

    def _is_even(self, fmt: Format) -> bool:
        rounded = self.analysis.rounded.get(fmt)
        return rounded is not None and rounded.is_even

    def _evidence(self, unit: int, found: Sequence[Alternative]) -> dict[str, float | str]:
        """The times of the unit, and what each other format would change."""
        analysis = self.analysis
        known: dict[str, float | str] = {
            OPS_IN_KERNEL: float(len(analysis.units.members[unit]))
        }
        if analysis.priced is Priced.TIME:
            times = {
                TIME_IN.format(fmt.label): 1e6 * float(t[unit])
                for fmt, t in analysis.times.items()
            }
            known |= {label: time for label, time in times.items() if np.isfinite(time)}
            known |= {
                CASTS_IF.format(a.fmt.label): round(1e6 * a.casts, 3) + 0.0 for a in found
            }
        for one in (a for a in found if self.adds_up and a.tells_errors):
            known |= {ERROR_IF.format(one.beside.label): one.error}
            known |= {ERROR_IF.format(one.fmt.label): one.low_error}
        return known


def _kept(found: Sequence[Alternative]) -> tuple[Decider, str]:
    """What kept a unit in fp32, of its other formats, the one that gains most first."""
    if not found:
        return Decider.TIME, "no time in another format is known"
    texts = [a.would_save if a.gains_nothing else a.trade for a in found]
    return found[0].against, "; ".join(texts)


def _lowered(found: Sequence[Alternative]) -> tuple[Decider, str]:
    """What lowered a unit, and what kept it from a format that gains more."""
    beside = [a for a in found if a.from_fp32]
    texts = [a.saves for a in beside]
    further = [a for a in found if not (a.from_fp32 or a.gains_nothing)]
    texts += [a.trade for a in further]
    return beside[0].in_favour if beside else Decider.NEIGHBOURS, "; ".join(texts)
