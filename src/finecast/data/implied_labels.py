"""The right classes that a user's evaluation function implies.

A function that counts right decisions tells which ones are right: it is called again on the
outputs of the fp32 model with the two best scores of some decisions exchanged. Where fp32 was
right one right decision is lost; where its second class is the right one, a decision is won.
Groups of decisions are asked for together, and a group is split only where it could hold
decisions of several kinds. Where time ends, how many decisions of a group are right is known,
and not which ones: they are drawn.

Law: a function implies nothing unless what it says of groups is what it says of their parts,
so that an F1 score or a rank correlation implies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Final

import numpy as np

from finecast.data.decisions import ahead
from finecast.data.metrics import Score
from finecast.data.samples import Indices
from finecast.engines.base import Array
from finecast.numbers.rounding import widened
from finecast.planning.sensitivity import is_float

# More decisions than these are not asked for.
_MOST_DECISIONS: Final = 100_000
# The class of a decision whose right one is none of fp32's two best.
_OTHER: Final = -1
# The function is called again for at most this share of the time of its first call, or for so
# many seconds.
_MOST_TIME: Final = 0.25
_LEAST_S: Final = 0.5
# Numbers of calls that are worth their time in any case.
_LEAST_CALLS: Final = 8
# What groups win is compared with what so large a share of them wins together.
_CHECKED: Final = 0.5
# A count of decisions is a whole number within this: functions may compute in fp32.
_WHOLE: Final = 0.01
# The value of a metric where all decisions are right: a share, and percent.
_WHOLES: Final = (1.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpliedLabels:
    """The right classes of decisions, as far as an evaluation function implies them.

    Attributes:
        output: The output that is decided.
        classes: int64[n], the right class of each decision, in the order of the calls;
            -1 where neither of fp32's two best classes is right.
        whole: The metric's value where all decisions are right.
    """

    output: str
    classes: Indices
    whole: float

    def score(self, value: Score, calls: Sequence[Mapping[str, Array]]) -> Score:
        """The function's value for a model, with the margins of the model's decisions.

        Args:
            value: What the function returned.
            calls: The model's outputs of each call.
        """
        rows = _rows([call[self.output] for call in calls if self.output in call])
        if rows is None or len(rows) != len(self.classes) or not math.isfinite(value):
            return value
        margins = np.full(len(rows), -np.inf)
        known = self.classes >= 0
        margins[known] = ahead(rows[known], self.classes[known])
        # The value tells how many of the others are right, far from their borders.
        right = round(value / self.whole * len(rows)) - np.count_nonzero(margins > 0)
        margins[np.flatnonzero(~known)[: max(right, 0)]] = np.inf
        return Score(
            value, samples=value.samples, margins={self.output: margins}, whole=self.whole
        )


def seconds_for(first_call: float) -> float:
    """For how many seconds a function may be called again whose first call took so many."""
    return max(_LEAST_S, _MOST_TIME * first_call)


def implied_labels(
    value: float,
    calls: Sequence[Mapping[str, Array]],
    ask: Callable[[str, Sequence[Array]], float | None],
    seconds: float,
) -> ImpliedLabels | None:
    """What a function implies; None if its number is no share of decisions of an output.

    Args:
        value: The function's number for the fp32 model.
        calls: The fp32 model's outputs of each call.
        ask: Gives the function's number where one output is another one in each call; None
            where it takes no such outputs.
        seconds: How long the function may be called.
    """
    for output in calls[0] if calls else ():
        decided = [call[output] for call in calls if output in call]
        rows = _rows(decided)
        if rows is None or len(decided) < len(calls):
            continue
        for whole in _WHOLES:
            right = value / whole * len(rows)
            if not 0 < right <= len(rows) + _WHOLE or abs(right - round(right)) > _WHOLE:
                continue
            asked = _Asked(
                value=value,
                rows=rows,
                shapes=[output.shape for output in decided],
                ask=partial(ask, output),
                unit=whole / len(rows),
                ends=perf_counter() + seconds,
            )
            classes = asked.classes()
            if classes is not None:
                return ImpliedLabels(output=output, classes=classes, whole=whole)
    return None


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A function that is asked what exchanging the two best scores of some decisions wins.

    Attributes:
        value: Its number for the outputs as they are.
        rows: The scores of all decisions, [n, classes].
        shapes: The shape of the output of each call.
        unit: What one right decision is of its number.
        ends: When no more than a few calls are made, on the clock of ``perf_counter``.
        calls: How often it was called.
    """

    value: float
    rows: Array
    shapes: Sequence[tuple[int, ...]]
    ask: Callable[[Sequence[Array]], float | None]
    unit: float
    ends: float
    calls: int = field(default=0, init=False)
    _two: Indices = field(init=False)

    def __post_init__(self) -> None:
        """Find the two best classes of each decision, int64[2, n], the best one first."""
        wide = widened(self.rows)
        best = wide.argmax(axis=-1)
        np.put_along_axis(wide, best[:, None], -np.inf, axis=-1)
        self._two = np.stack([best, wide.argmax(axis=-1)])

    def classes(self) -> Indices | None:
        """The right class of each decision; None where the function counts no decisions.

        Decisions next to their borders are asked for first.
        """
        best, second = self._two
        order = np.argsort(ahead(self.rows, best), kind="stable")
        wins = np.zeros(len(order), np.intp)  # of each decision, in this order
        total, rng = self._wins(order), np.random.default_rng(0)
        if not total:
            return None
        groups, settled = [(0, len(order), total)], list[Indices]()
        while groups and (self.calls < _LEAST_CALLS or perf_counter() < self.ends):
            begin, end, won = groups.pop()
            if abs(won) == end - begin or end - begin == 1:
                wins[begin:end] = won // (end - begin)
                settled += [np.arange(i, i + 1) for i in range(begin, end)]
                continue
            middle = (begin + end) // 2
            first = self._wins(order[begin:middle])
            if first is None or abs(won - first) > end - middle:
                return None
            groups += [(middle, end, won - first), (begin, middle, first)]
        for begin, end, won in groups:
            gained = (end - begin + won) // 2
            wins[begin : begin + gained] = 1
            wins[begin + gained : begin + 2 * gained - won] = -1
            rng.shuffle(wins[begin:end])
            settled.append(np.arange(begin, end))
        half = [group for group in settled if rng.random() < _CHECKED]
        drawn = np.unique(np.concatenate([settled[0], *half]))
        if self._wins(order[drawn]) != wins[drawn].sum():
            return None
        classes = np.full(len(order), _OTHER)
        for win, right in ((-1, best), (1, second)):
            classes[order[wins == win]] = right[order[wins == win]]
        return classes

    def _wins(self, which: Indices) -> int | None:
        """How many more decisions are right; None where it is no whole number of them."""
        self.calls += 1
        changed, (best, second) = self.rows.copy(), self._two[:, which]
        changed[which, best] = self.rows[which, second]
        changed[which, second] = self.rows[which, best]
        ends = np.cumsum([math.prod(shape[:-1]) for shape in self.shapes])[:-1]
        parts = np.split(changed, ends)
        number = self.ask([a.reshape(s) for a, s in zip(parts, self.shapes, strict=True)])
        if number is None or not math.isfinite(number):
            return None
        count = (number - self.value) / self.unit
        whole = round(count)
        return whole if abs(count - whole) <= _WHOLE and abs(whole) <= len(which) else None


def _rows(outputs: Sequence[Array]) -> Array | None:
    """The scores of all decisions, which lie along the last axis; None of other outputs."""
    if not all(is_float(a) and a.ndim and a.shape[-1] > 1 and a.size for a in outputs):
        return None
    if len({(a.shape[-1], a.dtype) for a in outputs}) != 1:
        return None
    rows = np.concatenate([a.reshape(-1, a.shape[-1]) for a in outputs])
    return rows if len(rows) <= _MOST_DECISIONS else None
