"""Bias correction in a search: tried where a faster plan misses the criterion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

from finecast.engines.base import Feeds, Session
from finecast.errors import EngineError
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.planning.sensitivity import squared_error

# Of the error, what a correction has to leave at most: less is not told from noise.
_WORTH: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What correcting the biases of a plan does: relative output errors without and with."""

    biases: int
    error_without: float
    error_with: float

    @property
    def gains(self) -> bool:
        """Whether the error falls by more than noise."""
        return self.error_with <= _WORTH * self.error_without

    @property
    def share(self) -> float:
        """Of the squared error that is left."""
        return (self.error_with / self.error_without) ** 2 if self.error_without else 1.0

    @property
    def text(self) -> str:
        """For people."""
        biases = "1 bias" if self.biases == 1 else f"{self.biases} biases"
        return f"{biases} corrected: relative output error {self.change}"

    @property
    def change(self) -> str:
        """The errors without and with."""
        return f"{self.error_without:.3g} -> {self.error_with:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        errors = {"without": self.error_without, "with": self.error_with}
        return {"biases": self.biases, "relative_error": errors}


@runtime_checkable
class Correcting(Protocol):
    """A model, examined, of whose plans it is known how far off products are in the mean."""

    def corrected(self, plan: Plan) -> Plan:
        """``plan`` with biases corrected; itself where it has none on codes."""
        ...


def corrected(
    proposals: Sequence[Proposal], examined: Correcting, share: float
) -> list[Proposal]:
    """``proposals`` with biases corrected, which leaves a ``share`` of the squared errors."""
    return [
        replace(
            p,
            name=f"{p.name}, biases corrected",
            plan=examined.corrected(p.plan),
            error=share * p.error,
        )
        for p in proposals
    ]


def measured(
    subject: Subject, workload: Workload, plan: Plan, made: Plan
) -> Correction | None:
    """What the adjustments of ``made`` do to the error of ``plan``; None without any.

    Or where what runs the model does not run both.
    """
    if not made.adjustments:
        return None
    models = [subject.model.build(one) for one in (plan, made)]
    try:
        errors = [
            output_error(subject.session(one), subject.reference, subject.feeds(workload))
            for one in models
        ]
    except EngineError:
        return None
    finally:
        for one in models:
            one.release()
    biases = len(made.adjustments)
    return Correction(biases=biases, error_without=errors[0], error_with=errors[1])


def output_error(session: Session, reference: Session, batches: Sequence[Feeds]) -> float:
    """Relative error of the outputs, as the square root of the mean square over batches."""
    errors = [
        squared_error([*session.run(f).values()], [*reference.run(f).values()])
        for f in batches
    ]
    return math.sqrt(sum(errors) / len(errors))
