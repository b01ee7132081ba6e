"""Ops and patterns that engines compute wrongly in a low format: plans never contain them.

What each fault is, where it was reported and which test shows it is in the table of
``finecast.devices.faults``. A row here finds the nodes that the fault is about. It counts as
long as the installed release of the engine has the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from finecast.devices.faults import KnownFault, is_here, known_faults
from finecast.graph import Graph, Node, Value
from finecast.graph.structure import turned_axes
from finecast.graph.worklist import Worklist
from finecast.numbers.formats import Format
from finecast.ops import MOVES, POINTWISE, OpKind, by_name
from finecast.planning.products import CONVOLUTIONS, reduced_axes
from finecast.rules.folded import may_be_zeros, settled
from finecast.rules.scaled_operands import origin

# -------------------------------- OpenVINO: convolutions whose scale is applied more than once
#
# OpenVINO multiplies the sum of a convolution's codes by the scales for each op that reads the
# result. Where the shape is open and the convolution has no bias it then fuses all of these
# multiplications into the convolution, one after the other: with two readers the result is
# multiplied by the scale's square. With a bias, or fixed shapes, it does not; a bias behind a
# cast is none, and so keeps fp32 beside codes (`planning.planner.lowest`). Ops that change
# nothing, such as Identity, Dropout or a Pad by zeros, it removes before.

_CONV_SCALES = frozenset({"mul", "div", "neg"})
_ADDS = frozenset({"add", "sub"})
# Ops that may change nothing, by their attributes and constants; the others of a single value.
_KEEP_VALUES = MOVES | {OpKind.CAST, OpKind.REDUCTION}
_KEEP_ONE_VALUE = frozenset({"dropout", "sum", "mean", "max", "min"})


def scaled_twice(graph: Graph, low: Format) -> Mapping[int, str]:
    """Convolutions that would be scaled twice, with the reason."""
    text = (
        f"OpenVINO scales a convolution in {low.label} twice where its shape is open, it has"
        " no bias, and several ops read it"
    )
    return {
        node.id: text
        for node in graph.nodes
        if node.op in CONVOLUTIONS
        and not _has_bias(graph, node)
        and _is_read_twice(graph, node)
    }


def _is_read_twice(graph: Graph, node: Node) -> bool:
    """Whether several inputs of ops read the result, or what a constant makes of it."""
    (result,) = node.outputs[:1]
    while result is not None:
        value = graph.values[result]
        if value.fixed_shape is not None:
            return False
        ports = [n for n in value.uses for i in graph.nodes[n].inputs if i == result]
        if len(ports) != 1:
            return len(ports) > 1
        reader = graph.nodes[ports[0]]
        if not _is_merged(graph, value, reader):
            return False
        result = reader.outputs[0]
    return False


def _is_merged(graph: Graph, value: Value, reader: Node) -> bool:
    """Whether the op that reads ``value`` becomes part of the scale, or may change nothing."""
    others = [graph.values[i] for i in reader.input_ids if i != value.id]
    known = graph.once(settled)
    if any(v.id not in known for v in others):
        return False
    if reader.op in _CONV_SCALES:
        return True
    if reader.op in _ADDS:
        return any(may_be_zeros(graph, v) for v in others)
    kept = reader.op in _KEEP_ONE_VALUE and (not others or reader.op == "dropout")
    if not kept and by_name(reader.op).kind not in _KEEP_VALUES:
        return False
    after = None if reader.outputs[0] is None else graph.values[reader.outputs[0]]
    return after is not None and _may_be_equal(value, after)


def _may_be_equal(value: Value, other: Value) -> bool:
    """Whether both may have the same shape: sizes that are not known may be equal."""
    if value.shape is None or other.shape is None:
        return True
    pairs = zip(value.shape, other.shape, strict=False)
    known = [p for p in pairs if all(isinstance(size, int) for size in p)]
    return len(value.shape) == len(other.shape) and all(a == b for a, b in known)


def _has_bias(graph: Graph, node: Node) -> bool:
    """Whether it adds other numbers than zeros, in its own op."""
    index = node.inputs[2] if len(node.inputs) > 2 else None
    if index is None:
        return False
    bias = graph.values[index]
    return index not in graph.once(settled) or not may_be_zeros(graph, bias)


# ------------------------------------------ OpenVINO: two small products, one behind the other
#
# It compiles a chain of small products into one kernel (a *block*), together with as many of
# the ops after it as its registers allow. Which numbers of rows it does so for depends on the
# number of threads: with one thread up to 8 rows, with two threads 4 and 8.
#
# It crashes while it compiles where an op reads both a block and a kernel of the second kind,
# which chains of elementwise ops and casts become, op by op: it follows a null pointer (in
# ``tokenize_node`` of its snippets: finished kernels are not among the clones that it joins).
# Models with such ops of their own crash in fp32, too; the fault here keeps finecast's casts
# from being the second kernel.
#
# A block of two products in int8 gives errors of 1e9 times the result where nothing between
# the products needs floats: the block then quantizes the first product's sums, which are
# 32-bit integers, as if their bits were those of floats. All small products that follow
# another one keep out of int8. Four small diffusion nets of the zoo, where this is true of
# three to nine products, lose at most 2% of their speed in int8 by it (AVX512-VNNI).

# Sizes of the largest products that OpenVINO compiles so.
_ROWS = 8
_COLUMNS = 256
_PRODUCTS = frozenset({"matmul", "gemm"})
_MOVES = MOVES | {OpKind.CAST}
_JOINS = POINTWISE | {OpKind.SOFTMAX, OpKind.CAST, OpKind.COMPARISON}


def sums_behind_products(graph: Graph, low: Format) -> Mapping[int, str]:
    """Ops that read a block and another value, and the ops that compute that other value.

    If all of them have one format, fp32 as that of the graph's inputs, no cast is in between.
    OpenVINO multiplies a value that is subtracted by -1 first, which is such a kernel in any
    format; there the ops of the block stay in fp32 as well, as they are in the original model.
    """
    reasons: dict[int, str] = {}
    for product in graph.nodes:
        if not _is_small(graph, product) or not _behind_another(graph, product):
            continue
        for before, node in _readers(graph, product):
            others = [v for v in _inputs(graph, node) if v.producer != before.id]
            if not others:
                continue
            kept = {n for v in others for n in _computing(graph, v)}
            if node.op == "sub" and node.inputs[1] in {v.id for v in others}:
                kept |= {n for v in _inputs(graph, node) for n in _computing(graph, v, True)}
            text = f"OpenVINO crashes at {node.name} if it reads a cast to {low.label}"
            reasons |= dict.fromkeys((*kept, node.id), text)
    return reasons


def sums_of_codes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Small products behind another one, which in ``low`` might give them sums of codes."""
    return {
        product.id: "OpenVINO may take the sums of the small product before it in"
        f" {low.label}, which are integers, for floats"
        for product in graph.nodes
        if _is_small(graph, product) and _behind_another(graph, product)
    }


def _is_small(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a product that OpenVINO may compile into a block."""
    if node.op not in _PRODUCTS or len(node.inputs) < 2:
        return False
    left, right = (graph.values[i] if i is not None else None for i in node.inputs[:2])
    if left is None or right is None or right.constant is None:
        return False
    rows, columns = left.shape or (), right.shape or ()
    if len(rows) != 2 or len(columns) != 2:
        return False
    limits = zip((*rows, *columns), (_ROWS, *[_COLUMNS] * 3), strict=True)
    return all(isinstance(size, int) and size <= most for size, most in limits)


def _behind_another(graph: Graph, product: Node) -> bool:
    """Whether only elementwise ops are between another small product and this one."""
    source = product.inputs[0]
    behind = _computing(graph, graph.values[source]) if source is not None else ()
    return any(_is_small(graph, graph.nodes[i]) for i in behind)


def _readers(graph: Graph, product: Node) -> Iterator[tuple[Node, Node]]:
    """Elementwise ops that may read the block of ``product``, each after the node it reads."""
    node: Node | None = product
    while node is not None:
        read = {u for i in node.output_ids for u in graph.values[i].uses}
        users = [graph.nodes[i] for i in sorted(read)]
        joined = [u for u in users if by_name(u.op).kind in _JOINS]
        yield from ((node, user) for user in joined)
        node = joined[0] if len(users) == len(joined) == 1 else None


def _inputs(graph: Graph, node: Node) -> list[Value]:
    values = (graph.values[i] for i in node.input_ids)
    return [v for v in values if v.constant is None]


def _computing(graph: Graph, value: Value, whole_block: bool = False) -> set[int]:
    """The elementwise ops and moves that compute ``value``, back to the first other ops.

    Those other ops are included. With ``whole_block`` the search goes on past small products.
    """
    node_ids = Worklist([value.producer])
    for node in (graph.nodes[n] for n in node_ids):
        passed = by_name(node.op).kind in _JOINS | _MOVES
        if passed or (whole_block and _is_small(graph, node)):
            node_ids.add(v.producer for v in _inputs(graph, node))
    return node_ids.seen


# Finds the nodes, by id, that are computed wrongly in a low format, with the reason; an empty
# reason says that the kernel does not work.
Finder: TypeAlias = Callable[[Graph, Format], Mapping[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Where a known fault shows, by its name; without ``device``, on every device."""

    name: str
    formats: frozenset[Format]
    find: Finder
    device: str = "CPU"

    def holds(self, engine: str, device: str) -> bool:
        """Whether the installed release of ``engine`` has the fault on ``device``."""
        known = known_faults()[self.name]
        return known.engine == engine and self.device in ("", device) and known.is_here


def faults(
    engine: str, device: str, graph: Graph, lows: Collection[Format]
) -> dict[Format, dict[int, str]]:
    """The nodes that ``engine`` computes wrongly, with reasons, by each format of ``lows``."""
    here = [f for f in FAULTS if f.holds(engine, device)]
    return {
        low: {
            node: why
            for fault in here
            if not fault.formats.isdisjoint({low, low.storage})
            for node, why in fault.find(graph, low).items()
        }
        for low in lows
    }


def _kernels(*natives: str, **attributes: Collection[str]) -> Finder:
    """A finder of single ops, by native names and values of attributes."""

    def find(graph: Graph, low: Format) -> Mapping[int, str]:
        return {
            node.id: ""
            for node in graph.nodes
            if node.native in natives
            and all(node.attributes.get(name) in v for name, v in attributes.items())
        }

    return find


def _second_bias(graph: Graph, low: Format) -> Mapping[int, str]:
    """Additions of several constant vectors, one after the other, to a product.

    OpenVINO fuses them into the product even if there is a cast to or from fp16 between them,
    and then adds only the last one (MatMul and Gemm; not convolutions). So all of them keep
    out of fp16. Scalars are fused in another way, which is right; they and ops that move
    numbers may be between the additions.
    """
    reasons: dict[int, str] = {}
    for product in graph.nodes:
        if product.op not in _PRODUCTS:
            continue
        for bias in _biases(graph, product):
            before = bias
            between, after = _next_bias(graph, before)
            while after is not None and after.id not in reasons:
                text = (
                    f"OpenVINO leaves out the bias that {before.name} adds if {after.name} "
                    f"adds another in {low.label}"
                )
                reasons |= dict.fromkeys((before.id, *between, after.id), text)
                before = after
                between, after = _next_bias(graph, before)
    return reasons


def _biases(graph: Graph, product: Node) -> list[Node]:
    """The op that adds the first bias of ``product``: itself, or one that follows it."""
    if product.op == "gemm" and len(product.inputs) > 2:
        return [product]
    _, after = _next_bias(graph, product)
    return [after] if after is not None else []


def _next_bias(graph: Graph, start: Node) -> tuple[set[int], Node | None]:
    """The next op that adds a constant vector, and ids of the ops before it."""
    waiting, between, seen = list(start.outputs), set[int](), set[int]()
    while waiting:
        index = waiting.pop()
        if index is None or index in seen:
            continue
        seen.add(index)
        for node in (graph.nodes[n] for n in graph.values[index].uses):
            adds = node.op in _ADDS
            size = max((c.size for c in graph.constants(node)), default=0)
            if adds and size > 1:
                return between, node
            if (adds and size) or by_name(node.op).kind in _MOVES:
                between.add(node.id)
                waiting.extend(node.outputs)
    return between, None


# OpenVINO leaves a GroupNormalization of fixed shape whole if a group fits into the
# first cache (32 or 48 KiB here), to compile it at once; and that it can in fp32 alone.
_FIRST_CACHE_BYTES: Final = 1 << 16


def _small_group_norms(graph: Graph, low: Format) -> Mapping[int, str]:
    """GroupNormalizations of fixed shape with small groups: they do not load in bf16."""
    reasons: dict[int, str] = {}
    for node in graph.nodes:
        if node.native != "openvino::GroupNormalization" or node.inputs[0] is None:
            continue
        fixed = graph.values[node.inputs[0]].fixed_shape
        groups = node.attributes.get("num_groups")
        if not fixed or not isinstance(groups, int):
            continue
        if low.bytes_for(math.prod(fixed[1:]) // groups) <= _FIRST_CACHE_BYTES:
            reasons[node.id] = f"OpenVINO has no {low.label} kernel for it at this shape"
    return reasons


def _state_start(graph: Graph, low: Format) -> Mapping[int, str]:
    """Ops that make the value with which a state starts, such as an empty KV cache.

    OpenVINO does not empty the cache of keys if its first value is cast and that of the cache
    of values is not, or the other way round, and their attention is low.
    """
    starts = (graph.maker(n.inputs[0]) for n in graph.nodes if n.native == _STATE and n.inputs)
    return {
        node.id: f"OpenVINO may not empty a state whose first value is cast from {low.label}"
        for node in starts
        if node is not None
    }


def _reduced_codes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Ops that quantize a maximum, a minimum, or what drops an axis before another one.

    OpenVINO fuses the quantization into the reduction. Sums and means are computed rightly if
    what they read is in fp32; that depends on the plan, and here they count in any.
    """
    reasons: dict[int, str] = {}
    for node in graph.nodes:
        for value in _inputs(graph, node):
            maker = graph.maker(origin(graph, value))
            if maker is not None and _fuses_codes(graph, maker):
                reasons[node.id] = (
                    f"OpenVINO computes the quantization to {low.label} of the result of"
                    f" {maker.name} wrongly"
                )
    return reasons


def _fuses_codes(graph: Graph, node: Node) -> bool:
    """Whether a quantization may be fused into ``node``, a reduction, wrongly."""
    if node.op in ("reduce_max", "reduce_min"):
        return True
    reduces = by_name(node.op).kind is OpKind.REDUCTION
    if not reduces or node.attributes.get("keepdims", 1):
        return False
    read = graph.read(node, 0)
    axes = reduced_axes(graph, node)
    if read is None or read.shape is None or not axes:
        return True
    dropped = {axis % len(read.shape) for axis in axes}
    return any(axis not in dropped for axis in range(min(dropped), len(read.shape)))


# Axes of the weights of a convolution over a volume: channels and the window.
_VOLUME: Final = 5


def _depthwise_volumes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Convolutions over a volume that have a group for each channel.

    Under its default settings, where ops may have bf16, OpenVINO has no kernel for one whose
    operand has a zero point and whose result is quantized: the file loads under those alone
    that finecast prints. Zero points are not known here.
    """
    return {
        node.id: f"OpenVINO has no {low.label} kernel under its default settings for a"
        " convolution over a volume that has a group for each channel"
        for node in graph.nodes
        if node.op in CONVOLUTIONS
        and (weights := graph.read(node, 1)) is not None
        and _is_depthwise(node, weights.fixed_shape)
    }


def _is_depthwise(node: Node, sizes: tuple[int, ...] | None) -> bool:
    """Whether a convolution with weights of these sizes has that, in several groups."""
    if sizes is None or len(sizes) != _VOLUME + (node.op == "group_conv"):
        return False
    if node.op == "group_conv":
        groups, own, read = sizes[:3]
    else:
        stated = node.attributes.get("group", node.attributes.get("groups", 1))
        groups = stated if isinstance(stated, int) else 1
        own, read = sizes[0] // max(groups, 1), sizes[1]
    return groups > 1 and own == read == 1


def _computed_axes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Reductions over axes that the model computes or is given, which OpenVINO has in fp32."""
    return {
        node.id: f"OpenVINO has no {low.label} kernel for a reduction over computed axes"
        for node in graph.nodes
        if by_name(node.op).kind is OpKind.REDUCTION and len(node.inputs) > 1
        if (axes := node.inputs[1]) is not None and graph.values[axes].constant is None
    }


def _masked_rows(graph: Graph, low: Format) -> Mapping[int, str]:
    """Attentions in which a boolean mask may leave a query without a key.

    OpenVINO's own op gives NaN there, which no model means; ONNX's gives 0, as does one of
    OpenVINO's whose NaN is replaced. Of a mask that is a constant its rows are read.
    """
    reasons: dict[int, str] = {}
    for node in graph.nodes:
        mask = node.inputs[3] if node.native in _MASKED and len(node.inputs) > 3 else None
        if mask is None or graph.values[mask].dtype != "bool":
            continue
        readers = (
            graph.nodes[n]
            for out in node.outputs[:1]
            if out is not None
            for n in graph.values[out].uses
        )
        replaced = any(reader.native == "openvino::IsNaN" for reader in readers)
        constant = graph.values[mask].constant
        masks_all = constant is None or not constant.read().any(axis=-1).all()
        if masks_all and (replaced or node.native == "onnx::Attention"):
            reasons[node.id] = (
                f"OpenVINO attends to every key in {low.label} where the mask leaves out all"
            )
    return reasons


_MASKED: Final = frozenset({"onnx::Attention", "openvino::ScaledDotProductAttention"})
"""Ops whose fourth operand is a mask."""

_STATE: Final = "openvino::ReadValue"
"""The op that gives a state: its operand at first, then what the last call assigned."""


# ------------------------------------------------------ OpenVINO: integers of 64 and 32 bits
#
# Its CPU plugin takes int64 for int32, and divides integers as floats: models have int64 for
# sizes and indices, which are small. Where they are hashes or times, numbers are others.

_DIVISIONS: Final = frozenset({"div", "mod", "floor_divide"})
_WIDE: Final = frozenset({"int64", "uint64"})


# ONNX Runtime fuses the transposition of a matrix into a product, and forgets it where the
# other operand is a vector.

_TRANSPOSED_VECTORS: Final = "onnxruntime-transposed-vectors"


def forgotten_transpose(graph: Graph) -> str:
    """What ONNX Runtime computes wrongly of an ONNX model in fp32, too; empty if nothing."""
    if not is_here(_TRANSPOSED_VECTORS):
        return ""
    for node in graph.nodes:
        if node.native != "onnx::MatMul":
            continue
        matrix, vector = graph.read(node, 0), graph.read(node, 1)
        maker = None if matrix is None else graph.maker(matrix)
        if maker is None or vector is None or maker.op != "transpose":
            continue
        rank = len(matrix.shape or ()) if matrix is not None else 0
        turned = turned_axes(graph, maker, rank)
        if len(vector.shape or ()) == 1 and turned and turned[-2:] == (rank - 1, rank - 2):
            return (
                f"ONNX Runtime computes {node.name!r} wrongly, a known fault"
                f" ({_TRANSPOSED_VECTORS}): it multiplies a transposed matrix by a vector, and"
                " the Transpose is forgotten. Give the vector a second axis, or use OpenVINO"
            )
    return ""


_BEYOND_FLOATS: Final = 2.0**24
_BEYOND_32_BITS: Final = 2.0**31


def fault_of_integers(
    engine: str, graph: Graph, node: Node, largest: float
) -> KnownFault | None:
    """The known fault by which ``engine`` computes a node of integers wrongly, if any.

    No plan avoids it, as no low format is involved: it explains what was seen to be wrong.
    Numbers of up to ``largest``, of what the node reads and gives, have to be beyond those
    that the engine has: sizes and positions are right.
    """
    read, written = (
        {graph.values[i].dtype for i in ports if i is not None}
        for ports in (node.inputs, node.outputs)
    )
    name = ""
    if by_name(node.op).kind is OpKind.CAST and written & _WIDE and not read & _WIDE:
        name = "openvino-cast-int64"
    elif node.op in _DIVISIONS and written & {*_WIDE, "int32", "uint32"}:
        name = "openvino-integer-division"
    elif (read | written) & _WIDE:
        name = "openvino-int64"
    least = _BEYOND_FLOATS if name == "openvino-integer-division" else _BEYOND_32_BITS
    fault = known_faults().get(name)
    if fault is None or fault.engine != engine or largest < least:
        return None
    return fault if fault.is_here else None


_REDUCTIONS: Final = ("add", "mul", "max", "min")
_QUICK_GELU: Final = _kernels("com.microsoft::QuickGelu")
_BIAS_ADD: Final = _kernels("com.microsoft::BiasAdd")
_SCATTER_ND: Final = _kernels("onnx::ScatterND", reduction=_REDUCTIONS)
_SCATTER_SUMS: Final = _kernels("onnx::ScatterElements", reduction=("add", "mul"))
_SCATTER: Final = _kernels("onnx::ScatterElements", reduction=_REDUCTIONS)
_FP16: Final = frozenset({Format.FP16})
_BF16: Final = frozenset({Format.BF16})
_INT8: Final = frozenset({Format.INT8})

FAULTS: Final[tuple[Fault, ...]] = (
    Fault(name="openvino-second-bias", device="", formats=_FP16, find=_second_bias),
    Fault(name="openvino-block-and-chain", formats=_BF16, find=sums_behind_products),
    Fault(name="openvino-small-group-norms", formats=_BF16, find=_small_group_norms),
    Fault(name="openvino-computed-axes", formats=_BF16, find=_computed_axes),
    Fault(name="openvino-masked-rows", formats=_BF16, find=_masked_rows),
    Fault(name="openvino-state-start", device="", formats=_FP16 | _BF16, find=_state_start),
    Fault(name="openvino-scaled-twice", formats=_INT8, find=scaled_twice),
    Fault(name="openvino-sums-of-codes", formats=_INT8, find=sums_of_codes),
    Fault(name="openvino-reduced-codes", formats=_INT8, find=_reduced_codes),
    Fault(name="openvino-depthwise-volumes", formats=_INT8, find=_depthwise_volumes),
    Fault(name="openvino-quick-gelu", device="", formats=_FP16 | _BF16, find=_QUICK_GELU),
    Fault(name="openvino-bias-add", device="", formats=_BF16, find=_BIAS_ADD),
    Fault(name="onnxruntime-scatter-nd", formats=_FP16 | _BF16, find=_SCATTER_ND),
    Fault(name="onnxruntime-scatter-elements", formats=_FP16, find=_SCATTER_SUMS),
    Fault(name="onnxruntime-scatter-elements", formats=_BF16, find=_SCATTER),
    Fault(name="onnxruntime-eye-like", formats=_FP16, find=_kernels("onnx::EyeLike")),
    Fault(
        name="torch-low-samplers",
        device="",
        formats=frozenset(Format) - {Format.FP32},
        find=_kernels(
            *("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d"),
            *("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"),
            *("aten::matrix_exp", "aten::linalg_matrix_exp", "aten::soft_margin_loss"),
        ),
    ),
)
