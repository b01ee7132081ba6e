"""The settings, with Intel Neural Compressor's names, defaults and order of arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from finecast.errors import UsageError
from finecast.formats import Format
from finecast.measure.criterion import Criterion, CriterionKind
from finecast.policy import low_format

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
# By operator or by its name: {"weight": {"dtype": ["fp32"]}, "activation": {...}}.
OpDict = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]


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


@dataclass
class TuningCriterion:
    """How long to search: ``timeout`` 0 ends at the first trial that passes."""

    strategy: str = "basic"
    timeout: int = 0
    max_trials: int = 100
    objective: str = "performance"


@dataclass
class MixedPrecisionConfig:
    """What to convert, and how far.

    ``op_name_dict`` and ``op_type_dict`` keep ops in fp32 by the module's (or node's) name,
    a regular expression that must match all of it, or by its class (or op type).
    """

    device: str = "cpu"
    backend: str = "default"
    precisions: str | Sequence[str] = "bf16"
    model_name: str = ""
    inputs: Sequence[str] = field(default_factory=list[str])
    outputs: Sequence[str] = field(default_factory=list[str])
    quant_level: str | int = "auto"
    tuning_criterion: TuningCriterion = field(default_factory=TuningCriterion)
    accuracy_criterion: AccuracyCriterion = field(default_factory=AccuracyCriterion)
    excluded_precisions: Sequence[str] = field(default_factory=list[str])
    op_name_dict: OpDict = field(default_factory=dict[str, Any])
    op_type_dict: OpDict = field(default_factory=dict[str, Any])
    example_inputs: Any = None

    def low(self) -> Format:
        """The format to convert to: the first of ``precisions`` that is not excluded.

        Raises:
            UsageError: If none is left, or device or backend are not known.
        """
        for name, known, given in (
            ("device", _DEVICES, self.device),
            ("backend", _BACKENDS, self.backend),
        ):
            if given not in known:
                raise UsageError(
                    f"unknown {name} {given!r}", fix=f"use one of {', '.join(known)}"
                )
        single = isinstance(self.precisions, str)
        named = str(self.precisions).split(",") if single else list(self.precisions)
        left = [
            p.strip() for p in named if p.strip() not in (*self.excluded_precisions, "fp32")
        ]
        if not left:
            raise UsageError(
                f"precisions {self.precisions!r} without {list(self.excluded_precisions)!r}"
                " leave nothing to convert to",
                fix="leave bf16 or fp16 in",
            )
        return low_format(left[0])


def keeps_fp32(setting: Mapping[str, Mapping[str, Sequence[str]]], low: Format) -> bool:
    """Whether an entry of an op dict lists types, and ``low`` is not among them."""
    listed = (part["dtype"] for part in setting.values() if part.get("dtype"))
    return any(low.label not in types for types in listed)
