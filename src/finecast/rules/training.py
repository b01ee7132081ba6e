"""Rules of thumb as compiled training graphs need them.

Inductor's kernels, and ATen's, add up in fp32 whatever they read, and keep statistics in
fp32. A plain sum, a norm or a softmax of low values therefore rounds its result once, as every
other op does, and needs no fp32 copy of what it reads: an activation or a gradient that
products read in a low format would else be stored twice. This holds for formats of fp32's
range alone: the sum must not overflow when it is stored.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.rules import RULES, Context, Rule, Ruling

_SUMS_IN_FP32: Final = frozenset(
    {
        *("reduce_sum", "reduce_mean", "softmax", "softmax_backward"),
        *("batch_norm_training", "batch_norm_backward", "layer_norm", "layer_norm_backward"),
        # Not its gradient: Inductor takes that apart into products that it does round.
        "group_norm",
    }
)
_OF_THUMB: Final = frozenset({"tier", "reduction_depth"})


def _but_for_sums(rule: Rule) -> Rule:
    def judge(node: Node, context: Context) -> Ruling | None:
        wide = context.low.exponent_bits == Format.FP32.exponent_bits
        if wide and node.op in _SUMS_IN_FP32:
            return None
        return rule.judge(node, context)

    return Rule(name=rule.name, judge=judge, hard=rule.hard)


TRAINING_RULES: Final[tuple[Rule, ...]] = tuple(
    _but_for_sums(rule) if rule.name in _OF_THUMB else rule for rule in RULES
)
