"""The settings, with Intel Neural Compressor's names, defaults and order of arguments.

A value that cannot be followed here is an error that gives the reason. A setting that INC
ignores for mixed precision is accepted, and ``without_effect`` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from finecast.compat.neural_compressor.criteria import (
    AccuracyCriterion,
    TuningCriterion,
    check_level,
    refuses_unknown,
    without_evaluation,
)
from finecast.compat.neural_compressor.op_dicts import OpDict, check_op_dicts, names
from finecast.compat.neural_compressor.places import check_place
from finecast.compat.neural_compressor.quantization_config import PostTrainingQuantConfig
from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.pipeline.goal import Objective
from finecast.rules.policy import low_format

__all__ = [
    "AccuracyCriterion",
    "MixedPrecisionConfig",
    "PostTrainingQuantConfig",
    "TuningCriterion",
]

_PRECISIONS: Final = ("bf16", "fp16", "int8")
_NAMED: Final = ("fp32", *_PRECISIONS)


def is_frozen(model: object) -> bool:
    """Whether a model is the path of a frozen graph of TensorFlow's."""
    return isinstance(model, str | Path) and Path(model).suffix.lower() == ".pb"


@refuses_unknown
@dataclass
class MixedPrecisionConfig:
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

    @property
    def ports(self) -> tuple[str, ...]:
        """The names in ``inputs`` and ``outputs``."""
        return (*names(self.inputs), *names(self.outputs))

    @property
    def quantizes(self) -> bool:
        """Whether int8 is among the formats to convert to."""
        return Format.INT8 in self.formats()

    def low(self) -> Format:
        """The format to convert to: the first of ``precisions`` that is not excluded.

        Raises:
            UsageError: If none is left, or one is not known.
        """
        return self.formats()[0]

    def formats(self) -> tuple[Format, ...]:
        """Those of ``precisions`` that are not excluded.

        Raises:
            UsageError: If none is left, or one is not known.
        """
        named, excluded = names(self.precisions), names(self.excluded_precisions)
        for name in (*named, *excluded):
            if name not in _NAMED:
                raise unknown_name(name, _PRECISIONS, what="precision")
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
        formats = self.formats()
        if Format.FP16 in formats and self.device != "gpu":
            raise UsageError(
                f"precisions {self.precisions!r}: fp16 beside int8 is for GPUs",
                fix='use "int8,bf16", or device="gpu"',
            )
        return PostTrainingQuantConfig(
            device=self.device,
            backend=self.backend,
            inputs=self.inputs,
            outputs=self.outputs,
            op_type_dict=self.op_type_dict,
            op_name_dict=self.op_name_dict,
            example_inputs=self.example_inputs,
            excluded_precisions=tuple(
                f.label for f in (Format.BF16, Format.FP16) if f not in formats
            ),
            quant_level=self.quant_level,
            accuracy_criterion=self.accuracy_criterion,
            tuning_criterion=self.tuning_criterion,
        )

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        check_place(self.device, self.backend)
        check_level(self.quant_level)
        check_op_dicts(self.op_name_dict, self.op_type_dict, quantizes=False)
        self.tuning_criterion.check()
        self.accuracy_criterion.to_criterion()  # raises for a loss that is not usable
        if self.tuning_criterion.sought is not Objective.LATENCY:
            raise UsageError(
                f"objective {self.tuning_criterion.objective!r} is not supported for mixed"
                " precision: the fewest ops stay fp32",
                fix='use "performance", or quantization.fit',
            )

    def without_effect(self, *, evaluated: bool, frozen: bool = False) -> Iterator[str]:
        """The settings that are given and have no effect, each with the reason.

        Args:
            evaluated: Whether the model's accuracy can be measured.
            frozen: Whether the model is a frozen graph. It has no signature, so ``inputs`` and
                ``outputs`` name its ports.
        """
        if self.model_name:
            yield "model_name names the model, and changes nothing"
        strategy = self.tuning_criterion.strategy
        if strategy != "basic" or self.tuning_criterion.strategy_kwargs:
            yield f"strategy {strategy!r}: mixed precision has one strategy, in INC too"
        if len(self.formats()) > 1:
            yield f"of precisions {self.precisions!r}, {self.low().label} is used"
        if self.ports and not frozen:
            yield "inputs and outputs: all of the model is converted, whatever they name"
        if not evaluated:
            yield from without_evaluation(self)
