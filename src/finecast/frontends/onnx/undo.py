"""Notes of a conversion, and taking it back, so that another policy starts from the original.

Notes in the nodes' metadata tell what an edit changed from what the model's author wrote. All
their keys begin with ``MARK``. Digits that constants lost to rounding do not come back: an
fp16 weight becomes the equal fp32 number. Adjusted constants get their former numbers back bit
for bit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.devices.faults import is_mended
from finecast.frontends.onnx.coded_products import restore_products
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ComputedTensor,
    constant_tensor,
    set_constant,
)
from finecast.frontends.onnx.editor import FAULT_NOTE, MARK, ROUNDING, drop_unread
from finecast.frontends.onnx.miscomputed import tie_again
from finecast.frontends.onnx.model import POLICY_KEY
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.restating import BESIDE, EQUATION, STATED, become
from finecast.frontends.onnx.statements import STATEMENTS
from finecast.frontends.onnx.types import infer
from finecast.frontends.onnx.writer import (
    ATTRIBUTE_TIMES,
    SCALES,
    STORED,
    TIMES,
    WAS,
    apply_edits,
    phi_mark,
)
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.planning.adjustments import WHOLE, Adjustment
from finecast.planning.edits import edits
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECIDED_BY, DECISION
from finecast.rules.policy import conversion_stays

PLAN_KEY = "finecast.plan"


def undo(model: ir.Model, policy: str) -> None:
    """Give ``model`` the formats it had before a conversion to another than ``policy``.

    Law: a model that was never converted, or whose conversion stays, is left as it is, but for
    what stands there because of a fault that the installed engine no longer has.
    """
    restore_products(model)
    _take_out_mended(model)
    was = model.metadata_props.get(POLICY_KEY)
    if was is None or conversion_stays(was, policy):
        return
    _restore_ops(model)
    for nodes in _inserted(model):
        _take_out(nodes)
    infer(model, shapes=False)
    graph, binding = read(model, own_casts=True)
    formats: dict[int, Format] = {}
    for node in graph.float_nodes:
        was = _mark_of(node, binding)
        if was is not None:
            # An inserted cast has an empty mark. Casts from fp32 to fp32 are then dropped.
            formats[node.id] = Format.parse(was) if was else Format.FP32
    apply_edits(graph, binding, edits(graph, formats))
    drop_notes(model)
    for node in model.graph.all_nodes():
        for key, text in [*node.metadata_props.items()]:
            if key.startswith(MARK):
                _restore_attribute(node, key, text)
                _restore_constant(node, key, text)
                del node.metadata_props[key]
    for key in (PLAN_KEY, POLICY_KEY):
        model.metadata_props.pop(key, None)


def _take_out_mended(model: ir.Model) -> None:
    """Take out what is there because of faults that the engine no longer has."""
    tie_again(model)
    for nodes in _inserted(model):
        if is_mended(nodes[0].metadata_props.get(FAULT_NOTE, "")):
            _take_out(nodes)


def _mark_of(node: Node, binding: OnnxBinding) -> str | None:
    native = binding.nodes[node.id]
    if native is not None:
        return native.metadata_props.get(MARK)
    return binding.owners[node.id].metadata_props.get(phi_mark(node))


# Ops that were rewritten as others.


def _restore_ops(model: ir.Model) -> None:
    """Turn rewritten nodes into the ops that they were.

    A node stays as it is if another tool removed the operands of the former op.
    """
    shared = _values(model.graph)
    for graph in model.graphs():
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
                become(node, was["op"], inputs, was["attributes"])
        _restore_einsums(graph, shared | _values(graph))


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


def _restore_einsums(graph: ir.Graph, defined: Mapping[str | None, ir.Value]) -> None:
    """Turn MatMuls that were Einsums into these again.

    ``defined`` has the values that ``graph`` can read, by name. A MatMul stays if another tool
    removed the Einsum's operands, or reads between the nodes that move its result.
    """
    beside: dict[str, list[ir.Node]] = {}
    for node in graph:
        if (name := node.metadata_props.get(BESIDE)) is not None:
            beside.setdefault(name, []).append(node)
    for node in list(graph):
        text = node.metadata_props.pop(EQUATION, None)
        if text is None:
            continue
        was = json.loads(text)
        operands = [defined.get(was["first"]), defined.get(was["other"])]
        moves = beside.get(node.name or "", [])
        raw, end = node.outputs[0], _end(node, moves)
        if None in operands or end is None:
            continue
        become(node, "Einsum", operands, {"equation": was["equation"]})
        if end is not raw:
            end.replace_all_uses_with(raw, replace_graph_outputs=True)
            raw.name, end.name = end.name, raw.name
            raw.shape = end.shape
        graph.remove(moves, safe=True)


def _end(node: ir.Node, moves: Sequence[ir.Node]) -> ir.Value | None:
    """The product's result after all ``moves``; None if others read one of the steps."""
    end = node.outputs[0]
    while True:
        readers = [u.node for u in end.uses()]
        moving = [n for n in readers if n in moves]
        if not moving:
            return end
        if len(readers) > 1 or end.is_graph_output():
            return None
        end = moving[0].outputs[0]


# Nodes that were inserted, other than casts.


def _inserted(model: ir.Model) -> Iterator[list[ir.Node]]:
    """Roundings and multiplications that were inserted: the nodes of each, in order."""
    roundings: dict[str, list[ir.Node]] = {}
    scales: list[ir.Node] = []
    for node in model.graph.all_nodes():
        label = node.metadata_props.get(ROUNDING)
        if label is not None:
            roundings.setdefault(label, []).append(node)
        if SCALES in node.metadata_props:
            scales.append(node)
    yield from roundings.values()
    yield from ([node] for node in scales)


def _take_out(nodes: Sequence[ir.Node]) -> None:
    """Remove the nodes of one rounding, in order, and constants that only they read.

    Their readers read the value before them again, or the numbers that a constant's codes
    stand for. Nodes stay where another tool changed them or reads a value between them.
    """
    if not (nodes[0].inputs and nodes[-1].outputs):
        return
    graph, source, result = nodes[0].graph, nodes[0].inputs[0], nodes[-1].outputs[0]
    steps = [v for n in nodes for v in n.outputs]
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    scalars = [v for v in read if v is not source and v not in steps]
    inner = [u.node for v in steps if v is not result for u in v.uses()]
    whole = (
        graph is not None
        and all(n.graph is graph for n in nodes)
        and all(n in nodes for n in inner)
        and not any(v.is_graph_output() for v in steps)
        and all(constant_tensor(v) is not None for v in scalars)
    )
    if not whole or graph is None or source is None:
        return
    kept = _original(nodes, source)
    if kept is None:
        return
    if kept is not source:
        graph.register_initializer(kept)
        scalars.append(source)
    result.replace_all_uses_with(kept)
    graph.remove(nodes, safe=True)
    drop_unread(scalars)


def _original(nodes: Sequence[ir.Node], source: ir.Value) -> ir.Value | None:
    """What readers of a rounding read again: ``source``, or the numbers of constant codes.

    None if ``source`` is constant codes, and the ``nodes`` do not state their encoding.
    """
    tensor = constant_tensor(source)
    if tensor is None or tensor.dtype == ir.DataType.FLOAT:
        return source
    label = nodes[0].metadata_props[ROUNDING].partition(" ")[0]
    read = next((row.read for f, row in STATEMENTS.items() if f.label == label), None)
    if read is None:
        return None
    try:
        encoding = read(nodes)
        encoding.spread(tuple(tensor.shape.numpy()))
    except ValueError:
        return None
    name, dtype = nodes[-1].outputs[0].name or "", DATA_TYPES[encoding.format.result]
    return ir.val(name, const_value=ComputedTensor(tensor, encoding.decode, name, dtype))


# Constants and attributes that were adjusted.


def _restore_attribute(node: ir.Node, key: str, text: str) -> None:
    """Give the attribute that the note ``key`` is of its former number back."""
    name = key.removeprefix(ATTRIBUTE_TIMES)
    attribute = node.attributes.get(name)
    if not key.startswith(ATTRIBUTE_TIMES) or attribute is None:
        return
    try:
        content = {"node": "", "port": 0, "axis": WHOLE, "exponents": text}
        back = Adjustment.from_dict(content).undone
        number = back.of(np.array(attribute.as_float(), np.float32))
    except (TypeError, ValueError):  # the note was not written by finecast
        return
    node.attributes[name] = ir.AttrFloat32(name, float(number))


def _restore_constant(node: ir.Node, key: str, text: str) -> None:
    """Give the constant that the note ``key`` of ``node`` is of its former numbers back.

    A constant stays if other ops read it, too, or if it does not fit the note. Notes of other
    things change nothing.
    """
    port, _, axis = key.removeprefix(WAS).removeprefix(TIMES).partition(".")
    index = int(port) if port.isdecimal() else len(node.inputs)
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else constant_tensor(value)
    if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return
    if len(value.uses()) != 1:
        return
    shape = tensor.shape.numpy()
    try:
        if key.startswith(WAS):
            before = np.frombuffer(base64.b64decode(text, validate=True), STORED)
            set_constant(value, ir.tensor(before.reshape(shape).astype(np.float32)))
        else:
            content = {"node": "", "port": 0, "axis": -int(axis), "exponents": text}
            what = Adjustment.from_dict(content)
            if what.fits(shape):
                set_constant(value, ComputedTensor(tensor, what.undone.of))
    except (TypeError, ValueError):  # the note was not written by finecast
        return


# ------------------------------------------------------------ notes on nodes that viewers show
#
# Netron and others list a node's ``metadata_props``. Only ops that a search lowered have such
# a note: of others a policy or a rule says all there is to say. It has no measured figure, and
# no reason that compares such figures: one plan gives the same file on any day. Undoing a
# conversion takes the notes out.

TYPE_KEY: Final = "finecast.type"
_NOTES: Final = (TYPE_KEY, "finecast.kernel_ms", "finecast.reason")
"""Notes that are taken out. The last two are those of files that earlier releases wrote."""


def note_types(graph: Graph, binding: OnnxBinding, plan: Plan) -> None:
    """Note on each node the low type that a search chose; notes of before are taken out."""
    drop_notes(binding.model)
    chosen = {d.node: d.format for d in plan.decisions if _is_chosen_low(d)}
    for node in graph.float_nodes:
        native = binding.nodes[node.id]
        if native is not None and node.name in chosen:
            native.metadata_props[TYPE_KEY] = chosen[node.name].label


def drop_notes(model: ir.Model) -> None:
    """Take the notes out of a model."""
    for node in model.graph.all_nodes():
        for key in _NOTES:
            node.metadata_props.pop(key, None)


def _is_chosen_low(decision: Decision) -> bool:
    """Whether costs, not a policy or a rule, chose a format other than fp32."""
    return decision.format is not Format.FP32 and any(
        r.rule == DECISION and DECIDED_BY in r.evidence for r in decision.reasons
    )
