"""Runs a model in one of three engines: ONNX Runtime, OpenVINO, onnx's reference."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from finecast.engines.onnxruntime import explain as onnxruntime_text
from finecast.frontends.openvino.messages import explain as openvino_text

Values: TypeAlias = Sequence[Any]
Runner: TypeAlias = Callable[[Path, Mapping[str, Any]], list[Any]]

logging.getLogger("onnx").setLevel(logging.CRITICAL)


class NotRunError(Exception):
    """The engine cannot load or run the model; the text is its reason, in one line."""


def by_onnxruntime(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    """ONNX Runtime on the CPU; ops without fp16 kernel compute in fp32 between casts."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except Exception as error:  # its exception classes share no base but Exception
        raise NotRunError(_reason(onnxruntime_text(error), path)) from error


def by_openvino(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    """OpenVINO on the CPU, which runs the types that the model states."""
    import openvino as ov

    if any(not isinstance(a, np.ndarray) or a.dtype.kind in "OUS" for a in feeds.values()):
        raise NotRunError("OpenVINO takes no sequences, optionals or strings")
    try:
        core = _openvino_core()
        model = core.read_model(str(path))
        compiled = core.compile_model(
            model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        )
        request = compiled.create_infer_request()
        # An op that does nothing, like Dropout, can take its input's name away.
        whole = len(compiled.inputs) == len(feeds)
        for port, default in zip(
            compiled.inputs, feeds if whole else repeat(None), strict=False
        ):
            name = next((n for n in port.get_names() if n in feeds), default)
            if name is not None:
                request.set_tensor(port, _openvino_tensor(ov, feeds[name]))
        request.infer()
        return [_openvino_array(request.get_tensor(port)) for port in compiled.outputs]
    except Exception as error:  # it raises RuntimeError, and nanobind what it likes
        raise NotRunError(_reason(openvino_text(error), path)) from error


def by_reference(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    """onnx's own reference implementation, in numpy and ml_dtypes."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return list(ReferenceEvaluator(str(path)).run(None, dict(feeds)))
    except Exception as error:  # each op raises what numpy raises
        raise NotRunError(_reason(str(error), path)) from error


ENGINES: Final[Mapping[str, tuple[tuple[str, Runner], ...]]] = {
    "fp16": (("ONNX Runtime", by_onnxruntime), ("onnx.reference", by_reference)),
    "bf16": (("OpenVINO", by_openvino), ("onnx.reference", by_reference)),
}

CONVERTED_FOR: Final = {"fp16": "onnxruntime", "bf16": "openvino"}
"""The engine that models are converted for: the first of ``ENGINES`` that has the format."""


def feeds_for(model: onnx.ModelProto, inputs: Values) -> dict[str, Any]:
    """Inputs by name; a default that is not given stays the model's."""
    weights = {t.name for t in model.graph.initializer}
    names = [v.name for v in model.graph.input if v.name not in weights]
    if len(names) < len(inputs):
        names = [v.name for v in model.graph.input]
    return dict(zip(names, inputs, strict=False))


_CORES: list[Any] = []


def _openvino_core() -> Any:
    if not _CORES:
        import openvino as ov

        _CORES.append(ov.Core())
    return _CORES[0]


def _openvino_tensor(ov: Any, array: Any) -> Any:
    data = np.ascontiguousarray(array).reshape(np.shape(array))
    if data.dtype == ml_dtypes.bfloat16:
        return ov.Tensor(data.view(np.uint16), data.shape, ov.Type.bf16)
    return ov.Tensor(data)


def _openvino_array(tensor: Any) -> Any:
    if tensor.element_type.get_type_name() == "bf16":
        raw = np.frombuffer(tensor.data.tobytes(), np.uint16).view(ml_dtypes.bfloat16)
        return raw.reshape(tuple(tensor.shape))
    return tensor.data.copy()


def _reason(text: str, path: Path) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = (lines or ["no reason given"])[0].replace(str(path), "the model")
    return first[:160].replace("|", "/")
