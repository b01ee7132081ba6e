"""RAF's casting rules: always, never, follow, and special ones for some ops.

From awslabs/raf, ``python/raf/amp/type_hints.py``. RAF's pass goes through the graph once,
from inputs to outputs; at each op a rule gives a hint for each argument from the types that
the arguments have by then. Here the formats are propagated in the same way, and the result
is one verdict per op that leaves the plan no choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from finecast.compat.raf.hints import CastingRule, Hint, HintRule, ask, is_low
from finecast.errors import ModelError, UsageError
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import Tier, by_name
from finecast.rules import Context, Rule, Ruling
from finecast.rules.base import only
from finecast.rules.guests import Overrides
from finecast.rules.override import current, innermost
from finecast.rules.support import DEFINITION, KERNEL

ALWAYS: Final = frozenset(
    {
        *("conv", "conv_transpose", "conv_backward"),
        *("matmul", "linear", "addmm", "einsum"),
        *("attention", "torch_attention", "attention_backward"),
    }
)
NEVER: Final = frozenset(
    {
        *("range", "exp", "pow", "reciprocal", "erf", "atan", "tanh", "rsqrt", "mul"),
        *("softmax", "log_softmax", "softmax_backward", "gelu", "gelu_backward"),
        *("nll_loss", "nll_loss_backward", "cross_entropy_loss", "kl_div"),
        *("mse_loss", "mse_loss_backward", "bce_loss", "bce_loss_backward"),
        *("embedding_backward", "reduce_sum", "variance", "optimizer"),
    }
)
# A row of the op table has the gradients of tanh, "never", and of sigmoid, "follow".
_NEVER_NATIVE: Final = frozenset({"aten::tanh_backward"})

_MOST_CONCATENATED: Final = 5


def always(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """Low, whatever comes in."""
    return [amp_dtype if a is not None else None for a in args]


def never(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """fp32, whatever comes in."""
    return ["fp32" if a is not None else None for a in args]


def follow(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """Low unless fp32 arguments outnumber the low ones."""
    high = sum(a == "fp32" for a in args)
    low = sum(a == amp_dtype for a in args)
    return (never if high > low else always)(args, ret_type, amp_dtype)


def either(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """Low if any argument is: a sum takes its other side down."""
    return (always if amp_dtype in args else never)(args, ret_type, amp_dtype)


def first(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """As the first argument is."""
    return (always if args and args[0] == amp_dtype else never)(args, ret_type, amp_dtype)


def second(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """As the second argument is: a norm's gradient reads the result's gradient first."""
    return first(args[1:2], ret_type, amp_dtype)[:1] * len(args)


def majority(args: Sequence[Hint], ret_type: Sequence[Hint], amp_dtype: str) -> list[Hint]:
    """Low for a strict majority of low arguments, if they are not too many."""
    low = sum(a == amp_dtype for a in args)
    wins = len(args) <= _MOST_CONCATENATED and 2 * low > len(args)
    return (always if wins else never)(args, ret_type, amp_dtype)


SPECIAL: Final[Mapping[str, CastingRule]] = {
    "add": either,
    "sub": either,
    "batch_norm": always,
    "batch_norm_training": always,
    "batch_norm_backward": always,
    "layer_norm": first,
    "layer_norm_backward": second,
    "concat": majority,
    "split": first,
}


def rule_of(
    graph: Graph, node: Node, overrides: Overrides | None = None
) -> CastingRule | None:
    """RAF's rule for an op, that of an override before its own; None if there is none.

    Raises:
        UsageError: If an override has finecast's form, which RAF's forward pass cannot ask.
    """
    held = current() if overrides is None else overrides
    name = innermost(graph, node, held)
    if name is not None:
        override = held[name].rule
        if isinstance(override, HintRule):
            return override.rule
        raise UsageError(
            "RAF's rule set takes rules of (args, ret_type, amp_dtype)", where=name
        )
    if node.op in SPECIAL:
        return SPECIAL[node.op]
    if node.op in ALWAYS:
        return always
    if node.op in NEVER or node.native in _NEVER_NATIVE:
        return never
    return None if by_name(node.op).tier is Tier.NEVER else follow


def raf_rules(
    graph: Graph, low: Format, overrides: Overrides | None = None
) -> tuple[Rule, ...]:
    """The rules for ``graph``: definitions, kernels, and RAF's rules.

    Raises:
        ModelError: If ops have no rule: all of them, each with how often it occurs.
    """
    formats = propagate(graph, low, overrides)

    def judge(node: Node, context: Context) -> Ruling | None:
        del context
        fmt = formats.get(node.id)
        if fmt is None:
            return None
        return Ruling(permits=only(fmt), text=f"RAF's rule for {node.op}: {fmt.label}")

    return (DEFINITION, KERNEL, Rule(name="raf", judge=judge))


def propagate(
    graph: Graph, low: Format, overrides: Overrides | None = None
) -> dict[int, Format]:
    """The format that RAF's pass gives each fp32 node, going forwards."""
    own = (n for n in graph.float_nodes if n.format is Format.FP32)
    rules = {n.id: rule_of(graph, n, overrides) for n in own}
    missing = Counter(graph.nodes[i].native for i, rule in rules.items() if rule is None)
    if missing:
        listed = ", ".join(f"{op} ({count})" for op, count in missing.most_common())
        raise ModelError(
            f"no casting rule for {listed}",
            fix="give them one: with finecast.rules.override({op: rule})",
        )
    stored = {v.id: v.format.label for v in graph.values if v.format is not None}
    found: dict[int, Format] = {}
    for node in graph.nodes:
        rule = rules.get(node.id)
        if rule is None:
            source = node.inputs[0] if node.op == "cast" else None
            if source is not None and stored.get(source) == low.label:
                # A low value that is widened counts as low: the cast will be dropped.
                stored.update((i, low.label) for i in node.outputs if i is not None)
            continue
        args = [None if i is None else stored.get(i) for i in node.inputs]
        wanted = is_low(node, ask(rule, node, args, low.label), low.label)
        found[node.id] = low if wanted and low in node.admits else Format.FP32
        for value in graph.following_outputs(node):
            stored[value.id] = found[node.id].label
    return found
