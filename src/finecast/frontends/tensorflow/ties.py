"""What is of one type in a graph with bodies: the values that control flow hands on.

A body's arguments, what it gives back and the ports of its op are of one type. So are the
elements of a list: what is put into one comes out of it as what it is. The list itself is a
handle, handed from op to op, in and out of bodies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from finecast.frontends.tensorflow.functions import LOOPS, bodies
from finecast.frontends.tensorflow.library import Operation, Tensor, tf
from finecast.frontends.tensorflow.op_types import port_attributes
from finecast.frontends.tensorflow.regions import GraphRegion, every_operation

ELEMENT: Final = "element_dtype"
_RESULTS: Final = ""
"""Stands for the results of a body where the node of an input is named."""
_LIST_OP: Final = ("TensorList", "EmptyTensorList", "Identity")
"""What ops on lists, and what hands one on, begin with."""

Place = tuple[int, str]  # a tensor, by its region and name


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPort:
    """Where a value is read: input ``index`` of a node, or that result of a body."""

    region: int
    node: str
    index: int

    @property
    def is_result(self) -> bool:
        """Whether it is a result of the region's body."""
        return self.node == _RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a type is stated: an attribute of a node, or an element of a list attribute."""

    region: int
    node: str
    attribute: str
    index: int | None = None


@dataclass(slots=True, kw_only=True)
class TypeTie:
    """Ports through which one type flows.

    Attributes:
        inputs: What flows in.
        inner: Tensors of bodies that it comes out of.
        outer: Tensors that it comes out of beside the op.
        slots: Where the type is stated.
        region: Where it stands.
        of: What joins them: an op with bodies, or a list's first op.
        after: The operation behind which it may stand, by region and name.
        fixed: Whether the type cannot change.
    """

    of: Operation
    region: int
    after: Place
    inputs: list[InputPort] = field(default_factory=list[InputPort])
    inner: list[Place] = field(default_factory=list[Place])
    outer: list[Place] = field(default_factory=list[Place])
    slots: list[Slot] = field(default_factory=list[Slot])
    fixed: bool = False


def ties(found: Sequence[GraphRegion]) -> list[TypeTie]:
    """All that is tied in a model."""
    lists = _Lists()
    made: list[TypeTie] = []
    inner = {(r.parent, r.owner, r.role): r for r in found if r.owner}
    for region, op in every_operation(found):
        own = {role: inner[region.number, op.name, role] for role in bodies(op.node_def)}
        if own and op.type in LOOPS:
            made += _loop_ties(region.number, op, own, lists)
        elif own:
            made += _branch_ties(region.number, op, list(own.values()), lists)
        else:
            lists.visit(region.number, op)
    return [*made, *lists.ties()]


def _loop_ties(
    region: int, op: Operation, own: dict[str, GraphRegion], lists: _Lists
) -> Iterator[TypeTie]:
    body = own["body"]
    after = [port.tensor for port in body.model.outputs]
    for index, given in enumerate(op.inputs):
        arguments = [(r.number, r.arguments[index]) for r in own.values()]
        next_one = (body.number, after[index])
        if given.dtype == tf.variant:
            lists.join(
                (region, given.name), (region, op.outputs[index].name), next_one, *arguments
            )
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name), inner=arguments)
        tie.inputs.append(InputPort(region=region, node=op.name, index=index))
        if next_one not in arguments:
            tie.inputs.append(InputPort(region=body.number, node=_RESULTS, index=index))
        tie.outer.append((region, op.outputs[index].name))
        tie.slots += [_dtype_of(place) for place in arguments]
        tie.slots.append(Slot(region=region, node=op.name, attribute="T", index=index))
        yield tie


def _branch_ties(
    region: int, op: Operation, own: Sequence[GraphRegion], lists: _Lists
) -> Iterator[TypeTie]:
    for index, given in enumerate(list(op.inputs)[1:]):
        arguments = [(r.number, r.arguments[index]) for r in own]
        if given.dtype == tf.variant:
            lists.join((region, given.name), *arguments)
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name), inner=arguments)
        tie.inputs.append(InputPort(region=region, node=op.name, index=index + 1))
        tie.slots += [_dtype_of(place) for place in arguments]
        tie.slots.append(Slot(region=region, node=op.name, attribute="Tin", index=index))
        yield tie
    for index, result in enumerate(op.outputs):
        if result.dtype == tf.variant:
            ends = [(r.number, r.model.outputs[index].tensor) for r in own]
            lists.join((region, result.name), *ends)
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name))
        tie.inputs += [InputPort(region=r.number, node=_RESULTS, index=index) for r in own]
        tie.outer.append((region, result.name))
        tie.slots.append(Slot(region=region, node=op.name, attribute="Tout", index=index))
        yield tie


def _dtype_of(place: Place) -> Slot:
    region, tensor = place
    return Slot(region=region, node=tensor.removesuffix(":0"), attribute="dtype")


class _Lists:
    """Lists, as the handles that stand for one and what their ops take and give."""

    def __init__(self) -> None:
        self._group: dict[Place, list[Place]] = {}
        self._ops: dict[Place, list[tuple[int, Operation]]] = {}

    def join(self, *handles: Place) -> None:
        """All stand for one list, or for one after the other."""
        kept = self._group.setdefault(handles[0], [handles[0]])
        for other in handles[1:]:
            taken = self._group.setdefault(other, [other])
            if kept is not taken:
                kept += taken
                for place in taken:
                    self._group[place] = kept

    def visit(self, region: int, op: Operation) -> None:
        """Note an op that takes or gives a handle."""
        handles = [
            (region, t.name) for t in (*op.inputs, *op.outputs) if t.dtype == tf.variant
        ]
        if handles and op.type != "Placeholder":
            self.join(*handles)
            self._ops.setdefault(handles[0], []).append((region, op))

    def ties(self) -> Iterator[TypeTie]:
        """One for the elements of each list."""
        members: dict[int, list[tuple[int, Operation]]] = {}
        for handle, ops in self._ops.items():
            members.setdefault(id(self._group[handle]), []).extend(ops)
        yield from map(_list_tie, members.values())


def _list_tie(ops: Sequence[tuple[int, Operation]]) -> TypeTie:
    """What the ops of one list put in and take out."""
    writers = [(r, op) for r, op in ops if any(p == ELEMENT for p in _inputs(op))]
    last_region, last = (writers or ops[:1])[-1]
    region, first = min(ops, key=lambda found: found[0])
    tie = TypeTie(of=first, region=region, after=(last_region, last.name))
    for number, op in ops:
        tie.fixed |= not op.type.startswith(_LIST_OP)
        if not any(a.name == ELEMENT for a in op.op_def.attr):
            continue
        tie.slots.append(Slot(region=number, node=op.name, attribute=ELEMENT))
        tie.inputs += [
            InputPort(region=number, node=op.name, index=i)
            for i, attribute in enumerate(_inputs(op))
            if attribute == ELEMENT
        ]
        places = tie.inner if number != region else tie.outer
        made = zip(op.outputs, port_attributes(op, op.op_def.output_arg), strict=True)
        places += [(number, tensor.name) for tensor, a in made if a == ELEMENT]
    return tie


def _inputs(op: Operation) -> list[str]:
    return list(port_attributes(op, op.op_def.input_arg))


def is_handle(tensor: Tensor) -> bool:
    """Whether a tensor stands for a list or the like, which is no value of the graph."""
    handle: bool = tensor.dtype == tf.variant
    return handle
