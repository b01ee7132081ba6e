"""The settings, with Intel Neural Compressor's names, defaults and order of arguments.

What a value cannot mean here is refused with the reason; what INC itself ignores for mixed
precision is taken, and ``without_effect`` says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from finecast.data.criterion import Criterion, CriterionKind
from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.rules.policy import low_format

T = TypeVar("T")

_DEVICES: Final = ("cpu", "gpu", "npu", "xpu")
_BACKENDS: Final = (
    "default",
    "itex",
    "ipex",
    "onnxrt_trt_ep",
    "onnxrt_cuda_ep",
    "onnxrt_dnnl_ep",
    "onnxrt_dml_ep",
)
_PRECISIONS: Final = ("bf16", "fp16")
_DTYPES: Final = ("fp32", *_PRECISIONS)
_QUANT_LEVELS: Final = ("auto", 0, 1)
_OBJECTIVES: Final = ("performance", "accuracy", "modelsize", "footprint")
_STRATEGIES: Final = (
    *("basic", "auto", "mse", "mse_v2", "bayesian", "random", "exhaustive", "sigopt", "tpe"),
    *("hawq_v2", "conservative", "lazy"),
)
# By operator or by its name: {"weight": {"dtype": ["fp32"]}, "activation": {...}}.
OpDict = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
_PARTS: Final = ("weight", "activation")


def _naming_strangers(settings: type[T]) -> type[T]:
    """``settings``, which refuses a name that it does not have as every wrong value is."""
    init = settings.__init__
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name in known:
                continue
            if name in _SEARCH:
                raise UsageError(
                    f"{settings.__name__} has no setting {name!r}",
                    fix=f"give tuning_criterion=TuningCriterion({name}=...)",
                )
            raise unknown_name(name, known, what="setting", where=settings.__name__)
        init(self, *args, **given)

    settings.__init__ = checked
    return settings


# Settings of the search, which INC 1 and its quantization have beside the others.
_SEARCH: Final = ("strategy", "strategy_kwargs", "timeout", "max_trials", "objective")


@_naming_strangers
@dataclass
class AccuracyCriterion:
    """The accuracy to keep: a loss relative to the baseline, or absolute."""

    higher_is_better: bool = True
    criterion: str = "relative"
    tolerable_loss: float = 0.01

    def to_criterion(self) -> Criterion:
        """The same as a finecast ``Criterion``.

        Raises:
            UsageError: If the kind or the loss is not usable.
        """
        return Criterion(
            kind=CriterionKind.parse(self.criterion),
            tolerance=self.tolerable_loss,
            higher_is_better=self.higher_is_better,
        )


@_naming_strangers
@dataclass
class TuningCriterion:
    """How long to search: ``timeout`` 0 ends at the first trial that passes."""

    strategy: str = "basic"
    strategy_kwargs: Mapping[str, Any] | None = None
    timeout: float = 0
    max_trials: int = 100
    objective: str | Sequence[str] | Mapping[str, Any] = "performance"

    def check(self) -> None:
        """Raise UsageError for what cannot be followed."""
        if self.strategy not in _STRATEGIES:
            raise unknown_name(self.strategy, _STRATEGIES, what="strategy")
        if self.max_trials < 1 or self.timeout < 0:
            raise UsageError(
                f"max_trials {self.max_trials} and timeout {self.timeout} leave no trial",
                fix="give at least one trial, and seconds, or 0 for the first that passes",
            )
        given = [self.objective] if isinstance(self.objective, str) else self.objective
        if isinstance(given, Mapping) or list(given) != ["performance"]:
            listed = () if isinstance(given, Mapping) else given
            unknown = next((o for o in listed if o not in _OBJECTIVES), None)
            if unknown is not None:
                raise unknown_name(unknown, _OBJECTIVES, what="objective")
            raise UsageError(
                f"objective {self.objective!r} is not supported: the fewest ops stay fp32",
                fix='use "performance"',
            )


@_naming_strangers
@dataclass
class MixedPrecisionConfig:
    """What to convert, and how far.

    ``op_name_dict`` and ``op_type_dict`` keep ops in fp32 by the module's (or node's) name,
    a regular expression that must match all of it, or by its class (or op type).
    ``precision`` is another name of ``precisions``: of several, the first that is not
    excluded is used. ``quant_level`` says how ops fall back to fp32: 0 a type of op at a
    time, 1 op by op, "auto" first one and then the other. ``inputs`` and ``outputs`` are
    checked: all of the model is converted. ``model_name`` is a name and no more.
    """

    device: str = "cpu"
    backend: str = "default"
    precisions: str | Sequence[str] = "bf16"
    model_name: str = ""
    inputs: str | Sequence[str] = field(default_factory=list[str])
    outputs: str | Sequence[str] = field(default_factory=list[str])
    quant_level: str | int = "auto"
    tuning_criterion: TuningCriterion = field(default_factory=TuningCriterion)
    accuracy_criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    excluded_precisions: str | Sequence[str] = field(default_factory=list[str])
    op_name_dict: OpDict | None = None
    op_type_dict: OpDict | None = None
    example_inputs: Any = None
    precision: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            self.precisions = self.precision

    @property
    def ports(self) -> tuple[str, ...]:
        """The names in ``inputs`` and ``outputs``."""
        return (*names(self.inputs), *names(self.outputs))

    def low(self) -> Format:
        """The format to convert to: the first of ``precisions`` that is not excluded.

        Raises:
            UsageError: If none is left, or one is not known.
        """
        named, excluded = names(self.precisions), names(self.excluded_precisions)
        for name in (*named, *excluded):
            if name not in _DTYPES:
                raise unknown_name(name, _PRECISIONS, what="precision")
        left = [p for p in named if p not in (*excluded, "fp32")]
        if not left:
            raise UsageError(
                f"precisions {self.precisions!r} without {list(excluded)!r}"
                " leave nothing to convert to",
                fix="leave bf16 or fp16 in",
            )
        return low_format(left[0])

    def check(self) -> None:
        """Raise UsageError for a value that no setting has."""
        for what, known, given in (
            ("device", _DEVICES, self.device),
            ("backend", _BACKENDS, self.backend),
        ):
            if given not in known:
                raise unknown_name(given, known, what=what)
        if self.quant_level not in _QUANT_LEVELS:
            raise UsageError(
                f"unknown quant_level {self.quant_level!r}", fix='use "auto", 0 or 1'
            )
        for where, entries in (
            ("op_name_dict", self.op_name_dict),
            ("op_type_dict", self.op_type_dict),
        ):
            for name, setting in (entries or {}).items():
                _check_setting(setting, f"{where}[{name!r}]")
        self.tuning_criterion.check()

    def without_effect(self, *, evaluated: bool) -> Iterator[str]:
        """Settings given that change nothing, each with the reason."""
        if self.model_name:
            yield "model_name names the model, and changes nothing"
        strategy = self.tuning_criterion.strategy
        if strategy != "basic" or self.tuning_criterion.strategy_kwargs:
            yield f"strategy {strategy!r}: mixed precision has one strategy, in INC too"
        if len(names(self.precisions)) > len(names(self.excluded_precisions)) + 1:
            yield f"of precisions {self.precisions!r}, {self.low().label} is used"
        if self.ports:
            yield "inputs and outputs: all of the model is converted, whatever they name"
        searches = (
            ("tuning_criterion", self.tuning_criterion, TuningCriterion()),
            ("accuracy_criterion", self.accuracy_criterion, AccuracyCriterion()),
            ("quant_level", self.quant_level, "auto"),
        )
        for name, given, default in searches:
            if not evaluated and given != default:
                yield f"{name}: without eval_func, or eval_dataloader and eval_metric"


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names as INC takes them: a list, or one string with commas."""
    listed = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip() for name in listed if name.strip())


def _check_setting(setting: Mapping[str, Mapping[str, Sequence[str]]], where: str) -> None:
    for part, choice in setting.items():
        if part not in _PARTS:
            raise unknown_name(part, _PARTS, what="part of an op", where=where)
        for kind, given in choice.items():
            if kind != "dtype":
                raise UsageError(
                    f"{kind!r} is a setting of quantization, and this is mixed precision",
                    where=where,
                    fix='give "dtype" alone',
                )
            for dtype in names(given):
                if dtype not in _DTYPES:
                    raise unknown_name(dtype, _DTYPES, what="dtype", where=where)


def keeps_fp32(setting: Mapping[str, Mapping[str, Sequence[str]]], low: Format) -> bool:
    """Whether an entry of an op dict lists types, and ``low`` is not among them."""
    listed = (names(part["dtype"]) for part in setting.values() if part.get("dtype"))
    return any(low.label not in types for types in listed)
