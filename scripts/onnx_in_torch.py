"""Runs an ONNX model: its float ops in PyTorch in one type, integer ops in ONNX's reference.

For ``fidelity.py`` it is a second real engine with low-precision kernels. It has only the ops
of the models that are measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference.op_run import OpRun
from onnx.reference.ops import load_op
from torch.nn import functional as tf

Tensor = torch.Tensor


class TorchModel:
    """A model whose weights and activations are in ``dtype``; its outputs are fp32."""

    def __init__(self, path: str, dtype: torch.dtype, device: str = "cpu") -> None:
        self.graph = onnx.load(path).graph
        self.dtype = dtype
        self.device = device
        self.constants: dict[str, Any] = {
            t.name: self._in(numpy_helper.to_array(t)) for t in self.graph.initializer
        }

    @torch.no_grad()
    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs, in order."""
        values = dict(self.constants) | {k: self._in(v) for k, v in feeds.items()}
        for node in self.graph.node:
            arguments = [values[name] if name else None for name in node.input]
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            found = self._call(node, arguments, attributes)
            for name, value in zip(node.output, found, strict=False):
                values[name] = value
        return [values[o.name].float().cpu().numpy() for o in self.graph.output]

    def _in(self, array: np.ndarray) -> Any:
        if array.dtype == np.float32:
            return torch.from_numpy(np.array(array)).to(self.device, self.dtype)
        return np.asarray(array)

    def _call(
        self, node: onnx.NodeProto, arguments: list[Any], attributes: dict[str, Any]
    ) -> list[Any]:
        if node.op_type == "Constant":
            return [self._in(numpy_helper.to_array(attributes["value"]))]
        if node.op_type == "Cast":
            return [self._cast(arguments[0], attributes["to"])]
        if any(isinstance(a, Tensor) for a in arguments):
            return [OPS[node.op_type](arguments, attributes)]
        kind: type[OpRun] = load_op("", node.op_type, 17)
        runner = kind(node, _PARAMETERS)
        return list(runner.run(*arguments))

    def _cast(self, value: Any, to: int) -> Any:
        if to == onnx.TensorProto.FLOAT:
            if isinstance(value, Tensor):
                return value.to(self.dtype)
            return self._in(np.asarray(value).astype(np.float32))
        array = value.float().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        return array.astype(onnx.helper.tensor_dtype_to_np_dtype(to))


def _ints(value: Any) -> list[int]:
    return [int(v) for v in np.asarray(value).ravel()]


def _slice(arguments: list[Any], _: dict[str, Any]) -> Tensor:
    x, starts, ends = arguments[0], _ints(arguments[1]), _ints(arguments[2])
    axes = _ints(arguments[3]) if len(arguments) > 3 else list(range(len(starts)))
    steps = _ints(arguments[4]) if len(arguments) > 4 else [1] * len(starts)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _pad(arguments: list[Any], _: dict[str, Any]) -> Tensor:
    pads = _ints(arguments[1])
    rank = len(pads) // 2
    flat = [p for i in reversed(range(rank)) for p in (pads[i], pads[i + rank])]
    return tf.pad(arguments[0], flat)


def _conv(arguments: list[Any], attributes: dict[str, Any]) -> Tensor:
    pads = attributes.get("pads", [0, 0, 0, 0])
    return tf.conv2d(
        arguments[0],
        arguments[1],
        arguments[2] if len(arguments) > 2 else None,
        stride=attributes.get("strides", [1, 1]),
        padding=tuple(pads[:2]),
        groups=attributes.get("group", 1),
    )


def _gemm(arguments: list[Any], attributes: dict[str, Any]) -> Tensor:
    weight = arguments[1] if attributes.get("transB") else arguments[1].T
    return tf.linear(arguments[0], weight, arguments[2])


def _reduce(function: Callable[..., Tensor]) -> Callable[[list[Any], dict[str, Any]], Tensor]:
    def call(arguments: list[Any], attributes: dict[str, Any]) -> Tensor:
        axes = attributes.get("axes") or _ints(arguments[1])
        return function(
            arguments[0], dim=list(axes), keepdim=bool(attributes.get("keepdims", 1))
        )

    return call


def _reshape(arguments: list[Any], _: dict[str, Any]) -> Tensor:
    x, shape = arguments[0], _ints(arguments[1])
    return x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(shape)])


def _where(arguments: list[Any], _: dict[str, Any]) -> Tensor:
    condition = torch.from_numpy(np.asarray(arguments[0]))
    return torch.where(condition, *(a for a in arguments[1:]))


_PARAMETERS: dict[str, Any] = {
    "log": lambda *_: None,
    "opsets": {"": 17},
    "verbose": 0,
    "new_ops": None,
}

OPS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": lambda a, _: a[0] @ a[1],
    "Add": lambda a, _: a[0] + a[1],
    "Sub": lambda a, _: a[0] - a[1],
    "Mul": lambda a, _: a[0] * a[1],
    "Div": lambda a, _: a[0] / a[1],
    "Pow": lambda a, _: a[0] ** a[1],
    "Sqrt": lambda a, _: a[0].sqrt(),
    "Erf": lambda a, _: a[0].erf(),
    "Relu": lambda a, _: a[0].relu(),
    "Softmax": lambda a, k: a[0].softmax(k.get("axis", -1)),
    "LayerNormalization": lambda a, k: tf.layer_norm(
        a[0], a[1].shape, a[1], a[2], k.get("epsilon", 1e-5)
    ),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "ReduceL2": _reduce(torch.linalg.vector_norm),
    "Transpose": lambda a, k: a[0].permute(*k["perm"]),
    "Reshape": _reshape,
    "Flatten": lambda a, _: a[0].flatten(1),
    "Slice": _slice,
    "Pad": _pad,
    "Concat": lambda a, k: torch.cat(a, k["axis"]),
    "Squeeze": lambda a, _: a[0].squeeze(tuple(_ints(a[1]))),
    "Unsqueeze": lambda a, _: a[0][(slice(None),) * _ints(a[1])[0] + (None,)],
    "Gather": lambda a, k: (
        a[0]
        .index_select(
            k.get("axis", 0), torch.from_numpy(np.array(a[1]).ravel()).to(a[0].device)
        )
        .reshape(
            *a[0].shape[: k.get("axis", 0)],
            *np.asarray(a[1]).shape,
            *a[0].shape[k.get("axis", 0) + 1 :],
        )
    ),
    "Expand": lambda a, _: a[0] + torch.zeros(_ints(a[1]), dtype=a[0].dtype),
    "Clip": lambda a, _: a[0].clamp(min=a[1], max=a[2] if len(a) > 2 else None),
    "Where": _where,
    "Identity": lambda a, _: a[0],
    "Shape": lambda a, _: np.array(a[0].shape, dtype=np.int64),
}
