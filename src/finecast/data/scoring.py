"""A metric over batches: of each output by itself, and then of the worst.

Law: an output that nearly copies an input says nothing of the model. No metric is of it unless
the user names it or there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from finecast.data.metrics import Accumulator, Metric
from finecast.data.samples import Outputs, Samples
from finecast.engines.base import Array, Feeds
from finecast.planning.sensitivity import counted_outputs, is_float


class Score(float):
    """The value of a metric; ``outputs`` has it by output, the worst first.

    The value is that of the worst output. A user's own metric is of no output: ``outputs`` is
    empty then. ``samples`` has what it was computed from, by output, as far as that is known;
    of a user's own metric under an empty name.
    """

    outputs: Mapping[str, float]
    samples: Mapping[str, Samples]

    def __new__(
        cls,
        value: float,
        outputs: Mapping[str, float] | None = None,
        samples: Mapping[str, Samples] | None = None,
    ) -> Self:
        """A value, and the values by output that it was reduced from."""
        made = super().__new__(cls, value)
        made.outputs = MappingProxyType(dict(outputs or {}))
        made.samples = MappingProxyType(dict(samples or {}))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its outputs and samples: another process may have computed it."""
        return Score, (float(self), dict(self.outputs), dict(self.samples))


def by_output(value: float) -> dict[str, float]:
    """A metric's value by output, the worst first; empty for a metric of no output."""
    return dict(value.outputs) if isinstance(value, Score) else {}


class Scoring:
    """Takes batches for ``metric`` of the outputs in ``names``."""

    def __init__(self, metric: Metric, names: Sequence[str]) -> None:
        self.metric = metric
        self.totals: dict[str, Accumulator] = {name: metric.start() for name in names}
        self._filled: set[str] = set()  # outputs that were not empty in every batch

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
        """Take one batch: all of the model's outputs, labels, the fp32 model's outputs.

        Raises:
            UsageError: If the metric is not one of such outputs or labels.
        """
        for name, total in self.totals.items():
            total.update({name: outputs[name]}, labels, reference)
            if outputs[name].size:
                self._filled.add(name)

    def absorb(self, later: Scoring) -> None:
        """Take the batches that another one took, which come after these."""
        for name, total in later.totals.items():
            self.totals[name].absorb(total)
        self._filled |= later._filled

    def result(self) -> Score:
        """The metric of the worst output; NaN before the first batch.

        An output that is empty in every batch has no value and does not count.
        """
        found = {n: t.result() for n, t in self.totals.items() if n in self._filled}
        order = sorted(found, key=lambda name: self._goodness(found[name]))
        sampled = {name: one for name in order if (one := self.totals[name].samples())}
        return Score(
            found[order[0]] if order else math.nan,
            {name: found[name] for name in order},
            sampled if len(sampled) == len(order) else None,
        )

    def doubts(self) -> tuple[str, ...]:
        """Why the metric of the fp32 model says little; of several outputs with their names.

        Raises:
            UsageError: If it says nothing.
        """
        several = len(self.totals) > 1
        return tuple(
            f"output {name!r}: {doubt}" if several else doubt
            for name, total in self.totals.items()
            for doubt in total.doubts()
        )

    def _goodness(self, value: float) -> float:
        if math.isnan(value):
            return -math.inf
        return value if self.metric.higher_is_better else -value


def scored_outputs(
    metric: Metric, of: Sequence[str], feeds: Feeds, outputs: Outputs
) -> tuple[str, ...]:
    """Names of the outputs that ``metric`` is of.

    Args:
        metric: The metric.
        of: The outputs that the user names; empty for none.
        feeds: What the fp32 model was given.
        outputs: What it gave.
    """
    if of:
        return tuple(of)
    names, arrays = [*outputs], [*outputs.values()]
    counted = counted_outputs(feeds.values(), arrays)
    own = [n for n, a in zip(names, arrays, strict=True) if not is_float(a)]
    own = [n for i, n in enumerate(names) if i in counted or n in own]
    if not metric.each_output:
        return tuple(own[:1])
    return tuple(n for i, n in enumerate(names) if i in counted) or tuple(own[:1])
