"""Folds what is computed from constants alone into constants, and removes identities.

Law: outputs are the same numbers. What a plan converts is then what the ops read, and a
weight that went through a reshape is rounded once, from its original numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from os.path import commonpath
from typing import Any, Final

from finecast.frontends.tensorflow.functions import fresh
from finecast.frontends.tensorflow.library import NodeDef, Operation, Tensor, tf
from finecast.frontends.tensorflow.model import (
    PLACEHOLDERS,
    FrozenModel,
    SignaturePort,
    base_name,
    imported_graph,
)

_LARGEST_BYTES: Final = 10 << 20
"""A result that is larger than this, and than what it is computed from, is not folded; it is
the limit of Grappler's own constant folding."""
_CALLS: Final = re.compile(r"^((Stateful)?PartitionedCall/|Func/)+")
_PASSES_ON: Final = frozenset(
    {"Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"}
)


def folded(model: FrozenModel) -> FrozenModel:
    """``model`` without identities, ops on constants alone, and nodes that nothing reads.

    Raises:
        ModelError: If the graph is not valid.
    """
    return _with_short_names(_Folder(imported_graph(model.graph), model).finish())


def _with_short_names(model: FrozenModel) -> FrozenModel:
    """``model`` with the names of inlined calls left out of its nodes' names, where it can be.

    Saving a model wraps it in one more call; so its ops keep their names all the same.
    """
    inputs = {base_name(port.tensor) for port in model.inputs}
    ops = [n.name for n in model.graph.node if n.op != "Const" and n.name not in inputs]
    calls = [name.removesuffix(_CALLS.sub("", name)) for name in ops]
    around = f"{commonpath(calls)}/" if calls else ""
    short = {node.name: _CALLS.sub("", node.name) for node in model.graph.node}
    count = Counter(short.values())
    names: dict[str, str] = {}
    taken: set[str] = set()
    for name, shortest in short.items():
        wanted = shortest if count[shortest] == 1 else name.removeprefix(around)
        names[name] = fresh(wanted, taken)
        taken.add(names[name])
    for node in model.graph.node:
        node.name = names[node.name]
        for index, read in enumerate(node.input):
            before = base_name(read)
            node.input[index] = read.replace(before, names[before], 1)

    def moved(port: SignaturePort) -> SignaturePort:
        node, _, index = port.tensor.partition(":")
        return replace(port, tensor=f"{names[node]}:{index}")

    inputs, outputs = (tuple(map(moved, ports)) for ports in (model.inputs, model.outputs))
    return replace(model, inputs=inputs, outputs=outputs)


class _Folder:
    def __init__(self, graph: Any, model: FrozenModel) -> None:
        self.graph = graph
        self.model = model
        self.operations: list[Operation] = graph.get_operations()
        self.fed = {p.tensor for p in model.inputs}
        self.constant = self._constants()
        self.effects = self._with_effects()
        self.values = self._evaluated()
        self.made = {_folded_name(tensor): tensor for tensor in self.values}

    def _constants(self) -> set[str]:
        """Names of the ops whose results can be computed before the model runs."""
        found: set[str] = set()
        for op in self.operations:
            if op.control_inputs:
                continue  # its results must wait for another op
            if op.type == "Const" or (op.inputs and self._foldable(op, found)):
                found.add(op.name)
        return found

    def _foldable(self, op: Operation, known: set[str]) -> bool:
        if _is_stateful(op) or op.type in PLACEHOLDERS:
            return False
        if any(t.op.name not in known for t in op.inputs):
            return False
        if any(t.dtype in (tf.string, tf.resource, tf.variant) for t in op.outputs):
            return False
        made = sum(_bytes(t) for t in op.outputs)
        read = sum(_bytes(t) for t in op.inputs)
        return made < math.inf and made <= max(_LARGEST_BYTES, read)

    def _with_effects(self) -> set[str]:
        """Names of the ops that may do more than compute, as an assertion, or wait for one."""
        found: set[str] = set()
        for op in self.operations:
            before = (*op.control_inputs, *(t.op for t in op.inputs))
            if _is_stateful(op) or any(b.name in found for b in before):
                found.add(op.name)
        return found

    def _evaluated(self) -> dict[str, Any]:
        """Arrays of the folded tensors that other ops or the outputs read, by name."""
        ends = {self._source(p.tensor) for p in self.model.outputs}
        read = {
            t.name
            for op in self.operations
            if op.name not in self.constant
            for t in map(self._through, op.inputs)
        }
        wanted = [
            name
            for name in sorted(read | ends)
            if (op := self.graph.get_tensor_by_name(name).op).type != "Const"
            and op.name in self.constant
        ]
        if not wanted:
            return {}
        with tf.compat.v1.Session(graph=self.graph) as session:
            return dict(zip(wanted, session.run(wanted), strict=True))

    def _source(self, name: str) -> str:
        source: str = self._through(self.graph.get_tensor_by_name(name)).name
        return source

    def _through(self, tensor: Tensor) -> Tensor:
        """The tensor that ``tensor`` is a copy of, through identities."""
        while tensor.op.type in _PASSES_ON and tensor.name not in self.fed:
            if any(c.name in self.effects for c in tensor.op.control_inputs):
                break
            tensor = tensor.op.inputs[tensor.value_index]
        return tensor

    def finish(self) -> FrozenModel:
        nodes: dict[str, NodeDef] = {}
        outputs = tuple(
            replace(p, tensor=self._canonical(self._source(p.tensor)))
            for p in self.model.outputs
        )
        waiting = [base_name(p.tensor) for p in (*outputs, *self.model.inputs)]
        while waiting:
            name = waiting.pop()
            if name in nodes:
                continue
            nodes[name] = self._node(name)
            waiting += [base_name(i) for i in nodes[name].input]
        order = [n for op in self.operations for n in self._names(op) if n in nodes]
        result = tf.compat.v1.GraphDef()
        result.CopyFrom(_without_nodes(self.model.graph))
        result.node.extend(nodes[name] for name in order)
        return replace(self.model, graph=result, outputs=outputs)

    def _names(self, op: Operation) -> Iterator[str]:
        yield op.name
        for tensor in op.outputs[1:]:
            if tensor.name in self.values:
                yield _folded_name(tensor.name)

    def _canonical(self, name: str) -> str:
        return f"{_folded_name(name)}:0" if name in self.values else name

    def _node(self, name: str) -> NodeDef:
        if name in self.made:
            tensor = self.made[name]
            dtype = self.graph.get_tensor_by_name(tensor).dtype
            return _constant(name, self.values[tensor], dtype)
        op = self.graph.get_operation_by_name(name)
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(op.node_def)
        del node.input[:]
        node.input.extend(
            self._canonical(self._through(t).name).removesuffix(":0") for t in op.inputs
        )
        node.input.extend(f"^{c.name}" for c in op.control_inputs if c.name in self.effects)
        node.attr.pop("_class", None)  # names ops that may be folded, to be placed beside
        node.attr.pop("_output_shapes", None)
        return node


def _folded_name(tensor: str) -> str:
    name, _, index = tensor.partition(":")
    return name if index == "0" else f"{name}/output_{index}"


def _constant(name: str, value: Any, dtype: Any) -> NodeDef:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def _without_nodes(graph: Any) -> Any:
    rest = tf.compat.v1.GraphDef()
    rest.versions.CopyFrom(graph.versions)
    rest.library.CopyFrom(graph.library)
    return rest


def _is_stateful(op: Operation) -> bool:
    """Whether an op may do more than compute its results."""
    stateful = op.op_def is None or op.op_def.is_stateful
    return stateful and op.type not in PLACEHOLDERS


def _bytes(tensor: Tensor) -> float:
    """Bytes of a tensor; infinity where its shape is open."""
    size: int | None = tensor.shape.num_elements()
    return math.inf if size is None else size * tensor.dtype.size
