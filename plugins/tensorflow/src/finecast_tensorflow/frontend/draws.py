"""Graphs whose random ops draw the same in each run, to be run and never written."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any, Final

import numpy as np

from finecast_tensorflow.frontend.functions import every_node
from finecast_tensorflow.frontend.library import NodeDef, tf
from finecast_tensorflow.frontend.model import FrozenModel

_STATELESS: Final = {
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "Multinomial": "StatelessMultinomial",
}
"""The op that draws by a key, and not by a state of its own, for each random op."""


def with_fixed_draws(model: FrozenModel) -> FrozenModel:
    """A copy whose random ops draw by a fixed key each; the model itself if it has none."""
    if not any(node.op in _STATELESS for node in every_node(model.graph)):
        return model
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(model.graph)
    numbers = count()
    bodies = [(graph.node, ""), *((f.node_def, ":output") for f in graph.library.function)]
    for nodes, port in bodies:
        for node in [node for node in nodes if node.op in _STATELESS]:
            nodes.extend(_fix(node, next(numbers), port))
    return replace(model, graph=graph)


def _fix(node: NodeDef, number: int, port: str) -> list[NodeDef]:
    """Make a random op stateless; returns the constants that it reads then."""
    parts: dict[str, Any]
    if node.op == "Multinomial":
        parts = {"seed": np.array([0, number], dtype=np.int64)}
    else:
        parts = {
            "key": np.array([number], dtype=np.uint64),
            "counter": np.zeros(2, dtype=np.uint64),
            "algorithm": np.array(1, dtype=np.int32),  # Philox
        }
    constants = [_constant(f"{node.name}/draw/{name}", array) for name, array in parts.items()]
    data = [name for name in node.input if not name.startswith("^")]
    controls = [name for name in node.input if name.startswith("^")]
    behind = 2 if node.op == "Multinomial" else 1
    added = [f"{one.name}{port}:0" if port else one.name for one in constants]
    kinds = {name: node.attr[name] for name in node.attr if name not in ("seed", "seed2")}
    stated = _attributes(node.op, kinds)
    node.op = _STATELESS[node.op]
    del node.input[:]
    node.input.extend([*data[:behind], *added, *data[behind:], *controls])
    node.attr.clear()
    for name, value in stated.items():
        node.attr[name].CopyFrom(value)
    return constants


def _attributes(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the stateless op."""
    kept = {name: value for name, value in given.items() if name.startswith("_")}
    if op == "Multinomial":
        seed = tf.compat.v1.AttrValue(type=tf.int64.as_datatype_enum)
        return kept | {"T": given["T"], "output_dtype": given["output_dtype"], "Tseed": seed}
    if op == "RandomUniformInt":
        return kept | {"dtype": given["Tout"], "Tshape": given["T"]}
    return kept | {"dtype": given["dtype"], "Tshape": given["T"]}


def _constant(name: str, array: Any) -> NodeDef:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(array.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array))
    return node
