"""``fit``: Intel Neural Compressor's entry point, done by finecast."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from finecast.compat.neural_compressor.config import (
    MixedPrecisionConfig,
    OpDict,
    keeps_fp32,
)
from finecast.compat.neural_compressor.fallback import Fallback
from finecast.compat.neural_compressor.fit_subject import FitSubject, Result
from finecast.compat.neural_compressor.frameworks import Kind, kind_of
from finecast.errors import EngineError, ModelError, UsageError
from finecast.naming import unknown_name
from finecast.numbers.formats import Format

EvalFunc = Callable[[Any], float]

_ITEX: Final = (
    "backend 'itex': Intel's extension for TensorFlow is archived, and the bf16 kernels it"
    ' had for CPUs are TensorFlow\'s own (oneDNN): converted as with backend="default"'
)
# Backends of the matrix in INC's documentation that finecast does not drive: why, and what
# to do.
_UNSUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "ipex": (
        "Intel's extension for PyTorch is discontinued; its kernels are in PyTorch",
        'use backend="default"',
    ),
    "onnxrt_dml_ep": (
        "finecast does not drive DirectML, which has no bf16",
        'give DirectML the file that finecast.convert(model, "low.onnx", "all:fp16") writes',
    ),
}


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
        An object with ``.model`` and ``.save(path)``, of an ``nn.Module`` one that is a
        module itself; None where no trial keeps the accuracy. A model without any matrix
        product or convolution in the low format is never a result: it would gain nothing.

    Args:
        model: An ``nn.Module``, a ModelProto, a Keras model, or the path of an ONNX file, a
            SavedModel, a frozen ``.pb`` or an MXNet ``-symbol.json``.
        conf: The settings.
        eval_func: Accuracy of an ``nn.Module``, ModelProto (or path) or TensorFlow function.
        eval_dataloader: Batches ``(inputs, labels)``; with ``eval_metric``.
        eval_metric: ``update(predictions, labels)``, ``result()`` and ``reset()``.
        config: Another name of ``conf``.

    Raises:
        UsageError: If the settings cannot be followed here; says why.
        EngineError: If the device is slower in the low format than in fp32.
        ModelError: If no op could be converted.
    """
    settings = _settings(conf or config or MixedPrecisionConfig())
    low = settings.low()
    loader = _loader(eval_dataloader)
    _check(settings, eval_func, loader, eval_metric)
    evaluated = eval_func is not None or loader is not None
    subject = _subject(model, settings, low, loader)
    types = _selected(subject, settings, low)
    _check_speed(settings, low, subject)
    for text in settings.without_effect(evaluated=evaluated):
        warnings.warn(f"without effect: {text}", stacklevel=2)
    fixed = frozenset(subject.types) - frozenset(types)
    if not evaluated:
        result = subject.build(fixed)
        if not result.products:
            raise _no_gain(low)
        return result
    evaluate = _evaluation(subject, eval_func, loader, eval_metric)
    search: Fallback[Result] = Fallback(
        types=types,
        build=lambda kept: subject.build(kept | fixed),
        counts=lambda result: result.products > 0,
        evaluate=lambda result: evaluate(result.model),
        criterion=settings.accuracy_criterion.to_criterion(),
        tuning=settings.tuning_criterion,
        quant_level=settings.quant_level,
    )
    found = search.search(evaluate(subject.original))
    if not search.scores:
        raise _no_gain(low)
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
        fix="see what the rules say: finecast.torch.convert, or finecast explain",
    )


def _check(
    settings: MixedPrecisionConfig,
    eval_func: EvalFunc | None,
    dataloader: Iterable[Any] | None,
    metric: Any,
) -> None:
    settings.check()
    if settings.backend in _UNSUPPORTED:
        reason, fix = _UNSUPPORTED[settings.backend]
        raise UsageError(f"backend {settings.backend!r}: {reason}", fix=fix)
    if eval_func is None and (dataloader is None) != (metric is None):
        raise UsageError(
            "an evaluation needs both eval_dataloader and eval_metric",
            fix="give both, or eval_func",
        )
    lacking = [n for n in ("reset", "update", "result") if not hasattr(metric, n)]
    if eval_func is None and metric is not None and lacking:
        raise UsageError(
            f"eval_metric {metric!r} has no {lacking[0]}()",
            fix="give an object with reset(), update(predictions, labels) and result()",
        )


def _loader(dataloader: Iterable[Any] | None) -> Iterable[Any] | None:
    """Batches for every trial: what can be gone through but once is kept."""
    if dataloader is None or iter(dataloader) is not dataloader:
        return dataloader
    return list(dataloader)


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
    """The hardware gate: by running, not by CPUID; ``FORCE_BF16=1`` opens it."""
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
    """Ops that neither dict keeps in fp32.

    Raises:
        UsageError: If an entry matches no op of the model, or no op is left.
    """
    by_name = _kept(settings.op_name_dict, tuple(subject.known), low, "op_name_dict")
    kinds = tuple(dict.fromkeys(subject.known.values()))
    by_type = _kept(settings.op_type_dict, kinds, low, "op_type_dict")
    left = {
        name: kind
        for name, kind in subject.types.items()
        if name not in by_name and kind not in by_type
    }
    if not left and subject.types:
        raise UsageError(
            "nothing is left to convert", fix="check op_name_dict and op_type_dict"
        )
    return left


def _kept(
    entries: OpDict | None, known: tuple[str, ...], low: Format, where: str
) -> frozenset[str]:
    """What the entries, each a regular expression for all of a name, keep in fp32."""
    found: set[str] = set()
    for pattern, setting in (entries or {}).items():
        try:
            matching = [name for name in known if re.fullmatch(pattern, name)]
        except re.error:
            matching = []
        matching = matching or [name for name in known if name == pattern]
        if not matching:
            raise unknown_name(pattern, known, what="op", where=where)
        if keeps_fp32(setting, low):
            found.update(matching)
    return frozenset(found)


def _evaluation(
    subject: FitSubject,
    eval_func: EvalFunc | None,
    dataloader: Iterable[Any] | None,
    metric: Any,
) -> EvalFunc:
    if eval_func is not None:
        return lambda model: _number(eval_func(model), "eval_func")

    def evaluate(model: Any) -> float:
        assert dataloader is not None
        predict = subject.predictor(model)
        metric.reset()
        for inputs, labels in dataloader:
            metric.update(predict(inputs), labels)
        return _number(metric.result(), "eval_metric")

    return evaluate


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"it gave {value!r}, and an accuracy is a number", where=where, fix="return one"
        ) from error
