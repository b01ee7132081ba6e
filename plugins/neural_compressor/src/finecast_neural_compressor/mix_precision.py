"""``fit``: INC's entry point for mixed precision, done by finecast.

Where an evaluation is given, ops are reverted to fp32 until the accuracy is kept, as INC does:
finecast's own search would give no model where the low format saves no time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from finecast import Format, Goal
from finecast.calls import checks
from finecast.data import check_finite
from finecast.errors import UsageError
from finecast.tuning import Budget
from finecast_neural_compressor import quantization
from finecast_neural_compressor.config import MixedPrecisionConfig
from finecast_neural_compressor.frameworks import given
from finecast_neural_compressor.given_model import (
    EvalFunc,
    GivenModel,
    Lowered,
    ModelEvaluation,
    no_product,
    warn_unused,
)
from finecast_neural_compressor.op_dicts import permitted

Model = TypeVar("Model")
Scores = dict[frozenset[str], float]


@checks
def fit(
    model: Any,
    conf: MixedPrecisionConfig | None = None,
    eval_func: EvalFunc | None = None,
    eval_dataloader: Iterable[Any] | None = None,
    eval_metric: Any = None,
    *,
    config: MixedPrecisionConfig | None = None,
) -> Any:
    """Convert ``model``; where an evaluation is given, keep its accuracy.

    Returns:
        An object with ``.model`` and ``.save(path)``; for an ``nn.Module`` it is a module
        itself. None, and a warning, if no trial keeps the accuracy. A model without any
        matrix product or convolution in the low format is never a result, as it would gain
        nothing.

    Args:
        model: An ``nn.Module``, a ModelProto, a Keras model, or the path of an ONNX file, a
            SavedModel, or a frozen ``.pb``.
        conf: The settings.
        eval_func: Returns the accuracy of a model: an ``nn.Module``, a ModelProto (over 2 GB
            a path), or a TensorFlow function.
        eval_dataloader: Batches ``(inputs, labels)``; with ``eval_metric``.
        eval_metric: ``update(predictions, labels)``, ``result()`` and ``reset()``.
        config: Another name of ``conf``.

    Raises:
        UsageError: If the settings cannot be followed here; says why.
        EngineError: If the device is slower in the low format than in fp32.
        ModelError: If no op could be converted.
    """
    settings = conf or config or MixedPrecisionConfig()
    if Format.INT8 in settings.formats:
        return quantization.fit(
            model,
            settings.quantization(),
            quantization.required(eval_dataloader, "eval_dataloader"),
            eval_func=eval_func,
            eval_dataloader=None if eval_metric is None else eval_dataloader,
            eval_metric=eval_metric,
        )
    low = settings.low()
    settings.check()
    evaluation = ModelEvaluation.of(eval_func, eval_dataloader, eval_metric)
    taken = given(model, settings, evaluation.batches)
    everything = taken.convertible(low)
    types = _selected(taken, settings, everything, low)
    taken.gaining([low], settings.device)
    warn_unused(settings, taken, evaluation)
    fixed = frozenset(everything) - frozenset(types)
    if evaluation.given:
        return _searched(taken, settings, types, fixed, evaluation)
    result = taken.lowered(low, fixed)
    if not result.products:
        raise no_product([low], result.model)
    return result


def _selected(
    taken: GivenModel, settings: MixedPrecisionConfig, types: Mapping[str, str], low: Format
) -> dict[str, str]:
    """The convertible ops, by name with their types, that neither dict keeps in fp32.

    Raises:
        UsageError: If an entry matches no op of the model, or no op is left.
    """
    formats_by_op = permitted(taken.known, settings.op_name_dict, settings.op_type_dict)
    left = {
        n: kind
        for n, kind in types.items()
        if n not in formats_by_op or low in formats_by_op[n]
    }
    if not left and types:
        raise UsageError(
            "nothing is left to convert", fix="check op_name_dict and op_type_dict"
        )
    return left


def _searched(
    taken: GivenModel,
    settings: MixedPrecisionConfig,
    types: Mapping[str, str],
    fixed: frozenset[str],
    evaluation: ModelEvaluation,
) -> Lowered | None:
    """The best model that keeps the accuracy, by reverting ops of ``types`` to fp32."""
    low, goal = settings.low(), settings.goal
    baseline = taken.score(evaluation, None)
    check_finite(baseline, "the evaluation")
    goal.criterion.check(baseline)

    def trial(kept: frozenset[str]) -> tuple[Lowered, float] | None:
        result = taken.lowered(low, kept | fixed)
        if not result.products:  # it would gain nothing
            return None
        return result, evaluation.score(result)

    lowered, scores = fallback(types, trial, goal, baseline, settings.quant_level)
    if not scores:
        raise no_product([low])
    if lowered is None:
        better = max if goal.criterion.higher_is_better else min
        warnings.warn(
            f"no converted model: fp32 has {baseline:.6g}, and none of {len(scores)} trials"
            f" kept it, the best with {better(scores.values()):.6g}; accuracy_criterion says"
            " how much may be lost",
            stacklevel=3,
        )
    return lowered


def fallback(
    types: Mapping[str, str],
    trial: Callable[[frozenset[str]], tuple[Model, float] | None],
    goal: Goal,
    baseline: float,
    quant_level: str | int = "auto",
) -> tuple[Model | None, Scores]:
    """The best model that keeps the goal, None if no trial does, and the accuracies.

    It is the first that passes, if that is enough. Otherwise the search goes on until the time
    is up, and of those that pass the one with the fewest ops in fp32 is taken.

    Args:
        types: Type of each op that can be converted, by its name.
        trial: Gives a model with its accuracy; None if it is not worth a trial.
        goal: The accuracy to keep, and how long to search.
        baseline: The accuracy of the fp32 model.
        quant_level: 0 reverts types of ops only, 1 single ops only, "auto" both in turn.
    """
    budget, scores = Budget(goal=goal), Scores()
    best: tuple[int, Model] | None = None
    for kept in _fallbacks(types, goal.criterion.higher_is_better, quant_level, scores):
        if kept in scores or len(kept) >= len(types):
            continue
        if budget.spent(len(scores)):
            break
        outcome = trial(kept)
        if outcome is None:
            continue
        model, scores[kept] = outcome
        if goal.criterion.passes(scores[kept], baseline):
            if best is None or len(kept) < best[0]:
                best = len(kept), model
            if goal.first_is_enough:
                break
    return (best[1] if best is not None else None), scores


def _fallbacks(
    types: Mapping[str, str], higher_is_better: bool, quant_level: str | int, scores: Scores
) -> Iterator[frozenset[str]]:
    """The ops to keep in fp32 in each trial, in INC's order.

    None; those of one type; a single op; ops together, one more each time, those first that
    had the best accuracy alone.
    """
    yield frozenset()
    if quant_level != 1:
        for kind in sorted(set(types.values())):
            yield frozenset(name for name, k in types.items() if k == kind)
    if quant_level == 0:
        return
    single = [frozenset({name}) for name in types]
    yield from single
    sign = -1.0 if higher_is_better else 1.0
    together = frozenset[str]()
    for one in sorted(single, key=lambda s: sign * scores.get(s, math.inf * sign)):
        together |= one
        yield together
