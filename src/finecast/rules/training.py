"""The rules for compiled training graphs: sums, norms and softmax may be low.

Inductor's and ATen's kernels accumulate in fp32 whatever they read, and keep statistics in
fp32. A sum, a norm or a softmax of low values therefore rounds its result once, as every
other op does. If it had to read fp32, an activation or a gradient that products read in a low
format would be stored twice. This holds only for formats with fp32's exponent range, in which
the stored sum cannot overflow earlier.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.rules import RULES, Context, Rule, Ruling
from finecast.rules.tier import DEPTH, TIER

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


TRAINING_RULES: Final[tuple[Rule, ...]] = tuple(
    _except_sums(rule) if rule in (TIER, DEPTH) else rule for rule in RULES
)
