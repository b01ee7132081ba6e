"""Quantizing an ONNX model: by ``tune`` with the user's evaluation, or as low as permitted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finecast.compat.neural_compressor.evaluated_subject import EvaluatedSubject, ModelWorkload
from finecast.compat.neural_compressor.evaluation import ModelEvaluation
from finecast.compat.neural_compressor.onnx_fit import check_ports, feeds_of, predictor
from finecast.compat.neural_compressor.onnx_result import GivenModel, OnnxResult, given_model
from finecast.compat.neural_compressor.places import engine_that_runs
from finecast.compat.neural_compressor.quantization_config import PostTrainingQuantConfig
from finecast.compat.neural_compressor.quantization_rules import op_rule
from finecast.engines.base import Engine, Feeds
from finecast.engines.probe import speed_of
from finecast.errors import EngineError, ModelError, UsageError
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.pipeline.goal import Goal
from finecast.pipeline.tuning import tune
from finecast.planning.plan import Plan
from finecast.rules import UserRule
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.adjusting import Adjuster, adjusted_if_it_gains
from finecast.subjects.engine.integers import check_on_integers, drop_unfused
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.planning import check_stated, make_planner
from finecast.subjects.onnx.model import OnnxModel


def quantize(
    model: Any,
    conf: PostTrainingQuantConfig,
    batches: Iterable[Any],
    evaluation: ModelEvaluation,
) -> OnnxResult | None:
    """``quantization.fit`` for an ONNX model.

    Raises:
        FinecastError: As ``quantization.fit``.
    """
    source = given_model(model)
    engine = engine_that_runs(source.file.path, conf.device, conf.backend)
    check_ports(source.file, conf.ports)
    for text in conf.without_effect(evaluated=evaluation.given):
        warnings.warn(f"without effect: {text}", stacklevel=3)
    policy = Policy(scope=Scope.AUTO, formats=_gaining(engine, conf))
    feeds = _feeds(source, engine, batches, conf.samples)
    one = _Quantization(source=source, engine=engine, policy=policy, feeds=feeds)
    prepared = frontend.prepare(source.file, policy)
    check_stated(policy, engine, prepared)
    rules = tuple(op_rule(prepared.graph, conf).items())
    if evaluation.given:  # where accuracy is missed, tune tries all adjustments by itself
        return one.tuned(conf, evaluation, rules)
    return replace(one, policy=replace(policy, adjust=conf.adjusts)).lowest(rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantization:
    source: GivenModel
    engine: Engine
    policy: Policy
    feeds: Sequence[Feeds]

    def tuned(
        self,
        conf: PostTrainingQuantConfig,
        evaluation: ModelEvaluation,
        rules: tuple[tuple[str, UserRule], ...],
    ) -> OnnxResult | None:
        """The best model, by the objective, that keeps the accuracy; None if there is none."""
        file, tuning = self.source.file, conf.tuning_criterion
        criterion = conf.accuracy_criterion.to_criterion()
        subject = EvaluatedSubject(
            model=OnnxModel(file=file),
            engine=self.engine,
            reference=self.engine.load(file.path),
        )
        workload = ModelWorkload(
            score=lambda native: evaluation.score(native, lambda m: predictor(self.engine, m)),
            feeds=self.feeds,
            higher_is_better=criterion.higher_is_better,
        )
        goal = Goal(
            criterion=criterion,
            objective=tuning.sought,
            max_trials=tuning.max_trials,
            timeout_s=tuning.timeout or None,
            first_is_enough=not tuning.timeout,
        )
        outcome = tune(subject, workload, goal, self.policy, user_rules=rules)
        for text in outcome.warnings:
            warnings.warn(text, stacklevel=4)
        if not outcome.improved:
            warnings.warn(f"no quantized model: {outcome.why}", stacklevel=4)
            return None
        return self._result(outcome.plan, outcome.model)

    def lowest(self, rules: tuple[tuple[str, UserRule], ...]) -> OnnxResult:
        """The model with every op low that may be and that the engine runs so."""
        file = self.source.file
        source = OnnxModel(file=file)
        prepared = frontend.prepare(file, self.policy)
        facts = observe(prepared, lambda: self.feeds)
        planner = make_planner(
            prepared, self.policy, self.engine, facts=facts, user_rules=rules
        )
        planner = drop_unfused(source, planner, self.engine, self.feeds[0])
        adjuster = Adjuster(
            model=prepared, facts=facts, planner=planner, batches=lambda: self.feeds
        )
        plan, _ = adjusted_if_it_gains(
            planner.lowest(), adjuster, source, self.engine, self.feeds
        )
        applied = frontend.apply(file, plan, prepared)
        check_on_integers(self.engine, plan, applied, self.feeds[0])
        found = self._result(plan, applied.model)
        if not found.products:
            raise ModelError(
                "no matrix product or convolution could be converted to"
                f" {' or '.join(f.label for f in self.policy.formats)}",
                where=file.name,
                fix="see what the rules say: finecast explain",
            )
        return found

    def _result(self, plan: Plan, converted: Any) -> OnnxResult:
        lowered = [d.op for d in plan.decisions if d.format is not Format.FP32]
        return OnnxResult(
            source=self.source,
            converted=converted,
            lowered=len(lowered),
            products=sum(by_name(op).matmul_engine for op in lowered),
        )


def _gaining(engine: Engine, conf: PostTrainingQuantConfig) -> tuple[Format, ...]:
    """The formats that are faster than fp32 here, measured, or forced by ``FORCE_BF16=1``.

    Raises:
        EngineError: If there is none; says why.
    """
    found: list[Format] = []
    slow: list[str] = []
    for fmt in conf.formats:
        speed = speed_of(engine, fmt)
        if speed.gains or os.environ.get(f"FORCE_{fmt.name}") == "1":
            found.append(fmt)
        else:
            slow.append(speed.text)
    if not found:
        raise EngineError(
            "; ".join(slow),
            where=f"device {conf.device!r}, backend {conf.backend!r}",
            fix="use the fp32 model here",
        )
    for text in slow:
        warnings.warn(f"{text}: left out", stacklevel=4)
    return tuple(found)


def _feeds(
    source: GivenModel, engine: Engine, batches: Iterable[Any], samples: int
) -> list[Feeds]:
    """The inputs of the first batches that together have ``samples`` samples or more.

    Raises:
        UsageError: If there are no batches.
    """
    ports = [spec.name for spec in engine.load(source.file.path).inputs]
    found: list[Feeds] = []
    for inputs in _inputs(batches):
        found.append(feeds_of(inputs, ports))
        samples -= max((len(a) for a in found[-1].values() if a.ndim), default=1)
        if samples <= 0:
            break
    if not found:
        raise UsageError("calib_dataloader yields nothing", fix="give some batches")
    return found


def _inputs(batches: Iterable[Any]) -> Iterator[Any]:
    """The inputs of each batch: the first of a pair (inputs, labels), as in INC."""
    for batch in batches:
        yield batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
