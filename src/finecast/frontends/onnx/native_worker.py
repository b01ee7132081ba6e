"""onnx's C++ passes over bytes.

``native`` has them run in a ``worker_process``. This file imports nothing of finecast, so that
the process starts as fast as onnx does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import onnx
import onnx.inliner
from onnx import version_converter


def _infer(message: bytes, data_prop: int) -> bytes:
    done = onnx.shape_inference.infer_shapes(message, data_prop=bool(data_prop))
    return done.SerializeToString()


def _convert(message: bytes, version: int) -> bytes:
    model = onnx.ModelProto.FromString(message)
    return version_converter.convert_version(model, version).SerializeToString()


def _inline(message: bytes) -> bytes:
    model = onnx.ModelProto.FromString(message)
    done = onnx.inliner.inline_local_functions(model, convert_version=True)
    return done.SerializeToString()


def _check(path: bytes) -> bytes:
    onnx.checker.check_model(os.fsdecode(path), full_check=True)
    return b""


# By name: functions of a serialized model, or of a file's path, that return serialized models.
PASSES: Final[dict[str, Callable[..., bytes]]] = {
    "infer": _infer,
    "convert": _convert,
    "inline": _inline,
    "check": _check,
}


def answer(
    request: Mapping[str, Any], payload: bytes, *_: object
) -> tuple[dict[str, str], bytes]:
    """Run one pass; raises what it raises."""
    return {"status": "done"}, PASSES[request["pass"]](payload, **request["options"])
