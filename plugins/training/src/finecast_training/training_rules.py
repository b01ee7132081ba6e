"""Rules for the graphs of forward and backward pass together, and what autocast does there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from finecast import Format
from finecast.graph import Graph, Node, backward_ops
from finecast.native.torch import autocast_formats as inference_formats
from finecast.ops import by_name
from finecast.planning import Planner, moves
from finecast.rules import (
    CALIBRATION,
    DEPTH,
    KEEP,
    RULES,
    TIER,
    Context,
    Permission,
    Reason,
    Rule,
    Ruling,
)
from finecast_training.products import PRODUCTS

# ------------------------------------------- rules: sums, norms and softmax may be low
#
# Inductor's and ATen's kernels accumulate in fp32 whatever they read, and keep statistics in
# fp32. A sum, a norm or a softmax of low values therefore rounds its result once, as every
# other op does. If it had to read fp32, an activation or a gradient that products read in a
# low format would be stored twice. This holds only for formats with fp32's exponent range, in
# which the stored sum cannot overflow earlier.

_SUMS_IN_FP32: Final = frozenset(
    {
        *("reduce_sum", "reduce_mean", "softmax", "softmax_backward"),
        *("batch_norm_training", "batch_norm_backward", "layer_norm", "layer_norm_backward"),
        # Without its gradient: Inductor decomposes that into products with rounded results.
        "group_norm",
    }
)


def _except_sums(rule: Rule) -> Rule:
    """``rule``, but without an opinion on ops that sum in fp32."""

    def judge(node: Node, context: Context) -> Ruling | None:
        wide = context.low.exponent_bits == Format.FP32.exponent_bits
        if wide and node.op in _SUMS_IN_FP32:
            return None
        return rule.judge(node, context)

    return Rule(name=rule.name, judge=judge, hard=rule.hard)


def _judge_lookups(node: Node, context: Context) -> Ruling | None:
    """A table's gradient is summed in fp32 and is the gradient of an fp32 parameter.

    Rounded in between it would be in memory twice, for no gain.
    """
    if node.op != "embedding_backward":
        return None
    return Ruling(
        permits=KEEP,
        text=f"it is summed in fp32, and widened at once if it is {context.low.label}",
    )


TRAINING_RULES: Final[tuple[Rule, ...]] = (
    *(
        _except_sums(rule) if rule in (TIER, DEPTH) else rule
        for rule in RULES
        if rule is not CALIBRATION
    ),
    PRODUCTS,
    Rule(name="lookups", judge=_judge_lookups),
)


# ---------------------------------------------------- the plan that ``torch.autocast`` follows

_PROMOTED: Final = (
    "it reads fp32: rounded, it would add errors that torch.autocast does not make"
)
_NOT_ITS: Final = "torch.autocast has no products in this format"
_GRADIENT: Final = "it reads gradients, which torch.autocast stores in this format"
_SAVED: Final = "the backward pass reads its result, which torch.autocast saves in this format"


def as_autocast(planner: Planner, *, products: bool = False) -> Planner:
    """``planner``, restricted to what ``torch.autocast`` rounds and stores.

    As far as the rules permit, ops that autocast keeps in fp32 stay in fp32. Low are ops whose
    results it saves low for the backward pass, and products of the backward pass that are low
    there: in fp32 they would need gradients of twice the size, and what was saved as well.
    With ``products`` what is low may have a format in which autocast has no products, too, as
    fp8 and tf32.
    """
    graph, permissions = planner.graph, planner.permissions
    followed = autocast_formats(graph, permissions, planner.policy.formats)
    saved = saved_ops(graph)
    backward = backward_ops(graph)
    gradients = {n for n in backward if by_name(graph.nodes[n].op).matmul_engine}
    narrowed = dict(permissions)
    for node, permission in permissions.items():
        fmt = followed[node]
        if fmt is Format.FP32:
            text = _PROMOTED
        elif node in saved:
            text = _SAVED
        else:
            text = _GRADIENT if node in gradients else ""
        own = {fmt} if text else {f for f in permission.formats if f.encodes_results}
        if products and by_name(graph.nodes[node].op).matmul_engine:
            own |= {f for f in permission.formats if not f.encodes_results}
        if len(permission.formats) > len(own):
            reason = Reason(
                rule="autocast",
                text=text or _NOT_ITS,
                permits=tuple(sorted(f.label for f in own)),
            )
            narrowed[node] = replace(
                permission, formats=frozenset(own), reasons=(*permission.reasons, reason)
            )
    return replace(planner, permissions=narrowed)


def no_lower_than_autocast(planner: Planner) -> Planner:
    """``planner``, restricted to fp32 and what ``torch.autocast`` rounds each op to.

    Each of its plans makes some of autocast's roundings and no other, whatever is saved.
    """
    followed = autocast_formats(planner.graph, planner.permissions, planner.policy.formats)
    narrowed = {
        node: replace(
            permission,
            formats=permission.formats & {followed[node], Format.FP32} or permission.formats,
        )
        for node, permission in planner.permissions.items()
    }
    return replace(planner, permissions=narrowed)


def autocast_formats(
    graph: Graph, permissions: Mapping[int, Permission], formats: Sequence[Format]
) -> dict[int, Format]:
    """The plan that ``torch.autocast`` follows in training, as far as the rules permit.

    It is that of inference, but for gradients. Those of an fp32 value are added up in fp32:
    each of its low readers has a cast of its own, whose gradient is fp32. The gradient of a
    product's bias is a sum of what the products of the backward pass read low, and low.
    """
    formats = [fmt for fmt in formats if fmt.encodes_results]
    chosen = inference_formats(graph, permissions, formats, _gradients_of_biases)
    return chosen | dict.fromkeys(_sums_of_gradients(graph, chosen), Format.FP32)


def _gradients_of_biases(graph: Graph, formats: Mapping[int, Format]) -> Iterator[Node]:
    """The sums that give the gradient of a bias which a low product adds itself.

    Such a sum reads the gradient of the product's result. So does a product of the backward
    pass, with an operand of the first. (A bias that is added in fp32 behind a product has an
    fp32 gradient: of that product none has an operand beside a bias.)
    """
    backward = backward_ops(graph)
    products = [n for n in graph.float_nodes if by_name(n.op).matmul_engine]
    operands = {
        source
        for node in products
        if node.op == "addmm" and node.id not in backward
        for source in _sources(graph, node)[1:]
    }
    gradients: set[int] = set()
    for node in products:
        sources = set(_sources(graph, node))
        if node.id in backward and formats[node.id] is not Format.FP32 and sources & operands:
            gradients |= sources - operands
    for node in graph.float_nodes:
        if node.op == "reduce_sum" and gradients.issuperset(_sources(graph, node)):
            yield node


def _sources(graph: Graph, node: Node) -> list[int]:
    """The values that ``node`` reads in its own format, before they were moved."""
    source_ids: list[int] = []
    for value in graph.following_inputs(node):
        source = value
        while source.producer is not None and moves(graph.nodes[source.producer]):
            (source,) = graph.following_inputs(graph.nodes[source.producer])
        source_ids.append(source.id)
    return source_ids


def _sums_of_gradients(graph: Graph, formats: Mapping[int, Format]) -> set[int]:
    """Additions in the backward pass whose results, moved or not, only fp32 ops read."""
    backward = backward_ops(graph)
    sums = set[int]()
    read_as: dict[int, set[Format]] = {}
    for node in reversed(graph.float_nodes):
        outputs = list(graph.following_outputs(node))
        read_as[node.id] = {Format.FP32} if any(v.is_output for v in outputs) else set()
        for reader in (graph.nodes[n] for v in outputs for n in v.uses if n in formats):
            passes_on = moves(reader) or reader.id in sums
            reader_formats = read_as[reader.id] if passes_on else {formats[reader.id]}
            read_as[node.id] |= reader_formats
        if node.op == "add" and node.id in backward and read_as[node.id] == {Format.FP32}:
            sums.add(node.id)
    return sums


def saved_ops(graph: Graph) -> set[int]:
    """Ops of the forward pass whose results the backward pass reads."""
    backward = backward_ops(graph)
    return {
        node.id
        for node in graph.float_nodes
        if node.id not in backward
        and any(n in backward for v in graph.following_outputs(node) for n in v.uses)
    }
