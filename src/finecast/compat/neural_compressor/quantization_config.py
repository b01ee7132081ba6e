"""Settings of post-training quantization, with INC's names, defaults and order of arguments.

A setting that finecast does not follow is refused if it would change the model. Otherwise,
where finecast always does it or does it in another way, it is accepted, and
``without_effect`` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from finecast.compat.neural_compressor.criteria import (
    AccuracyCriterion,
    TuningCriterion,
    check_level,
    refuses_unknown,
    without_evaluation,
)
from finecast.compat.neural_compressor.op_dicts import (
    DTYPES,
    OpDict,
    check_op_dicts,
    names,
)
from finecast.compat.neural_compressor.places import check_place
from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.rules.policy import Adjust

_DOMAINS: Final = ("auto", "cv", "object_detection", "nlp", "recommendation_system")
# Values that are refused: what to do instead, by setting and value.
_REFUSED: Final[Mapping[tuple[str, object], str]] = {
    ("approach", "dynamic"): 'use approach="static", and give calib_dataloader',
    ("approach", "weight_only"): 'use approach="static", and give calib_dataloader',
    ("quant_format", "QOperator"): 'use quant_format="QDQ": engines fuse it into int8 kernels',
    ("reduce_range", True): (
        "leave it out: it is for CPUs whose 8-bit sums overflow, on which no op gets int8 here"
    ),
    ("diagnosis", True): "use finecast explain, or finecast profile",
}
_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "approach": ("static", "dynamic", "auto", "weight_only"),
    "quant_format": ("default", "QDQ", "QOperator"),
    "reduce_range": (None, False, True),
    "diagnosis": (False, True),
    "domain": _DOMAINS,
}
_LEAVE_OUT: Final = (
    "first_conv_or_matmul_quantization",
    "last_conv_or_matmul_quantization",
    "pre_post_process_quantization",
)
_BY_FORMATS: Final = "accuracy is kept by the formats of single ops"
_NO_ALGORITHM: Final = "it is of an algorithm that is not used"
# Recipes without effect: INC's default, and the reason.
_NO_EFFECT: Final[Mapping[str, tuple[object, str]]] = {
    "layer_wise_quant": (False, _BY_FORMATS),
    "weight_correction": (False, _BY_FORMATS),
    "smooth_quant_args": (
        {},
        "each product has the alpha that is expected to err least",
    ),
    "layer_wise_quant_args": ({}, _NO_ALGORITHM),
    "rtn_args": ({}, _NO_ALGORITHM),
    "awq_args": ({}, _NO_ALGORITHM),
    "gptq_args": ({}, _NO_ALGORITHM),
    "teq_args": ({}, _NO_ALGORITHM),
    "autoround_args": ({}, _NO_ALGORITHM),
    "gemm_to_matmul": (True, "Gemm runs in int8 as it is"),
    "graph_optimization_level": (None, "the engine optimizes the model as it loads it"),
    "add_qdq_pair_to_weight": (False, "weights are stored as codes"),
    "optypes_to_exclude_output_quant": ([], "what an op reads is quantized, no output"),
    "dedicated_qdq_pair": (False, "a value is quantized once for all that read it"),
}
# Settings without effect: the default, and the reason.
_DEFAULTS: Final[Mapping[str, tuple[object, str]]] = {
    "domain": ("auto", "what gains is measured"),
    "approach": ("static", "ranges are those of calib_dataloader, as with 'static'"),
    "ni_workload_name": ("quantization", "it names a diagnosis, which there is none of"),
    "example_inputs": (None, "calib_dataloader has some"),
}
# Recipes that adjust operands before they are quantized.
_ADJUST: Final = {"smooth_quant": Adjust.SMOOTH, "fast_bias_correction": Adjust.BIAS}
_RECIPES: Final = (*_LEAVE_OUT, *_ADJUST, *_NO_EFFECT)
_SEARCH: Final = "plans are tried by time and predicted error"


@refuses_unknown
@dataclass
class PostTrainingQuantConfig:
    """How to quantize: ops that run on integers get int8, others bf16 where that gains.

    ``excluded_precisions=["bf16"]`` leaves int8 and fp32. ``op_name_dict`` and
    ``op_type_dict`` list the types that an op may have beside fp32; schemes, granularities and
    algorithms of quantization are finecast's own, and others are refused. Of ``recipes`` these
    have an effect: those that keep the first or the last product, or the ops before and after
    these, out of int8, and ``smooth_quant`` and ``fast_bias_correction``. Of several
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
    def ports(self) -> tuple[str, ...]:
        """The names in ``inputs`` and ``outputs``."""
        return (*names(self.inputs), *names(self.outputs))

    @property
    def formats(self) -> tuple[Format, ...]:
        """int8, then bf16, and on a GPU fp16, without those that are excluded."""
        excluded = {DTYPES[name] for name in names(self.excluded_precisions)}
        known = (Format.INT8, Format.BF16, *((Format.FP16,) * (self.device == "gpu")))
        return tuple(f for f in known if f not in excluded)

    @property
    def samples(self) -> int:
        """How many samples calibrate."""
        given = self.calibration_sampling_size
        return given if isinstance(given, int) else given[0]

    @property
    def adjusts(self) -> tuple[Adjust, ...]:
        """Adjustments of operands that recipes ask for; each is kept if errors are less."""
        return tuple(kind for name, kind in _ADJUST.items() if self.recipes.get(name))

    def leaves_out(self, recipe: str) -> bool:
        """Whether a recipe leaves ops out of int8."""
        return not self.recipes.get(recipe, True)

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        check_place(self.device, self.backend)
        check_level(self.quant_level)
        check_op_dicts(self.op_name_dict, self.op_type_dict, quantizes=True)
        self.tuning_criterion.check()
        self.accuracy_criterion.to_criterion()  # raises for a loss that is not usable
        for name, known in _VALUES.items():
            given = getattr(self, name)
            if given not in known:
                raise unknown_name(repr(given), [repr(v) for v in known], what=name)
            fix = _REFUSED.get((name, given))
            if fix is not None:
                raise UsageError(f"{name}={given!r} is not supported", fix=fix)
        for name in self.recipes:
            if name not in _RECIPES:
                raise unknown_name(name, _RECIPES, what="recipe")
        for name in names(self.excluded_precisions):
            if name not in DTYPES:
                raise unknown_name(name, tuple(DTYPES), what="precision")
        if not self.formats:
            raise UsageError(
                f"without {list(names(self.excluded_precisions))!r} nothing is left to convert"
                " to",
                fix="leave int8 or bf16 in",
            )
        self._check_samples()

    def _check_samples(self) -> None:
        given = self.calibration_sampling_size
        sizes = [given] if isinstance(given, int) else given
        if not sizes or min(sizes) < 1:
            raise UsageError(
                f"calibration_sampling_size {given!r} leaves no sample", fix="give 1 or more"
            )

    def without_effect(self, *, evaluated: bool) -> Iterator[str]:
        """The settings that are given and have no effect, each with the reason."""
        for name, value in self.recipes.items():
            default, why = _NO_EFFECT.get(name, (value, ""))
            if value != default:
                yield f"recipe {name}: {why}"
        for name, (default, why) in _DEFAULTS.items():
            if getattr(self, name) != default:
                yield f"{name}: {why}"
        given = self.calibration_sampling_size
        if not isinstance(given, int) and len(given) > 1:
            yield f"calibration_sampling_size {list(given)!r}: {given[0]} samples are used"
        if self.ports:
            yield "inputs and outputs: all of the model is converted, whatever they name"
        yield from self._unused_search(evaluated=evaluated)

    def _unused_search(self, *, evaluated: bool) -> Iterator[str]:
        """Settings of the search without effect; all of them if there is no evaluation."""
        if not evaluated:
            yield from without_evaluation(self)
            return
        tuning = self.tuning_criterion
        if tuning.strategy != "basic" or tuning.strategy_kwargs:
            yield f"strategy {tuning.strategy!r}: {_SEARCH}"
        if self.quant_level != "auto":
            yield f"quant_level: {_SEARCH}"
