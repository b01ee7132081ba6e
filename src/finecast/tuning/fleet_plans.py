"""What a plan of a fleet is on each kind of machine, as people look at it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finecast.data.certificates import Certificate
from finecast.naming import number_of
from finecast.planning.plan import Plan
from finecast.reports.base import Report, TextTable


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOutcome:
    """What a plan is on one kind of machine.

    Attributes:
        name: The kind.
        plan: The number of its plan, from 0 on.
        fp32_s: Predicted seconds of a call of fp32.
        best_s: The same of its own best plan.
        time_s: The same of the plan of the fleet.
        baseline: The metric of fp32 there; NaN if it was not evaluated.
        metric: That of the plan.
        certificate: The bound on its loss; None if none was asked for.
        lock: The lock that was written for it.
    """

    name: str
    plan: int
    fp32_s: float
    best_s: float
    time_s: float
    baseline: float = math.nan
    metric: float = math.nan
    certificate: Certificate | None = None
    lock: Path | None = None

    @property
    def loss(self) -> float:
        """By how much longer a call takes than one of its own best plan, as a share."""
        return self.time_s / self.best_s - 1

    @property
    def judged(self) -> bool:
        """Whether plans were evaluated as on that machine."""
        return not math.isnan(self.baseline)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FleetPlans(Report):
    """The plans of a fleet.

    Attributes:
        plans: The plans.
        outputs: The models that were written, one for each plan that lowers any op.
        kinds: What becomes of each kind.
        bounds: For each plan what no other one of at most its error loses less than, on the
            kind that loses most; minus infinity if that was not proven.
        metric: The name of the metric.
        notes: What else is to be known.
    """

    plans: Sequence[Plan]
    outputs: Sequence[Path | None]
    kinds: Sequence[KindOutcome]
    bounds: Sequence[float]
    metric: str
    notes: Sequence[str] = ()

    @property
    def lines(self) -> Sequence[str]:
        """The verdict, and a line for each kind."""
        worst = max(self.kinds, key=lambda kind: kind.loss)
        count = len(self.plans)
        head = "one plan" if count == 1 else f"{count} plans"
        head += f" for {number_of(len(self.kinds), 'kind')} of machines: "
        if worst.loss < 1:
            head += f"the largest loss of speed is {worst.loss:.1%}, on {worst.name}"
        else:
            times = f"{worst.loss + 1:.2f} times as long on {worst.name}"
            head += f"a call takes {times} as by its own best plan"
        return [head, *map(self._line, self.kinds), *self.notes]

    def _line(self, kind: KindOutcome) -> str:
        text = f"{kind.name}: {kind.time_s * 1e3:.3f} ms a call, {kind.best_s * 1e3:.3f} with"
        text += f" its own best plan, {kind.fp32_s * 1e3:.3f} in fp32; {self._accuracy(kind)}"
        return text + (f"; plan {kind.plan + 1}" if len(self.plans) > 1 else "")

    def _accuracy(self, kind: KindOutcome) -> str:
        if not kind.judged:
            return "not evaluated here"
        if kind.certificate is not None:
            return f"at most {kind.certificate.bound:.3g} lost"
        return f"{kind.baseline:.6g} -> {kind.metric:.6g}"

    @property
    def tables(self) -> Sequence[TextTable]:
        """A row for each kind."""
        several = len(self.plans) > 1
        rows = [
            (
                kind.name,
                *((str(kind.plan + 1),) if several else ()),
                self._accuracy(kind),
                *(f"{s * 1e3:.3f}" for s in (kind.fp32_s, kind.best_s, kind.time_s)),
                f"{kind.loss:.1%}",
            )
            for kind in self.kinds
        ]
        return [
            TextTable(
                left=("kind", *(("plan",) if several else ()), self.metric),
                right=("fp32\nms", "own best\nms", "fleet\nms", "loss"),
                rows=rows,
                fold=("kind", self.metric),
                notes=self.notes,
            )
        ]

    def _content(self) -> dict[str, Any]:
        return {
            "plans": [
                {
                    "plan": plan.digest,
                    "output": None if output is None else str(output),
                    "ops": dict(plan.counts),
                    "kinds": [k.name for k in self.kinds if k.plan == number],
                    "proven_worst_loss": bound,
                }
                for number, (plan, output, bound) in enumerate(
                    zip(self.plans, self.outputs, self.bounds, strict=True)
                )
            ],
            "kinds": [
                {
                    "name": k.name,
                    "plan": k.plan,
                    "fp32_ms": k.fp32_s * 1e3,
                    "own_best_ms": k.best_s * 1e3,
                    "fleet_ms": k.time_s * 1e3,
                    "loss": k.loss,
                    "evaluated": k.judged,
                    "baseline": k.baseline,
                    "metric": k.metric,
                    "certificate": None if k.certificate is None else k.certificate.to_dict(),
                    "lock": None if k.lock is None else str(k.lock),
                }
                for k in self.kinds
            ],
            "metric": self.metric,
            "notes": list(self.notes),
        }
