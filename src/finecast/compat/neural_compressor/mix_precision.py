"""``fit``: Intel Neural Compressor's entry point, done by finecast."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from finecast.compat.neural_compressor.config import (
    MixedPrecisionConfig,
    OpDict,
    keeps_fp32,
)
from finecast.compat.neural_compressor.fallback import Fallback
from finecast.errors import EngineError, ModelError, UsageError
from finecast.formats import Format

if TYPE_CHECKING:
    from finecast.compat.neural_compressor.subjects import Subject

EvalFunc = Callable[[Any], float]

# Backends of the matrix in INC's documentation that finecast does not drive, and why.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "ipex": "Intel's extension for PyTorch is discontinued; its kernels are in PyTorch",
    "itex": "there is no TensorFlow frontend",
    "onnxrt_dml_ep": "DirectML has no bf16",
}


class Result(Protocol):
    """What ``fit`` returns."""

    @property
    def model(self) -> Any:
        """The converted model."""
        ...

    @property
    def lowered(self) -> int:
        """How many ops (or modules) are not fp32 any more."""
        ...

    def save(self, root: str | Path) -> None:
        """Write the model to ``root``."""
        ...


def fit(
    model: Any,
    conf: MixedPrecisionConfig | None = None,
    eval_func: EvalFunc | None = None,
    eval_dataloader: Iterable[Any] | None = None,
    eval_metric: Any = None,
    *,
    config: MixedPrecisionConfig | None = None,
) -> Result | None:
    """Convert ``model``; where an evaluation is given, keep its accuracy.

    Returns:
        An object with ``.model`` and ``.save(path)``; None where no trial keeps the
        accuracy. A model that is all fp32 is never a result.

    Args:
        model: An ``nn.Module``, an ONNX ModelProto, or the path of an ONNX file.
        conf: The settings.
        eval_func: Accuracy of a model.
        eval_dataloader: Batches ``(inputs, labels)``; with ``eval_metric``.
        eval_metric: ``update(predictions, labels)``, ``result()`` and ``reset()``.
        config: Another name of ``conf``.

    Raises:
        UsageError: If the settings cannot be followed here; says why.
        EngineError: If the device is slower in the low format than in fp32.
        ModelError: If no op could be converted.
    """
    settings = conf or config or MixedPrecisionConfig()
    low = settings.low()
    _check(settings, eval_func, eval_dataloader, eval_metric)
    subject = _subject(model, settings, low, eval_dataloader)
    _check_speed(settings, low, subject)
    types = _selected(subject.types, settings, low)
    if not types:
        raise UsageError(
            "nothing is left to convert", fix="check op_name_dict and op_type_dict"
        )
    fixed = frozenset(subject.types) - frozenset(types)
    if eval_func is None and eval_dataloader is None:
        result = subject.build(fixed)
        if not result.lowered:
            raise ModelError(
                f"no op of the model could be converted to {low.label}",
                fix="see what the rules say: finecast.torch.convert, or finecast explain",
            )
        return result
    evaluate = _evaluation(subject, eval_func, eval_dataloader, eval_metric)
    search: Fallback[Result] = Fallback(
        types=types,
        build=lambda kept: subject.build(kept | fixed),
        counts=lambda result: result.lowered > 0,
        evaluate=lambda result: evaluate(result.model),
        criterion=settings.accuracy_criterion.to_criterion(),
        tuning=settings.tuning_criterion,
    )
    return search.search(evaluate(subject.original))


def _check(
    settings: MixedPrecisionConfig,
    eval_func: EvalFunc | None,
    dataloader: Iterable[Any] | None,
    metric: Any,
) -> None:
    if settings.backend in _UNSUPPORTED:
        raise UsageError(
            f"backend {settings.backend!r}: {_UNSUPPORTED[settings.backend]}",
            fix='use backend="default"',
        )
    if eval_func is None and (dataloader is None) != (metric is None):
        raise UsageError(
            "an evaluation needs both eval_dataloader and eval_metric",
            fix="give both, or eval_func",
        )
    if settings.tuning_criterion.objective != "performance":
        raise UsageError(
            f"objective {settings.tuning_criterion.objective!r} is not supported",
            fix='use "performance"',
        )


def _subject(
    model: Any,
    settings: MixedPrecisionConfig,
    low: Format,
    dataloader: Iterable[Any] | None,
) -> Subject:
    if isinstance(model, str | Path) or _is_proto(model):
        from finecast.compat.neural_compressor.onnx_subject import OnnxSubject

        return OnnxSubject.of(model, settings, low)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from finecast.compat.neural_compressor.torch_subject import TorchSubject

        return TorchSubject.of(model, settings, low, dataloader)
    known = "an ONNX model or path"
    if importlib.util.find_spec("torch") is not None:
        known = f"an nn.Module, {known}"
    raise UsageError(f"cannot convert a {type(model).__name__}", fix=f"give {known}")


def _is_proto(model: object) -> bool:
    return type(model).__name__ == "ModelProto"


def _check_speed(settings: MixedPrecisionConfig, low: Format, subject: Subject) -> None:
    """The hardware gate: by running, not by CPUID; ``FORCE_BF16=1`` opens it."""
    if low is Format.BF16 and os.environ.get("FORCE_BF16") == "1":
        return
    reason = subject.slow(low)
    if reason:
        raise EngineError(
            f"{low.label} on {settings.device}: {reason}",
            fix="set FORCE_BF16=1 to convert all the same"
            if low is Format.BF16
            else "use precisions='bf16'",
        )


def _selected(
    types: Mapping[str, str], settings: MixedPrecisionConfig, low: Format
) -> dict[str, str]:
    """Ops that neither dict keeps in fp32."""

    def kept(text: str, entries: OpDict) -> bool:
        return any(
            re.fullmatch(pattern, text) and keeps_fp32(setting, low)
            for pattern, setting in entries.items()
        )

    return {
        name: kind
        for name, kind in types.items()
        if not kept(name, settings.op_name_dict) and not kept(kind, settings.op_type_dict)
    }


def _evaluation(
    subject: Subject,
    eval_func: EvalFunc | None,
    dataloader: Iterable[Any] | None,
    metric: Any,
) -> EvalFunc:
    if eval_func is not None:
        return lambda model: float(eval_func(model))

    def evaluate(model: Any) -> float:
        assert dataloader is not None
        metric.reset()
        for inputs, labels in dataloader:
            metric.update(subject.predict(model, inputs), labels)
        return float(metric.result())

    return evaluate
