"""Infers types and shapes of values: from the ops' definitions, then by onnx's own inference.

onnx's inference gives up at the first op that it does not know, and it knows none of ONNX
Runtime's. The definitions alone type most graphs: ports with one type variable share a type.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.constants import shape_of
from finecast.frontends.onnx.definitions import (
    Definition,
    definition,
    normal_domain,
)
from finecast.frontends.onnx.native import message_without_weights, without_weights
from finecast.ops import POINTWISE, lookup

_LOG = logging.getLogger(__name__)

# By op type: the attribute that states the output's element type, and the type without it.
_DTYPE_ATTRIBUTES: Final[Mapping[str, tuple[str, ir.DataType | None]]] = {
    "Cast": ("to", None),
    "ConstantOfShape": ("value", ir.DataType.FLOAT),
    "RandomNormal": ("dtype", ir.DataType.FLOAT),
    "RandomUniform": ("dtype", ir.DataType.FLOAT),
    "Multinomial": ("dtype", ir.DataType.INT32),
    "HannWindow": ("output_datatype", ir.DataType.FLOAT),
    "HammingWindow": ("output_datatype", ir.DataType.FLOAT),
    "BlackmanWindow": ("output_datatype", ir.DataType.FLOAT),
}
# Ops whose output may have another type than the input that shares its type variable.
_NOT_BY_VARIABLE: Final = frozenset(
    {"EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli"}
)
_LITERALS: Final = {f"tensor({dtype.name.lower()})": dtype for dtype in ir.DataType}
# Ops whose result has the rank of the first input.
_LIKE_FIRST: Final = frozenset(
    {"BatchNormalization", "Cast", "Dropout", "Identity", "LayerNormalization", "LogSoftmax"}
    | {"Slice", "Softmax", "Pad"}
)


def infer(
    model: ir.Model, *, shapes: bool, message: onnx.ModelProto | None = None
) -> tuple[ir.Value, ...]:
    """Give every value of ``model`` its type, and every output a shape, where known.

    Types that the file states stay, and a value whose type cannot be inferred stays without.
    Exporters leave shapes of outputs out and engines need none, but ONNX asks for them.

    Args:
        model: Changed in place.
        shapes: Whether all values are to have shapes.
        message: The message that ``model`` was read from, if it still has the same values and
            ops: then the model need not be serialized for onnx.

    Returns:
        The values that have a shape only because of ``shapes``.
    """
    unknown = _by_definitions(model)
    shaped_values: list[ir.Value] = []
    outputs = set(model.graph.outputs)
    if shapes or unknown or any(v.shape is None for v in outputs):
        shaped_values = _by_onnx(model, message)
        if unknown:
            _by_definitions(model)
    return () if unknown else tuple(v for v in shaped_values if v not in outputs)


def forget_free_sizes(model: ir.Model) -> None:
    """Take away the names of sizes that no input has: another model's may have other values.

    ONNX Runtime gives values whose sizes have the same names the same memory.
    """
    known = {str(dim) for v in model.graph.inputs for dim in v.shape or ()}
    for value in (value for node in model.graph.all_nodes() for value in node.outputs):
        dims = value.shape or ()
        if any(not isinstance(dim, int) and str(dim) not in known for dim in dims):
            kept = (d if isinstance(d, int) or str(d) in known else None for d in dims)
            value.shape = ir.Shape(kept)


def _by_definitions(model: ir.Model) -> int:
    """Set types where definitions tell them; returns how many results are left without.

    One pass in topological order, bodies included; unifies type variables both ways.
    """
    opsets = {normal_domain(d): v for d, v in model.opset_imports.items()}

    def type_graph(graph: ir.Graph) -> int:
        for value in graph.initializers.values():
            if value.type is None and value.const_value is not None:
                value.type = ir.TensorType(value.const_value.dtype)
        unknown = 0
        for node in graph:
            unknown += type_node(node)
            unknown += sum(v.type is None for v in node.outputs if v.name)
        return unknown

    def type_node(node: ir.Node) -> int:
        if not node.domain and node.op_type == "Constant":
            _type_constant(node)
            return 0
        schema = definition(node.op_type, node.domain, opsets.get(node.domain, 1))
        if schema is None:
            return 0
        if not node.domain and node.op_type in _DTYPE_ATTRIBUTES:
            _set(node.outputs[0], _stated(node))
        elif node.op_type not in _NOT_BY_VARIABLE:
            _unify(node, schema)
        return sum(map(type_graph, bodies(node)))

    return type_graph(model.graph)


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Graphs among the attributes of ``node``."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def bodies_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The same of a message."""
    for attribute in node.attribute:
        yield from (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


def _type_constant(node: ir.Node) -> None:
    output = node.outputs[0]
    if output.type is not None:
        return
    tensor = ir.convenience.get_const_tensor(output)
    if tensor is not None:
        output.type = ir.TensorType(tensor.dtype)
        output.shape = output.shape or shape_of(tensor)


def _stated(node: ir.Node) -> ir.TypeProtocol | None:
    name, default = _DTYPE_ATTRIBUTES[node.op_type]
    attribute = node.attributes.get(name)
    if attribute is None:
        return ir.TensorType(default) if default is not None else None
    if attribute.is_ref():
        return None
    if attribute.type is ir.AttributeType.TENSOR:
        return ir.TensorType(attribute.as_tensor().dtype)
    return ir.TensorType(ir.DataType(attribute.as_int()))


def _unify(node: ir.Node, found: Definition) -> None:
    """Give ports without a type that of a port with the same type variable."""
    if not any(v is not None and v.type is None for v in (*node.outputs, *node.inputs)):
        return
    sides = (node.outputs, found.outputs), (node.inputs, found.inputs)
    ports = [(v, p, i) for values, p in sides for i, v in enumerate(values) if v is not None]
    bound: dict[str | None, ir.TypeProtocol] = {}
    for value, side, index in ports:
        if value.type is not None and side.binds(index):
            bound[side.type_of(index)] = value.type
    bound.pop(None, None)  # ports that the definition does not have
    for value, side, index in ports:
        variable = side.type_of(index)
        if value.type is not None or variable is None:
            continue
        if variable in bound and side.binds(index):
            value.type = bound[variable]
            continue
        allowed = found.constraints.get(variable, frozenset({variable}))
        literal = _LITERALS.get(next(iter(allowed))) if len(allowed) == 1 else None
        _set(value, ir.TensorType(literal) if literal is not None else None)


def _set(value: ir.Value, kind: ir.TypeProtocol | None) -> None:
    if value.type is None and kind is not None:
        value.type = kind


def _by_onnx(model: ir.Model, message: onnx.ModelProto | None) -> list[ir.Value]:
    """Fill in the types and shapes that ``onnx.shape_inference`` finds; none if it refuses.

    ``message`` lacks the types that the definitions told of ops which onnx does not know. If
    onnx then finds less, it is asked again about ``model``, serialized with those types.

    Returns the values that were given a shape.
    """
    shaped_values: list[ir.Value] = []
    proto = None
    if message is not None:
        proto = _unless_refused(lambda: inferred(message_without_weights(message)))
        if proto is None:
            return shaped_values
    if proto is None or _tells_less(proto, model.graph):
        proto = _unless_refused(lambda: inferred(without_weights(model)))
    if proto is not None:
        _fill(proto, model.graph, shaped_values)
    return shaped_values


def _unless_refused(infer_of: Callable[[], onnx.ModelProto]) -> onnx.GraphProto | None:
    """The graph of the model that ``infer_of`` returns; None if onnx refuses the model."""
    try:
        return infer_of().graph
    except (native.PassError, ValueError) as error:
        _LOG.debug("onnx infers no shapes: %s", error)
        return None


def _tells_less(proto: onnx.GraphProto, graph: ir.Graph) -> bool:
    """Whether a value of ``graph`` has a type and, in ``proto``, none."""
    typed_names = {v.name for v in (*proto.value_info, *proto.output)}
    return any(
        v.name not in typed_names for n in graph for v in n.outputs if v.name and v.type
    )


def inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes that onnx infers, by data propagation where that ends.

    Data propagation finds more shapes, but makes an object of each element of 1-D values. For
    long signals that can exceed the pass's memory: then plain inference is run.
    """
    if _hide_misread(proto.graph):
        proto.opset_import.append(onnx.OperatorSetIdProto(domain=ASIDE, version=1))
    try:
        return native.transform("infer", proto, data_prop=1)
    except native.PassDiedError as error:
        _LOG.debug("%s; again without data propagation", error)
        return native.transform("infer", proto, data_prop=0)


ASIDE: Final = "finecast.aside"
"""A domain of which onnx knows no op: its passes and its converter leave these alone."""


def _hide_misread(graph: onnx.GraphProto) -> bool:
    """Hide ops that engines give other shapes than onnx infers; whether there are any.

    PyTorch's older exporter writes ``unbind`` as parts of one element each that are to lose
    the axis. Where sizes of parts are given ONNX has them keep it, and engines do not. ONNX
    Runtime fails where a stated shape is not that of the value.
    """
    hidden = False
    for node in graph.node:
        sized = node.op_type == "SplitToSequence" and len(node.input) > 1 and not node.domain
        if sized and any(a.name == "keepdims" and a.i == 0 for a in node.attribute):
            node.domain, hidden = ASIDE, True
        for body in bodies_in(node):
            hidden |= _hide_misread(body)
    return hidden


def check_inferable(model: ir.Model) -> None:
    """Refuse models on which onnx's passes or checker are known to crash or never end.

    The passes have limits anyway (``native``); this error comes at once and names the node.

    Raises:
        ModelError: If an attribute is of another kind than its op defines, an op of
            ``ai.onnx.ml`` reads a value whose type is not known, or an Einsum's equation has
            characters that ONNX does not allow.
    """
    typed = _TYPED_DOMAIN in model.opset_imports
    if typed:
        _by_definitions(model)
    versions = {normal_domain(d): v for d, v in model.opset_imports.items()}
    for node in model.graph.all_nodes():
        if node.attributes:
            _check_attributes(node, versions.get(node.domain))
        if node.op_type == "Einsum" and not node.domain:
            _check_equation(node)
        elif typed and node.domain == _TYPED_DOMAIN:
            _check_typed(node)


_TYPED_DOMAIN: Final = "ai.onnx.ml"
_TERM: Final = r"[A-Za-z]*(\.\.\.[A-Za-z]*)?"
_EQUATION: Final = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def _check_attributes(node: ir.Node, version: int | None) -> None:
    if version is None:
        return
    schema = definition(node.op_type, node.domain, version)
    kinds = schema.attributes if schema else {}
    for name, attribute in node.attributes.items():
        if kinds.get(name, attribute.type.value) != attribute.type.value:
            wanted = ir.AttributeType(kinds[name]).name.lower()
            raise ModelError(
                f"attribute {name!r} of {node.op_type} is of kind"
                f" {attribute.type.name.lower()}, and is defined as {wanted}",
                where=f"node {node.name!r}",
                fix="run onnx.checker on the model, and export it again",
            )


def _check_typed(node: ir.Node) -> None:
    for value in node.inputs:
        if value is not None and value.type is None:
            raise ModelError(
                f"{node.op_type} reads {value.name!r}, whose type is not known",
                where=f"node {node.name!r}",
                fix="give its type in the model's value_info",
            )


def _check_equation(node: ir.Node) -> None:
    equation = node.attributes.get("equation")
    if equation is None or equation.is_ref() or equation.type is not ir.AttributeType.STRING:
        return
    text = "".join(str(equation.value).split())
    if not _EQUATION.fullmatch(text):
        raise ModelError(
            f"Einsum has the equation {str(equation.value)[:40]!r}, which ONNX does not allow",
            where=f"node {node.name!r}",
            fix="write terms of letters with at most one '...' each, as in 'bij,bjk->bik'",
        )


def _fill(proto: onnx.GraphProto, graph: ir.Graph, given: list[ir.Value]) -> None:
    """Fill in what ``proto`` states and ``graph``, which it was serialized from, does not."""
    infos = {v.name: v for v in (*proto.value_info, *proto.output)}
    for value in (*(v for n in graph for v in n.outputs), *graph.inputs):
        info = infos.get(value.name or "")
        if info is not None and (value.type is None or value.shape is None):
            _adopt(value, info, given)
    if len(proto.node) != len(graph):
        return
    for node, twin in zip(graph, proto.node, strict=True):
        for info, body in zip(bodies_in(twin), bodies(node), strict=False):
            _fill(info, body, given)


def _adopt(value: ir.Value, info: onnx.ValueInfoProto, given: list[ir.Value]) -> None:
    which = info.type.WhichOneof("value")
    if which is None:
        return
    if value.type is None:
        value.type = ir.serde.deserialize_type_proto_for_type(info.type)
    if value.shape is not None:
        return
    given.append(value)
    if which == "tensor_type":
        value.shape = _dims(info.type.tensor_type)
    else:
        value.shape = ir.serde.deserialize_type_proto_for_shape(info.type)


def _dims(kind: onnx.TypeProto.Tensor) -> ir.Shape | None:
    """The shape without denotations: ``ir.serde`` reads these too, in five times the time."""
    if not kind.HasField("shape"):
        return None
    return ir.Shape([getattr(d, d.WhichOneof("value") or "", None) for d in kind.shape.dim])


def types_computed_in(model: ir.Model) -> frozenset[ir.DataType | None]:
    """Types of the results of a model's ops, other than casts and constants."""
    nodes = (n for n in model.graph.all_nodes() if n.op_type not in ("Cast", "Constant"))
    return frozenset(v.dtype for node in nodes for v in node.outputs)


# Shapes and ranks.


def static_shapes(
    model: ir.Model, inputs: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of values outside of bodies, by name, where onnx's inference knows all sizes.

    Args:
        model: The model, which is not changed.
        inputs: Shapes of its inputs by name.
    """

    def with_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
        graph = proto.graph
        for port in graph.input:
            if port.name in inputs:
                dims = [
                    onnx.TensorShapeProto.Dimension(dim_value=d) for d in inputs[port.name]
                ]
                port.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(dim=dims))
        graph.ClearField("value_info")  # the stated shapes have symbolic dimensions
        for port in graph.output:
            port.type.tensor_type.ClearField("shape")
        return inferred(proto)

    try:
        graph = _unless_refused(lambda: with_inputs(without_weights(model)))
    except native.PassDiedError as error:
        _LOG.debug("onnx infers no shapes: %s", error)
        return {}
    if graph is None:
        return {}
    sizes_by_name = {
        v.name: _sizes(v.type.tensor_type) for v in (*graph.value_info, *graph.output)
    }
    return {name: sizes for name, sizes in sizes_by_name.items() if sizes is not None}


def correct_outputs(model: ir.Model) -> tuple[str, ...]:
    """Give outputs whose declared number of axes is wrong their right one, in place.

    onnx can find this out of a converted model alone: more is inferred of newer opsets.

    Returns:
        What was wrong, for people.
    """

    def undeclared(proto: onnx.ModelProto) -> onnx.ModelProto:
        result_names = {name for node in proto.graph.node for name in node.output}
        for value in (*proto.graph.output, *proto.graph.value_info):
            if value.name in result_names:
                value.type.tensor_type.ClearField("shape")
        return inferred(proto)

    graph = _unless_refused(lambda: undeclared(without_weights(model)))
    if graph is None:
        return ()
    kinds = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}
    corrections: list[str] = []
    for value in (v for node in model.graph for v in node.outputs):  # casts of outputs, too
        kind = kinds.get(value.name or "")
        if kind is None or not kind.HasField("shape") or value.shape is None:
            continue
        declared, axes = len(value.shape), len(kind.shape.dim)
        if declared == axes:
            continue
        value.shape = ir.Shape([d.dim_value or None for d in kind.shape.dim])
        if value.is_graph_output():
            text = f"output {value.name!r} is declared with {declared} axes and has {axes}"
            corrections.append(f"{text}: the declaration is corrected")
    return tuple(corrections)


def _sizes(kind: onnx.TypeProto.Tensor) -> tuple[int, ...] | None:
    if not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    sizes = tuple(d.dim_value for d in kind.shape.dim)
    return sizes if min(sizes, default=0) >= 0 else None  # inputs too small for a window


def ranks_of(model: ir.Model) -> Mapping[str, int]:
    """The rank of each value of ``model``, by name, where it can be told.

    After a Reshape to computed sizes onnx infers no shapes any more, and none for the ops that
    follow. The number of dimensions can often be told all the same.

    A copy is inferred: ``model`` is to be written without shapes that its file does not state.
    """
    copy = model.clone()
    infer(copy, shapes=True)
    ranks: dict[str, int] = {}
    for value in (*copy.graph.inputs, *copy.graph.initializers.values()):
        _note(ranks, value, None)
    for node in copy.graph.all_nodes():
        for number, value in enumerate(node.outputs):
            _note(ranks, value, _rank(node, ranks) if number == 0 else None)
    return ranks


def _note(found: dict[str, int], value: ir.Value, rank: int | None) -> None:
    known = rank if value.shape is None else len(value.shape)
    if known is not None and value.name:
        found[value.name] = known


def _rank(node: ir.Node, known: Mapping[str, int]) -> int | None:
    """The rank of the first output, from the node's attributes or the ranks of its inputs."""
    inputs = [v for v in node.inputs if v is not None]
    if node.domain or not inputs:
        return None
    if node.op_type == "Transpose" and "perm" in node.attributes:
        return len(node.attributes["perm"].as_ints())
    if node.op_type == "Reshape":
        target = inputs[1].shape if len(inputs) > 1 else None
        size = target[0] if target is not None and len(target) else None
        return size if isinstance(size, int) else None
    ranks = [known.get(v.name or "") for v in inputs]
    if node.op_type in _LIKE_FIRST:
        return ranks[0]
    if any(r is None for r in ranks):
        return None
    sure = [r for r in ranks if r is not None]
    if node.op_type == "Gather":
        return sum(sure) - 1
    kind = lookup(f"onnx::{node.op_type}").kind
    if kind in POINTWISE or (node.op_type == "MatMul" and min(sure) > 1):
        return max(sure)
    return None
