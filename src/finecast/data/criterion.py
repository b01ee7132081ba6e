"""The accuracy to keep.

Laws: the target is the baseline made worse by the tolerance, which is absolute or relative to
the baseline's magnitude; NaN never passes, nor Inf beside a finite baseline. A metric that
compares with the fp32 outputs has its baseline by definition (agreement and cosine 1, max_abs
0, snr_db infinite). From an infinite baseline no distance can be stated, so the tolerance is
then itself the target: ``--metric snr_db --tolerance 30`` keeps at least 30 dB. Relative to a
baseline of 0 no distance can be stated either; the tolerance then counts as absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from finecast.errors import ModelError, UsageError
from finecast.naming import look_up


class CriterionKind(Enum):
    """How the tolerance is read."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"

    @classmethod
    def parse(cls, name: str) -> CriterionKind:
        """Read ``relative`` or ``absolute``.

        Raises:
            UsageError: If it is neither.
        """
        return look_up(name, {k.value: k for k in cls}, what="criterion", where="--criterion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How much worse than the baseline a result may be.

    Raises:
        UsageError: If the tolerance is negative or not finite.
    """

    kind: CriterionKind = CriterionKind.RELATIVE
    tolerance: float = 0.01
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise UsageError(
                f"tolerance {self.tolerance} is not usable", fix="give a number of 0 or more"
            )

    def target(self, baseline: float) -> float:
        """The worst value that still passes.

        Raises:
            ModelError: If the baseline is NaN.
        """
        if math.isnan(baseline):
            raise ModelError(
                "the fp32 model's metric is NaN",
                fix="check the data and the metric with the fp32 model first",
            )
        if math.isinf(baseline):
            return self.tolerance
        loss = self.tolerance
        if self.kind is CriterionKind.RELATIVE and baseline != 0:
            loss *= abs(baseline)
        return baseline - loss if self.higher_is_better else baseline + loss

    def check(self, baseline: float, worst: float | None = None) -> None:
        """Refuse a criterion that every result meets.

        Args:
            baseline: The fp32 model's metric.
            worst: The metric's worst value, where it has one.

        Raises:
            UsageError: If ``worst`` passes, or the tolerance is the whole baseline or more.
        """
        whole = self.kind is CriterionKind.RELATIVE and self.tolerance >= 1
        lost = whole and self.higher_is_better and 0 < baseline < math.inf
        if lost or (worst is not None and self.passes(worst, baseline)):
            fix = f"give less, as {self.tolerance / 100:g} for {self.tolerance:g}%"
            if baseline == 0:
                fix = "check data and metric: there is nothing to keep"
            raise UsageError(
                f"{self.kind.value} tolerance {self.tolerance:g} lets every result pass: the"
                f" fp32 model has {baseline:.6g}, the target is {self.target(baseline):.6g}",
                where="--tolerance",
                fix=fix,
            )

    def passes(self, value: float, baseline: float) -> bool:
        """Whether ``value`` is at least as good as the target.

        False for NaN, and for an infinite value beside a finite baseline: that is no accuracy.
        """
        if math.isinf(value) and not math.isinf(baseline):
            return False
        target = self.target(baseline)
        return value >= target if self.higher_is_better else value <= target
