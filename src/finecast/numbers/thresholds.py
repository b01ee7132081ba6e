"""Thresholds for "faster", "equal" and "right" that several parts of finecast share.

Times: the less is known of them, the more two have to differ. Least is known of another hour
or machine, more by a short probe of one kernel, more by a race of whole models, and most by
a model of a device, which has no noise. What one module alone compares stays there.

Errors are relative, ||y - r|| / ||r|| of an output y and fp32's r.
"""

from __future__ import annotations

from typing import Final

from finecast.numbers.formats import Format

# --------------------------------------------------------------------------- faster and equal

SAME_TIME: Final = 1.03
"""Plans whose costs are within this ratio count as equally fast, if not told otherwise."""

MODELLED_GAIN: Final = 1.005
"""The ratio by which a plan has to be faster than another one by modelled times, and by which
one is said to be: what is as good as another one, rounded to percents, is not."""

PROBED_GAIN: Final = 1.05
"""A format has to be so many times as fast as fp32 in a probe of a kernel: short probes cannot
tell smaller speedups from noise."""

SLOWER: Final = 1.25
"""A call may take so many times as long as it did when its model was locked: medians of one
model on a quiet machine differ by a few percent from hour to hour, on shared ones by more."""

# -------------------------------------------------------------------------------------- right

LIMIT: Final = 0.5
"""A relative error from which on not one binary digit of an output is right."""

USELESS: Final = 1.0
"""A relative error that zeros would have as well: a format that explains it is no excuse."""

ENGINE_FACTOR: Final = 16.0
"""An engine's error may be so many times that predicted by its types: four binary digits.
Engines fuse ops, reorder sums and approximate functions, which costs a digit or two; an op
that they compute wrongly (a bias left out) costs all digits that the format has."""

ENGINE_LIMIT: Final = 0.1
ENGINE_FACTOR_BEYOND: Final = 4.0
"""Beyond the first, an engine's error may be so many times that predicted: sixteen times the
error that codes of 8 bits have would be no digit at all."""

NOTICED: Final = 0.02
"""Engines are not suspected of errors below this relative error. Where numbers cancel (a flow
is the difference of coordinates) digits may be lost rightly; reports state the error."""

UNSEEN: Final = 3.0
"""So many of n decisions may change though none did in another run of the same formats: an
event that did not occur in n trials has a probability below 3 / n, with a confidence of 95%
("rule of three"; Hanley and Lippman-Hand, 1983)."""

APPROXIMATED: Final = Format.BF16.unit_roundoff
"""Engines approximate some functions in fp32, and differ by less than this: one rounding to
bf16."""

REORDERED: Final = Format.FP16.unit_roundoff / 8
"""What outputs of one model may differ by in any case. Sums in another order stay below it,
and a single rounding to a low format exceeds it."""

OWN_SHARE: Final = 0.5
"""The part of a low model's own relative error by which its outputs may differ elsewhere.

If the two are independent, the error against fp32 grows by an eighth: sqrt(1 + OWN_SHARE^2).
"""


def excused(predicted: float) -> float:
    """The largest relative error of an engine that ``predicted``, by its types, explains."""
    several = ENGINE_FACTOR * predicted
    return max(NOTICED, min(several, max(ENGINE_LIMIT, ENGINE_FACTOR_BEYOND * predicted)))


def excused_share(predicted: float, count: int) -> float:
    """The largest share of ``count`` decisions of an engine that may change.

    ``predicted`` is the share that changes by the engine's types: where errors are small, it
    grows as they do.
    """
    return excused(predicted + UNSEEN / max(count, 1))
