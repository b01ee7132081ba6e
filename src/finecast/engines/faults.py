"""Ops and patterns that engines compute wrongly in a low format: plans never contain them.

What each fault is, where it was reported and which test shows it is in the table of
``finecast.devices.faults``. A row here finds the nodes that the fault is about. It counts as
long as the installed release of the engine has the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from finecast.devices.faults import known_faults
from finecast.engines.openvino_mlp import sums_behind_products, sums_of_codes
from finecast.engines.openvino_scales import scaled_twice
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name

# Finds the nodes, by id, that are computed wrongly in a low format, with the reason; an empty
# reason says that the kernel does not work.
Finder: TypeAlias = Callable[[Graph, Format], Mapping[int, str]]

_MOVES: Final = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CAST})
_ADDS: Final = frozenset({"add", "sub"})
_PRODUCTS: Final = frozenset({"matmul", "gemm"})


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
            if low in fault.formats
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
    found: dict[int, str] = {}
    for product in graph.nodes:
        if product.op not in _PRODUCTS:
            continue
        for bias in _biases(graph, product):
            before = bias
            between, after = _next_bias(graph, before)
            while after is not None and after.id not in found:
                text = (
                    f"openvino leaves out the bias that {before.name} adds if {after.name} "
                    f"adds another in {low.label}"
                )
                found |= dict.fromkeys((before.id, *between, after.id), text)
                before = after
                between, after = _next_bias(graph, before)
    return found


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
    found: dict[int, str] = {}
    for node in graph.nodes:
        if node.native != "openvino::GroupNormalization" or node.inputs[0] is None:
            continue
        fixed = graph.values[node.inputs[0]].fixed_shape
        groups = node.attributes.get("num_groups")
        if not fixed or not isinstance(groups, int):
            continue
        if low.bytes_for(math.prod(fixed[1:]) // groups) <= _FIRST_CACHE_BYTES:
            found[node.id] = f"openvino has no {low.label} kernel for it at this shape"
    return found


def _batched_weights(graph: Graph, low: Format) -> Mapping[int, str]:
    """Products by a constant of several matrices: their kernel on integers does not run."""
    return {
        node.id: f"onnxruntime has no {low.label} kernel for weights of several matrices"
        for node in graph.nodes
        if node.op in _PRODUCTS and len(node.inputs) > 1 and node.inputs[1] is not None
        if len(graph.values[node.inputs[1]].shape or ()) > 2
    }


def _computed_padding(graph: Graph, low: Format) -> Mapping[int, str]:
    """Pads by a number that the model computes.

    OpenVINO pads by whatever its buffer has in every type. In fp32 the converted model gives
    at least what the given one gives.
    """
    return {
        node.id: f"openvino pads by another number than the one that is computed: {low.label}"
        " would change it"
        for node in graph.nodes
        if node.native in _PADS
        if (number := _pad_value(node)) is not None and graph.values[number].constant is None
    }


def _computed_axes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Reductions over axes that the model computes or is given, which OpenVINO has in fp32."""
    return {
        node.id: f"openvino has no {low.label} kernel for a reduction over computed axes"
        for node in graph.nodes
        if by_name(node.op).kind is OpKind.REDUCTION and len(node.inputs) > 1
        if (axes := node.inputs[1]) is not None and graph.values[axes].constant is None
    }


def _masked_rows(graph: Graph, low: Format) -> Mapping[int, str]:
    """Attentions in which a boolean mask may leave a query without a key.

    OpenVINO's own op gives NaN there, which no model means; ONNX's gives 0, as does one of
    OpenVINO's whose NaN is replaced. Of a mask that is a constant its rows are read.
    """
    found: dict[int, str] = {}
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
            found[node.id] = (
                f"openvino attends to every key in {low.label} where the mask leaves out all"
            )
    return found


def _pad_value(node: Node) -> int | None:
    """The id of the number that a Pad pads by; None if it is no operand."""
    index = _PADS[node.native]
    return node.inputs[index] if index < len(node.inputs) else None


_PADS: Final = {"onnx::Pad": 2, "openvino::Pad": 3}
"""The operand of Pad ops that is the number to pad by."""
_MASKED: Final = frozenset({"onnx::Attention", "openvino::ScaledDotProductAttention"})
"""Ops whose fourth operand is a mask."""

_REDUCTIONS: Final = ("add", "mul", "max", "min")
_FP16: Final = frozenset({Format.FP16})
_BF16: Final = frozenset({Format.BF16})
_INT8: Final = frozenset({Format.INT8})

FAULTS: Final[tuple[Fault, ...]] = (
    Fault(name="openvino-second-bias", device="", formats=_FP16, find=_second_bias),
    Fault(name="openvino-block-and-chain", formats=_BF16, find=sums_behind_products),
    Fault(name="openvino-small-group-norms", formats=_BF16, find=_small_group_norms),
    Fault(name="openvino-computed-padding", formats=_FP16 | _BF16, find=_computed_padding),
    Fault(name="openvino-computed-axes", formats=_BF16, find=_computed_axes),
    Fault(name="openvino-masked-rows", formats=_BF16, find=_masked_rows),
    Fault(name="openvino-scaled-twice", formats=_INT8, find=scaled_twice),
    Fault(name="openvino-sums-of-codes", formats=_INT8, find=sums_of_codes),
    Fault(
        name="openvino-quick-gelu",
        device="",
        formats=_FP16 | _BF16,
        find=_kernels("com.microsoft::QuickGelu"),
    ),
    Fault(
        name="openvino-bias-add",
        device="",
        formats=_BF16,
        find=_kernels("com.microsoft::BiasAdd"),
    ),
    Fault(name="onnxruntime-batched-weights", formats=_INT8, find=_batched_weights),
    Fault(
        name="onnxruntime-scatter-nd",
        formats=_FP16 | _BF16,
        find=_kernels("onnx::ScatterND", reduction=_REDUCTIONS),
    ),
    Fault(
        name="onnxruntime-scatter-elements",
        formats=_FP16,
        find=_kernels("onnx::ScatterElements", reduction=("add", "mul")),
    ),
    Fault(
        name="onnxruntime-scatter-elements",
        formats=_BF16,
        find=_kernels("onnx::ScatterElements", reduction=_REDUCTIONS),
    ),
    Fault(name="onnxruntime-eye-like", formats=_FP16, find=_kernels("onnx::EyeLike")),
    Fault(
        name="torch-low-samplers",
        device="",
        formats=frozenset(Format) - {Format.FP32},
        find=_kernels(
            *("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d"),
            *("aten::matrix_exp", "aten::linalg_matrix_exp", "aten::soft_margin_loss"),
        ),
    ),
)
