"""Which framework a model is of, and what to do with models that ``fit`` does not take."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from finecast.errors import UsageError

_CHECKPOINT: Final = (
    "a checkpoint or an old format of TensorFlow's",
    "load it, and give the Keras model, or a SavedModel of it",
)
_TFLITE: Final = (
    "a TensorFlow Lite model",
    "use finecast.convert or finecast.tune, or give the SavedModel that it was made from",
)
_JAX: Final = ("a JAX model", "export it to ONNX (pip install jax2onnx), and give that file")
_OPENVINO: Final = (
    "an OpenVINO model",
    "use finecast.convert or finecast.tune, or give what it was made from (ONNX, nn.Module)",
)
_STATE: Final = (
    "a file of PyTorch's",
    "build the nn.Module, load the file, and give the module",
)
_PROGRAM: Final = (
    "an exported program",
    "convert it with: finecast convert model.pt2 -o low.pt2, or finecast tune",
)
_PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "jax": _JAX,
    "flax": _JAX,
    "openvino": _OPENVINO,
}
_SUFFIXES: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys((".h5", ".ckpt", ".meta"), _CHECKPOINT),
    ".tflite": _TFLITE,
    **dict.fromkeys((".pt", ".pth", ".bin", ".safetensors"), _STATE),
    ".pt2": _PROGRAM,
    ".xml": _OPENVINO,
}


class Kind(Enum):
    """A framework whose models ``fit`` takes."""

    ONNX = "ONNX"
    TORCH = "PyTorch"
    TENSORFLOW = "TensorFlow"
    MXNET = "MXNet"


_OTHER_FILES: Final = {
    **dict.fromkeys((".pb", ".keras"), Kind.TENSORFLOW),
    **dict.fromkeys((".params", ".json"), Kind.MXNET),
}
_OTHER_PACKAGES: Final = {
    **dict.fromkeys(("tensorflow", "keras", "tf_keras"), Kind.TENSORFLOW),
    "mxnet": Kind.MXNET,
}


def kind_of(model: Any) -> Kind:
    """The framework of ``model``.

    Raises:
        UsageError: If ``fit`` does not take such models; says what to do next.
    """
    if isinstance(model, str | Path):
        path = Path(model)
        other = _SUFFIXES.get(path.suffix.lower())
        if (path / "saved_model.pb").is_file():
            return Kind.TENSORFLOW
        if other is not None:
            raise _unread(str(path), other)
        return _OTHER_FILES.get(path.suffix.lower(), Kind.ONNX)
    if type(model).__name__ == "ModelProto":
        return Kind.ONNX
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return Kind.TORCH
    for base in type(model).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _OTHER_PACKAGES:
            return _OTHER_PACKAGES[package]
        other = _PACKAGES.get(package)
        if other is not None:
            raise _unread(type(model).__name__, other)
    known = "an ONNX model or path"
    if importlib.util.find_spec("torch") is not None:
        known = f"an nn.Module, {known}"
    raise UsageError(f"cannot convert a {type(model).__name__}", fix=f"give {known}")


def _unread(model: str, other: tuple[str, str]) -> UsageError:
    what, fix = other
    return UsageError(f"{what}, which fit does not take", where=model, fix=fix)
