"""Inlines calls of functions.

Law: the graph computes the same. A function that is marked to be compiled by XLA then runs op
by op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from finecast.frontends.tensorflow.functions import (
    CALLS,
    STATELESS,
    called_by,
    flattened,
    has_effects,
    is_stateful,
    library_of,
    needed,
    redirect,
)
from finecast.frontends.tensorflow.library import GraphDef, NodeDef, tf
from finecast.frontends.tensorflow.model import FrozenModel, base_name


def inlined(model: FrozenModel) -> FrozenModel:
    """``model`` without calls; control-flow ops whose bodies only compute become stateless."""
    library = library_of(model.graph)
    graph = tf.compat.v1.GraphDef()
    graph.versions.CopyFrom(model.graph.versions)
    moved: dict[str, str] = {}
    for node in model.graph.node:
        if node.op in CALLS:
            body = inlined(flattened(library[node.attr["f"].func.name], library))
            moved |= _insert(graph, node, body)
            continue
        copy = graph.node.add()
        copy.CopyFrom(node)
        if node.op in STATELESS and not any(
            has_effects(library[name], library) for name in called_by(node)
        ):
            copy.op = STATELESS[node.op]
    redirect(graph.node, moved)
    graph.library.function.extend(needed(graph.node, library))
    outputs = tuple(replace(p, tensor=moved.get(p.tensor, p.tensor)) for p in model.outputs)
    return replace(model, graph=graph, outputs=outputs)


def _insert(graph: GraphDef, call: NodeDef, body: FrozenModel) -> dict[str, str]:
    """Add the nodes of ``body`` under the call's name; returns the tensors of its results.

    Nodes that wait for the call now wait for a NoOp of its name, which waits for its results.
    """
    data = [name for name in call.input if not name.startswith("^")]
    before = [name for name in call.input if name.startswith("^")]
    given = dict(zip((base_name(p.tensor) for p in body.inputs), data, strict=True))
    for node in body.graph.node:
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{call.name}/{node.name}"
        copy.input[:] = list(_under(call.name, node.input))
        if node.name in given:
            kind = node.attr["dtype"].type
            copy.Clear()
            copy.name, copy.op = f"{call.name}/{node.name}", "Identity"
            copy.attr["T"].type = kind
            copy.input.append(given[node.name])
        elif is_stateful(node):
            copy.input.extend(before)
    ends = [f"{call.name}/{port.tensor}" for port in body.outputs]
    done = graph.node.add(name=call.name, op="NoOp")
    done.input.extend(dict.fromkeys(f"^{base_name(end)}" for end in ends))
    done.input.extend(before)
    return {f"{call.name}:{index}": end for index, end in enumerate(ends)}


def _under(scope: str, names: Sequence[str]) -> Iterator[str]:
    """Inputs of nodes, with ``scope`` before the names in them."""
    for name in names:
        mark = "^" if name.startswith("^") else ""
        yield f"{mark}{scope}/{name.removeprefix('^')}"
