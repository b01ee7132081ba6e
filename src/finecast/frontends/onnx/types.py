"""Infers the types of all values: from the ops' definitions, then by onnx's own inference.

onnx's inference gives up at the first op that it does not know, and it knows none of ONNX
Runtime's. The definitions alone type most graphs: ports with one type variable share a type.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Final

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.constants import shape_of
from finecast.frontends.onnx.definitions import (
    Definition,
    TypedPorts,
    attribute_types,
    definition,
    normal_domain,
)
from finecast.frontends.onnx.skeleton import message_without_weights, run_without_weights

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
_LITERALS: Final = {
    f"tensor({name})": dtype
    for name, dtype in {
        "float": ir.DataType.FLOAT,
        "float16": ir.DataType.FLOAT16,
        "bfloat16": ir.DataType.BFLOAT16,
        "double": ir.DataType.DOUBLE,
        "bool": ir.DataType.BOOL,
        "string": ir.DataType.STRING,
        **{
            f"{u}int{n}": ir.DataType[f"{u}int{n}".upper()]
            for u in ("", "u")
            for n in (8, 16, 32, 64)
        },
    }.items()
}


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
    unknown = _Typing(model).run()
    given: list[ir.Value] = []
    outputs = set(model.graph.outputs)
    if shapes or unknown or any(v.shape is None for v in outputs):
        given = _by_onnx(model, message)
        if unknown:
            _Typing(model).run()
    return () if unknown else tuple(v for v in given if v not in outputs)


class _Typing:
    """One pass in topological order, bodies included; unifies type variables both ways."""

    def __init__(self, model: ir.Model) -> None:
        self.opsets = {normal_domain(d): v for d, v in model.opset_imports.items()}
        self.model = model
        self.unknown = 0

    def run(self) -> int:
        """Set types where they can be told; returns how many results are left without."""
        self.graph(self.model.graph)
        return self.unknown

    def graph(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            if value.type is None and value.const_value is not None:
                value.type = ir.TensorType(value.const_value.dtype)
        for node in graph:
            self.node(node)
            self.unknown += sum(v.type is None for v in node.outputs if v.name)

    def node(self, node: ir.Node) -> None:
        if not node.domain and node.op_type == "Constant":
            _type_constant(node)
            return
        found = definition(node.op_type, node.domain, self.opsets.get(node.domain, 1))
        if found is None:
            return
        if not node.domain and node.op_type in _DTYPE_ATTRIBUTES:
            _set(node.outputs[0], _stated(node))
        elif node.op_type not in _NOT_BY_VARIABLE:
            _unify(node, found)
        for body in bodies(node):
            self.graph(body)


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Graphs among the attributes of ``node``."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def every_node(graph: ir.Graph) -> Iterator[ir.Node]:
    """All nodes of ``graph`` and of its bodies; a node comes before those of its bodies."""
    for node in graph:
        yield node
        if node.attributes:
            for body in bodies(node):
                yield from every_node(body)


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
    values = (*node.outputs, *node.inputs)
    if not any(v is not None and v.type is None for v in values):
        return
    bound: dict[str, ir.TypeProtocol] = {}
    for values, ports in ((node.outputs, found.outputs), (node.inputs, found.inputs)):
        for index, value in enumerate(values):
            variable = ports.type_of(index)
            if (
                value is not None
                and value.type is not None
                and variable
                and ports.binds(index)
            ):
                bound[variable] = value.type
    for values, ports in ((node.outputs, found.outputs), (node.inputs, found.inputs)):
        for index, value in enumerate(values):
            if value is not None and value.type is None:
                _set(value, _known(index, ports, bound, found))


def _known(
    index: int, ports: TypedPorts, bound: Mapping[str, ir.TypeProtocol], found: Definition
) -> ir.TypeProtocol | None:
    variable = ports.type_of(index)
    if variable is None:
        return None
    if variable in bound and ports.binds(index):
        return bound[variable]
    allowed = found.constraints.get(variable, frozenset({variable}))
    literal = _LITERALS.get(next(iter(allowed))) if len(allowed) == 1 else None
    return ir.TensorType(literal) if literal is not None else None


def _set(value: ir.Value, kind: ir.TypeProtocol | None) -> None:
    if value.type is None and kind is not None:
        value.type = kind


def _by_onnx(model: ir.Model, message: onnx.ModelProto | None) -> list[ir.Value]:
    """Fill in the types and shapes that ``onnx.shape_inference`` finds; none if it refuses.

    ``message`` lacks the types that the definitions told of ops which onnx does not know. If
    onnx then finds less, it is asked again about ``model``, serialized with those types.

    Returns the values that were given a shape.
    """
    given: list[ir.Value] = []
    try:
        found = None if message is None else inferred(message_without_weights(message)).graph
        if found is None or _tells_less(found, model.graph):
            found = run_without_weights(model, inferred).graph
    except (native.PassError, ValueError) as error:
        _LOG.debug("onnx infers no shapes: %s", error)
    else:
        _fill(found, model.graph, given)
    return given


def _tells_less(proto: onnx.GraphProto, graph: ir.Graph) -> bool:
    """Whether a value of ``graph`` has a type and, in ``proto``, none."""
    told = {v.name for v in (*proto.value_info, *proto.output)}
    return any(v.name not in told for n in graph for v in n.outputs if v.name and v.type)


def inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes that onnx infers, by data propagation where that ends.

    Data propagation finds more shapes, but makes an object of each element of 1-D values. For
    long signals that can exceed the pass's memory: then plain inference is run.
    """
    try:
        return native.transform("infer", proto, data_prop=1)
    except native.PassDiedError as error:
        _LOG.debug("%s; again without data propagation", error)
        return native.transform("infer", proto, data_prop=0)


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
        _Typing(model).run()
    versions = {normal_domain(d): v for d, v in model.opset_imports.items()}
    for node in every_node(model.graph):
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
    kinds = attribute_types(node.op_type, node.domain, version)
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
                fix="state its type in the model's value_info",
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
        if not any(a.type in _GRAPH_ATTRIBUTES for a in twin.attribute):
            continue
        inner = [g for a in twin.attribute for g in ([a.g] if a.HasField("g") else a.graphs)]
        for body, info in zip(bodies(node), inner, strict=False):
            _fill(info, body, given)


_GRAPH_ATTRIBUTES: Final = frozenset({onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})


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
    nodes = (n for n in every_node(model.graph) if n.op_type not in ("Cast", "Constant"))
    return frozenset(v.dtype for node in nodes for v in node.outputs)
