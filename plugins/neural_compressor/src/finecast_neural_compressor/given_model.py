"""What ``fit`` is given: a model of some framework, and the user's evaluation of it."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from finecast import Criterion, Format, Goal, Plan, Policy
from finecast.api import search
from finecast.data import Workload, check_finite, metric_value, spread
from finecast.engines import Feeds, Session, Speed, explain, lacks_kernel
from finecast.errors import EngineError, ModelError, UsageError, UserCodeError
from finecast.graph import Graph
from finecast.naming import kind_of
from finecast.native import Subject, commonest_verdict
from finecast.ops import by_name
from finecast.rules import UserRule
from finecast.tuning import Place
from finecast.usercode import guarded
from finecast_neural_compressor.config import (
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
)

EvalFunc = Callable[[Any], float]
Rules = Mapping[str, UserRule]
Settings = MixedPrecisionConfig | PostTrainingQuantConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """How accuracy is measured: by ``function``, or by ``metric`` on ``batches``.

    Batches are (inputs, labels). Where all are None there is no evaluation.
    """

    function: EvalFunc | None
    batches: Iterable[Any] | None
    metric: Any

    @classmethod
    def of(
        cls, function: EvalFunc | None, dataloader: Iterable[Any] | None, metric: Any
    ) -> ModelEvaluation:
        """The evaluation that the user's arguments of ``fit`` state.

        Raises:
            UsageError: If only one of dataloader and metric is given, or the metric lacks a
                method.
        """
        if function is None and (dataloader is None) != (metric is None):
            raise UsageError(
                "an evaluation needs both eval_dataloader and eval_metric",
                fix="give both, or eval_func",
            )
        lacking = [n for n in ("reset", "update", "result") if not hasattr(metric, n)]
        if function is None and metric is not None and lacking:
            raise UsageError(
                f"eval_metric {metric!r} has no {lacking[0]}()",
                fix="give an object with reset(), update(predictions, labels) and result()",
            )
        return cls(function=function, batches=kept(dataloader), metric=metric)

    @property
    def given(self) -> bool:
        """Whether there is an evaluation."""
        return self.function is not None or self.batches is not None

    def score(self, of: Lowered) -> float:
        """The accuracy of a model.

        Raises:
            UserCodeError: If the evaluation fails, or does not give a number.
        """
        if self.function is not None:
            model = of.model
            where = getattr(self.function, "__qualname__", "eval_func")
            try:
                with guarded(
                    "the evaluation failed",
                    where=where,
                    fix=f"it is given {kind_of(model)}, the model as it was or"
                    " converted, and returns a number",
                ):
                    accuracy = self.function(model)
            except UserCodeError as error:
                if not lacks_kernel(error.__cause__):
                    raise
                raise UserCodeError(
                    "the evaluation failed: ONNX Runtime has"
                    f" {explain(error.__cause__)} in the type that the model has there: its"
                    " CPU has few kernels of bf16",
                    where=where,
                    fix="run the model in OpenVINO inside the function, or give"
                    " eval_dataloader and eval_metric in its place, which do that; or keep"
                    " such ops in fp32 by op_type_dict",
                ) from error.__cause__
            return metric_value(accuracy, "eval_func")
        assert self.batches is not None
        with guarded(
            "eval_dataloader or eval_metric failed",
            where=type(self.metric).__name__,
            fix="batches are (inputs, labels), and the metric gets predictions and labels",
        ):
            self.metric.reset()
            for inputs, labels in self.batches:
                self.metric.update(of.predict(inputs), labels)
            accuracy = self.metric.result()
        return metric_value(accuracy, "eval_metric")


def kept(dataloader: Iterable[Any] | None) -> Iterable[Any] | None:
    """Batches that every trial can iterate; an iterator, which allows one pass, as a list."""
    if dataloader is None or iter(dataloader) is not dataloader:
        return dataloader
    return list(dataloader)


class Lowered(Protocol):
    """What ``fit`` returns; has ``save(path)``, too."""

    @property
    def model(self) -> Any:
        """The converted model, as an evaluation takes it."""
        ...

    @property
    def products(self) -> int:
        """How many matrix products or convolutions are low; they gain most by it."""
        ...

    def predict(self, inputs: Any) -> Any:
        """The outputs on one batch."""
        ...


def low_ops(plan: Plan | None) -> tuple[str, ...]:
    """The canonical op of each node that the plan lowers."""
    decisions = () if plan is None else plan.decisions
    return tuple(d.op for d in decisions if d.format is not Format.FP32)


def products_in(ops: Iterable[str]) -> int:
    """How many of ``ops`` are matrix products or convolutions."""
    return sum(by_name(op).matmul_engine for op in ops)


def feeds_of(inputs: Any, ports: Sequence[str]) -> dict[str, Any]:
    """The inputs of one batch by name: a mapping, or values in the order of ``ports``.

    Raises:
        UsageError: If there are not as many as ``ports``.
    """
    if isinstance(inputs, Mapping):
        return {name: np.asarray(x) for name, x in cast("Mapping[str, Any]", inputs).items()}
    listed = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if len(listed) != len(ports):
        raise UsageError(
            f"a batch has {len(listed)} inputs, and the model {len(ports)}",
            where=", ".join(ports),
            fix="let the data loader give them in this order, or by name in a dict",
        )
    return {name: np.asarray(x) for name, x in zip(ports, listed, strict=True)}


class GivenModel(ABC):
    """The model that ``fit`` is given.

    Attributes:
        known: The type of each op by its name; for modules the class of each.
        by_modules: Whether ``known`` has modules, and ops are in these.
        names_ports: Whether the settings' ``inputs`` and ``outputs`` say what the model has.
    """

    known: Mapping[str, str]
    by_modules: bool = False
    names_ports: bool = False

    @property
    @abstractmethod
    def native(self) -> Any:
        """The fp32 model in its library's form."""

    @abstractmethod
    def convertible(self, low: Format) -> Mapping[str, str]:
        """Those of ``known`` that may be in ``low``."""

    @abstractmethod
    def speed(self, low: Format) -> Speed:
        """Whether ``low`` is faster than fp32 on the device, as measured."""

    @abstractmethod
    def lowered(self, low: Format, kept: frozenset[str]) -> Lowered:
        """The model with every op low that may be, but those of ``known`` in ``kept``."""

    @abstractmethod
    def graph(self, policy: Policy) -> Graph:
        """The graph whose ops rules judge under the policy."""

    @abstractmethod
    def feeds(self, inputs: Any) -> Feeds:
        """The inputs of one batch by name."""

    @abstractmethod
    def quantized(self, policy: Policy, rules: Rules, calibration: Sequence[Any]) -> Lowered:
        """The model with every op low that may be and that runs so.

        ``calibration`` has the inputs of batches, as data loaders give them.
        """

    @abstractmethod
    def subject(self) -> Subject:
        """The model as the search takes it; sessions have the plan's model as ``module``."""

    @abstractmethod
    def result(self, model: Any, plan: Plan | None) -> Lowered:
        """The result for the native model of a plan, which may be left out for ``model``."""

    def score(self, evaluation: ModelEvaluation, session: Session | None) -> float:
        """The accuracy of the model that a session runs; of the fp32 model for None."""
        loaded: Any = session  # with the model that it was loaded from
        native = self.native if session is None else loaded.module
        return evaluation.score(self.result(native, None))

    def gaining(self, formats: Sequence[Format], device: str) -> tuple[Format, ...]:
        """The formats that are faster than fp32 here, measured, or forced by ``FORCE_BF16=1``.

        INC decides by the CPU's feature flags, and has the same variable.

        Raises:
            EngineError: If there is none; says why.
        """
        faster_formats: list[Format] = []
        slow: dict[Format, str] = {}
        for fmt in formats:
            speed = None if os.environ.get(f"FORCE_{fmt.name}") == "1" else self.speed(fmt)
            if speed is None or speed.gains:
                faster_formats.append(fmt)
            else:
                slow[fmt] = speed.text
        if not faster_formats:
            other = "" if Format.BF16 in formats else "use precisions='bf16', or "
            raise EngineError(
                "; ".join(slow.values()),
                where=f"device {device!r}",
                fix=f"{other}set FORCE_{formats[0].name}=1 to convert all the same",
            )
        for text in slow.values():
            warnings.warn(f"skipped: {text}", stacklevel=4)
        return tuple(faster_formats)

    def tuned(
        self,
        goal: Goal,
        policy: Policy,
        rules: Rules,
        calibration: Sequence[Any],
        evaluation: ModelEvaluation,
    ) -> Lowered | None:
        """The best model, by the objective, that keeps the accuracy; None if there is none."""
        workload = ModelWorkload(
            score=partial(self.score, evaluation),
            feeds=[self.feeds(inputs) for inputs in calibration],
            criterion=goal.criterion,
        )
        place = Place(subject=self.subject(), workload=workload)
        outcome = search(place, goal, policy, user_rules=tuple(rules.items()))
        for text in outcome.warnings:
            warnings.warn(text, stacklevel=4)
        if not outcome.improved:
            warnings.warn(f"no quantized model: {outcome.why}", stacklevel=4)
            return None
        return self.result(outcome.model, outcome.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload(Workload):
    """The user's evaluation of a model itself, and calibration data to time it on.

    ``score`` is of the model that a session runs, and of the fp32 model for None.
    """

    score: Callable[[Session | None], float]
    feeds: Sequence[Feeds]
    criterion: Criterion

    @property
    def higher_is_better(self) -> bool:
        """Whether higher is better, by the criterion."""
        return self.criterion.higher_is_better

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The user's score of the model that was loaded."""
        value = self.score(None if reference is None else session)
        if reference is None:
            check_finite(value, "the evaluation")
        return value

    def evaluated(self) -> Sequence[Feeds]:
        """All feeds."""
        return self.feeds

    def calibration(self) -> Sequence[Feeds]:
        """All feeds."""
        return self.feeds

    def timing(self) -> Sequence[Feeds]:
        """The largest of the feeds."""
        return spread(self.feeds, 1)


def samples_of(batches: Iterable[Any], samples: int) -> list[Any]:
    """The inputs of the first batches that together have ``samples`` samples or more.

    Of a pair (inputs, labels) the inputs are the first, as in INC.

    Raises:
        UsageError: If there are no batches.
    """
    inputs: list[Any] = []
    for batch in batches:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        inputs.append(batch[0] if pair else batch)
        samples -= max((len(a) for a in _arrays(inputs[-1]) if np.ndim(a)), default=1)
        if samples <= 0:
            break
    if not inputs:
        raise UsageError("calib_dataloader yields nothing", fix="give some batches")
    return inputs


def _arrays(inputs: Any) -> Iterable[Any]:
    if isinstance(inputs, Mapping):
        return inputs.values()
    return inputs if isinstance(inputs, tuple | list) else (inputs,)


def warn_unused(settings: Settings, taken: GivenModel, evaluation: ModelEvaluation) -> None:
    """Warn of each setting that is given and has no effect."""
    texts = [*settings.without_effect(evaluated=evaluation.given)]
    if settings.ports and not taken.names_ports:
        texts.append("inputs and outputs: all of the model is converted, whatever they name")
    for text in texts:
        warnings.warn(f"without effect: {text}", stacklevel=3)


def no_product(formats: Sequence[Format], model: object = None) -> ModelError:
    """The error for a model without a product in a low format.

    Its reason is that of the plan of ``model``, if it has one as PyTorch's modules do.
    """
    plan: Plan | None = getattr(model, "finecast_plan", None)
    why = "" if plan is None else commonest_verdict(plan)[1]
    return ModelError(
        "no matrix product or convolution could be converted to"
        f" {' or '.join(f.label for f in formats)}{why and f' ({why})'}, and other ops gain"
        " nothing by it",
        fix="see what the rules say: finecast explain MODEL NODE",
    )
