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
from collections.abc import Sequence
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
# 1 less a share is rounded to this many digits: 99.9% is 0.001, as users write it.
_DIGITS: Final = 12


def _drop_of(given: float | str | None) -> float | None:
    """A loss in the metric's own unit.

    Raises:
        UsageError: If it is none, or a percentage: of what is not said.
    """
    if isinstance(given, str) and given.strip().endswith("%"):
        raise UsageError(
            f"{given.strip()!r} is a share, and this is in the metric's own unit",
            where="--max-drop",
            fix="give 0.01 for a point of top1, or by --tolerance the share of fp32's metric",
        )
    return share_of(given, where="--max-drop", example=_DEFAULT_TOLERANCE)


def _range_of(given: str | Sequence[float] | None) -> tuple[float, float] | None:
    """The ends of a range, given as two numbers or as text: ``0:1``; None stays None.

    Raises:
        UsageError: If it is no range of two finite numbers.
    """
    if given is None:
        return None
    ends = given.split(":") if isinstance(given, str) else given
    try:
        least, most = (float(end) for end in ends)
    except (TypeError, ValueError):
        least, most = math.nan, math.nan
    if math.isfinite(most - least) and least < most:
        return least, most
    raise UsageError(
        f"{given!r} is no range of scores",
        where="--score-range",
        fix="give the least and the largest score of a sample, as 0:1",
    )


class CriterionKind(Enum):
    """How the tolerance is read."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How much worse than the baseline a result may be.

    For example ``Criterion(tolerance=0.005)``, or in other words ``Criterion(keep="99.5%")``.

    Attributes:
        kind: How the tolerance is read.
        tolerance: The loss of the metric that is allowed.
        higher_is_better: Which way the metric improves.
        max_drop: An absolute tolerance, in NNCF's word; None once it is read.
        keep: The share of the metric to keep instead of a tolerance; None once it is read.
        confidence: The confidence at which the loss has to be proven for the population that
            the data were drawn from; None if the metric on the data decides.
        score_range: The least and the largest score that a sample can have, where the metric
            is a mean of scores and does not tell its range; None if that is not known.
        stated: The option that said what may be lost.

    Raises:
        UsageError: If the tolerance is negative or not finite, or is given beside ``keep`` or
            ``max_drop``; if nothing is to be kept, or nothing can be proven at the confidence.
    """

    kind: CriterionKind = Option(
        help="Alias: whether --tolerance is absolute, as --max-drop, or a share of fp32's"
        " metric.",
        flags=("--criterion",),
        metavar="relative|absolute",
        python=((str, CriterionKind), "relative or absolute"),
        keywords=("criterion",),
        convert=partial(member_of, CriterionKind, what="criterion"),
    ).field(CriterionKind.RELATIVE)
    tolerance: float = Option(
        help="Instead of --max-drop: the loss allowed as a share of fp32's metric, as 0.01.",
        metavar="X",
        python=((Real, str), "a number"),
        convert=partial(share_of, where="--tolerance", example=_DEFAULT_TOLERANCE),
    ).field(_DEFAULT_TOLERANCE)
    higher_is_better: bool = True
    max_drop: float | None = Option(
        help="How much the metric may get worse, in its own unit, as 0.01 of top1; of snr_db,"
        " max_abs and kld the value to reach, as 30 dB. Default: 1% of fp32's metric.",
        metavar="X",
        python=((Real, str), "a number"),
        convert=_drop_of,
    ).field(None)
    keep: float | str | None = Option(
        help="Alias: the share of fp32's metric to keep, as 99%.",
        metavar="SHARE",
        python=((Real, str), "a share as '99%'"),
        convert=partial(share_of, where="--keep", example=0.99, most=1.0),
    ).field(None)
    confidence: float | None = Option(
        help="Guarantee the limit for new data of the same kind, at this confidence, as 0.95."
        " Half of the data choose a plan, the other half certify it.",
        metavar="SHARE",
        python=((Real, str), "a share, as 0.95"),
        convert=partial(share_of, where="--confidence", example=0.95),
    ).field(None)
    score_range: tuple[float, float] | None = Option(
        help="The range of a sample's score, as 0:1, for --eval, mse, mae and kld: with it"
        " --confidence needs fewer samples.",
        metavar="LEAST:MOST",
        python=((str, Sequence), "two numbers, as (0, 1)"),
        convert=_range_of,
    ).field(None)
    stated: str = field(default="--tolerance", repr=False, compare=False)

    def __post_init__(self) -> None:
        convert_options(self)
        if self.keep is not None:
            self._check_alone("--keep", CriterionKind.RELATIVE, self.max_drop)
            if not self.keep:
                raise UsageError(
                    "to keep 0 lets every result pass",
                    where="--keep",
                    fix="give the share to keep, as 0.99 or 99%",
                )
            lost = round(1 - float(self.keep), _DIGITS)
            self._set(CriterionKind.RELATIVE, lost, "--keep")
        if self.max_drop is not None:
            self._check_alone("--max-drop", self.kind, None)
            self._set(CriterionKind.ABSOLUTE, self.max_drop, "--max-drop")
        if self.confidence is not None:
            check_confidence(self.confidence)
        elif self.score_range is not None:
            raise UsageError(
                "a range of scores counts for a certificate alone, and none is asked for",
                where="--score-range",
                fix="give --confidence too, or leave it out",
            )

    def _check_alone(self, option: str, kind: CriterionKind, other: float | None) -> None:
        """Refuse two ways to say what may be lost."""
        if (self.kind, self.tolerance, other) != (kind, _DEFAULT_TOLERANCE, None):
            raise UsageError(
                f"{option} says how much may be lost, and so does another option",
                where=option,
                fix="give one of them",
            )

    def _set(self, kind: CriterionKind, tolerance: float, stated: str) -> None:
        for name, value in (("kind", kind), ("tolerance", tolerance), ("stated", stated)):
            object.__setattr__(self, name, value)
        for name in ("keep", "max_drop"):
            object.__setattr__(self, name, None)

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
        """Refuse a criterion that every result meets, and a share of what has none.

        Args:
            baseline: The fp32 model's metric.
            worst: The metric's worst value, where it has one.

        Raises:
            UsageError: If ``worst`` passes, or the tolerance is the whole baseline or more; or
                if a share is to be kept of a baseline of 0, or an infinite one.
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
        if self.stated == "--keep" and (baseline == 0 or math.isinf(baseline)):
            bound = "most that may be lost" if baseline == 0 else "worst that passes"
            raise UsageError(
                f"the fp32 model has {baseline:g} of this metric, and no share of that can be"
                " kept",
                where="--keep",
                fix=f"give --tolerance, which is then the {bound}",
            )

    def passes(self, value: float, baseline: float) -> bool:
        """Whether ``value`` is at least as good as the target.

        False for NaN, and for an infinite value beside a finite baseline: that is no accuracy.
        """
        if math.isinf(value) and not math.isinf(baseline):
            return False
        target = self.target(baseline)
        return value >= target if self.higher_is_better else value <= target
