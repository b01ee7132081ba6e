"""``fit``: INC's entry point for post-training quantization, done by finecast's ``tune``.

Ops that run on integers get int8, and others bf16 where that gains. If the accuracy is not
kept, ops fall back to bf16 or fp32, whichever costs least time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from finecast.compat.neural_compressor.evaluation import EvalFunc, ModelEvaluation, kept
from finecast.compat.neural_compressor.frameworks import Kind, kind_of
from finecast.compat.neural_compressor.quantization_config import PostTrainingQuantConfig
from finecast.errors import UsageError

_ELSEWHERE: Final = {
    Kind.TORCH: 'use finecast.torch.tune(..., policy="auto:int8,bf16"), or export it to ONNX',
    Kind.TENSORFLOW: "use finecast tune MODEL -o low.xml --auto-cast-type int8 (OpenVINO)",
    Kind.MXNET: "export it to ONNX, or use mix_precision.fit with bf16",
}


def fit(
    model: Any,
    conf: object,
    calib_dataloader: Iterable[Any] | None = None,
    calib_func: Callable[[Any], object] | None = None,
    eval_func: EvalFunc | None = None,
    eval_dataloader: Iterable[Any] | None = None,
    eval_metric: Any = None,
) -> Any:
    """Quantize ``model``; where an evaluation is given, keep its accuracy.

    Returns:
        An object with ``.model`` and ``.save(path)``. With an evaluation it is the fastest
        model that keeps the accuracy and is faster than fp32; None if there is none, and a
        warning says why. Without an evaluation every op that may have a low format has it.

    Args:
        model: An ONNX ModelProto, or the path of an ONNX file.
        conf: The settings, a ``PostTrainingQuantConfig``.
        calib_dataloader: Batches ``(inputs, labels)``, or inputs by name. Values are quantized
            over their ranges on these; by default on ``eval_dataloader``.
        calib_func: Not supported: the model is observed on data.
        eval_func: Returns the accuracy of a model: a ModelProto (over 2 GB, a path).
        eval_dataloader: Batches ``(inputs, labels)``; with ``eval_metric``.
        eval_metric: ``update(predictions, labels)``, ``result()`` and ``reset()``.

    Raises:
        UsageError: If the settings cannot be followed here; says why.
        EngineError: If the device is slower in each low format than in fp32.
        ModelError: If no product could be converted.
    """
    if not isinstance(conf, PostTrainingQuantConfig):
        raise UsageError(
            f"conf is a {type(conf).__name__}", fix="give a PostTrainingQuantConfig"
        )
    check_kind(model)
    conf.check()
    if calib_func is not None:
        raise UsageError(
            "calib_func runs the model by itself, and its values are observed on data",
            fix="give calib_dataloader",
        )
    evaluation = ModelEvaluation.of(eval_func, eval_dataloader, eval_metric)
    batches = kept(calib_dataloader) if calib_dataloader is not None else evaluation.batches
    if batches is None:
        raise no_data("calib_dataloader")
    from finecast.compat.neural_compressor.onnx_quantization import quantize

    return quantize(model, conf, batches, evaluation)


def check_kind(model: Any) -> None:
    """Raise UsageError unless it is an ONNX model; says what quantizes other models."""
    kind = kind_of(model)
    if kind is not Kind.ONNX:
        raise UsageError(
            f"int8 by this interface is for ONNX models, and this one is of {kind.value}",
            fix=_ELSEWHERE[kind],
        )


def no_data(argument: str) -> UsageError:
    """The error for a call without data; ``argument`` is the one that should give it."""
    return UsageError(
        "int8 needs the ranges of the model's values, and there is no data",
        fix=f"give {argument}: batches (inputs, labels)",
    )
