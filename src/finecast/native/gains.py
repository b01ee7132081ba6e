"""What adjustments of operands gain: the errors of a plan without and with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from finecast.engines.base import Feeds, Session
from finecast.engines.exact import Exact
from finecast.errors import UsageError
from finecast.naming import number_of, percent
from finecast.planning.plan import Plan
from finecast.rules.policy import Adjust

# An adjustment gains if it leaves less than this share of the error; more may be noise.
_WORTH: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one kind of adjustment does to a plan.

    ``operands`` is the number of operands that it changes; the errors are relative errors of
    the outputs.
    """

    kind: Adjust
    operands: int
    error_without: float
    error_with: float

    @classmethod
    def of(cls, kind: Adjust, plans: tuple[Plan, Plan], errors: tuple[float, float]) -> Gain:
        """From the plans without and with the adjustment, and their errors."""
        without, made = plans
        changed = set(made.adjustments) - set(without.adjustments)
        return cls(
            kind=kind,
            operands=len(changed),
            error_without=errors[0],
            error_with=errors[1],
        )

    @property
    def gains(self) -> bool:
        """Whether the error falls by more than noise."""
        return self.error_with < _WORTH * self.error_without

    @property
    def share(self) -> float:
        """The share of the squared error that is left with the adjustment."""
        return (self.error_with / self.error_without) ** 2 if self.error_without else 1.0

    @property
    def text(self) -> str:
        """The kind, the number of operands and the errors, as text."""
        return f"{self.kind.value}: {number_of(self.operands, 'operand')}, {self.change}"

    @property
    def change(self) -> str:
        """The errors without and with the adjustment, as text."""
        before, after = percent(self.error_without), percent(self.error_with)
        return f"relative output error {before} -> {after}"

    def to_dict(self) -> dict[str, Any]:
        """The gain in JSON's types."""
        errors = {"without": self.error_without, "with": self.error_with}
        return {"kind": self.kind.value, "operands": self.operands, "relative_error": errors}


def range_gain(plan: Plan, rounded_error: Callable[[Plan], float]) -> Gain | None:
    """What scaled values do to the numbers of ``plan``; None if it has none.

    ``rounded_error`` measures a plan by arithmetic: an engine may compute and keep in fp32
    what the plan has in fp16.
    """
    others = tuple(a for a in plan.adjustments if not a.of_whole)
    if others == plan.adjustments:
        return None
    without = replace(plan, adjustments=others)
    errors = rounded_error(without), rounded_error(plan)
    return Gain.of(Adjust.RANGE, (without, plan), errors)


def no_adjustments(kind: Adjust, what: str) -> UsageError:
    """The error for a model, described by ``what``, that has no operands for ``kind``."""
    return UsageError(
        f"operands are adjusted by {kind.value} in models of ONNX and OpenVINO alone, as"
        f" engines run them: this is {what}",
        where="--adjust",
        fix="leave it out",
    )


def bias_gain(
    plan: Plan, corrected: Callable[[Plan], Plan], error: Callable[[Plan], float]
) -> Gain | None:
    """What corrected biases do to ``plan``; None if it has none to correct.

    ``error`` gives a plan's relative output error.
    """
    after = corrected(plan)
    if after.adjustments == plan.adjustments:
        return None
    return Gain.of(Adjust.BIAS, (plan, after), (error(plan), error(after)))


def output_error(
    session: Session, reference: Session, calls: Sequence[Feeds], of: Sequence[str] = ()
) -> float:
    """Relative error of the worst output on all ``calls``; ``of`` are those the user names."""
    return Exact.of(reference, calls, of).error(session)
