"""ONNX models with fixed draws in place of random ops, to be run and never written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from finecast.frontends.onnx.types import bodies_in
from finecast.numbers.draws import LENGTH, normal, uniform

_TYPED: Final = frozenset({"RandomNormal", "RandomUniform"})
_LIKE: Final = frozenset({"RandomNormalLike", "RandomUniformLike", "Bernoulli"})
_RANDOM: Final = _TYPED | _LIKE | {"Multinomial"}
"""Ops that draw in any mode."""
FIXED_FROM: Final = 13
"""The first operation set in which draws can be stated by other ops: it has Range and Mod, by
which elements are numbered, Softmax is of one axis, and sums take axes as an input."""
_TRAINING: Final = 2
"""The input of a Dropout that is True in training."""
_CAST_LIKE: Final = 15
"""The first set in which draws have the type of what they are mixed with. It changes no op of
the two before it but by what an op can do besides: a model of theirs is read as one of it."""
_FLOAT, _INT32, _INT64 = 1, 6, 7
"""ONNX's numbers of types."""


def draws(kind: str, domain: str, *, training: bool) -> bool:
    """Whether an op draws at random.

    ``training`` says whether its third input is True: since operation set 12 a Dropout draws
    by it.
    """
    drawing = kind in _RANDOM or (kind == "Dropout" and training)
    return drawing and domain in ("", "ai.onnx")


def may_draw(model: onnx.ModelProto) -> bool:
    """Whether a model, which may lack its weights, seems to have a random op."""
    return any(map(_may_draw, (model.graph, *model.functions)))


def _may_draw(nodes: onnx.GraphProto | onnx.FunctionProto) -> bool:
    return any(
        draws(node.op_type, node.domain, training=len(node.input) > _TRAINING)
        or any(map(_may_draw, bodies_in(node)))
        for node in nodes.node
    )


def fix_draws(proto: onnx.ModelProto, folder: str = "") -> bool:
    """Put tables in place of random ops; returns whether there were any.

    A model of an operation set before 13 stays as it is.

    Args:
        proto: The model, which is changed. Its weights may lie in files.
        folder: That of these files.
    """
    stated = [o for o in proto.opset_import if o.domain in ("", "ai.onnx")]
    if not stated or stated[0].version < FIXED_FROM or not may_draw(proto):
        return False
    numbers = count()
    for nodes in (proto.graph, *proto.functions):
        _fix(nodes, numbers, folder)
    if not next(numbers):
        return False
    stated += (
        o for f in proto.functions for o in f.opset_import if o.domain == stated[0].domain
    )
    for one in stated:
        one.version = max(one.version, _CAST_LIKE)
    return True


def _fix(
    graph: onnx.GraphProto | onnx.FunctionProto, numbers: Iterator[int], folder: str
) -> None:
    true = _true_constants(graph, folder)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for body in bodies_in(node):
            _fix(body, numbers, folder)
        training = len(node.input) > _TRAINING and node.input[_TRAINING] in true
        if draws(node.op_type, node.domain, training=training):
            nodes += _Table(node, next(numbers)).nodes()
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _true_constants(
    graph: onnx.GraphProto | onnx.FunctionProto, folder: str
) -> frozenset[str]:
    """Names of the graph's constants that are True."""
    given = {t.name: t for t in getattr(graph, "initializer", ())}
    stated = (node for node in graph.node if node.op_type == "Constant")
    given |= {n.output[0]: a.t for n in stated for a in n.attribute if a.name == "value"}
    flags = (n for n, t in given.items() if t.data_type == TensorProto.BOOL and not t.dims)
    return frozenset(n for n in flags if bool(numpy_helper.to_array(given[n], folder)))


class _Table:
    """The nodes that stand for one random op."""

    def __init__(self, node: onnx.NodeProto, number: int) -> None:
        self._node, self._number = node, number
        self._stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self._made: list[onnx.NodeProto] = []
        self._base = f"{next(name for name in node.output if name)}/draw"

    def nodes(self) -> list[onnx.NodeProto]:
        """The last has the op's name."""
        kind = self._node.op_type
        if kind == "Dropout":
            self._dropout()
        elif kind == "Multinomial":
            self._multinomial()
        elif kind == "Bernoulli":
            chances = self._op("Cast", self._node.input[0], to=_FLOAT)
            hits = self._op("Less", self._uniform(self._shape()), chances)
            self._typed(hits)
        elif kind.startswith("RandomNormal"):
            start, scale = self._stated.get("mean", 0.0), self._stated.get("scale", 1.0)
            self._scaled(self._drawn(normal(self._number), self._shape()), scale, start)
        else:
            low, high = self._stated.get("low", 0.0), self._stated.get("high", 1.0)
            self._scaled(self._uniform(self._shape()), high - low, low)
        self._made[-1].name = self._node.name
        return self._made

    def _dropout(self) -> None:
        data, ratio, *_ = self._node.input
        ratio = ratio or self._floats(0.5)
        ratio = self._op("Cast", ratio, to=_FLOAT)
        drawn = self._uniform(self._shape())
        outputs = self._node.output
        mask = outputs[1] if len(outputs) > 1 and outputs[1] else f"{self._base}/kept"
        self._op("Not", self._op("Less", drawn, ratio), output=mask)
        kept = self._op("Cast", mask, to=_FLOAT)
        kept = self._op("Div", kept, self._op("Sub", self._floats(1.0), ratio))
        self._op("Mul", data, self._op("CastLike", kept, data), output=outputs[0])

    def _multinomial(self) -> None:
        """The first class up to which chances add up to more than what is drawn."""
        count_drawn = int(self._stated.get("sample_size", 1))
        read = self._op("Cast", self._node.input[0], to=_FLOAT)
        rows = self._op("Gather", self._op("Shape", read), self._ints([0]))
        shape = self._op("Concat", rows, self._ints([count_drawn]), axis=0)
        drawn = self._op("Unsqueeze", self._uniform(shape), self._ints([2]))
        chances = self._op("Softmax", read, axis=-1)
        sums = self._op("CumSum", chances, self._ints(1))
        passed = self._op("Less", self._op("Unsqueeze", sums, self._ints([1])), drawn)
        passed = self._op("Cast", passed, to=_INT64)
        drawn = self._op("ReduceSum", passed, self._ints([2]), keepdims=0)
        classes = self._op("Gather", self._op("Shape", read), self._ints(1))
        last = self._op("Sub", classes, self._ints(1))  # where rounded sums end below 1
        drawn = self._op("Min", drawn, last)
        kind = int(self._stated.get("dtype", _INT32))
        self._op("Cast", drawn, to=kind, output=self._node.output[0])

    def _shape(self) -> str:
        if self._node.op_type in _TYPED:
            return self._ints([*self._stated["shape"]])
        return self._op("Shape", self._node.input[0])

    def _uniform(self, shape: str) -> str:
        return self._drawn(uniform(self._number), shape)

    def _drawn(self, table: Any, shape: str) -> str:
        size = self._op("ReduceProd", shape, keepdims=0)
        every = self._op("Range", self._ints(0), size, self._ints(1))
        index = self._op("Mod", every, self._ints(LENGTH))
        flat = self._op("Gather", self._constant(table), index)
        return self._op("Reshape", flat, shape)

    def _scaled(self, drawn: str, scale: float, start: float) -> None:
        wide = self._op("Mul", drawn, self._floats(scale))
        self._typed(self._op("Add", wide, self._floats(start)))

    def _typed(self, value: str) -> None:
        """``value`` as the op's result, of its type: stated, or else that of its input."""
        output = self._node.output[0]
        kind = self._stated.get("dtype")
        if kind is None and self._node.op_type in _LIKE:
            self._op("CastLike", value, self._node.input[0], output=output)
        else:
            self._op("Cast", value, to=int(kind or _FLOAT), output=output)

    def _op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{self._base}/{len(self._made)}"
        made = helper.make_node(kind, inputs, [output], name=output, **attributes)
        self._made.append(made)
        return output

    def _constant(self, array: Any) -> str:
        return self._op("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def _ints(self, numbers: int | Sequence[int]) -> str:
        return self._constant(np.array(numbers, dtype=np.int64))

    def _floats(self, number: float) -> str:
        return self._constant(np.array(number, dtype=np.float32))
