"""A native model that is changed by a few primitives, and what they do for every library.

A frontend implements ``NativeModel``: how its library states tensors, ops, types and
constants. On these are written, once for all libraries: replaying the edits of a plan, copies
that round all that a plan rounds, roundings that an extra input switches on, and mean errors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.graph import Graph
from finecast.numbers.blocks import E4M3, FOUR_OVER_SIX, BlockLayout, Element
from finecast.numbers.encodings import Dynamic, Encoding, Encodings, Reading, Scaled
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.numbers.roundmodes import Rounder
from finecast.planning.adjustments import Adjustment, AdjustOperand
from finecast.planning.biases import Bias
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    KernelRounding,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
    edits,
)
from finecast.planning.points import Switch

OFFSET: Final = "finecast_offset"
"""The input of a model that rounds at random: int64, the number of the first sample."""

SCALE: Final = "finecast_scale"
"""What the names of multiplications and additions begin with that adjustments insert."""

RUNS: Final = "finecast_runs"
"""What the names of outputs and ops begin with that count the runs of bodies."""


class NativeModel(ABC):
    """A copy of a native model, in which ops can be given other tensors to read.

    A tensor is whatever the library names one by: an object, or a string. A region is the
    model itself (0) or a body of control flow.

    Attributes:
        library: What messages call models of this kind.
        states: Formats that models of this kind can state.
        emulates_all: Whether copies round as any device does: at random, too, and after each
            step of an op.
        computes: Whether a function can compute a node in place of the library.
        graph: The graph of the model before anything was changed.
    """

    library: ClassVar[str]
    states: ClassVar[Collection[Format]]
    emulates_all: ClassVar[bool] = False
    computes: ClassVar[bool] = False

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._switches: dict[int, Any] = {}
        self._elements: dict[tuple[int, int], Any] = {}

    # What is read, and by whom.

    @abstractmethod
    def tensor(self, value: int) -> Any:
        """The tensor of the value with this id."""

    @abstractmethod
    def read_at(self, node: int, index: int) -> Any:
        """The tensor that input ``index`` of ``node`` reads after the changes so far."""

    @abstractmethod
    def give(self, value: int, uses: Iterable[Use], tensor: Any) -> None:
        """Have ``uses`` of the value read ``tensor``; an output keeps its name."""

    # New tensors.

    @abstractmethod
    def op(self, kind: str, *inputs: Any, **attributes: Any) -> Any:
        """The result of a new op that computes in fp32.

        Kinds and attributes are called as in OpenVINO's operation sets. Numbers and lists of
        integers among ``inputs`` become constants.
        """

    @abstractmethod
    def constant(self, array: NDArray[np.float32]) -> Any:
        """A constant tensor of these numbers."""

    def rounded_constant(self, value: int, how: Reading) -> Any:
        """A constant of the numbers of the constant with the id ``value``, rounded.

        A library that can read a constant again when the model is written holds no copy.
        """
        stats = self.graph.values[value].constant
        assert stats is not None
        return self.constant(how.round(stats.read().astype(np.float32)))

    def retyped(self, tensor: Any, was: Format, to: Format) -> Any:
        """``tensor``, which has the type ``was``, cast to another float type."""
        raise NotImplementedError

    def rounded(self, tensor: Any, how: Rounder) -> Any:
        """``tensor`` rounded, in fp32: by arithmetic, unless a library has a better way."""
        return converted(self.op, tensor, how)

    def round_numbers(self, node: int, how: Rounder) -> None:
        """Round operands of a node that are its own numbers, and no values of the graph."""
        del node, how

    def compute(self, node: int, function: Callable[..., Any]) -> None:
        """Have ``function`` compute the one result of a node from what the node reads.

        It is given an array for each input, None for an absent one. No other change is to
        follow.
        """
        raise NotImplementedError

    # What edits of a plan need; a conversion notes these changes in the model.

    def retype(self, node: int, to: Format) -> None:
        """Have a node compute in ``to``."""
        raise NotImplementedError

    def declare(self, value: int, to: Format) -> None:
        """Declare an input in another type, or an output, whose tensor has the type then."""
        raise NotImplementedError

    def cast(self, value: int, to: Format, *, exact: bool = False) -> Any:
        """A new cast of a value; ``exact`` if the value is first rounded in fp32."""
        raise NotImplementedError

    def stored(self, value: int, to: Format) -> Any:
        """A new constant: the constant with the id ``value``, stored in ``to``."""
        raise NotImplementedError

    def round_trip(self, tensor: Any, to: Encoding) -> Any:
        """``tensor`` rounded to one of ``states``, and read as fp32."""
        raise NotImplementedError

    def stored_and_read(self, value: int, to: Encoding) -> Any:
        """The constant with the id ``value``, stored in one of ``states`` and read from there.

        It is read as fp32, or as what codes are decoded to.
        """
        raise NotImplementedError

    def round_as_read(self, edit: KernelRounding) -> None:
        """Have nodes round a value by scales that are found in each run.

        Nothing is to be done where kernels round what meets constants in the format.
        """
        del edit

    # What adjustments of operands need; the model is read again after them.

    def adjust_attribute(self, node: int, what: Adjustment) -> None:
        """Give a node other numbers in an attribute."""
        raise NotImplementedError

    def adjust_constant(self, edit: AdjustOperand) -> None:
        """Have a node read other numbers in place of a constant's."""
        raise NotImplementedError

    def adjusted(self, tensor: Any, kind: str, by: NDArray[np.float32]) -> Any:
        """A tensor multiplied by numbers, or with a number added, by an op that keeps fp32.

        ``kind`` is "multiply" or "add".
        """
        raise NotImplementedError

    # Inputs of the model, and its bodies.

    @abstractmethod
    def add_switch(self) -> Any:
        """The new input ``SWITCH`` of the model, a vector of bool."""

    def add_input(self, name: str, shape: tuple[int, ...]) -> Any:
        """A new fp32 input of the model."""
        raise NotImplementedError

    def region_of(self, tensor: Any) -> int:
        """The number of the region in which new ops read this tensor of a value.

        0, the model itself, where bodies read what is outside of them.
        """
        del tensor
        return 0

    def parent_of(self, region: int) -> int:
        """The region that a body's op stands in."""
        raise NotImplementedError

    def hand_in(self, region: int, tensor: Any) -> Mapping[int, Any]:
        """Make ``tensor``, of the parent's region, an input of a body.

        Returns the input by its region; an op may have to have it in all of its bodies.
        """
        raise NotImplementedError

    def hand_out(self, region: int, count: Any | None) -> Any:
        """A number of a body, summed over all runs of the body, in the parent's region.

        0 where the body does not run.

        Args:
            region: The body.
            count: A result of an earlier call, in this region; None for 1 in each run.
        """
        raise NotImplementedError

    def join(self, other: Any) -> None:
        """Take the ops of ``other``, a model with the same inputs, which read this one's.

        What is made and given from then on is in this model; ``other`` still gives its ops
        other tensors to read. Its outputs are dropped.

        Raises:
            ModelError: If the ops of ``other`` cannot stand in this model.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(self, switches: int = 0, outputs: Mapping[str, Any] | None = None) -> Any:
        """The changed native model.

        Args:
            switches: The number of elements of the extra input; 0 if there is none.
            outputs: New outputs, by name, in place of the model's own.
        """

    def switched(self, k: int, on: Any, off: Any) -> Any:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        region = self.region_of(off)
        if (k, region) not in self._elements:
            self._elements[k, region] = self.element(k, region)
        return self.op("select", self._elements[k, region], on, off)

    def element(self, k: int, region: int) -> Any:
        """Element ``k`` of the extra input ``SWITCH``, in a region."""
        return self.op("gather", self.switch_in(region), k, 0)

    def switch_in(self, region: int) -> Any:
        """The extra input in a region; a body gets that of its parent."""
        if region == 0 and region not in self._switches:
            self._switches[0] = self.add_switch()
        elif region not in self._switches:
            self._switches |= self.hand_in(region, self.switch_in(self.parent_of(region)))
        return self._switches[region]


def uses_of(graph: Graph, value: int) -> Iterator[Use]:
    """Everything that reads a value: inputs of nodes, and the model's output."""
    graph_value = graph.values[value]
    for node in graph_value.uses:
        for index, source in enumerate(graph.nodes[node].inputs):
            if source == value:
                yield Use(node=node, index=index)
    if graph_value.is_output:
        yield Use(node=None)


def adjust(model: NativeModel, edits: Iterable[AdjustOperand]) -> None:
    """Adjust operands in ``model``, which has to be read again then.

    Ops that read the same of a value share what gives it.
    """
    tensors: dict[tuple[Any, Adjustment], Any] = {}
    for edit in edits:
        value, what = edit.value, edit.what
        if value is None:
            model.adjust_attribute(edit.node, what)
        elif model.graph.values[value].constant is not None:
            model.adjust_constant(edit)
        else:
            before = model.read_at(edit.node, what.port)  # adjusted along another axis, maybe
            key = before, replace(what, node="", port=0)
            if key not in tensors:
                tensors[key] = before
                for kind, by in what.steps:
                    tensors[key] = model.adjusted(tensors[key], kind, by)
            model.give(value, [Use(node=edit.node, index=what.port)], tensors[key])


def replay(model: NativeModel, changes: Iterable[Edit], exact: Collection[int] = ()) -> None:
    """Make the edits of a plan in ``model``.

    Args:
        model: The model.
        changes: The edits.
        exact: Ids of values that are rounded in fp32 before they are cast to bf16.

    Raises:
        ModelError: If an edit asks for a format that the model cannot state.
    """
    for edit in changes:
        match edit:
            case SetFormat():
                model.retype(edit.node, edit.to)
            case SetPort():
                model.declare(edit.value, edit.to)
            case ConvertConstant():
                model.give(edit.value, edit.uses, model.stored(edit.value, edit.to))
            case InsertCast():
                first = edit.value in exact and edit.to is Format.BF16
                low = model.cast(edit.value, edit.to, exact=first)
                model.give(edit.value, edit.uses, low)
            case RoundTrip():
                _round_trip(model, edit)
            case KernelRounding():
                model.round_as_read(edit)


def _round_trip(model: NativeModel, edit: RoundTrip) -> None:
    """Let uses read a value rounded to a format, in fp32; a constant is stored in it."""
    value = model.graph.values[edit.value]
    if edit.to.format not in model.states:
        floats = (f.label for f in model.states if not f.has_scales and f is not Format.FP32)
        raise ModelError(
            f"{model.library} models cannot hold {edit.to.format.label} here",
            where=value.name,
            fix=f"use {' or '.join(floats)}",
        )
    if value.constant is not None:
        model.give(edit.value, edit.uses, model.stored_and_read(edit.value, edit.to))
        return
    read: list[tuple[Any, list[Use]]] = []
    for use in edit.uses:  # an earlier edit may have let them read a cast of the value
        assert use.node is not None
        tensor = model.read_at(use.node, use.index)
        same = next((uses for other, uses in read if other == tensor), None)
        if same is None:
            read.append((tensor, [use]))
        else:
            same.append(use)
    for tensor, uses in read:
        model.give(edit.value, uses, model.round_trip(tensor, edit.to))


def with_switches(model: NativeModel, switches: Sequence[Switch]) -> Any:
    """The native model with roundings that an extra input switches on.

    The input ``SWITCH`` is a bool vector: where element k is true, the operands and outputs
    that ``switches[k]`` lists are rounded, each to its format and back to fp32. Law: with all
    elements false it computes what the model computes.
    """
    graph = model.graph
    rounded: dict[tuple[int, Reading], Any] = {}
    tensors: dict[tuple[int, Reading, int], Any] = {}

    def switched(value: int, encoding: Reading, k: int) -> Any:
        """The value, rounded if element ``k`` of the switch is true."""
        exact = model.tensor(value)
        if (value, encoding) not in rounded:  # one rounding serves all switches
            rounded[value, encoding] = _rounded(model, value, exact, encoding)
        return model.switched(k, rounded[value, encoding], exact)

    for k, switch in enumerate(switches):
        for (node, index), encoding in switch.ports.items():
            value = graph.nodes[node].inputs[index]
            if value is None:
                continue
            key = (value, encoding, k)
            if key not in tensors:
                tensors[key] = switched(value, encoding, k)
            model.give(value, [Use(node=node, index=index)], tensors[key])
        for number, encoding in switch.outputs.items():
            value = graph.outputs[number].id
            model.give(value, [Use(node=None)], switched(value, encoding, k))
    return model.finish(len(switches))


def _rounded(model: NativeModel, value: int, tensor: Any, encoding: Reading) -> Any:
    """``tensor``, which holds ``value`` after earlier roundings, rounded.

    A constant is rounded here, not when the model runs.
    """
    if model.graph.values[value].constant is not None:
        return model.rounded_constant(value, encoding)
    how = Rounder(
        format=encoding.format,
        encoding=None if isinstance(encoding, Format) else encoding,
    )
    return model.rounded(tensor, how)


def with_runs(model: NativeModel, regions: Iterable[int]) -> Any:
    """The native model with new outputs alone: how often each of ``regions`` runs in a call.

    They are called as ``runs_of`` says.
    """
    counts: dict[str, Any] = {}
    for number in regions:
        count, region = None, number
        while region:
            count, region = model.hand_out(region, count), model.parent_of(region)
        counts[runs_of(number)] = count
    return model.finish(outputs=counts)


def runs_of(region: int) -> str:
    """The name of the output of ``with_runs`` that counts the runs of a body."""
    return f"{RUNS}_{region}"


def with_roundings(model: NativeModel, changes: Iterable[Edit]) -> Any:
    """The native model in fp32 with the numbers of the model that the edits make.

    Sums may differ in their order. The results of low ops are rounded where they are stored,
    and values that are cast where they are read.
    """
    _round_as(model, changes, {})
    return model.finish()


def _round_as(model: NativeModel, changes: Iterable[Edit], current: dict[int, Any]) -> None:
    """Round what the edits round; ``current`` has the tensors of values that have others."""
    graph = model.graph

    def round_for(value: int, to: Reading, uses: Iterable[Use]) -> Any:
        low = _rounded(model, value, current.get(value, model.tensor(value)), to)
        model.give(value, uses, low)
        return low

    def stored(value: int, to: Format) -> None:
        if to is not Format.FP32:
            current[value] = round_for(value, to, uses_of(graph, value))

    for edit in changes:
        match edit:
            case SetFormat():
                for value in graph.following_outputs(graph.nodes[edit.node]):
                    stored(value.id, edit.to)
            case SetPort() if graph.values[edit.value].is_input:
                stored(edit.value, edit.to)
            case InsertCast() | ConvertConstant() | RoundTrip() | KernelRounding():
                if edit.to is not Format.FP32:
                    round_for(edit.value, edit.to, edit.uses)
            case _:
                pass


def with_noise(model: NativeModel) -> Any:
    """The native model with results of ops that are off by a unit in the last place.

    That is as much as sums in another order change. Along the longest axis of a known size
    numbers are moved up or down at random: equal ones, as those of weights that are the same
    everywhere, are then no longer equal. Other values stay.
    """
    graph, draw = model.graph, np.random.default_rng(0)
    ends = np.nextafter(np.float32(1), np.array([0, 2], np.float32))
    for value in graph.values:
        sizes = [d if isinstance(d, int) else 0 for d in value.shape or ()]
        if value.format is not Format.FP32 or value.producer is None or not any(sizes):
            continue
        tensor = model.tensor(value.id)
        if model.region_of(tensor):
            continue
        axis = int(np.argmax(sizes))
        along = [size if at == axis else 1 for at, size in enumerate(sizes)]
        factors = draw.choice(ends, sizes[axis]).reshape(along)
        moved = model.op("multiply", tensor, model.constant(factors))
        model.give(value.id, uses_of(graph, value.id), moved)
    return model.finish()


def with_mean_errors(
    model: NativeModel,
    exact: NativeModel,
    formats: Mapping[int, Format],
    encodings: Mapping[int, Encodings],
    places: Sequence[Bias],
) -> Any:
    """A native model whose outputs are the mean errors of products on codes, by channel.

    Law: a mean error is subtracted from its product's result before later ops read that, so
    the next product's error is its own and not one passed on.

    Args:
        model: A copy, in which the products' operands are rounded to codes.
        exact: Another copy, which computes the same in fp32.
        formats: Formats of the nodes on codes, by id; all others compute in fp32.
        encodings: Encodings of those nodes' operands, by the same ids.
        places: The products, and where their channels are.
    """
    graph = model.graph
    model.join(exact)
    means: dict[str, Any] = {}
    corrected: dict[int, Any] = {}
    for number, place in enumerate(places):
        (result,) = graph.following_outputs(graph.nodes[place.product])
        error = model.op("subtract", model.tensor(result.id), exact.tensor(result.id))
        axes = [a for a in range(place.rank) if a != place.rank + place.axis]
        if not place.rank:
            rows = [-1, place.channels]
            error, axes = model.op("reshape", error, rows, special_zero=False), [0]
        mean = model.op("reduce_mean", error, axes, keep_dims=True)
        means[f"mean_error_{number}"] = mean
        corrected[result.id] = model.op("subtract", model.tensor(result.id), mean)
        model.give(result.id, uses_of(graph, result.id), corrected[result.id])
    _round_as(model, edits(graph, formats, encodings=encodings), corrected)
    return model.finish(outputs=means)


# --------------------------------------- rounding in fp32, for copies that emulate low formats
#
# A cast to a low type and back means the same, but some engines remove both where they have no
# kernels of that type, and some formats are no type of the library. Law: ``rounded`` gives
# what a cast to the format and back gives, to nearest even (T. J. Dekker, "A floating-point
# technique for extending the available precision", 1971: the high part of a product by 2 ** n
# + 1). Numbers below fp32's smallest normal number may be taken for 0, as engines' kernels do.
#
# ``op`` makes an op of a library's model, such as ``NativeModel.op``.

Op: TypeAlias = Callable[..., Any]

_FP32_BITS: Final = np.finfo(np.float32).nmant
# The product of a number above this by 2 ** n + 1 could overflow: such numbers are first
# multiplied by _DOWN, which is exact.
_LARGE: Final = 2.0**64
_MOST: Final = 2.0**104
_DOWN: Final = 2.0**-32


def rounded(op: Op, x: Any, fmt: Format) -> Any:
    """The numbers of the tensor ``x`` rounded to ``fmt``, in fp32."""
    magnitude = op("abs", x)
    if fmt.exponent_bits == Format.FP32.exponent_bits:
        large = op("greater", magnitude, _LARGE)
        factor = op("select", large, _DOWN, 1.0)
        back = op("divide", _high_part(op, op("multiply", x, factor), fmt), factor)
        # Inf and NaN have no high part.
        return op("select", op("is_finite", x), back, x)
    bounded = op("clamp", x, min_value=-2 * fmt.max, max_value=2 * fmt.max)
    step = fmt.smallest_subnormal
    steps = op("round", op("multiply", bounded, 1 / step), mode="half_to_even")
    small = op("less", magnitude, fmt.smallest_normal)
    near = op("select", small, op("multiply", steps, step), _high_part(op, bounded, fmt))
    # From half a unit in the last place above the largest number on, numbers overflow; that
    # tie itself does so where the largest number's last bit is odd (to even).
    limit = (fmt.max + overflow_limit(fmt)) / 2
    inside = op("less_equal" if fmt.finite_only else "less", magnitude, limit)
    beyond = op("multiply", op("sign", x), math.nan if fmt.finite_only else math.inf)
    numbers = op("select", inside, near, beyond)
    return op("select", op("is_nan", x), x, numbers)  # kernels of clamp may not pass NaN on


def converted(op: Op, x: Any, how: Rounder) -> Any:
    """The tensor ``x`` as a device converts it, to nearest even.

    Overflows saturate, and subnormals become 0, where ``how`` says so.
    """
    if isinstance(how.encoding, Dynamic):
        return dynamic(op, x, how.encoding)
    if isinstance(how.encoding, Scaled):
        return coded(op, x, how.encoding)
    fmt = how.format
    if how.saturate:
        x = op("clamp", x, min_value=-fmt.max, max_value=fmt.max)
    numbers = x if fmt is Format.FP32 else rounded(op, x, fmt)
    if not how.flush_subnormals:
        return numbers
    tiny = op("less", op("abs", numbers), fmt.smallest_normal)
    return op("select", tiny, op("multiply", numbers, 0.0), numbers)


def coded(op: Op, x: Any, encoding: Scaled) -> Any:
    """The tensor ``x`` rounded to the numbers that codes of ``encoding`` stand for.

    ``encoding`` has one scale for the whole tensor. Engines replace the division by a constant
    with a product by its reciprocal, so a number halfway between two codes may become either.
    """
    if encoding.axis is not None:
        raise ValueError("an encoding by channel: only constants have one")
    scale, zero = encoding.scale[0], float(encoding.zero_point)
    steps = op("round", op("divide", x, scale), mode="half_to_even")
    low, high = encoding.grid.lowest - zero, encoding.grid.highest - zero
    numbers = op("multiply", op("clamp", steps, min_value=low, max_value=high), scale)
    return op("select", op("is_nan", x), 0.0, numbers)


def dynamic(op: Op, x: Any, encoding: Dynamic) -> Any:
    """The tensor ``x`` as a kernel rounds it by scales that it finds for groups of numbers."""
    group, layout = encoding.group, encoding.format.blocks
    rows = op("reshape", x, [1, -1, group], special_zero=False) if group else x
    ends = op("reduce_max", op("abs", rows), [-1], keep_dims=True)
    if layout is not None:
        rounded_rows = _in_blocks(op, rows, ends, layout)
    else:
        least = op("maximum", ends, float(encoding.least))
        scales = op("divide", least, float(encoding.largest))
        steps = op("divide", rows, scales)
        floats = encoding.grid.has_floats
        steps = (
            _nearest(op, steps, E4M3) if floats else op("round", steps, mode="half_to_even")
        )
        rounded_rows = op("multiply", steps, scales)
    return op("reshape", rounded_rows, op("shape_of", x), special_zero=False)


def _in_blocks(op: Op, rows: Any, ends: Any, layout: BlockLayout) -> Any:
    """``rows``, each of which is a block whose largest magnitude is in ``ends``, rounded.

    It is what ``numbers.blocks`` computes, but for blocks below 2^-118 and beyond 2^104, and
    for a NaN, which may leave the other numbers of its block as they are. In OpenVINO, whose
    divisions may be off by a unit in the last place, so may be the scale of a tensor.
    """
    element = layout.element
    if layout.per_tensor:
        whole = op("reduce_max", ends, [0, 1, 2], keep_dims=True)
        share = op("divide", whole, element.largest * layout.largest_scale)
        of_tensor = op("maximum", share, Format.FP32.smallest_normal)
        scales = op("divide", op("divide", ends, element.largest), of_tensor)
        stored = _nearest(op, scales, E4M3)
        if layout.four_over_six:
            by_four = _nearest(op, op("multiply", scales, FOUR_OVER_SIX), E4M3)
            six, four = (_errors(op, rows, s, of_tensor, element) for s in (stored, by_four))
            stored = op("select", op("greater", six, four), by_four, stored)
        scales = op("multiply", stored, of_tensor)
        ends = op("multiply", whole, 0.0)  # NaN for an Inf anywhere
        divisors = op("select", op("greater", scales, 0.0), scales, 1.0)
    else:
        top = 2.0**element.largest_exponent
        least = Format.FP32.smallest_normal * top
        power = _power_below(op, op("clamp", ends, min_value=least, max_value=_MOST))
        scales = divisors = op("multiply", power, 1 / top)
    near = op("multiply", _nearest(op, op("divide", rows, divisors), element), scales)
    # What is not finite becomes NaN, also where a kernel of clamp does not pass it on.
    spoiled = op("multiply", op("add", rows, ends), 0.0)
    return op("multiply", near, op("add", spoiled, 1.0))


def _errors(op: Op, rows: Any, scales: Any, of_tensor: Any, element: Element) -> Any:
    """The sum of squared errors of each row under its scale, as shares of the tensor's scale.

    Sums of kernels may differ in their last digits, so that of two scales that are as good
    either may be chosen.
    """
    divisors = op("multiply", scales, of_tensor)
    divisors = op("select", op("greater", divisors, 0.0), divisors, 1.0)
    near = op("multiply", _nearest(op, op("divide", rows, divisors), element), scales)
    missed = op("subtract", near, op("divide", rows, of_tensor))
    return op("reduce_sum", op("multiply", missed, missed), [-1], keep_dims=True)


def _nearest(op: Op, x: Any, element: Element) -> Any:
    """Each number rounded to the nearest element, and clamped to the largest."""
    top = 2.0 ** (element.largest_exponent + 1)
    bounded = op("clamp", op("abs", x), min_value=element.smallest_normal, max_value=top)
    step = op("multiply", _power_below(op, bounded), 2.0**-element.mantissa_bits)
    near = op("multiply", op("round", op("divide", x, step), mode="half_to_even"), step)
    return op("clamp", near, min_value=-element.largest, max_value=element.largest)


def _power_below(op: Op, x: Any) -> Any:
    """The largest power of two that is not above each number, from 2^-126 to 2^104."""
    product = op("multiply", x, 2.0**_FP32_BITS + 1.0)
    nearest = op("subtract", product, op("subtract", product, x))
    return op("select", op("greater", nearest, x), op("multiply", nearest, 0.5), nearest)


def _high_part(op: Op, x: Any, fmt: Format) -> Any:
    """Each number rounded to as many mantissa bits as ``fmt`` has, to nearest even."""
    dropped = _FP32_BITS - fmt.mantissa_bits
    product = op("multiply", x, 2.0**dropped + 1.0)
    return op("subtract", product, op("subtract", product, x))
