"""Positions, coordinates and counts: numbers whose absolute error matters, not the relative.

bf16 distinguishes 2,047 from 2,040, but not from 2,046; the sine of a position, the pixel at
a coordinate and the larger of two times would change. Two walks find such numbers.

Forwards: whole numbers (an integer cast to float, a range, a cumulative sum, a constant of
whole numbers that the format lacks) stay fp32 while they are only moved, scaled and shifted,
and so do the ops that read them. The walk ends at products of the matmul engine and at norms,
whose results are features, and behind bounded functions. Two cases are taken for masks: a
number multiplied by a mask's filler, and an integer input combined with other data.

Backwards: what sin, grids, cumulative sums, comparisons and index computations read stays
fp32. The walk ends at the ops above, except softmax, and at values that other ops read as
well, which are features (reads by a backward pass do not count). It ends at sums and maxima,
too, unless they decide which branch runs. A value that is added to a constant grid on that
way is a position for all of its readers: a second walk forwards starts from those, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final

from finecast.graph import Graph, Node, Value, ops_for_backward
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.formats import Format
from finecast.ops import MOVES, POINTWISE, OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import scalars

_MASK_FILLER: Final = 1e4
"""Masks multiply by magnitudes from 1e4 on; no slope or scale of positions is as large."""

_LARGEST_COUNT: Final = 2.0**24
"""From here on fp32 lacks whole numbers: larger constants are fillers of masks."""

_MOVES: Final = MOVES | {OpKind.RESIZE, OpKind.CAST}
_LINEAR: Final = frozenset(
    (
        *("add", "sub", "mul", "div", "mod", "floor_divide", "sum", "mean", "neg", "abs"),
        *("clip", "max", "min", "where", "square", "floor", "ceil", "round", "trunc"),
        *("addcmul", "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "phi"),
    )
)
_FEATURES: Final = frozenset(
    {
        OpKind.MATMUL,
        OpKind.CONV,
        OpKind.RECURRENT,
        OpKind.ATTENTION,
        OpKind.NORM,
        OpKind.POOL,
        OpKind.LOSS,
    }
)
# A softmax keeps the order of scores, unless its results are rounded to equal numbers.
_ORDERED: Final = POINTWISE | _MOVES | {OpKind.SOFTMAX}
_COUNTERS: Final = frozenset({"range", "cum_sum", "cum_prod"})
# Integers of these types are exact in every format of 16 bits.
_NARROW: Final = frozenset({"bool", "int4", "uint4", "int8", "uint8"})
_ALL: Final = (0, 1, 2, 3)
# By op, the inputs whose absolute error matters.
_SENSITIVE: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("sin", "cos", "tan"), (0,)),
    **dict.fromkeys(("affine_grid", "cum_sum", "cum_prod", "arg_max", "arg_min"), (0,)),
    **dict.fromkeys(("top_k", "unique", "hardmax", "floor", "ceil", "round", "trunc"), (0,)),
    **dict.fromkeys(("grid_sample", "roi_align", "max_roi_pool", "crop_and_resize"), (1,)),
    **dict.fromkeys(("equal", "not_equal", "greater", "greater_or_equal"), (0, 1)),
    **dict.fromkeys(("less", "less_or_equal", "non_max_suppression"), (0, 1)),
    **dict.fromkeys(("range", "mod", "floor_divide"), _ALL),
}


class _Kind(IntEnum):
    """Certainty of a coordinate: an integer input of the model (GIVEN) may also be a mask."""

    GIVEN = 1
    SURE = 2


def _judge(node: Node, context: Context) -> Ruling | None:
    why = context.graph.once(_kept, context.low).get(node.id)
    return Ruling(permits=KEEP, text=why) if why is not None else None


def _kept(graph: Graph, low: Format) -> dict[int, str]:
    """By node id, why nodes that compute or read coordinates keep fp32."""
    forwards = _Forwards(graph, low).kept()
    into = _backwards(graph, forwards)
    shifts = [n for n in map(graph.nodes.__getitem__, into) if _on_grid(n, graph)]
    if shifts:
        forwards = _Forwards(graph, low, [i for n in shifts for i in n.outputs]).kept()
        into = _backwards(graph, forwards)
    return into | forwards


class _Forwards:
    """One walk in the graph's order, which starts at whole numbers and at ``on_grids``."""

    def __init__(self, graph: Graph, low: Format, on_grids: Iterable[int | None] = ()) -> None:
        self.graph = graph
        self.low = low
        self.kinds: dict[int, _Kind] = {
            v.id: _Kind.SURE for v in graph.values if _whole_beyond(v, low)
        }
        self.kinds |= {i: _Kind.SURE for i in on_grids if i is not None}
        self.fixed = {v.id for v in graph.values if v.constant is not None}

    def kept(self) -> dict[int, str]:
        reasons: dict[int, str] = {}
        for node in self.graph.nodes:
            if node.op in _COUNTERS:
                reasons[node.id] = f"{node.op} counts: whole numbers that the format may lack"
                self._mark(node, _Kind.SURE)
            elif self._reads(node):
                reasons[node.id] = "it reads positions or counts, whose digits all matter"
            if all(i in self.fixed for i in node.input_ids):
                self.fixed.update(node.output_ids)
        return reasons

    def _reads(self, node: Node) -> bool:
        """Whether ``node`` has to read coordinates in fp32; marks results that are some."""
        inputs = [self.graph.values[i] for i in node.input_ids]
        floats = [v for v in inputs if v.format]
        integers = self._integers(node, inputs)
        kinds = [self.kinds[v.id] for v in floats if v.id in self.kinds]
        kinds += [_Kind.GIVEN if _is_given(self.graph, v) else _Kind.SURE for v in integers]
        op = by_name(node.op).kind
        if not kinds or (op in _FEATURES and not outer_product(self.graph, node)):
            return False
        if _fills(node, floats):
            return False
        meets = any(v.id not in self.fixed and v.id not in self.kinds for v in floats)
        counts = [*integers, *(v for v in floats if v.id in self.kinds)]
        if meets and (max(kinds) is _Kind.GIVEN or _scales(node, counts)):
            return False
        divides = meets and node.op == "div" and floats[0].id not in self.kinds
        if (node.op in _LINEAR and not divides) or op in _MOVES or op is OpKind.MATMUL:
            self._mark(node, max(kinds))
        return True

    def _integers(self, node: Node, inputs: list[Value]) -> list[Value]:
        """The integer inputs that the op converts to floats, by a cast or by promotion."""
        info = by_name(node.op)
        outputs = (self.graph.values[i] for i in node.output_ids)
        if info.kind not in POINTWISE | {OpKind.CAST} or not any(v.format for v in outputs):
            return []
        return [v for v in inputs if _is_wide(v, self.low) and not _sums(self.graph, v)]

    def _mark(self, node: Node, kind: _Kind) -> None:
        for index in node.outputs:
            if index is not None and self.graph.values[index].format is not None:
                self.kinds[index] = kind


def _backwards(graph: Graph, forwards: Mapping[int, str]) -> dict[int, str]:
    """One walk against the graph's order, which starts at ops with sensitive inputs."""
    reasons: dict[int, str] = {}
    later = graph.once(ops_for_backward)
    chain = {node.id for node in graph.nodes if _decides(graph, node)}
    for node in reversed(graph.nodes):
        if _sensitive_ports(graph, node):
            reasons[node.id] = f"{node.op} reads positions or decides by them: it reads fp32"
            continue
        kind = by_name(node.op).kind
        summed = kind is OpKind.REDUCTION
        if kind not in _ORDERED and not summed and not outer_product(graph, node):
            continue
        uses = [(n, i) for i in node.output_ids for n in graph.values[i].uses]
        readers = [u for u in uses if graph.nodes[u[0]].op not in READS_SHAPE_ONLY]
        if node.id not in later:
            readers = [u for u in readers if u[0] not in later]
        decides = bool(readers) and all(n in chain for n, _ in readers)
        if summed and not decides:
            continue
        if decides:
            chain.add(node.id)
        feeds = [_feeds(graph, n, i, reasons, forwards) for n, i in readers]
        if any(feeds) and (all(feeds) or _on_grid(node, graph)):
            into = next((graph.nodes[n].name for n, _ in readers if n in reasons), None)
            if into is not None:
                reasons[node.id] = (
                    f"its result goes to {into}, which reads positions or decides by them"
                )
    return reasons


def _feeds(
    graph: Graph,
    reader: int,
    value: int,
    found: Mapping[int, str],
    forwards: Mapping[int, str],
) -> bool:
    """Whether ``reader`` reads ``value`` as a coordinate."""
    node = graph.nodes[reader]
    ports = _sensitive_ports(graph, node)
    if ports:
        return any(node.inputs[p] == value for p in ports)
    return reader in found or reader in forwards


def _sensitive_ports(graph: Graph, node: Node) -> tuple[int, ...]:
    """Float inputs whose absolute error matters.

    A comparison with zero has none, for rounding keeps the sign, unless it decides what runs:
    there one sum that is rounded to the other side of zero is another branch.
    """
    values = graph.values
    inputs = [None if i is None else values[i] for i in node.inputs]
    ports = _SENSITIVE.get(node.op, ())
    if node.op == "cast":
        dtypes = {values[i].dtype for i in node.output_ids}
        ports = (0,) if any("int" in d for d in dtypes) else ()
    zeros = (
        v.constant.largest == 0 for v in inputs if v is not None and v.constant is not None
    )
    if by_name(node.op).kind is OpKind.COMPARISON and (0 in scalars(node) or any(zeros)):
        return ports if _decides(graph, node) else ()
    floats = (
        p for p in ports if p < len(inputs) and (v := inputs[p]) is not None and v.format
    )
    return tuple(floats)


def _deciding(graph: Graph) -> frozenset[int | None]:
    """Ids of the truth values that reach a branch or a loop, by ops on truth values."""
    truths: set[int | None] = set()
    for node in reversed(graph.nodes):
        decides = by_name(node.op).kind is OpKind.CONTROL or truths.intersection(node.outputs)
        if decides:
            read = node.input_ids
            truths.update(i for i in read if graph.values[i].dtype == "bool")
    return frozenset(truths)


def _decides(graph: Graph, node: Node) -> bool:
    """Whether the result of a comparison says which branch runs, or how often a loop does."""
    compares = by_name(node.op).kind is OpKind.COMPARISON
    return compares and bool(graph.once(_deciding).intersection(node.outputs))


def outer_product(graph: Graph, node: Node) -> bool:
    """Whether a product of the matmul engine has no sum, as positions times frequencies."""
    if by_name(node.op).kind is not OpKind.MATMUL:
        return False
    equation = node.attributes.get("equation")
    if isinstance(equation, str):
        terms, _, result = equation.replace(" ", "").partition("->")
        return bool(result) and set(terms) - {","} <= set(result)
    first = graph.read(node, 0)
    plain = node.op in ("matmul", "linear")
    return plain and first is not None and first.shape is not None and first.shape[-1:] == (1,)


def _fills(node: Node, floats: list[Value]) -> bool:
    """Whether the node multiplies a mask of ones and zeros by a filler like -1e9."""
    constants = (v.constant for v in floats if v.constant is not None)
    sizes = [*(c.largest for c in constants if c.size == 1), *map(abs, scalars(node))]
    return node.op == "mul" and any(size >= _MASK_FILLER for size in sizes)


def _scales(node: Node, coordinates: list[Value]) -> bool:
    """Whether the node multiplies or divides other numbers by a single count, as a length."""
    single = (v.shape is not None and all(d == 1 for d in v.shape) for v in coordinates)
    return node.op in ("mul", "div") and all(single)


def _is_wide(value: Value, low: Format) -> bool:
    if "int" not in value.dtype or value.dtype in _NARROW:
        return False
    return value.constant is None or not value.constant.all_in(low)


def _sums(graph: Graph, value: Value) -> bool:
    """Whether an integer value is the result of an op on quantized numbers."""
    maker = graph.maker(value)
    return maker is not None and by_name(maker.op).kind is OpKind.QUANTIZE


def _is_given(graph: Graph, value: Value) -> bool:
    """Whether a value is an input of the model, or only moved and cast from one."""
    while (maker := graph.maker(value)) is not None:
        before = graph.read(maker, 0)
        if by_name(maker.op).kind not in _MOVES or before is None:
            return False
        value = before
    return value.is_input


def _on_grid(node: Node, graph: Graph) -> bool:
    """Whether the node adds to a grid, a constant of several whole numbers, and no mask."""
    constants = [v.constant for v in graph.following_inputs(node) if v.constant is not None]
    grids = (c.size > 1 and c.whole and 1 < c.largest < _LARGEST_COUNT for c in constants)
    return node.op in ("add", "sub") and any(grids)


def _whole_beyond(value: Value, low: Format) -> bool:
    """Whether a constant has only whole numbers, some of which ``low`` lacks."""
    constant = value.constant
    if constant is None or value.format is not Format.FP32 or constant.size < 2:
        return False
    counts = constant.whole and constant.largest < _LARGEST_COUNT
    return counts and not constant.all_in(low)


COORDINATES: Final = Rule(name="coordinates", judge=_judge)
