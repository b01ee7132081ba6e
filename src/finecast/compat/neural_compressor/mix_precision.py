"""``fit``: Intel Neural Compressor's entry point, done by finecast."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

from finecast.compat.neural_compressor import quantization
from finecast.compat.neural_compressor.config import MixedPrecisionConfig, is_frozen
from finecast.compat.neural_compressor.evaluation import EvalFunc, ModelEvaluation
from finecast.compat.neural_compressor.fallback import Fallback
from finecast.compat.neural_compressor.fit_subject import FitSubject, Result
from finecast.compat.neural_compressor.frameworks import Kind, kind_of
from finecast.compat.neural_compressor.op_dicts import restrictions
from finecast.errors import EngineError, ModelError, UsageError
from finecast.numbers.formats import Format
from finecast.pipeline.workload import check_finite

_ITEX: Final = (
    "backend 'itex': Intel's extension for TensorFlow is archived, and the bf16 kernels it"
    ' had for CPUs are TensorFlow\'s own (oneDNN): converted as with backend="default"'
)


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
            SavedModel, a frozen ``.pb`` or an MXNet ``-symbol.json``.
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
    settings = _settings(conf or config or MixedPrecisionConfig())
    if settings.quantizes:
        return _quantized(model, settings, eval_func, eval_dataloader, eval_metric)
    low = settings.low()
    settings.check()
    evaluation = ModelEvaluation.of(eval_func, eval_dataloader, eval_metric)
    subject = _subject(model, settings, low, evaluation.batches)
    types = _selected(subject, settings, low)
    _check_speed(settings, low, subject)
    frozen = is_frozen(model)
    for text in settings.without_effect(evaluated=evaluation.given, frozen=frozen):
        warnings.warn(f"without effect: {text}", stacklevel=2)
    if not evaluation.given:
        result = subject.build(frozenset(subject.types) - frozenset(types))
        if not result.products:
            raise _no_gain(low)
        return result
    return _searched(subject, settings, types, evaluation)


def _quantized(
    model: Any,
    settings: MixedPrecisionConfig,
    eval_func: EvalFunc | None,
    eval_dataloader: Iterable[Any] | None,
    eval_metric: Any,
) -> Any:
    """``quantization.fit``, calibrated on ``eval_dataloader``."""
    quantization.check_kind(model)
    conf = settings.quantization()
    if eval_dataloader is None:
        raise quantization.no_data("eval_dataloader")
    return quantization.fit(
        model,
        conf,
        eval_dataloader,
        eval_func=eval_func,
        eval_dataloader=None if eval_metric is None else eval_dataloader,
        eval_metric=eval_metric,
    )


def _searched(
    subject: FitSubject,
    settings: MixedPrecisionConfig,
    types: Mapping[str, str],
    evaluation: ModelEvaluation,
) -> Result | None:
    """The best model that keeps the accuracy, by reverting ops of ``types`` to fp32."""
    fixed = frozenset(subject.types) - frozenset(types)

    def score(native: Any) -> float:
        return evaluation.score(native, subject.predictor)

    search: Fallback[Result] = Fallback(
        types=types,
        build=lambda kept: subject.build(kept | fixed),
        counts=lambda result: result.products > 0,
        evaluate=lambda result: score(result.model),
        criterion=settings.accuracy_criterion.to_criterion(),
        tuning=settings.tuning_criterion,
        quant_level=settings.quant_level,
    )
    baseline = score(subject.original)
    check_finite(baseline, "the evaluation")
    search.criterion.check(baseline)
    found = search.search(baseline)
    if not search.scores:
        raise _no_gain(settings.low())
    if found is None:
        better = max if search.criterion.higher_is_better else min
        best = better(search.scores.values())
        warnings.warn(
            f"no converted model: fp32 has {baseline:.6g}, and none of {len(search.scores)}"
            f" trials kept it, the best with {best:.6g}; accuracy_criterion says how much may"
            " be lost",
            stacklevel=3,
        )
    return found


def _settings(given: object) -> MixedPrecisionConfig:
    if not isinstance(given, MixedPrecisionConfig):
        raise UsageError(
            f"conf is a {type(given).__name__}", fix="give a MixedPrecisionConfig"
        )
    return given


def _no_gain(low: Format) -> ModelError:
    return ModelError(
        f"no matrix product or convolution could be converted to {low.label}, and other ops"
        " gain nothing by it",
        fix="see what the rules say: finecast explain MODEL NODE",
    )


def _subject(
    model: Any,
    settings: MixedPrecisionConfig,
    low: Format,
    dataloader: Iterable[Any] | None,
) -> FitSubject:
    kind = kind_of(model)
    if settings.backend == "itex":
        if kind is not Kind.TENSORFLOW:
            raise UsageError(
                "backend 'itex' is for TensorFlow models", fix='use backend="default"'
            )
        warnings.warn(_ITEX, stacklevel=3)
    if kind is Kind.MXNET:
        from finecast.compat.neural_compressor.mxnet_export import exported

        model, kind = exported(model, settings.example_inputs), Kind.ONNX
    if kind is Kind.TENSORFLOW:
        _require("tensorflow", "pip install 'finecast[tensorflow]'")
        from finecast.compat.neural_compressor.tensorflow_fit import TensorFlowFit

        return TensorFlowFit.of(model, settings, low)
    if kind is Kind.ONNX:
        from finecast.compat.neural_compressor.onnx_fit import OnnxFit

        return OnnxFit.of(model, settings, low)
    from finecast.compat.neural_compressor.torch_fit import TorchFit

    return TorchFit.of(model, settings, low, dataloader)


def _require(package: str, install: str) -> None:
    """Raise EngineError unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise EngineError(f"a model of {package} needs {package}", fix=install)


def _check_speed(settings: MixedPrecisionConfig, low: Format, subject: FitSubject) -> None:
    """Raise EngineError if ``low``, measured, gains nothing here; ``FORCE_BF16=1`` skips this.

    INC decides by the CPU's feature flags, and has the same variable.
    """
    if os.environ.get(f"FORCE_{low.name}") == "1":
        return
    reason = subject.slow(low)
    if reason:
        other = "" if low is Format.BF16 else "use precisions='bf16', or "
        raise EngineError(
            f"{low.label} on {settings.device}: {reason}",
            fix=f"{other}set FORCE_{low.name}=1 to convert all the same",
        )


def _selected(
    subject: FitSubject, settings: MixedPrecisionConfig, low: Format
) -> dict[str, str]:
    """The convertible ops, by name with their types, that neither dict keeps in fp32.

    Raises:
        UsageError: If an entry matches no op of the model, or no op is left.
    """
    by_name = restrictions(settings.op_name_dict, tuple(subject.known), "op_name_dict")
    kinds = tuple(dict.fromkeys(subject.known.values()))
    by_type = restrictions(settings.op_type_dict, kinds, "op_type_dict")
    anything = frozenset({low})
    left = {
        name: kind
        for name, kind in subject.types.items()
        if low in by_name.get(name, anything) & by_type.get(kind, anything)
    }
    if not left and subject.types:
        raise UsageError(
            "nothing is left to convert", fix="check op_name_dict and op_type_dict"
        )
    return left
