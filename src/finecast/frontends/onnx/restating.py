"""Rewrites bf16 ops as equivalent ops that an engine's pattern matchers recognise.

Engines fuse patterns of ops: a Swish after a convolution, a norm written out in steps. Some of
their matchers recognise a pattern with fp32 constants only, or are stopped by a cast that the
definition of an op implies. Here the nodes of such a pattern become other ops that compute the
same, each in the place and with the name of the one it replaces. The former op is noted in
the node's metadata, and a second conversion starts from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx.constants import MARK, ConvertedTensor, constant_tensor
from finecast.frontends.onnx.einsum import take_back_products, write_products
from finecast.frontends.onnx.joint_constants import combine_norms
from finecast.frontends.onnx.opset import opset_of, raise_opset
from finecast.frontends.onnx.types import every_node, infer
from finecast.frontends.replaying import Restated

# Metadata of a rewritten node: the op that it was, its inputs and attributes, as JSON; and the
# numbers of constants among these inputs that nothing reads any more.
STATED: Final = f"{MARK}.op"

# ONNX defines HardSwish as x * HardSigmoid(x) with this alpha and beta.
_HARD_SWISH: Final = (1 / 6, 0.5)
_STASHING: Final = frozenset({"LayerNormalization", "RMSNormalization"})


Restatement: TypeAlias = Callable[[ir.Node], Sequence[ir.Node]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One kind of rewriting.

    Attributes:
        restate: Rewrites a bf16 node and those around it; returns the nodes that it changed.
        reason: Why, as the user is told.
        since: The first opset that has the new op.
        applies: Whether ``restate`` would change a node: asked before the opset is raised.
    """

    restate: Restatement
    reason: str
    since: int = 0
    applies: Callable[[ir.Node], bool] = lambda _: True


def restate(model: ir.Model, engine: str) -> tuple[ir.Model, tuple[Restated, ...]]:
    """Rewrite bf16 ops of ``model``, in place, for ONNX's definitions and for ``engine``.

    Law: in exact arithmetic the outputs are the same.

    Returns:
        The model, which is another object if its opset had to be raised; and what changed.
    """
    found: list[Restated] = []
    if products := write_products(model):
        found.append(Restated(nodes=products, reason=_PRODUCT))
    rows = RESTATEMENTS.get(engine, ())
    if rows and (joint := combine_norms(model)):
        found.append(Restated(nodes=joint, reason=_JOINT))
    for row in rows:
        low = [n for n in every_node(model.graph) if _is_low(n)]
        if row.since > opset_of(model) and any(row.applies(n) for n in low):
            try:
                model = raise_opset(model, row.since)
            except ModelError:
                continue  # the opset cannot be raised, and the ops stay as they are
            infer(model, shapes=False)
            low = [n for n in every_node(model.graph) if _is_low(n)]
        changed = [m for n in low if row.applies(n) for m in row.restate(n)]
        if changed:
            names = tuple(dict.fromkeys(n.name or "" for n in changed))
            found.append(Restated(nodes=names, reason=row.reason))
    _drop_operands(model)
    return model, tuple(found)


def _drop_operands(model: ir.Model) -> None:
    """Remove the numbers that only rewritten nodes read; those nodes note them."""
    constants = model.graph.initializers
    dropped: set[str] = set()
    for node in every_node(model.graph):
        text = node.metadata_props.get(STATED)
        if text is None:
            continue
        was = json.loads(text)
        for name in was["inputs"]:
            value = constants.get(name)
            number = None if value is None or _is_read(value) else _scalar(value)
            if number is not None:
                was.setdefault("constants", {})[name] = number
                node.metadata_props[STATED] = json.dumps(was)
                dropped.add(name)
    for name in dropped:
        del constants[name]


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output() or value.is_graph_input()


def take_back_ops(model: ir.Model) -> None:
    """Turn rewritten nodes into the ops that they were.

    A node stays as it is if another tool removed the operands of the former op.
    """
    shared = _values(model.graph)
    for graph in (model.graph, *model.graph.subgraphs()):
        own = shared | _values(graph)
        for node in graph:
            text = node.metadata_props.pop(STATED, None)
            if text is None:
                continue
            was = json.loads(text)
            for name, number in was.get("constants", {}).items():
                if name not in own:
                    own[name] = shared[name] = _constant(model, node, name, float(number))
            if all(name in own for name in was["inputs"] if name):
                inputs = [own.get(name) for name in was["inputs"]]
                _become(node, was["op"], inputs, was["attributes"])
        take_back_products(graph, shared | _values(graph))


def _constant(model: ir.Model, node: ir.Node, name: str, number: float) -> ir.Value:
    """A new constant of the type that ``node`` computes in."""
    array = np.asarray(number, np.float32)
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    value = ir.val(name, const_value=ir.tensor(array.astype(dtype.numpy()), name=name))
    model.graph.register_initializer(value)
    return value


def _values(graph: ir.Graph) -> dict[str | None, ir.Value]:
    """The values that ``graph`` defines, by name."""
    made = (v for node in graph for v in node.outputs)
    found = {v.name: v for v in (*graph.inputs, *graph.initializers.values(), *made)}
    return {name: value for name, value in found.items() if name}


def _is_low(node: ir.Node) -> bool:
    """Whether the node computes in bf16; engines match patterns in fp16 as they do in fp32."""
    outputs = node.outputs
    return not node.domain and bool(outputs) and outputs[0].dtype == ir.DataType.BFLOAT16


def _state(
    node: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    **attributes: float,
) -> ir.Node:
    """Turn ``node`` into an ``op``, and note in its metadata what it was at first."""
    was = {
        "op": node.op_type,
        "inputs": [v.name if v is not None else "" for v in node.inputs],
        "attributes": {k: a.value for k, a in node.attributes.items()},
    }
    node.metadata_props.setdefault(STATED, json.dumps(was))
    _become(node, op, inputs, attributes)
    return node


def _become(
    node: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, int | float],
) -> None:
    node.op_type = op
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    node.attributes.clear()
    for name, value in attributes.items():
        node.attributes[name] = (
            ir.AttrInt64(name, value)
            if isinstance(value, int)
            else ir.AttrFloat32(name, value)
        )


def _statistics(node: ir.Node) -> Sequence[ir.Node]:
    """Let a norm compute its statistics in bf16 by its definition (``stash_type``).

    Its mean and deviation have that type, too: where they are read, they keep fp32.
    """
    statistics = node.outputs[1:]
    read = any(v.uses() or v.is_graph_output() for v in statistics)
    if node.op_type not in _STASHING or read:
        return ()
    dtype = node.outputs[0].dtype
    assert dtype is not None
    given = {k: a.value for k, a in node.attributes.items()}
    if given.get("stash_type", int(ir.DataType.FLOAT)) != ir.DataType.FLOAT:
        return ()
    for value in statistics:
        value.type = None  # the stated one would contradict the attribute
    return (_state(node, node.op_type, node.inputs, **{**given, "stash_type": int(dtype)}),)


def _neutral(node: ir.Node) -> Sequence[ir.Node]:
    """Replace a product with 1 or a sum with 0 by Identity."""
    kept = _beside(node, _NEUTRAL.get(node.op_type))
    return () if kept is None else (_state(node, "Identity", [kept]),)


# The neutral element of each op, and whether it may be the first operand as well.
_NEUTRAL: Final[Mapping[str, tuple[float, bool]]] = {
    "Mul": (1.0, True),
    "Div": (1.0, False),
    "Add": (0.0, True),
    "Sub": (0.0, False),
}


def _beside(node: ir.Node, neutral: tuple[float, bool] | None) -> ir.Value | None:
    """The other operand, if one is the op's neutral element; else None."""
    if neutral is None or len(node.inputs) != 2:
        return None
    number, either = neutral
    for index in (1, 0) if either else (1,):
        if _scalar(node.inputs[index]) == number:
            return node.inputs[1 - index]
    return None


def _scalar(value: ir.Value | None) -> float | None:
    """The number of a constant of rank 0: broadcasting it never makes the result larger."""
    tensor = constant_tensor(value) if value is not None else None
    if tensor is None or tensor.shape.rank():
        return None
    return float(np.asarray(tensor.numpy()).astype(np.float32))


def _quotient(node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * (1 / sqrt(v)) as x / sqrt(v)."""
    if node.op_type == "Reciprocal":
        root = node.inputs[0]
    elif node.op_type == "Div" and _scalar(node.inputs[0]) == 1.0:
        root = node.inputs[1]
    else:
        return ()
    producer = root.producer() if root is not None else None
    inverse = node.outputs[0]
    readers = [u.node for u in inverse.uses()]
    only_products = all(_is_product(n, inverse) for n in readers)
    if producer is None or producer.op_type != "Sqrt" or not readers or not only_products:
        return ()
    if inverse.is_graph_output():
        return ()
    changed = [_state(node, "Identity", [root])]
    for reader in readers:
        other = reader.inputs[1 if reader.inputs[0] is inverse else 0]
        changed.append(_state(reader, "Div", [other, inverse]))
    return changed


def _is_product(node: ir.Node, operand: ir.Value) -> bool:
    return node.op_type == "Mul" and _is_low(node) and list(node.inputs).count(operand) == 1


def _hard_swish(node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * HardSigmoid(x) as HardSwish(x), if nothing else reads the HardSigmoid."""
    if node.op_type != "HardSigmoid":
        return ()
    attributes = node.attributes
    alpha = attributes["alpha"].as_float() if "alpha" in attributes else 0.2
    beta = attributes["beta"].as_float() if "beta" in attributes else 0.5
    gate, x = node.outputs[0], node.inputs[0]
    uses = list(gate.uses())
    if not np.allclose((alpha, beta), _HARD_SWISH, rtol=1e-6) or len(uses) != 1:
        return ()
    product = uses[0].node
    if gate.is_graph_output() or not _is_product(product, gate) or x not in product.inputs:
        return ()
    return _state(node, "Identity", [x]), _state(product, "HardSwish", [gate])


def _scaled_swish(node: ir.Node) -> bool:
    """Whether ``node`` is the Sigmoid of x * Sigmoid(b * x), with b a constant number."""
    scaled = node.inputs[0] if node.op_type == "Sigmoid" else None
    product = scaled.producer() if scaled is not None else None
    if scaled is None or product is None or product.op_type != "Mul":
        return False
    uses, gate = list(node.outputs[0].uses()), node.outputs[0]
    if len(uses) != 1 or len(scaled.uses()) != 1 or gate.is_graph_output():
        return False
    x, _ = _scaling(product)
    return x is not None and _is_product(uses[0].node, gate) and x in uses[0].node.inputs


def _scaling(product: ir.Node) -> tuple[ir.Value | None, float]:
    """The operand beside a constant number, and that number before it was rounded to bf16."""
    for index in (1, 0):
        value = product.inputs[index]
        if _scalar(value) is not None and value is not None:
            tensor = constant_tensor(value)
            source = tensor.source if isinstance(tensor, ConvertedTensor) else tensor
            assert source is not None
            number = np.asarray(source.numpy()).astype(np.float32)
            return product.inputs[1 - index], float(number)
    return None, 1.0


def _swish(node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * Sigmoid(b * x) as a Swish."""
    gate, scaled = node.outputs[0], node.inputs[0]
    product = scaled.producer() if scaled is not None else None
    assert product is not None
    x, alpha = _scaling(product)
    reader = next(iter(gate.uses())).node
    return (
        _state(product, "Identity", [x]),
        _state(node, "Identity", [scaled]),
        _state(reader, "Swish", [gate], alpha=alpha),
    )


_PRODUCT: Final = "ONNX's Einsum has no bf16, its MatMul has"
_JOINT: Final = (
    "a batch norm's four vectors are one scale and one shift: combined in fp32, rounded once"
)

RESTATEMENTS: Final[Mapping[str, Iterable[_Row]]] = {
    "openvino": (
        _Row(
            restate=_statistics,
            reason="statistics in fp32 put casts around the norm's kernel, which computes them"
            " in fp32 anyway",
        ),
        _Row(
            restate=_neutral,
            reason="a bf16 product with 1 or sum with 0 is not removed, and keeps the ops"
            " around it from being fused",
        ),
        _Row(
            restate=_quotient,
            reason="a norm is recognised by its quotient, not by the product with an inverse",
        ),
        _Row(restate=_hard_swish, reason="one kernel, or part of the one before it"),
        _Row(
            restate=_swish,
            reason="a bf16 Swish is recognised without a factor inside, or as one op",
            since=24,
            applies=_scaled_swish,
        ),
    )
}
"""Rewritings for each engine, by its name; for other engines ops stay as they are."""
