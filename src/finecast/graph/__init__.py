"""The neutral graph: SSA, read-only, the same for every frontend.

Bodies of control flow are regions of the same graph: their nodes stand in ``Graph.nodes``
with their region's id, and a value captured from an outer region is simply used. Where
control flow forces values to share one type (branches of an If, the state of a Loop), the
frontend puts a ``phi`` node whose inputs are the values that flow in and whose outputs are
those that flow out, so that the core knows nothing else about control flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from finecast.graph.fingerprints import Fingerprint, fingerprint
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.rounding import round_to
from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.graph.builder import GraphBuilder as GraphBuilder
    from finecast.graph.structure import MODEL_INPUT as MODEL_INPUT
    from finecast.graph.structure import OpStructure as OpStructure
    from finecast.graph.structure import Structure as Structure
else:
    __getattr__ = imported_on_use(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Dim: TypeAlias = int | str | None
Attribute: TypeAlias = int | float | str | tuple[int | float | str, ...]

# Codes of a scaled format are integers to the graph, and tf32 is stored as fp32.
_DECISIONS = frozenset({"bool", "int32", "int64"})
_STORED = {f.label: f for f in FLOATS if f is not Format.TF32}

ROUNDS: Final = "finecast.rounds"
"""Attribute of a node that a conversion added to round its input by fp32 arithmetic: the
label of the format."""

SCALARS: Final = "finecast.scalars"
"""Attribute of a node: the numbers that it takes as operands but that are no graph values."""

STATED: Final = "finecast.stated"
"""Attribute of a node that the model itself keeps from being lowered."""

PHI: Final = "phi"
"""The op of a node that a frontend adds only to give values one format: its native name is
``finecast::phi``."""

INNER: Final = "finecast.inner"
"""Attribute of a phi: how many of its outputs, the first ones, are values inside a body."""

# Elements checked at once; for most constants the first ones already settle the question.
_PIECE: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ConstantStats:
    """A constant's element count, and properties that are computed when first asked for.

    ``read`` returns the constant as an array; it may come from disk.
    """

    size: int
    read: Callable[[], NDArray[np.generic]] = field(repr=False, compare=False)

    @cached_property
    def largest(self) -> float:
        """Largest finite magnitude, 0 if there is none."""
        array = self.read().astype(np.float32, copy=False)
        if array.size:
            top = float(np.maximum(array.max(), -array.min()))  # NaN if there is any
            if math.isfinite(top):
                return abs(top)  # most constants: no copy of a large one was made
        finite = self._magnitudes
        return float(finite.max()) if finite.size else 0.0

    @cached_property
    def smallest_nonzero(self) -> float:
        """Smallest finite magnitude above 0, 0 if there is none."""
        finite = self._magnitudes
        nonzero = finite[finite > 0]
        return float(nonzero.min()) if nonzero.size else 0.0

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What identifies its numbers and their order."""
        return fingerprint(self.read())

    def all_in(self, fmt: Format) -> bool:
        """Whether each number is one of ``fmt``'s, so that rounding to it changes none."""
        flat = self.read().reshape(-1)
        pieces = (
            flat[i : i + _PIECE].astype(np.float32, copy=False)
            for i in range(0, flat.size, _PIECE)
        )
        return all(np.array_equal(p, round_to(p, fmt), equal_nan=True) for p in pieces)

    @cached_property
    def whole(self) -> bool:
        """Whether each number is an integer."""
        flat = self.read().reshape(-1)
        pieces = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
        return all(np.array_equal(p, np.rint(p.astype(np.float32))) for p in pieces)

    @property
    def _magnitudes(self) -> NDArray[np.float32]:
        array = np.abs(self.read().astype(np.float32, copy=False)).ravel()
        return array[np.isfinite(array)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One SSA value. ``dtype`` is a format's label (``fp32``) or another type's name.

    ``came_as`` is the encoding that the value had in a model that another tool quantized, and
    that was taken back to floats.
    """

    id: int
    name: str
    dtype: str
    shape: tuple[Dim, ...] | None = None
    producer: int | None = None
    uses: tuple[int, ...] = ()
    constant: ConstantStats | None = None
    is_input: bool = False
    is_output: bool = False
    came_as: Scaled | None = None

    @property
    def format(self) -> Format | None:
        """The float format it is stored in; None for integers, fp64, strings, sequences."""
        return _STORED.get(self.dtype)

    @property
    def is_decision(self) -> bool:
        """Whether it holds integers or bools, as indices and masks are."""
        return self.dtype in _DECISIONS

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape if every size of it is known; else None."""
        sizes = tuple(size for size in self.shape or () if isinstance(size, int))
        return sizes if self.shape is not None and len(sizes) == len(self.shape) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op.

    ``follows_in[i]`` says that input i is read in the op's own format, ``follows_out[j]``
    that output j is written in it; the other float ports keep the type they have. ``admits``
    are the formats that the op's definition allows; a node whose ``format`` is None carries
    no float that could change. ``source`` is the line of the user's program that the op comes
    from, as far as the model tells it.
    """

    id: int
    name: str
    op: str
    native: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    follows_in: tuple[bool, ...]
    follows_out: tuple[bool, ...]
    format: Format | None
    admits: frozenset[Format] = frozenset()
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])
    scope: str = ""
    region: int = 0
    source: str = field(default="", compare=False)

    @property
    def input_ids(self) -> list[int]:
        """Ids of the values that it reads, without the inputs that are left out."""
        return [i for i in self.inputs if i is not None]

    @property
    def output_ids(self) -> list[int]:
        """Ids of the values that it gives, without the outputs that are left out."""
        return [i for i in self.outputs if i is not None]

    @property
    def outer_outputs(self) -> tuple[int | None, ...]:
        """Its outputs but those that a phi has inside of a body."""
        inner = self.attributes.get(INNER, 0)
        return self.outputs[inner:] if isinstance(inner, int) else self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All nodes in topological order, bodies before the node that owns them.

    ``nodes[i].id == i`` and ``values[i].id == i``. ``ports`` are the names of inputs and of
    outputs, each in the order that callers by position go by; empty where it is not known.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    digest: str = ""
    ports: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), compare=False)
    _derived: dict[object, Any] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, Any]
    )

    def once(
        self, derive: Callable[Concatenate[Graph, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``derive(self, *args)``, computed the first time and kept as long as the graph."""
        key = (derive, args, *kwargs.items())
        if key not in self._derived:
            self._derived[key] = derive(self, *args, **kwargs)
        return self._derived[key]

    def static_shapes(self, names: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of the values in ``names`` (ids) whose sizes are all known."""
        shapes = {name: self.values[index].fixed_shape for name, index in names.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The model's inputs, in order."""
        return tuple(v for v in self.values if v.is_input)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The model's outputs."""
        return tuple(v for v in self.values if v.is_output)

    @property
    def float_nodes(self) -> tuple[Node, ...]:
        """Nodes that compute in a float format: those a plan decides."""
        return tuple(n for n in self.nodes if n.format is not None)

    def find(self, name: str) -> Node:
        """The node called ``name``.

        Raises:
            KeyError: If there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def maker(self, value: Value | int | None) -> Node | None:
        """The node that gives a value (or the value of that id); None if no node does."""
        graph_value = self.values[value] if isinstance(value, int) else value
        made = None if graph_value is None else graph_value.producer
        return None if made is None else self.nodes[made]

    def read(self, node: Node, port: int) -> Value | None:
        """The value that ``node`` reads at input ``port``; None where it has none."""
        index = node.inputs[port] if port < len(node.inputs) else None
        return None if index is None else self.values[index]

    def readers(self, value: Value) -> Iterator[Node]:
        """The nodes that read ``value``."""
        return map(self.nodes.__getitem__, value.uses)

    def constants(self, node: Node) -> list[ConstantStats]:
        """Those that the node reads, in order of its inputs."""
        read = (self.values[i].constant for i in node.input_ids)
        return [one for one in read if one is not None]

    def following_inputs(self, node: Node) -> Iterator[Value]:
        """Values that ``node`` reads in its own format."""
        for index, follows in zip(node.inputs, node.follows_in, strict=True):
            if index is not None and follows:
                yield self.values[index]

    def following_outputs(self, node: Node) -> Iterator[Value]:
        """Values that ``node`` writes in its own format."""
        for index, follows in zip(node.outputs, node.follows_out, strict=True):
            if index is not None and follows:
                yield self.values[index]


# ----------------------------------- which ops of a training graph belong to its backward pass


TANGENTS: Final = "tangents"
"""How AOT autograd calls the inputs that are gradients of the outputs, before a number."""


def backward_ops(graph: Graph) -> frozenset[int]:
    """Ops of the backward pass: all that depend on gradients of the outputs.

    A graph without such inputs has no backward pass.
    """
    reached = {v.id for v in graph.inputs if v.name.startswith(TANGENTS)}
    op_ids = set[int]()
    for node in graph.nodes if reached else ():
        if any(value in reached for value in node.inputs):
            op_ids.add(node.id)
            reached.update(node.output_ids)
    return frozenset(op_ids)


def ops_for_backward(graph: Graph) -> frozenset[int]:
    """Ops of the backward pass, and those whose results only such ops read."""
    op_ids = set(backward_ops(graph))
    for node in reversed(graph.nodes) if op_ids else ():
        outputs = [graph.values[v] for v in node.output_ids]
        uses = [n for v in outputs for n in v.uses]
        if uses and op_ids.issuperset(uses) and not any(v.is_output for v in outputs):
            op_ids.add(node.id)
    return frozenset(op_ids)
