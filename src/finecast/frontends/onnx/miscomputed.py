"""ONNX ops that OpenVINO reads without a word and computes wrongly: refused, or restated.

A model with one of them is not given to OpenVINO: the next engine is tried. Weights that two
products read are restated so that the engine is right; old opsets' ops are in ``opset``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import onnx_ir as ir

from finecast.devices.faults import is_here, known_faults
from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.editor import Editor, drop_unread
from finecast.naming import listed

if TYPE_CHECKING:
    import onnx


_Kept: TypeAlias = "int | str | tuple[int, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """A node of ONNX's own domain: its attributes of some kinds, and which inputs it has."""

    name: str
    kind: str
    attributes: Mapping[str, _Kept]
    inputs: Sequence[bool]

    def integer(self, name: str, default: int = 0) -> int:
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def integers(self, name: str, default: int) -> Sequence[int]:
        """A list of integers; numbers that are not stated are ``default``."""
        value = self.attributes.get(name, ())
        return value if isinstance(value, tuple) and value else (default,) * _MOST_AXES


_MOST_AXES: Final = 3
"""The most axes that engines pool over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miscomputed:
    """Ops of these kinds that are wrong where ``when`` holds."""

    fault: str
    ops: frozenset[str]
    when: Callable[[_Op], bool]


def _starts_in_padding(op: _Op) -> bool:
    """Whether the last window of a pooling may begin behind the input, and so not count.

    That is where ceil((n + p + q - k) / s) * s, where the last one begins, can reach n + p.
    """
    if not op.integer("ceil_mode"):
        return False
    kernel, strides = op.integers("kernel_shape", 0), op.integers("strides", 1)
    ends = op.integers("pads", 0)[-len(kernel) :]
    return any(k <= s + end - 1 for k, s, end in zip(kernel, strides, ends, strict=False))


_RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})
_PEEPHOLES: Final = 7
"""The input of LSTM that is its peepholes."""

_MISCOMPUTED: Final[Sequence[_Miscomputed]] = (
    _Miscomputed(
        fault="openvino-attention-windows",
        ops=frozenset({"Attention"}),
        when=lambda op: (
            op.integer("left_window_size", -1) >= 0 or op.integer("right_window_size", -1) >= 0
        ),
    ),
    _Miscomputed(
        fault="openvino-dft-onesided",
        ops=frozenset({"DFT"}),
        when=lambda op: op.integer("onesided") == 1,
    ),
    _Miscomputed(
        fault="openvino-recurrent-layout",
        ops=_RECURRENT,
        when=lambda op: op.integer("layout") == 1,
    ),
    _Miscomputed(
        fault="openvino-lstm-peepholes",
        ops=frozenset({"LSTM"}),
        when=lambda op: any(op.inputs[_PEEPHOLES:]),
    ),
    _Miscomputed(
        fault="openvino-lstm-input-forget",
        ops=frozenset({"LSTM"}),
        when=lambda op: op.integer("input_forget") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-antialias",
        ops=frozenset({"Resize"}),
        when=lambda op: op.integer("antialias") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-exclude-outside",
        ops=frozenset({"Resize"}),
        when=lambda op: op.integer("exclude_outside") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-aspect-ratio",
        ops=frozenset({"Resize"}),
        when=lambda op: op.attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch",
    ),
    _Miscomputed(
        fault="openvino-max-pool-ceil", ops=frozenset({"MaxPool"}), when=_starts_in_padding
    ),
)


def miscomputed(graph: onnx.GraphProto | ir.Graph) -> str:
    """What OpenVINO computes wrongly in a model and its bodies; empty if nothing is known."""
    for op, fault in miscomputed_ops(graph):
        what = known_faults()[fault].fault
        return f"it computes {op} wrongly, a known fault ({fault}): {what}"
    return ""


def miscomputed_ops(graph: onnx.GraphProto | ir.Graph) -> Iterator[tuple[str, str]]:
    """The ops that OpenVINO computes wrongly, bodies included, each with the fault's name."""
    for op in _of_file(graph) if isinstance(graph, ir.Graph) else _of_message(graph):
        for row in _MISCOMPUTED:
            if op.kind in row.ops and row.when(op) and is_here(row.fault):
                yield f"{op.kind} {op.name!r}", row.fault


_ASKED: Final = frozenset().union(*(row.ops for row in _MISCOMPUTED))


def _of_message(graph: onnx.GraphProto) -> Iterator[_Op]:
    for node in graph.node:
        if node.op_type in _ASKED and node.domain in ("", "ai.onnx"):
            stated: dict[str, _Kept] = {}
            for found in node.attribute:
                if found.type == found.INT:
                    stated[found.name] = found.i
                elif found.type == found.INTS:
                    stated[found.name] = tuple(found.ints)
                elif found.type == found.STRING:
                    stated[found.name] = found.s.decode(errors="replace")
            yield _Op(
                name=node.name or (node.output[0] if node.output else ""),
                kind=node.op_type,
                attributes=stated,
                inputs=[bool(value) for value in node.input],
            )
        for attribute in node.attribute:
            for body in (
                *([attribute.g] if attribute.HasField("g") else ()),
                *attribute.graphs,
            ):
                yield from _of_message(body)


def _of_file(graph: ir.Graph) -> Iterator[_Op]:
    kinds = (ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.STRING)
    for node in graph.all_nodes():
        if node.op_type in _ASKED and not node.domain:
            kept = (a for a in node.attributes.values() if a.type in kinds)
            stated = {
                a.name: tuple(v) if isinstance(v := a.value, list | tuple) else v for a in kept
            }
            inputs = [value is not None for value in node.inputs]
            yield _Op(
                name=node.name or "", kind=node.op_type, attributes=stated, inputs=inputs
            )


# ----------------------------------------------------- square weights that products read twice
#
# ``x @ w @ w.T`` of a tied autoencoder is one. OpenVINO keeps the packed weights of a product
# by their address and sizes, and not by whether they are transposed: the product that comes
# second gets the weights of the first one. Products whose weights are transposed therefore
# read a constant of their own, which holds the transposed numbers. A copy of the same numbers
# would do in ONNX, but not in OpenVINO's IR, in which equal constants are one.
#
# Law: the model computes the same numbers; ops that stay keep their names.

FAULT: Final = "openvino-tied-weights"
_LOOKED_THROUGH: Final = frozenset({"Cast", "Identity", "Transpose"})
_WEIGHTS: Final = 1
"""The operand of products that is their weights."""


def confused_weights(names: Sequence[str]) -> str:
    """What the user is told of the products ``names``; empty if there are none."""
    if not names:
        return ""
    first = listed([repr(name) for name in names], 1)
    return (
        f"OpenVINO computes {first} with the weights of another product, which"
        " reads the same ones untransposed: the model is taken with transposed weights of its"
        " own"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A product ``node`` that reads constant ``weights`` through casts to types ``to``."""

    node: ir.Node
    weights: ir.Value
    transposed: bool
    to: tuple[int, ...]


def untied(model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """A model whose products read transposed constants where others read them as they are.

    Returns the model itself, or a copy, and the names of the products that were changed: none
    if the installed OpenVINO computes them rightly.
    """
    if not is_here(FAULT) or not _confused(model):
        return model, ()
    copy = model.clone()
    editor = Editor(copy)
    names: list[str] = []
    for weights, turned in _confused(copy).items():
        tensor = constant_tensor(weights)
        assert tensor is not None
        numbers = np.ascontiguousarray(np.swapaxes(tensor.numpy(), -1, -2))
        own = editor.constant(f"{weights.name}_transposed", numbers)
        own.shape, own.type = ir.Shape(numbers.shape), weights.type
        for reading in turned:
            _read(editor, reading, own)
            names.append(reading.node.name or reading.node.op_type)
    return copy, tuple(names)


def _confused(model: ir.Model) -> dict[ir.Value, list[_Reading]]:
    """The weights that are read in both ways, with those products that transpose them."""
    readings: dict[ir.Value, list[_Reading]] = defaultdict(list)
    for node in model.graph.all_nodes():
        if (found := _reading(node)) is not None:
            readings[found.weights].append(found)
    turned = {w: [r for r in several if r.transposed] for w, several in readings.items()}
    return {w: found for w, found in turned.items() if 0 < len(found) < len(readings[w])}


def _reading(node: ir.Node) -> _Reading | None:
    """How a product reads square weights; None for other nodes."""
    value = node.inputs[_WEIGHTS] if len(node.inputs) > _WEIGHTS else None
    transposed = None if value is None or node.domain else _transposes(node)
    if value is None or transposed is None:
        return None
    orders, to = list[list[int]](), list[int]()
    for step in _steps(value):
        if step.op_type == "Transpose":
            orders.append(list(step.attributes.get_ints("perm", ())) or [1, 0])
        elif step.op_type == "Cast":
            to.insert(0, step.attributes.get_int("to", ir.DataType.FLOAT))
        assert step.inputs[0] is not None
        value = step.inputs[0]
    tensor = constant_tensor(value)
    shape = () if tensor is None else tensor.shape.numpy()
    square = len(shape) > 1 and shape[-1] == shape[-2] > 1 and set(shape[:-2]) <= {1}
    if not square or tensor is None or not tensor.dtype.is_floating_point():
        return None
    if any(order != _last_two_swapped(len(shape)) for order in orders):
        return None
    turned = transposed ^ (len(orders) % 2 == 1)
    return _Reading(node=node, weights=value, transposed=turned, to=tuple(to))


def _last_two_swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _transposes(node: ir.Node) -> bool | None:
    """Whether a product itself transposes its weights; None for other nodes."""
    if node.op_type == "MatMul":
        return False
    if node.op_type == "Gemm":
        return bool(node.attributes.get_int("transB", 0))
    if node.op_type == "Einsum" and len(node.inputs) == 2:
        return transposed_in(node.attributes.get_string("equation", ""))
    return None


def transposed_in(equation: str) -> bool | None:
    """Whether an Einsum of two operands is a product by the second one, transposed.

    None if the second one is no matrix of which one axis is summed over.
    """
    terms, _, result = equation.replace(" ", "").partition("->")
    weights = terms.partition(",")[2]
    columns = [label for label in weights if label in result]
    return weights[0] == columns[0] if len(weights) == 2 and len(columns) == 1 else None


def with_second_turned(equation: str) -> str:
    """The equation of an Einsum of two operands whose second one is given transposed."""
    first, comma, rest = equation.replace(" ", "").partition(",")
    labels, arrow, result = rest.partition("->")
    return f"{first}{comma}{labels[::-1]}{arrow}{result}"


def _steps(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that ``value`` comes through from a constant, the last one first."""
    node = value.producer()
    while node is not None and node.op_type in _LOOKED_THROUGH and not node.domain:
        yield node
        source = node.inputs[0]
        node = None if source is None else source.producer()


def _read(editor: Editor, reading: _Reading, weights: ir.Value) -> None:
    """Let a product read ``weights``, which are not transposed."""
    node, read, last = reading.node, weights, reading.node.inputs[_WEIGHTS]
    assert last is not None
    before = [last, *(v for step in _steps(last) if (v := step.inputs[0]) is not None)]
    for to in reading.to:
        name = editor.fresh(f"{read.name}_cast")
        read = editor.op("Cast", [read], {"to": to}, name=name, dtype=ir.DataType(to))
    node.prepend(editor.take())
    node.replace_input_with(_WEIGHTS, read)
    if node.op_type == "Gemm":
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
    elif node.op_type == "Einsum":
        turned = with_second_turned(node.attributes.get_string("equation", ""))
        node.attributes["equation"] = ir.AttrString("equation", turned)
    drop_unread(before)
