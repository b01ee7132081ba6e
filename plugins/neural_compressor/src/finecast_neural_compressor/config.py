"""The settings, with Intel Neural Compressor's names, defaults and order of arguments.

A value that cannot be followed here is an error that gives the reason. A setting that INC
ignores, or that finecast follows in its own way, is accepted, and ``without_effect`` names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from finecast import Criterion, CriterionKind, Format, Goal, Objective
from finecast.errors import UsageError
from finecast.naming import member_of, unknown_name
from finecast.rules import Adjust, low_format
from finecast_neural_compressor.op_dicts import DTYPES, OpDict, check_op_dicts, names

T = TypeVar("T")

_STRATEGIES: Final = (
    *("basic", "auto", "mse", "mse_v2", "bayesian", "random", "exhaustive", "sigopt", "tpe"),
    *("hawq_v2", "conservative", "lazy"),
)
_OBJECTIVES: Final = ("performance", "accuracy", "modelsize", "footprint")
_SOUGHT: Final = {
    "performance": Objective.LATENCY,
    "modelsize": Objective.SIZE,
    "footprint": Objective.MEMORY,
}
# Settings of TuningCriterion, which INC 1 had as keywords of the configuration itself.
_SEARCH: Final = ("strategy", "strategy_kwargs", "timeout", "max_trials", "objective")

_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "device": ("cpu", "gpu", "npu", "xpu"),
    "backend": (
        *("default", "itex", "ipex", "onnxrt_trt_ep"),
        *("onnxrt_cuda_ep", "onnxrt_dnnl_ep", "onnxrt_dml_ep"),
    ),
    "quant_level": ("auto", 0, 1),
    "approach": ("static", "dynamic", "auto", "weight_only"),
    "quant_format": ("default", "QDQ", "QOperator"),
    "reduce_range": (None, False, True),
    "diagnosis": (False, True),
    "domain": ("auto", "cv", "object_detection", "nlp", "recommendation_system"),
}
"""What INC takes, by setting."""

_STATIC: Final = ("", 'use approach="static", and give calib_dataloader')
# Values of INC's that are refused: why, and what to do instead, by setting and value.
_REFUSED: Final[Mapping[tuple[str, object], tuple[str, str]]] = {
    ("backend", "ipex"): (
        ": Intel's extension for PyTorch is discontinued; its kernels are in PyTorch",
        'use backend="default"',
    ),
    ("backend", "onnxrt_dml_ep"): (
        ": finecast does not drive DirectML, which has no bf16",
        'give DirectML the file that finecast.convert(model, "low.onnx", "all:fp16") writes',
    ),
    ("approach", "dynamic"): _STATIC,
    ("approach", "weight_only"): _STATIC,
    ("quant_format", "QOperator"): (
        "",
        'use quant_format="QDQ": engines fuse it into int8 kernels',
    ),
    ("reduce_range", True): (
        "",
        "leave it out: it is for CPUs whose 8-bit sums overflow, where no op gets int8 here",
    ),
    ("diagnosis", True): ("", "use finecast explain, or finecast profile"),
}

# The engine that runs ONNX models, by backend and device. INC's default is ONNX Runtime; here
# it is OpenVINO, because ONNX Runtime has no bf16 arithmetic on CPUs, or what else loads it.
_ENGINES: Final[Mapping[tuple[str, str], str | None]] = {
    ("default", "cpu"): None,
    ("default", "gpu"): "openvino:GPU",
    ("default", "npu"): "openvino:NPU",
    ("onnxrt_cuda_ep", "gpu"): "onnxruntime:CUDA",
    ("onnxrt_trt_ep", "gpu"): "onnxruntime:Tensorrt",
    ("onnxrt_dnnl_ep", "cpu"): "onnxruntime:Dnnl",
}

# Recipes that keep ops out of int8, and those that adjust operands before they are quantized.
_LEAVE_OUT: Final = (
    "first_conv_or_matmul_quantization",
    "last_conv_or_matmul_quantization",
    "pre_post_process_quantization",
)
_ADJUST: Final = {"fast_bias_correction": Adjust.BIAS}
# Recipes without effect: INC's default, and the reason.
_BY_FORMATS: Final = "accuracy is kept by the formats of single ops"
_NO_ALGORITHM: Final[tuple[object, str]] = ({}, "it is of an algorithm that is not used")
_NO_EFFECT: Final[Mapping[str, tuple[object, str]]] = {
    "layer_wise_quant": (False, _BY_FORMATS),
    "weight_correction": (False, _BY_FORMATS),
    "smooth_quant": (False, _BY_FORMATS),
    "smooth_quant_args": _NO_ALGORITHM,
    "layer_wise_quant_args": _NO_ALGORITHM,
    "rtn_args": _NO_ALGORITHM,
    "awq_args": _NO_ALGORITHM,
    "gptq_args": _NO_ALGORITHM,
    "teq_args": _NO_ALGORITHM,
    "autoround_args": _NO_ALGORITHM,
    "gemm_to_matmul": (True, "Gemm runs in int8 as it is"),
    "graph_optimization_level": (None, "the engine optimizes the model as it loads it"),
    "add_qdq_pair_to_weight": (False, "weights are stored quantized"),
    "optypes_to_exclude_output_quant": ([], "what an op reads is quantized, no output"),
    "dedicated_qdq_pair": (False, "a value is quantized once for all that read it"),
}
_RECIPES: Final = (*_LEAVE_OUT, *_ADJUST, *_NO_EFFECT)
# Settings without effect: the default, and the reason.
_DEFAULTS: Final[Mapping[str, tuple[object, str]]] = {
    "model_name": ("", "it names the model, and changes nothing"),
    "domain": ("auto", "what gains is measured"),
    "approach": ("static", "ranges are those of calib_dataloader, as with 'static'"),
    "ni_workload_name": ("quantization", "it names a diagnosis, which there is none of"),
}


def refuses_unknown(settings: type[T]) -> type[T]:
    """``settings``, whose constructor raises UsageError for an unknown keyword."""
    init = settings.__init__
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name in _SEARCH and name not in known:
                raise UsageError(
                    f"{settings.__name__} has no setting {name!r}",
                    fix=f"give tuning_criterion=TuningCriterion({name}=...)",
                )
            if name not in known:
                raise unknown_name(name, known, what="setting", where=settings.__name__)
        init(self, *args, **given)

    settings.__init__ = checked
    return settings


@refuses_unknown
@dataclass
class AccuracyCriterion:
    """The accuracy to keep: a loss relative to the baseline, or absolute."""

    higher_is_better: bool = True
    criterion: str = "relative"
    tolerable_loss: float = 0.01

    def to_criterion(self) -> Criterion:
        """These settings as a ``Criterion`` of finecast's.

        Raises:
            UsageError: If the kind or the loss is not usable.
        """
        kind = member_of(CriterionKind, self.criterion, what="criterion")
        loss = self.tolerable_loss
        if kind is CriterionKind.RELATIVE and self.higher_is_better and loss >= 1:
            raise UsageError(
                f"tolerable_loss={loss:g} is {loss:.0%} of the accuracy: every model keeps it",
                where="AccuracyCriterion",
                fix=f"give {loss / 100:g} for {loss:g}%, or criterion='absolute'",
            )
        return Criterion(kind=kind, tolerance=loss, higher_is_better=self.higher_is_better)


@refuses_unknown
@dataclass
class TuningCriterion:
    """How long to search: ``timeout`` 0 ends at the first trial that passes."""

    strategy: str = "basic"
    strategy_kwargs: Mapping[str, Any] | None = None
    timeout: float = 0
    max_trials: int = 100
    objective: str | Sequence[str] | Mapping[str, Any] = "performance"

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        if self.strategy not in _STRATEGIES:
            raise unknown_name(self.strategy, _STRATEGIES, what="strategy")
        if self.max_trials < 1 or self.timeout < 0:
            raise UsageError(
                f"max_trials {self.max_trials} and timeout {self.timeout} leave no trial",
                fix="give at least one trial, and seconds, or 0 for the first that passes",
            )
        _ = self.sought  # raises for an objective that is not supported

    @property
    def sought(self) -> Objective:
        """``objective`` as an ``Objective`` of finecast's.

        Raises:
            UsageError: If ``objective`` is unknown, not supported, or more than one.
        """
        given = [self.objective] if isinstance(self.objective, str) else self.objective
        listed = () if isinstance(given, Mapping) else tuple(given)
        for one in listed:
            if one not in _OBJECTIVES:
                raise unknown_name(one, _OBJECTIVES, what="objective")
        found = _SOUGHT.get(listed[0]) if len(listed) == 1 else None
        if found is None:
            raise UsageError(
                f"objective {self.objective!r} is not supported: a search has one, and keeps"
                " the accuracy whatever it is",
                fix=f"use one of {', '.join(_SOUGHT)}",
            )
        return found


class _Settings:
    """What both configurations have in common."""

    device: str
    backend: str
    inputs: str | Sequence[str]
    outputs: str | Sequence[str]
    quant_level: str | int
    op_name_dict: OpDict | None
    op_type_dict: OpDict | None
    excluded_precisions: str | Sequence[str]
    accuracy_criterion: AccuracyCriterion
    tuning_criterion: TuningCriterion

    @property
    def ports(self) -> tuple[str, ...]:
        """The names in ``inputs`` and ``outputs``."""
        return (*names(self.inputs), *names(self.outputs))

    @property
    def engine(self) -> str | None:
        """The engine that runs ONNX models, ``NAME[:DEVICE]``; None for the first that does.

        Raises:
            UsageError: If the backend does not run on the device.
        """
        if (self.backend, self.device) not in _ENGINES:
            there = [f'"{d}"' for b, d in _ENGINES if b == self.backend]
            raise UsageError(
                f"backend {self.backend!r} does not run on device {self.device!r}",
                fix=f"use device={' or '.join(there)}",
            )
        return _ENGINES[self.backend, self.device]

    @property
    def goal(self) -> Goal:
        """The accuracy to keep, and how long to search."""
        tuning = self.tuning_criterion
        return Goal(
            criterion=self.accuracy_criterion.to_criterion(),
            objective=tuning.sought,
            max_trials=tuning.max_trials,
            timeout_s=tuning.timeout or None,
            first_is_enough=not tuning.timeout,
        )

    def _check(self, *, quantizes: bool) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        for name in (n for n in _VALUES if hasattr(self, n)):
            given, known = getattr(self, name), _VALUES[name]
            if given not in known:
                if name == "quant_level":
                    raise UsageError(f"unknown {name} {given!r}", fix='use "auto", 0 or 1')
                raise unknown_name(str(given), [str(v) for v in known], what=name)
            if (name, given) in _REFUSED:
                why, fix = _REFUSED[name, given]
                raise UsageError(f"{name}={given!r} is not supported{why}", fix=fix)
        check_op_dicts(self.op_name_dict, self.op_type_dict, quantizes=quantizes)
        for name in names(self.excluded_precisions):
            if name not in DTYPES:
                raise unknown_name(name, tuple(DTYPES), what="precision")
        self.tuning_criterion.check()
        self.accuracy_criterion.to_criterion()  # raises for a loss that is not usable

    def _unused(self, strategy: str, *, evaluated: bool) -> Iterator[str]:
        """Settings of both configurations without effect, each with the reason.

        ``strategy`` says what is done whatever strategy is asked for.
        """
        for name, (default, why) in _DEFAULTS.items():
            if getattr(self, name, default) != default:
                yield f"{name}: {why}"
        tuning = self.tuning_criterion
        if evaluated and (tuning.strategy != "basic" or tuning.strategy_kwargs):
            yield f"strategy {tuning.strategy!r}: {strategy}"
        searches = (
            ("tuning_criterion", tuning, TuningCriterion()),
            ("accuracy_criterion", self.accuracy_criterion, AccuracyCriterion()),
            ("quant_level", self.quant_level, "auto"),
        )
        for name, given, default in searches:
            if not evaluated and given != default:
                yield f"{name}: without eval_func, or eval_dataloader and eval_metric"


@refuses_unknown
@dataclass
class PostTrainingQuantConfig(_Settings):
    """How to quantize: ops that run on integers get int8, others bf16 where that gains.

    ``excluded_precisions=["bf16"]`` leaves int8 and fp32. ``op_name_dict`` and
    ``op_type_dict`` list the types that an op may have beside fp32; schemes, granularities and
    algorithms of quantization are finecast's own, and others are refused. Of ``recipes`` these
    have an effect: those that keep the first or the last product, or the ops before and after
    these, out of int8, and ``fast_bias_correction``. Of several
    ``calibration_sampling_size`` the first is used.
    """

    device: str = "cpu"
    backend: str = "default"
    domain: str = "auto"
    recipes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    quant_format: str = "default"
    inputs: str | Sequence[str] = field(default_factory=list[str])
    outputs: str | Sequence[str] = field(default_factory=list[str])
    approach: str = "static"
    calibration_sampling_size: int | Sequence[int] = field(default_factory=lambda: [100])
    op_type_dict: OpDict | None = None
    op_name_dict: OpDict | None = None
    reduce_range: bool | None = None
    example_inputs: Any = None
    excluded_precisions: str | Sequence[str] = field(default_factory=list[str])
    quant_level: str | int = "auto"
    accuracy_criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    tuning_criterion: TuningCriterion = field(default_factory=TuningCriterion)
    diagnosis: bool = False
    ni_workload_name: str = "quantization"

    @property
    def formats(self) -> tuple[Format, ...]:
        """int8, then bf16, and on a GPU fp16, without those that are excluded."""
        excluded = {DTYPES[name] for name in names(self.excluded_precisions)}
        known = (Format.INT8, Format.BF16, *((Format.FP16,) * (self.device == "gpu")))
        return tuple(f for f in known if f not in excluded)

    @property
    def samples(self) -> int:
        """How many samples calibrate."""
        return self._sizes[0]

    @property
    def _sizes(self) -> Sequence[int]:
        given = self.calibration_sampling_size
        return [given] if isinstance(given, int) else given

    @property
    def adjusts(self) -> tuple[Adjust, ...]:
        """Adjustments of operands that recipes ask for; each is kept if errors are less."""
        return tuple(kind for name, kind in _ADJUST.items() if self.recipes.get(name))

    def leaves_out(self, part: str) -> bool:
        """Whether a recipe leaves ops out of int8: ``first_``, ``last_`` or ``pre_post``."""
        return any(not self.recipes.get(n, True) for n in _LEAVE_OUT if n.startswith(part))

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        self._check(quantizes=True)
        for name in self.recipes:
            if name not in _RECIPES:
                raise unknown_name(name, _RECIPES, what="recipe")
        if not self.formats:
            raise UsageError(
                f"without {list(names(self.excluded_precisions))!r} nothing is left to convert"
                " to",
                fix="leave int8 or bf16 in",
            )
        if not self._sizes or min(self._sizes) < 1:
            raise UsageError(
                f"calibration_sampling_size {self._sizes!r} leaves no sample",
                fix="give 1 or more",
            )

    def without_effect(self, *, evaluated: bool) -> Iterator[str]:
        """The settings that are given and have no effect, each with the reason."""
        search = "plans are tried by time and predicted error"
        for name, value in self.recipes.items():
            default, why = _NO_EFFECT.get(name, (value, ""))
            if value != default:
                yield f"recipe {name}: {why}"
        if len(self._sizes) > 1:
            yield f"calibration_sampling_size {self._sizes!r}: {self.samples} samples are used"
        yield from self._unused(search, evaluated=evaluated)
        if evaluated and self.quant_level != "auto":
            yield f"quant_level: {search}"


@refuses_unknown
@dataclass
class MixedPrecisionConfig(_Settings):
    """The formats to convert to, the ops to keep, and the accuracy to keep.

    ``op_name_dict`` and ``op_type_dict`` keep ops in fp32 by the module's (or node's) name,
    a regular expression that must match all of it, or by its class (or op type).
    ``precision`` is another name of ``precisions``: of several, the first that is not
    excluded is used; with int8 among them the model is quantized, with int8 and bf16 mixed.
    ``quant_level`` says how ops fall back to fp32: 0 a type of op at a time, 1 op by op,
    "auto" by types and then by ops. The names in ``inputs`` and ``outputs`` are checked, but
    all of the model is converted. ``model_name`` has no effect.
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

    def low(self) -> Format:
        """The format to convert to: the first of ``precisions`` that is not excluded."""
        return self.formats[0]

    @property
    def formats(self) -> tuple[Format, ...]:
        """Those of ``precisions`` that are not excluded.

        Raises:
            UsageError: If none is left, or one is not known.
        """
        named, excluded = names(self.precisions), names(self.excluded_precisions)
        known = [name for name in DTYPES if name != "uint8"]
        for name in (*named, *excluded):
            if name not in known:
                raise unknown_name(name, known, what="precision")
        left = [p for p in named if p not in (*excluded, "fp32")]
        if not left:
            raise UsageError(
                f"precisions {self.precisions!r} without {list(excluded)!r}"
                " leave nothing to convert to",
                fix="leave bf16, fp16 or int8 in",
            )
        return tuple(low_format(name) for name in dict.fromkeys(left))

    def quantization(self) -> PostTrainingQuantConfig:
        """These settings for ``quantization.fit``, to be used if int8 is among the precisions.

        Raises:
            UsageError: If fp16 is to be mixed with int8 on another device than a GPU.
        """
        if Format.FP16 in self.formats and self.device != "gpu":
            raise UsageError(
                f"precisions {self.precisions!r}: fp16 beside int8 is for GPUs",
                fix='use "int8,bf16", or device="gpu"',
            )
        others = [f.label for f in (Format.BF16, Format.FP16) if f not in self.formats]
        shared = {n: getattr(self, n) for n in _Settings.__annotations__}
        shared |= {"excluded_precisions": others, "example_inputs": self.example_inputs}
        return PostTrainingQuantConfig(**shared)

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        self._check(quantizes=False)
        if self.tuning_criterion.sought is not Objective.LATENCY:
            raise UsageError(
                f"objective {self.tuning_criterion.objective!r} is not supported for mixed"
                " precision: the fewest ops stay fp32",
                fix='use "performance", or quantization.fit',
            )

    def without_effect(self, *, evaluated: bool) -> Iterator[str]:
        """The settings that are given and have no effect, each with the reason."""
        if len(self.formats) > 1:
            yield f"of precisions {self.precisions!r}, {self.low().label} is used"
        yield from self._unused(
            "mixed precision has one strategy, in INC too", evaluated=evaluated
        )
