"""The primitives by which ONNX models are changed: names, constants, ops, and what reads what.

onnx_ir's ``Tape`` makes nodes, too, but gives no names and places nothing; and its
``NameFixPass`` makes names unique in each graph only. Plans need names of nodes that are
unique in the whole model, bodies included, and that stay the same when it is read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

FREE_INITIALIZERS: Final = 4
"""The first IR version in which an initializer need not be an input."""
_FLOAT: Final = ir.DataType.FLOAT

# The notes of a conversion are metadata of nodes, and all begin with this. They tell what an
# edit changed from what the model's author wrote. The note of just this name is the format
# that a node had before; of a node that an edit inserted it is empty.
MARK: Final = "finecast.was"
# Of the nodes that round one value by other ops than casts: the format's label, a space, and a
# name that no other rounding has.
ROUNDING: Final = f"{MARK}.rounding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A place that reads a value: an input of an ONNX node, or an output of a body."""

    owner: ir.Node | ir.Graph
    index: int

    def value(self) -> ir.Value:
        """The value that is read there."""
        inside = isinstance(self.owner, ir.Graph)
        values = self.owner.outputs if inside else self.owner.inputs
        value = values[self.index]
        assert value is not None
        return value

    def read(self, value: ir.Value) -> None:
        """Read ``value`` there from now on."""
        if isinstance(self.owner, ir.Node):
            self.owner.replace_input_with(self.index, value)
        else:
            self.owner.outputs[self.index] = value


class Editor:
    """Changes one model in place.

    Attributes:
        model: The model.
        main: Its main graph.
        made: Nodes that were made and are not in a graph yet, in order.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.main = model.graph
        self.made: list[ir.Node] = []
        self._taken: set[str] | None = None

    def fresh(self, name: str) -> str:
        """``name``, with underscores appended while the model or this editor used it."""
        if self._taken is None:
            values, nodes = every_value(self.model), self.main.all_nodes()
            self._taken = {entry.name or "" for entry in (*values, *nodes)}
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def constant(self, name: str, numbers: NDArray[Any] | ir.TensorProtocol) -> ir.Value:
        """A new constant of the main graph, by a fresh name that begins with ``name``."""
        # ``ir.tensor`` asks first which of many protocols an array follows, which takes longer
        # than all else here.
        own = isinstance(numbers, np.ndarray | np.generic)
        tensor = ir.Tensor(np.asarray(numbers)) if own else numbers
        tensor.name = self.fresh(name)
        return self.register(ir.val(tensor.name, const_value=tensor))

    def register(self, value: ir.Value) -> ir.Value:
        """Make ``value``, a constant, one of the main graph; it is returned."""
        self.main.register_initializer(value)
        if (self.model.ir_version or 0) < FREE_INITIALIZERS:
            self.main.inputs.append(value)
        return value

    def op(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str,
        node: str = "",
        dtype: ir.DataType | None = _FLOAT,
        shape: ir.Shape | None = None,
    ) -> ir.Value:
        """The result, called ``name``, of a new node, which is added to ``made``.

        Args:
            kind: The op's type, of the default domain.
            inputs: What it reads.
            attributes: Its attributes.
            name: The name of its result.
            node: Its own name, that of its result if empty.
            dtype: The type of its result; None if it is to be inferred.
            shape: The shape of its result, if that is known.
        """
        kept = None if dtype is None else ir.TensorType(dtype)
        out = ir.Value(name=name, shape=shape, type=kept)
        self.made.append(ir.node(kind, inputs, attributes, name=node or name, outputs=[out]))
        return out

    def take(self) -> list[ir.Node]:
        """The nodes that were made since the last call, in order."""
        new_nodes, self.made = self.made, []
        return new_nodes

    def place_after(self, value: ir.Value) -> None:
        """Put the nodes that were made right after the one that makes ``value``."""
        place_after(value, self.take(), self.main)

    def replace_result(self, value: ir.Value, result: ir.Value) -> None:
        """Let all readers of an op's ``value`` read ``result`` in its place.

        The nodes that were made compute ``result`` from ``value``, and are put after it.
        """
        node, new_nodes = value.producer(), self.take()
        assert node is not None
        inside = [use for use in value.uses() if use.node in new_nodes]
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        for use in inside:
            use.node.replace_input_with(use.idx, value)
        node.append(new_nodes)
        result.shape, value.shape = value.shape, None


def name_nodes(model: ir.Model) -> None:
    """Give every node a unique, non-empty name; names that already are unique stay."""
    kept: set[str] = set()
    renamed: list[tuple[int, ir.Node]] = []
    for number, node in enumerate(model.graph.all_nodes()):
        if node.name and node.name not in kept:
            kept.add(node.name)
        else:
            renamed.append((number, node))
    for number, node in renamed:
        base = f"{node.name or node.op_type}_{number}"
        names = itertools.chain([base], (f"{base}_{n}" for n in itertools.count()))
        node.name = next(name for name in names if name not in kept)
        kept.add(node.name)


def every_value(model: ir.Model) -> list[ir.Value]:
    """All values of the model and its bodies: inputs, initializers and results."""
    values: dict[ir.Value, None] = {}
    for graph in model.graphs():
        values.update(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        for node in graph:
            values.update(dict.fromkeys(node.outputs))
    return list(values)


def home_of(value: ir.Value, main: ir.Graph) -> ir.Graph:
    """The graph or body that defines ``value``; ``main`` where onnx_ir does not say."""
    producer = value.producer()
    home = value.graph if producer is None else producer.graph
    return home if isinstance(home, ir.Graph) else main


def place_after(
    value: ir.Value,
    nodes: Sequence[ir.Node],
    main: ir.Graph,
    prologue: list[ir.Node] | None = None,
) -> None:
    """Put ``nodes``, which read ``value``, after the node that makes it.

    If no node makes it, they become the first of its graph. Those of the ``main`` graph are
    added to ``prologue`` instead, if there is one: its owner puts all of them first at once.
    """
    home, producer = home_of(value, main), value.producer()
    if producer is not None:
        home.insert_after(producer, nodes)
    elif home is main and prologue is not None:
        prologue += nodes
    elif len(home):
        home.insert_before(home[0], nodes)
    else:
        home.extend(nodes)


def place_first(nodes: Sequence[ir.Node], main: ir.Graph) -> None:
    """Make ``nodes`` the first of the main graph."""
    if len(main):
        main.insert_before(main[0], nodes)
    else:
        main.extend(nodes)


def is_read(value: ir.Value) -> bool:
    """Whether an op reads ``value``, or a graph gives it."""
    return bool(value.uses()) or value.is_graph_output()


def drop_unread(values: Iterable[ir.Value]) -> None:
    """Remove those of the constants ``values`` that nothing reads.

    Of a value that is computed from constants, the nodes and constants go that it alone needs.
    """
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        home = value.graph if node is None else node.graph
        results = [value] if node is None else node.outputs
        if any(map(is_read, results)) or not isinstance(home, ir.Graph):
            continue
        if node is not None:
            waiting += [v for v in node.inputs if v is not None]
            home.remove(node, safe=True)
        elif value.is_initializer():
            home.initializers.pop(value.name or "")
            if value in home.inputs:
                home.inputs.remove(value)


def turn_into(
    node: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Node:
    """Turn ``node`` into an ``op``; constants that it alone read leave the model."""
    before = [v for v in node.inputs if v is not None and v.is_initializer()]
    node.op_type, node.domain = op, domain
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    node.attributes.clear()
    for attribute in ir.convenience.convert_attributes(attributes or {}):
        node.attributes.add(attribute)
    drop_unread(v for v in before if not v.is_graph_input())
    return node
