"""Regions that the model came quantized in keep their types: casts would break int8 kernels.

Engines run ``dequantize -> op -> quantize`` as one kernel on integers, and also products that
read dequantized weights or activations. The op is fp32 in the graph only: in a low format
casts would stand between it and the nodes that the engine fuses, and weights would be
dequantized in every run. The same holds for ops that scale the sums of integer products.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

from finecast.graph import ROUNDS, Graph, Node
from finecast.ops import MOVES, POINTWISE, OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.folded import computed_from_constants
from finecast.rules.scaled_operands import origin

_FUSED: Final = MOVES | POINTWISE
DEQUANTIZES: Final = frozenset({"dequantize", "fake_quantize"})
"""Ops that convert integer codes to the numbers that they encode."""

STATES_CODES: Final = DEQUANTIZES | {"quantize", "dynamic_quantize"}
"""Ops that only state an encoding: of their first input, by the parameters in the others."""

_DECODES: Final = frozenset({"sub", "mul"})
_SCALES_AND_BIASES: Final = frozenset({"mul", "add"})


class _From(Enum):
    """What a float value is, in terms of quantized numbers.

    A dequantized tensor; its integers cast to float; a scale; a sum of integer products; or
    the result of an op that may run in one kernel with the dequantization in front of it.
    """

    TENSOR = auto()
    CODES = auto()
    SCALE = auto()
    SUM = auto()
    OP = auto()


def _judge(node: Node, context: Context) -> Ruling | None:
    if node.id not in context.graph.once(_regions):
        return None
    return Ruling(permits=KEEP, text="it belongs to a quantized region, which stays as it is")


def quantized_notes(graph: Graph) -> list[str]:
    """A note that a model came quantized, if it did."""
    # Such as QLinearConv, which computes on integers itself.
    steps = (n for n in graph.nodes if by_name(n.op).kind is OpKind.QUANTIZE)
    computed = {n.id for n in steps if n.op not in STATES_CODES}
    ids = graph.once(_regions) | computed
    if not ids:
        return []
    every = computed.union(n.id for n in graph.float_nodes)  # casts of codes read none
    stay = len(ids & every)
    return [f"{stay} of {len(every)} ops came quantized by another tool and stay as they are"]


def computed_in(graph: Graph, node: Node) -> str:
    """The label of the format of the node's operands; "quantized" in a quantized region.

    Empty for a node without floats.
    """
    if node.id in graph.once(_regions):
        return "quantized"
    for source in (graph.values[i] for i in node.input_ids):
        maker = graph.maker(origin(graph, source))  # ops between move codes
        label = None if maker is None else maker.attributes.get(ROUNDS)
        if isinstance(label, str):
            return label
    return node.format.label if node.format else ""


def _regions(graph: Graph) -> frozenset[int]:
    """Ids of the float nodes that engines run on integers, or that scale integer sums."""
    if not any(_quantizes(n) for n in graph.nodes):
        return frozenset()
    sources: dict[int, _From] = {}
    scaling = frozenset(n.id for n in graph.nodes if _scales(graph, n, sources))
    return scaling | _fused(graph, sources)


def _quantizes(node: Node) -> bool:
    """Whether the node quantizes or dequantizes in the original model, not by a conversion."""
    return by_name(node.op).kind is OpKind.QUANTIZE and ROUNDS not in node.attributes


def _scales(graph: Graph, node: Node, found: dict[int, _From]) -> bool:
    """Whether the node converts integer sums to float or scales them.

    Records in ``found`` what the node's float outputs are.
    """
    info = by_name(node.op)
    outputs = [i for i in node.output_ids if graph.values[i].format is not None]
    if _quantizes(node):
        kind = _From.TENSOR if node.op in DEQUANTIZES else _From.SCALE
        found.update(dict.fromkeys(outputs, kind))
        return False
    if outputs and (kind := _decoded(graph, node, found)) is not None:
        found.update(dict.fromkeys(outputs, kind))
        return True
    if node.op == "cast" and outputs and _sums_integers(graph, node.inputs):
        found.update(dict.fromkeys(outputs, _From.SUM))
        return True
    data = _data(graph, node)
    kinds = {found.get(i) for i in data}
    if not data or not kinds <= {_From.SCALE, _From.SUM} or node.op not in _SCALES_AND_BIASES:
        picks = info.kind is OpKind.POOL and info.exact  # maximum pooling: a code stays one
        # PyTorch's integer kernels accept a cast of their operand, and give the cast's type.
        passes = picks or info.kind in MOVES or node.op == "cast"
        if passes and len(kinds) == 1 and None not in kinds:
            found.update((i, k) for i in outputs for k in kinds if k is not None)
        return False
    if node.op == "mul":  # after a bias is added the value is an ordinary float
        kind = _From.SUM if _From.SUM in kinds else _From.SCALE
        found.update(dict.fromkeys(outputs, kind))
    return True


def _decoded(graph: Graph, node: Node, found: dict[int, _From]) -> _From | None:
    """What the node's result is if the node is a step of a dequantization; else None.

    OpenVINO states one by three ops: a cast to float, ``sub`` of a zero point, ``mul``.
    """
    source = graph.read(node, 0) if node.op == "cast" else None
    if source is not None:
        maker = graph.maker(source)
        if source.format is not None or maker is None:
            return None
        before = {found.get(i) for i in maker.input_ids}
        return _From.CODES if _From.TENSOR in before else None
    kinds = [found[i] for i in node.input_ids if i in found]
    if node.op not in _DECODES or kinds != [_From.CODES]:
        return None
    return _From.CODES if node.op == "sub" else _From.TENSOR


def _sums_integers(graph: Graph, inputs: Iterable[int | None]) -> bool:
    whole = (i for i in inputs if i is not None and graph.values[i].format is None)
    return any(_quantizes(n) for n in map(graph.maker, whole) if n is not None)


def _fused(graph: Graph, found: dict[int, _From]) -> frozenset[int]:
    """Ids of products of dequantized tensors, and of ops in front of a new quantization."""
    candidates: set[int] = set()
    products: set[int] = set()
    fixed = graph.once(computed_from_constants)
    for node in graph.nodes:
        read = _data(graph, node)
        data = [i for i in read if i in found or graph.values[i].producer not in fixed]
        info = by_name(node.op)
        if _quantizes(node) or not data:
            continue
        kinds = {found.get(i) for i in data}
        if info.matmul_engine and _From.TENSOR in kinds:
            products.add(node.id)
        elif kinds <= {_From.TENSOR} or (
            info.kind in _FUSED and kinds <= {_From.TENSOR, _From.OP}
        ):
            candidates.add(node.id)
        else:
            continue
        found.update((i, _From.OP) for i in node.output_ids if i not in found)
    kept = set(products)
    for node in reversed(graph.nodes):
        if node.id in candidates and _leads_to(graph, node, kept):
            kept.add(node.id)
    return frozenset(kept)


def _leads_to(graph: Graph, node: Node, kept: set[int]) -> bool:
    """Whether every reader of the node quantizes or is among ``kept``."""
    readers = {n for i in node.output_ids for n in graph.values[i].uses}
    kinds = (_quantizes(graph.nodes[n]) or n in kept for n in readers)
    return bool(readers) and all(kinds)


def _data(graph: Graph, node: Node) -> list[int]:
    """Ids of the float values that a node reads, constants apart."""
    values = (graph.values[i] for i in node.input_ids)
    return [v.id for v in values if v.constant is None and v.format is not None]


QUANTIZED: Final = Rule(name="quantized", judge=_judge)
