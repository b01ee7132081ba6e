"""The accuracy-driven fallback: ops are reverted to fp32 until the accuracy is kept.

Trials in order: everything converted; each op type reverted alone; each op reverted alone; ops
reverted together, one more each time, those with the best accuracy alone first. A set of ops
that leaves no product low is not tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from finecast.compat.neural_compressor.criteria import TuningCriterion
from finecast.data.criterion import Criterion

Model = TypeVar("Model")


@dataclass(slots=True, kw_only=True)
class Fallback(Generic[Model]):
    """A search over sets of ops to keep in fp32.

    Attributes:
        types: Type of each op that can be converted, by its name.
        build: Makes the model with the named ops left in fp32.
        counts: Whether a model is worth a trial: a product in it is low.
        evaluate: Measures a model's accuracy.
        criterion: The accuracy to keep.
        tuning: How long to search.
        quant_level: 0 reverts types of ops only, 1 single ops only, "auto" both in turn.
        scores: Accuracy of each trial so far, by the names of ops left in fp32.
    """

    types: Mapping[str, str]
    build: Callable[[frozenset[str]], Model]
    counts: Callable[[Model], bool]
    evaluate: Callable[[Model], float]
    criterion: Criterion
    tuning: TuningCriterion
    quant_level: str | int = "auto"
    scores: dict[frozenset[str], float] = field(default_factory=dict[frozenset[str], float])

    def search(self, baseline: float) -> Model | None:
        """The best model that keeps the criterion; None if no trial does.

        With a timeout of 0 it is the first that passes. Otherwise the search goes on until the
        time is up, and of those that pass the one with the fewest ops in fp32 is taken.
        """
        start = time.monotonic()
        best: tuple[int, Model] | None = None
        for kept in self._trials():
            if kept in self.scores or len(kept) >= len(self.types):
                continue
            if len(self.scores) >= self.tuning.max_trials:
                break
            model = self.build(kept)
            if not self.counts(model):
                continue
            self.scores[kept] = self.evaluate(model)
            if self.criterion.passes(self.scores[kept], baseline):
                if best is None or len(kept) < best[0]:
                    best = len(kept), model
                if not self.tuning.timeout:
                    break
            if self.tuning.timeout and time.monotonic() - start > self.tuning.timeout:
                break
        return best[1] if best is not None else None

    def _trials(self) -> Iterator[frozenset[str]]:
        yield frozenset()
        if self.quant_level != 1:
            for kind in sorted(set(self.types.values())):
                yield frozenset(name for name, k in self.types.items() if k == kind)
        if self.quant_level == 0:
            return
        single = [frozenset({name}) for name in self.types]
        yield from single
        sign = 1.0 if self.criterion.higher_is_better else -1.0
        worst = float("-inf") * sign
        ranked = sorted(single, key=lambda s: -sign * self.scores.get(s, worst))
        together: frozenset[str] = frozenset()
        for one in ranked:
            together |= one
            yield together
