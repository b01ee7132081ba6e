"""Takes back an earlier conversion, so that another policy starts from the original.

The notes in a SavedModel name the ops and constants that were low before the conversion, and
the casts that were there. All others that are low, and all other casts, are the conversion's.
Digits that a constant lost do not come back: it becomes the fp32 number that it stands for. If
the original constant is still in the graph, that is read again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from finecast.errors import ModelError
from finecast.frontends.native_model import SCALE, adjust, uses_of
from finecast.frontends.saved_models import POLICY, converted_to
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.planning.adjustments import Adjustment, edits_by
from finecast.planning.edits import Use
from finecast.planning.plan import Plan
from finecast_tensorflow.frontend.library import DTYPES, tf
from finecast_tensorflow.frontend.model import FrozenModel, base_name
from finecast_tensorflow.frontend.native import CAST, At, TensorFlowNative
from finecast_tensorflow.frontend.reader import GraphBinding, read

_PLAN: Final = "plan"
_LOW: Final = "low_before"
_PORTS: Final = "ports_before"
_ADJUSTED: Final = "adjusted"


def noted(graph: Graph, plan: Plan, before: Mapping[str, str]) -> dict[str, str]:
    """The notes of a model that is made by applying ``plan`` to ``graph``.

    ``before`` are those of the model that the plan is applied to. If it is a conversion, they
    stay: the original is the model before the first one.
    """
    adjusted = [
        *json.loads(before.get(_ADJUSTED, "[]")),
        *(a.to_dict() for a in plan.adjustments),
    ]
    made = {_ADJUSTED: json.dumps(adjusted)} if adjusted else {}
    if converted_to(before):
        return {**before, **made, _PLAN: plan.digest, POLICY: plan.policy}
    ports = {v.name: v.dtype for v in (*graph.inputs, *graph.outputs) if v.name in plan.io}
    low = [n.name for n in graph.nodes if _is_low(n.format) or _casts_floats(graph, n)]
    low += [v.name for v in graph.values if v.constant is not None and _is_low(v.format)]
    kept = {_LOW: low, _PORTS: ports}
    return {
        _PLAN: plan.digest,
        POLICY: plan.policy,
        **made,
        **{name: json.dumps(content) for name, content in kept.items() if content},
    }


def before_conversion(graph: Graph, binding: GraphBinding, where: str) -> FrozenModel:
    """The model as it was before a conversion; that of ``binding`` is not changed.

    Raises:
        ModelError: If the notes of the conversion cannot be read; it names ``where``.
    """
    before, ports, adjusted = _read_notes(binding.model.notes, where)
    model = TensorFlowNative(graph, binding)
    for value in (*graph.inputs, *graph.outputs):
        if value.name in ports:
            model.declare(value.id, ports[value.name])
    for value in graph.values:
        if value.constant is not None and _is_low(value.format) and value.name not in before:
            model.give(value.id, uses_of(graph, value.id), _wide(model, value))
    for node in graph.nodes:
        if node.name in before:
            continue
        if _is_low(node.format):
            model.retype(node.id, Format.FP32)
        elif _casts_floats(graph, node) and (result := node.outputs[0]) is not None:
            model.give(result, uses_of(graph, result), model.read_at(node.id, 0))
    return replace(_unadjusted(model.finish(), adjusted), notes={})


def _unadjusted(model: FrozenModel, made: Sequence[Adjustment]) -> FrozenModel:
    """The model before its operands were adjusted."""
    if not made:
        return model
    native = TensorFlowNative(*read(model))
    graph = native.graph
    nodes = {node.name: node for node in graph.nodes}
    left: list[Adjustment] = []
    for one in made:
        node = None if one.attribute else nodes.get(one.node)
        value = None if node is None else graph.read(node, one.port)
        maker = None if value is None or value.producer is None else value.producer
        if node is None or value is None or maker is None:
            left.append(one.undone)
            continue
        source = native.read_at(node.id, one.port)
        while maker is not None and graph.nodes[maker].name.startswith(SCALE):
            source, read_by = native.read_at(maker, 0), graph.read(graph.nodes[maker], 0)
            maker = None if read_by is None else read_by.producer
        native.give(value.id, [Use(node=node.id, index=one.port)], source)
    adjust(native, edits_by(left, graph))
    return native.finish()


def _read_notes(
    notes: Mapping[str, str], where: str
) -> tuple[frozenset[str], dict[str, Format], list[Adjustment]]:
    """Names of what was low before a conversion, and formats of ports, by name, before it.

    Then the adjustments that were made.
    """
    formats = {fmt.label: fmt for fmt in DTYPES}
    try:
        low: Any = json.loads(notes.get(_LOW, "[]"))
        ports: Any = json.loads(notes.get(_PORTS, "{}"))
        made = [Adjustment.from_dict(one) for one in json.loads(notes.get(_ADJUSTED, "[]"))]
        return frozenset(low), {n: formats[label] for n, label in ports.items()}, made
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the model was converted by finecast before, to {converted_to(notes)}, and has no"
            " notes of what was changed that can be read",
            where=where,
            fix="give the model that it was made from",
        ) from error


def _wide(model: TensorFlowNative, value: Value) -> At:
    """The tensor of the fp32 constant that ``value`` was rounded from, if it is still there.

    Else that of a new constant with the same numbers as ``value``.
    """
    assert value.constant is not None
    assert value.format is not None
    region, tensor = model.tensor(value.id)
    low = value.constant.read()
    name = base_name(tensor).removesuffix(f"/{value.format.label}")
    beside = model.nodes(region).get(name)
    if beside is not None and beside.attr["dtype"].type == tf.float32.as_datatype_enum:
        array = tf.make_ndarray(beside.attr["value"].tensor)
        if np.array_equal(convert_constant(array, value.format), low, equal_nan=True):
            return At(region, f"{name}:0")
    wide = low.astype(np.float32)
    return model.add_constant(region, name, wide, tf.float32)


def _casts_floats(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a Cast between formats that ops compute in."""
    ports = [graph.values[i] for i in (*node.inputs, *node.outputs) if i is not None]
    return node.native == CAST and all(v.format in DTYPES for v in ports)


def _is_low(fmt: Format | None) -> bool:
    return fmt not in (None, Format.FP32)
