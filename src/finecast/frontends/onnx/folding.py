"""Values of ONNX models that are computed from constants alone, by onnx's reference evaluator.

Law: the shape of such a value follows from the shapes of what it is computed from, and from
the numbers of small constants such as axes; not from what the file states. So no more memory
is taken than ``ConstantFolding`` allows, whatever a hostile model states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.folding import WIDE, ConstantFolding
from finecast.frontends.onnx.constants import ComputedTensor, constant_reader, constant_tensor
from finecast.frontends.onnx.definitions import dtype_label
from finecast.frontends.onnx.editor import MARK
from finecast.ops import lookup

# The most elements of a constant that is read for the shape of another: axes, sizes, indices.
_MOST_READ: Final = 1 << 20
# Before opset 7 an op on two operands stated by attributes along which axis one is repeated.
_BROADCASTS_SINCE: Final = 7
# By their definition, results have the shape that the operands have when each is repeated.
_BROADCASTING: Final = frozenset(
    {"Identity", "Cast", "Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Reciprocal", "Sqrt"}
    | {"Exp", "Log", "Erf", "Sigmoid", "Tanh", "Softplus", "Relu", "Clip", "Sin", "Cos", "Pow"}
    | {"Add", "Sub", "Mul", "Div", "Min", "Max", "Sum", "Mean", "Where", "Not", "And", "Or"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)
# numpy computes their results as views: of operands that take no memory they take none.
_VIEWS: Final = frozenset(
    {"Flatten", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Unsqueeze"}
)
_REDUCTIONS: Final = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"}
    | {"ReduceSumSquare"}
)
# What numpy, onnx and onnx_ir raise on malformed ops: these stay ops, and are checked as such.
_MALFORMED: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class OnnxFolding:
    """Finds the values of a model that are computed from constants alone, node by node.

    Attributes:
        tensors: Their numbers, which are computed when they are read and never held.
    """

    def __init__(self, opset: int) -> None:
        self.tensors: dict[ir.Value, ir.TensorProtocol] = {}
        self._opset = opset
        self._folding: ConstantFolding[ir.Value] = ConstantFolding()

    def add(self, value: ir.Value) -> None:
        """Note ``value`` if it is a constant."""
        tensor = constant_tensor(value)
        if tensor is not None:
            self._folding.add(value, tensor.nbytes, dtype_label(ir.TensorType(tensor.dtype)))

    def fold(self, node: ir.Node) -> bool:
        """Whether ``node`` gives constants alone, of which floats are: it is no op then.

        What computes shapes and indices from constants is noted, too, but stays an op.
        """
        rule = _SHAPES.get(node.op_type)
        read = [v for v in node.inputs if v is not None]
        if (
            rule is None
            or node.domain not in ("", "ai.onnx")
            or any(key.startswith(MARK) for key in node.metadata_props)
            or self._opset < _BROADCASTS_SINCE
            or not (node.inputs and read and node.inputs[0] is read[0])
            or not all(v in self._folding for v in read)
            or any(v.is_graph_output() or v.dtype is None for v in node.outputs)
        ):
            return False
        tensors = [None if v is None else self._tensor(v) for v in node.inputs]
        try:
            shapes = rule(node, tensors, self._opset)
        except _MALFORMED:
            return False
        if not shapes or min(size for shape in shapes for size in (0, *shape)) < 0:
            return False
        first, others = self._tensor(read[0]), tensors[1:]
        model = _model(node, self._opset)
        constants = [
            ComputedTensor(
                first,
                partial(_computed, model, others, index),
                value.name or "",
                value.dtype or ir.DataType.FLOAT,
                ir.Shape(shape),
            )
            for index, (value, shape) in enumerate(zip(node.outputs, shapes, strict=True))
        ]
        outputs = {
            v: (t.nbytes, dtype_label(v.type))
            for v, t in zip(node.outputs, constants, strict=True)
        }
        if not self._folding.fold(lookup(f"onnx::{node.op_type}"), read, outputs):
            return False
        self.tensors.update(zip(node.outputs, constants, strict=True))
        return all(label in WIDE for _, label in outputs.values())

    def _tensor(self, value: ir.Value) -> ir.TensorProtocol:
        tensor = self.tensors.get(value) or constant_tensor(value)
        assert tensor is not None
        return tensor


def _computed(
    model: onnx.ModelProto,
    others: Sequence[ir.TensorProtocol | None],
    index: int,
    first: NDArray[Any],
) -> NDArray[Any]:
    """Result ``index`` of the op of ``model``, which reads ``first`` and the ``others``."""
    arrays = [None if t is None else constant_reader(t)() for t in others]
    return _evaluated(model, [first, *arrays])[index]


def _model(node: ir.Node, opset: int) -> onnx.ModelProto:
    """A model of the op alone: the node itself may be changed or removed by an edit."""
    proto = onnx.NodeProto(op_type=node.op_type)
    proto.input.extend("" if v is None else f"x{i}" for i, v in enumerate(node.inputs))
    proto.output.extend(f"y{i}" for i in range(len(node.outputs)))
    proto.attribute.extend(ir.to_proto(a) for a in node.attributes.values())
    graph = onnx.GraphProto(name="folded", node=[proto])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in proto.input if name)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in proto.output)
    return onnx.ModelProto(
        ir_version=onnx.IR_VERSION,
        graph=graph,
        opset_import=[onnx.OperatorSetIdProto(domain="", version=opset)],
    )


def _evaluated(
    model: onnx.ModelProto, arrays: Sequence[NDArray[Any] | None]
) -> list[NDArray[Any]]:
    from onnx.reference import ReferenceEvaluator

    feeds = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    with np.errstate(all="ignore"):
        results: Any = ReferenceEvaluator(model).run(None, feeds)
    return [np.asarray(r) for r in results]


# ------------------------------------------------------ the shapes of results, by type of op

_Tensors = Sequence[ir.TensorProtocol | None]
_Shapes = list[tuple[int, ...]]


def _sizes(tensor: ir.TensorProtocol | None) -> tuple[int, ...]:
    assert tensor is not None
    return tuple(tensor.shape.numpy())


def _integers(tensor: ir.TensorProtocol | None) -> NDArray[np.int64]:
    """The numbers of axes, sizes or indices."""
    if tensor is None or tensor.size > _MOST_READ:
        raise ValueError("more numbers than are read to find a shape")
    return np.asarray(constant_reader(tensor)()).astype(np.int64)


def _broadcast(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del node, opset
    return [np.broadcast_shapes(*(_sizes(t) for t in tensors if t is not None))]


def _viewed(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    first, *others = tensors
    blank = np.broadcast_to(np.float32(0), _sizes(first))
    arrays = [blank, *(None if t is None else _integers(t) for t in others)]
    return [a.shape for a in _evaluated(_model(node, opset), arrays)]


def _transposed(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del opset
    sizes = _sizes(tensors[0])
    order = node.attributes.get_ints("perm", [*range(len(sizes))[::-1]])
    if sorted(order) != [*range(len(sizes))]:
        raise ValueError("no order of the axes")
    return [tuple(sizes[axis] for axis in order)]


def _concatenated(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del opset
    shapes = [_sizes(t) for t in tensors]
    axis = node.attributes["axis"].as_int() % len(shapes[0])
    joined = sum(shape[axis] for shape in shapes)
    if len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) != 1:
        raise ValueError("sizes that differ along other axes")
    return [(*shapes[0][:axis], joined, *shapes[0][axis + 1 :])]


def _gathered(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del opset
    table, rows = _sizes(tensors[0]), _integers(tensors[1])
    axis = node.attributes.get_int("axis", 0) % len(table)
    if rows.size and not -table[axis] <= rows.min() <= rows.max() < table[axis]:
        raise ValueError("an index beyond the table")
    return [(*table[:axis], *rows.shape, *table[axis + 1 :])]


def _reduced(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del opset
    sizes = _sizes(tensors[0])
    axes: Sequence[int] = node.attributes.get_ints("axes", [])
    if len(tensors) > 1 and tensors[1] is not None:
        axes = _integers(tensors[1]).reshape(-1).tolist()
    if not axes:
        axes = [] if node.attributes.get_int("noop_with_empty_axes", 0) else range(len(sizes))
    kept = node.attributes.get_int("keepdims", 1)
    along = {axis % len(sizes) for axis in axes}
    shape = (1 if axis in along else size for axis, size in enumerate(sizes))
    return [tuple(s for axis, s in enumerate(shape) if kept or axis not in along)]


def _expanded(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del node, opset
    return [np.broadcast_shapes(_sizes(tensors[0]), tuple(_integers(tensors[1]).tolist()))]


def _tiled(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del node, opset
    times = _integers(tensors[1]).tolist()
    return [tuple(s * n for s, n in zip(_sizes(tensors[0]), times, strict=True))]


def _filled(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del node, opset
    return [tuple(_integers(tensors[0]).reshape(-1).tolist())]


def _multiplied(node: ir.Node, tensors: _Tensors, opset: int) -> _Shapes:
    del node, opset
    one, two = map(_sizes, tensors)
    if min(len(one), len(two)) < 2 or one[-1] != two[-2]:
        raise ValueError("no product of matrices")
    return [(*np.broadcast_shapes(one[:-2], two[:-2]), one[-2], two[-1])]


_Rule = Callable[[ir.Node, _Tensors, int], _Shapes]
_SHAPES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(_BROADCASTING, _broadcast),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "Transpose": _transposed,
    "Concat": _concatenated,
    "Gather": _gathered,
    "Expand": _expanded,
    "Tile": _tiled,
    "ConstantOfShape": _filled,
    "MatMul": _multiplied,
}
