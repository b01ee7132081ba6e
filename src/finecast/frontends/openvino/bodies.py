"""Bodies of If, Loop and TensorIterator, and which of their ports must have one type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import openvino

_LOOPS: Final = frozenset({"Loop", "TensorIterator"})

# A port of an op with bodies: its kind ("in" and "out" of the op itself, "parameter" and
# "result" of a body), the number of the body (0 for the op itself), and the port's index.
_Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Input ``index`` of an op, which stands in the graph's region ``region``."""

    op: openvino.Node
    index: int
    region: int

    @property
    def port(self) -> openvino.Input:
        """The input as an object of OpenVINO."""
        return self.op.input(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Body number ``body`` of the op ``owner``, which stands in the region ``parent``."""

    owner: Any
    body: int
    model: openvino.Model
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Ports that must have one type, as control flow passes the same values through them.

    What is read at ``inputs`` (inputs of the op, results of bodies) comes out at ``inner``,
    parameters of bodies, and at ``outer``, outputs of the op.
    """

    inputs: tuple[Entry, ...]
    inner: tuple[openvino.Output, ...]
    outer: tuple[openvino.Output, ...]


def bodies(op: Any) -> list[openvino.Model]:
    """The bodies of a control-flow op; empty for other ops."""
    kind = op.get_type_name()
    if kind == "If":
        return [op.get_then_body(), op.get_else_body()]
    return [op.get_function()] if kind in _LOOPS else []


def every_op(model: openvino.Model) -> Iterator[openvino.Node]:
    """The ops of ``model`` and of all bodies in it, sorted topologically, bodies first."""
    for op in model.get_ordered_ops():
        for body in bodies(op):
            yield from every_op(body)
        yield op


def ties_of(op: Any, region: int, inner: Sequence[tuple[int, openvino.Model]]) -> list[Tie]:
    """The ties of an op with bodies, read from its port descriptions.

    Args:
        op: An If, Loop or TensorIterator.
        region: The number of the region that it stands in.
        inner: Region number and model of each of its bodies.
    """
    groups = _Groups()
    for number in range(len(inner)):
        which = (number,) if op.get_type_name() == "If" else ()
        for description in op.get_input_descriptions(*which):
            outside = ("in", 0, description.input_index)
            groups.join(outside, ("parameter", number, description.body_parameter_index))
            if hasattr(
                description, "body_value_index"
            ):  # a state: its value for the next iteration
                groups.join(outside, ("result", number, description.body_value_index))
        for description in op.get_output_descriptions(*which):
            outside = ("out", 0, description.output_index)
            groups.join(outside, ("result", number, description.body_value_index))
    return [_tie(op, region, inner, places) for places in groups.all()]


def hand_in(region: Region, port: openvino.Output) -> openvino.Output:
    """Add an input to a body, fed by ``port`` of the parent's region; returns its port."""
    from openvino import opset13

    parameter = opset13.parameter(port.get_partial_shape(), port.get_element_type())
    region.model.add_parameters([parameter])
    if region.owner.get_type_name() == "If":
        both: list[Any] = [None, None]
        both[region.body] = parameter
        region.owner.set_input(port, *both)
    else:
        region.owner.set_invariant_input(parameter, port)
    return parameter.output(0)


def hand_out(region: Region, count: openvino.Output | None) -> openvino.Output:
    """A new output of an op: a number of one of its bodies, summed over the body's runs.

    Args:
        region: The body.
        count: The number, of shape [1]; None for 1 in each run.
    """
    from openvino import opset13

    results: list[Any] = []
    for number, body in enumerate(bodies(region.owner)):
        own = number == region.body
        source = count if own and count is not None else opset13.constant([np.float32(own)])
        results.append(opset13.result(source))
        body.add_results(results[-1:])
    if region.owner.get_type_name() == "If":
        return region.owner.set_output(*results)
    steps = region.owner.get_concatenated_slices(results[0].output(0), 0, 1, 1, -1, 0)
    total: openvino.Output = opset13.reduce_sum(steps, [0], keep_dims=True).output(0)
    return total


class _Groups:
    """Groups of places, those joined directly or through others being one group."""

    def __init__(self) -> None:
        self._group: dict[_Place, list[_Place]] = {}

    def join(self, one: _Place, other: _Place) -> None:
        """Merge the groups of both."""
        kept = self._group.setdefault(one, [one])
        taken = self._group.setdefault(other, [other])
        if kept is not taken:
            kept += taken
            for place in taken:
                self._group[place] = kept

    def all(self) -> list[list[_Place]]:
        """Each group once, ordered by its first place."""
        return list({id(group): group for group in self._group.values()}.values())


def _tie(
    op: Any, region: int, inner: Sequence[tuple[int, openvino.Model]], places: list[_Place]
) -> Tie:
    inputs: list[Entry] = []
    parameters: list[openvino.Output] = []
    outer: list[openvino.Output] = []
    for kind, body, index in places:
        if kind == "in":
            inputs.append(Entry(op=op, index=index, region=region))
        elif kind == "out":
            outer.append(op.output(index))
        elif kind == "parameter":
            parameters.append(inner[body][1].get_parameters()[index].output(0))
        else:
            result = inner[body][1].get_results()[index]
            inputs.append(Entry(op=result, index=0, region=inner[body][0]))
    return Tie(inputs=tuple(inputs), inner=tuple(parameters), outer=tuple(outer))
