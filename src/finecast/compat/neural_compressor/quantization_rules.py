"""Settings of quantization for single ops, as a rule like those that users write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from finecast.compat.neural_compressor.op_dicts import restrictions
from finecast.compat.neural_compressor.quantization_config import PostTrainingQuantConfig
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules import NodeView, UserRule

_NAME: Final = "conf"


def op_rule(graph: Graph, conf: PostTrainingQuantConfig) -> dict[str, UserRule]:
    """The rule, by its name; empty if the settings restrict no op.

    Raises:
        UsageError: If an entry of the op dicts matches no op of the model.
    """
    permitted = _permitted(graph, conf)
    if not permitted:
        return {}

    def rule(view: NodeView) -> list[str] | None:
        found = permitted.get(view.name)
        return None if found is None else sorted(f.label for f in found)

    return {_NAME: rule}


def _permitted(graph: Graph, conf: PostTrainingQuantConfig) -> dict[str, frozenset[Format]]:
    """The formats that settings permit, by the names of ops that they restrict."""
    every = frozenset({Format.FP32, *conf.formats})
    kinds = {n.name: n.native.rpartition("::")[2] for n in graph.nodes}
    by_op = restrictions(conf.op_name_dict, tuple(kinds), "op_name_dict")
    by_type = restrictions(
        conf.op_type_dict, tuple(dict.fromkeys(kinds.values())), "op_type_dict"
    )
    outside, float_only = _kept_from_int8(graph.nodes, conf), every - {Format.INT8}
    found: dict[str, frozenset[Format]] = {}
    for node in graph.float_nodes:
        left = by_op.get(node.name, every) & by_type.get(kinds[node.name], every) & every
        if node.name in outside:
            left &= float_only
        if left != every:
            found[node.name] = left
    return found


def _kept_from_int8(nodes: Sequence[Node], conf: PostTrainingQuantConfig) -> frozenset[str]:
    """Names of the ops that recipes leave out of int8."""
    products = [n.id for n in nodes if by_name(n.op).matmul_engine]
    if not products:
        return frozenset()
    first, last = products[0], products[-1]
    kept: set[int] = set()
    if conf.leaves_out("first_conv_or_matmul_quantization"):
        kept.add(first)
    if conf.leaves_out("last_conv_or_matmul_quantization"):
        kept.add(last)
    if conf.leaves_out("pre_post_process_quantization"):
        kept.update(n.id for n in nodes if not first <= n.id <= last)
    return frozenset(n.name for n in nodes if n.id in kept)
