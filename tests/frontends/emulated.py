"""Runs a model in numpy and rounds as a plan says: what the converted model must equal.

Law: a node in a low format reads its following inputs rounded to it, computes, and rounds its
results; a tie (phi) in a low format rounds what flows into it. Everything else is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to

Array = NDArray[Any]
Env = dict[str, Any]

_TYPES: Final[Mapping[int, Any]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.DOUBLE: np.float64,
}


class Emulator:
    """A model, the graph read from it, and formats by node name."""

    def __init__(
        self, model: onnx.ModelProto, graph: Graph, formats: Mapping[str, Format]
    ) -> None:
        self.model = model
        self.formats = formats
        self.nodes = {n.name: n for n in graph.nodes}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The model's outputs, in fp32."""
        env = self.graph(self.model.graph, dict(feeds))
        return [env[o.name] for o in self.model.graph.output]

    def graph(self, graph: onnx.GraphProto, env: Env) -> Env:
        for tensor in graph.initializer:
            env[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            results = self.node(node, env)
            env.update(zip(node.output, results, strict=True))
        return env

    def node(self, node: onnx.NodeProto, env: Env) -> Sequence[Any]:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            return [numpy_helper.to_array(attributes["value"])]
        inputs = [env[i] if i else None for i in node.input]
        if node.op_type in _CONTROL:
            return getattr(self, f"_{node.op_type.lower()}")(
                node.name, inputs, attributes, env
            )
        neutral = self.nodes.get(node.name)
        if neutral is None:  # computed from constants alone, in the model's own types
            if node.op_type == "Cast":
                return [self._cast(inputs[0], attributes["to"], None, None)]
            return _OPS[node.op_type](inputs, attributes)
        fmt = self.formats.get(node.name)
        if fmt is not None:
            inputs = [
                _round(a, fmt) if follows else a
                for a, follows in zip(inputs, neutral.follows_in, strict=True)
            ]
        if node.op_type == "Cast":
            return [self._cast(inputs[0], attributes["to"], neutral, fmt)]
        results = _OPS[node.op_type](inputs, attributes)
        if fmt is None:
            return results
        return [
            _round(a, fmt) if f else a
            for a, f in zip(results, neutral.follows_out, strict=False)
        ] + list(results[len(neutral.follows_out) :])

    @staticmethod
    def _cast(array: Any, to: int, neutral: Node | None, fmt: Format | None) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            if fmt is not None and neutral and fmt is not neutral.format:
                return np.asarray(array).astype(fmt.dtype).astype(np.float32)
            return np.asarray(array).astype(_TYPES[to])

    def _tie(self, owner: str, port: str, array: Array) -> Array:
        fmt = self.formats.get(f"{owner}/phi_{port}")
        return array if fmt is None else _round(array, fmt)

    def _if(self, name: str, inputs: list[Any], attributes: Any, env: Env) -> list[Any]:
        body = attributes["then_branch" if inputs[0] else "else_branch"]
        inner = self.graph(body, dict(env))
        return [self._tie(name, f"out{i}", inner[o.name]) for i, o in enumerate(body.output)]

    def _loop(self, name: str, inputs: list[Any], attributes: Any, env: Env) -> list[Any]:
        body, state = attributes["body"], self._tie(name, "state0", inputs[2])
        shown: list[Array] = []
        for turn in range(int(np.asarray(inputs[0]).reshape(()))):
            start = [np.int64(turn), np.bool_(True), state]
            given = {p.name: v for p, v in zip(body.input, start, strict=True)}
            inner = self.graph(body, env | given)
            state = self._tie(name, "state0", inner[body.output[1].name])
            shown.append(self._tie(name, "scan1", inner[body.output[2].name]))
        return [state, np.stack(shown)]

    def _scan(self, name: str, inputs: list[Any], attributes: Any, env: Env) -> list[Any]:
        body, state = attributes["body"], self._tie(name, "state0", inputs[0])
        shown: list[Array] = []
        for row in self._tie(name, "in1", inputs[1]):
            given = {body.input[0].name: state, body.input[1].name: row}
            inner = self.graph(body, env | given)
            state = self._tie(name, "state0", inner[body.output[0].name])
            shown.append(self._tie(name, "scan1", inner[body.output[1].name]))
        return [state, np.stack(shown)]


_CONTROL: Final = frozenset({"If", "Loop", "Scan"})


def _round(array: Any, fmt: Format) -> Any:
    """fp32 arrays only: others are not the plan's."""
    if not isinstance(array, (np.ndarray, np.generic)) or array.dtype != np.float32:
        return array
    return np.asarray(round_to(np.asarray(array, np.float32), fmt))


def _clip(inputs: list[Any], _: Any) -> list[Array]:
    low = inputs[1] if len(inputs) > 1 else None
    high = inputs[2] if len(inputs) > 2 else None
    return [np.clip(inputs[0], low, high)]


_OPS: Final[Mapping[str, Any]] = {
    "Relu": lambda i, _: [np.maximum(i[0], np.zeros((), i[0].dtype))],
    "Neg": lambda i, _: [np.negative(i[0])],
    "Abs": lambda i, _: [np.abs(i[0])],
    "Identity": lambda i, _: [i[0]],
    "Floor": lambda i, _: [np.floor(i[0])],
    "Transpose": lambda i, a: [np.transpose(i[0], a["perm"])],
    "Reshape": lambda i, _: [np.reshape(i[0], tuple(i[1]))],
    "Clip": _clip,
    "Add": lambda i, _: [i[0] + i[1]],
    "Sub": lambda i, _: [i[0] - i[1]],
    "Mul": lambda i, _: [i[0] * i[1]],
    "Max": lambda i, _: [np.maximum(i[0], i[1])],
    "Min": lambda i, _: [np.minimum(i[0], i[1])],
    "Less": lambda i, _: [i[0] < i[1]],
    "Where": lambda i, _: [np.where(i[0], i[1], i[2])],
    "Concat": lambda i, a: [np.concatenate(i, axis=a["axis"])],
    "Split": lambda i, a: np.split(i[0], 2, axis=a["axis"]),
    "Gather": lambda i, a: [np.take(i[0], i[1], axis=a["axis"])],
}
