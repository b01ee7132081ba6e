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
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from numbers import Real
from typing import Final

from finecast.calls import checks
from finecast.data.certificates import check_confidence
from finecast.errors import ModelError, UsageError
from finecast.naming import Option, convert_options, member_of, share_of

_DEFAULT_TOLERANCE: Final = 0.01


class CriterionKind(Enum):
    """How the tolerance is read."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How much worse than the baseline a result may be.

    For example ``Criterion(tolerance="0.5%")``, which is ``tolerance=0.005``.

    Attributes:
        kind: How the tolerance is read.
        tolerance: The loss of the metric that is allowed.
        higher_is_better: Which way the metric improves.
        max_drop: An absolute tolerance, in NNCF's word; None once it is read.
        confidence: The confidence at which the loss has to be proven for the population that
            the data were drawn from; None if the metric on the data decides.
        stated: The option that said what may be lost.

    Raises:
        UsageError: If the tolerance is negative or not finite, or is given beside
            ``max_drop``; or if nothing can be proven at the confidence.
    """

    kind: CriterionKind = Option(
        help="Whether the tolerance is absolute, as max_drop, or a share of fp32's metric.",
        python=((str, CriterionKind), "relative or absolute"),
        keywords=("criterion",),
        convert=partial(member_of, CriterionKind, what="criterion"),
    ).field(CriterionKind.RELATIVE)
    tolerance: float = Option(
        help="The loss allowed as a share of fp32's metric, as 0.01.",
        metavar="X",
        python=((Real, str), "a number"),
        convert=partial(share_of, where="--tolerance", example=_DEFAULT_TOLERANCE),
    ).field(_DEFAULT_TOLERANCE)
    higher_is_better: bool = True
    max_drop: float | None = Option(
        help="How much the metric may get worse, in its own unit, as 0.01 of top1; default: 1%"
        " of fp32's metric.",
        metavar="X",
        python=((Real, str), "a number"),
        convert=partial(share_of, where="--max-drop", example=_DEFAULT_TOLERANCE),
    ).field(None)
    confidence: float | None = Option(
        help="Guarantee the limit for new data of the same kind, at this confidence, as 0.95."
        " Half of the data choose a plan, the other half certify it.",
        metavar="SHARE",
        python=((Real, str), "a share, as 0.95"),
        convert=partial(share_of, where="--confidence", example=0.95),
    ).field(None)
    stated: str = field(default="--tolerance", repr=False, compare=False)

    def __post_init__(self) -> None:
        convert_options(self)
        if self.max_drop is not None:
            if self.tolerance != _DEFAULT_TOLERANCE:
                raise UsageError(
                    "--max-drop says how much may be lost, and so does --tolerance",
                    where="--max-drop",
                    fix="give one of them",
                )
            read = {"kind": CriterionKind.ABSOLUTE, "tolerance": self.max_drop}
            for name, value in {**read, "stated": "--max-drop", "max_drop": None}.items():
                object.__setattr__(self, name, value)
        if self.confidence is not None:
            check_confidence(self.confidence)

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

    def allowed_loss(self, baseline: float) -> float:
        """What may be lost of the metric.

        Of a metric without a finite best value it is the negated target.

        Raises:
            ModelError: If the baseline is NaN.
        """
        target = self.target(baseline)
        return -target if math.isinf(baseline) else abs(baseline - target)

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
                where=self.stated,
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
