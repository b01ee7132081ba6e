"""RAF's casting rules and their notation: always, never, follow, special ones for some ops.

From awslabs/raf, ``python/raf/amp/type_hints.py``. RAF's pass goes through the graph once,
from inputs to outputs; at each op a rule gives a hint for each argument from the types that
the arguments have by then. Here the formats are propagated in the same way, and the result
is one verdict per op that leaves the plan no choice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from finecast import Format
from finecast.errors import ModelError, UsageError
from finecast.graph import Graph, Node
from finecast.naming import unknown_name
from finecast.ops import OP_TABLE, Tier, by_name
from finecast.rules import (
    DEFINITION,
    KERNEL,
    Context,
    Guest,
    NodeView,
    Override,
    Overrides,
    Rule,
    Ruling,
    UserRule,
    current,
    innermost,
    only,
    parameters,
)

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
    formats: dict[int, Format] = {}
    for node in graph.nodes:
        rule = rules.get(node.id)
        if rule is None:
            source = node.inputs[0] if node.op == "cast" else None
            if source is not None and stored.get(source) == low.label:
                # A low value that is widened counts as low: the cast will be dropped.
                stored.update((i, low.label) for i in node.output_ids)
            continue
        args = [None if i is None else stored.get(i) for i in node.inputs]
        wanted = is_low(node, ask(rule, node, args, low.label), low.label)
        formats[node.id] = low if wanted and low in node.admits else Format.FP32
        for value in graph.following_outputs(node):
            stored[value.id] = formats[node.id].label
    return formats


# --------------------------- RAF's notation: names of ops, rules with a hint for each argument
#
# A rule is ``rule(args, ret_type, amp_dtype) -> [hint, ...]``: one hint for each tensor, by
# any name of a format, or None for "keep its type". Arguments that are no float tensors are
# passed as None. An op is low if every argument that shares its format is hinted low, else
# fp32.


class DType(str):
    """A format's label, equal to all other names of the format: ``bf16`` to ``bfloat16``."""

    __slots__ = ()

    @property
    def checked_type(self) -> DType:
        """Itself; RAF's rules read an argument's type by this name."""
        return self

    @property
    def dtype(self) -> DType:
        """Itself; RAF's rules read the type of a tensor's elements by this name."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _label(self) == _label(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_label(self))


Hint: TypeAlias = "str | None"
CastingRule: TypeAlias = Callable[[Sequence[Hint], Sequence[Hint], str], Sequence[Any]]


class PrimType:
    """A hint in RAF's notation: ``PrimType("float16")``, or ``PrimType(None)``."""

    def __init__(self, dtype: Hint) -> None:
        self.dtype = dtype


def check_dtype(kind: Any, dtype: str) -> bool:
    """Whether ``kind``, an argument's ``checked_type`` (a tuple: all of it), is ``dtype``."""
    return all(found is not None and DType(found) == dtype for found in _flat([kind]))


def gen_hint_helper(kind: Any, target: Hint) -> PrimType:
    """``target`` for an argument of floats; None, "keep the type", for any other."""
    dtype = next(_flat([kind]))
    return PrimType(None if dtype is None else target)


def read_hints(given: object, count: int) -> tuple[Hint, ...]:
    """The labels of the formats that a rule's answer ``given`` names for ``count`` tensors.

    Law: all names of formats are accepted, and numpy's and torch's types. None stays None:
    the argument keeps its type. Further hints, for arguments that are no tensors, are
    ignored.

    Raises:
        UsageError: If the answer is no list, is too short, or has an unknown format.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(
            f"it returned {given!r}", fix="return a list with one hint for each argument"
        )
    hints = tuple(_flat(given))
    if len(hints) < count:
        raise UsageError(
            f"it returned {len(hints)} hints for {count} arguments",
            fix="return one for each, None for those to leave as they are",
        )
    return tuple(None if h is None else Format.parse(h).label for h in hints[:count])


def _flat(given: Any) -> Iterator[Hint]:
    """Each hint as a string; RAF's tuple types and lists are flattened."""
    for one in given:
        fields = getattr(one, "fields", one)
        if isinstance(fields, list | tuple):
            yield from _flat(fields)
        elif one is None or isinstance(one, str):
            yield one
        elif isinstance(one, Format):
            yield one.label
        elif hasattr(one, "dtype") and one.dtype is not one:
            yield from _flat([one.dtype])
        else:
            yield getattr(one, "name", None) or str(one).removeprefix("torch.")


def _label(name: str) -> str:
    try:
        return Format.parse(str(name)).label
    except UsageError:
        return str(name)


_RAF: Final = "raf.op."
_PARAMETERS: Final = 3
_FLOATS: Final = frozenset({"fp32", "bf16", "fp16"})
# RAF's ops that have other names here: the canonical names of what PyTorch computes them by.
RAF_OPS: Final[Mapping[str, tuple[str, ...]]] = {
    "conv2d": ("conv",),
    "conv2d_transpose": ("conv_transpose",),
    "dense": ("linear", "matmul", "addmm"),
    "matmul": ("matmul", "addmm"),
    "batch_matmul": ("matmul",),
    "subtract": ("sub",),
    "multiply": ("mul",),
    "divide": ("div",),
    "power": ("pow",),
    "negative": ("neg",),
    "maximum": ("max",),
    "minimum": ("min",),
    "sum": ("reduce_sum",),
    "mean": ("reduce_mean",),
    "prod": ("reduce_prod",),
    "max": ("reduce_max",),
    "min": ("reduce_min",),
    "argmax": ("arg_max",),
    "argmin": ("arg_min",),
    "cumsum": ("cum_sum",),
    "concatenate": ("concat",),
    "expand_dims": ("unsqueeze",),
    "broadcast_to": ("expand",),
    "strided_slice": ("slice",),
    "swap_axis": ("transpose",),
    "embedding": ("gather",),
    "take": ("gather",),
    "avg_pool2d": ("average_pool",),
    "max_pool2d": ("max_pool",),
    "nll_loss": ("nll_loss",),
    "cross_entropy": ("cross_entropy_loss",),
    "batch_norm_infer": ("batch_norm",),
    "batch_norm_train": ("batch_norm_training",),
    "layer_norm_train": ("layer_norm",),
    "_contrib_dropout": ("dropout",),
}
_TRANSPOSED: Final = re.compile(r"_(nt|tn|tt)$")
# RAF names the gradient of an op for each argument, finecast one for all: ``NAME_backward``.
_GRADIENT: Final = re.compile(r"_(dx|dw|dxwb|dpred|dtrue)$")


def ops_named(name: str) -> tuple[str, ...]:
    """The names of the ops that ``name`` stands for: those of RAF are translated.

    Raises:
        UsageError: If it is RAF's name of an op that has no row in the op table.
    """
    if not name.startswith(_RAF):
        return (name,)
    stripped = _TRANSPOSED.sub("", name.removeprefix(_RAF))
    forward = _GRADIENT.sub("", stripped)
    known = {info.name for info in OP_TABLE}
    listed = RAF_OPS.get(forward, (forward,))
    if forward != stripped:
        listed = tuple(f"{one.removesuffix('_training')}_backward" for one in listed)
    ops = tuple(one for one in listed if one in known)
    if not ops:
        raise unknown_name(name, sorted(known), what="op", fix="or PyTorch's own, aten::NAME")
    return ops


@dataclass(frozen=True, slots=True)
class HintRule:
    """A rule in RAF's form as one of finecast's, by its answers for fp32 and low inputs.

    A rule that gives the same answer for both permits one format; a rule that follows its
    inputs permits both, and the plan decides.
    """

    rule: CastingRule

    def __call__(self, view: NodeView) -> list[str]:
        """The formats that the rule permits the op."""
        low = view.context.low.label
        return sorted({_wanted(self.rule, view, label, low) for label in ("fp32", low)})


def read_override(name: str, rule: Callable[..., Any]) -> Override | None:
    """An override whose op has RAF's name, or whose rule has RAF's form; None for others.

    Raises:
        UsageError: If it is RAF's name of an op that has no row in the op table.
    """
    count = parameters(rule)
    if count not in (1, _PARAMETERS) or (count == 1 and not name.startswith(_RAF)):
        return None
    own: UserRule = HintRule(rule) if count == _PARAMETERS else rule
    return Override(ops=ops_named(name), rule=own)


def ask(rule: CastingRule, node: Node, args: Sequence[Hint], low: str) -> tuple[Hint, ...]:
    """The hints of a rule for the arguments of ``node``, None for those that keep their type.

    Raises:
        UsageError: If the rule raises, or does not return a list of hints.
    """
    given = [None if a is None else DType(a) for a in args]
    results = [DType("fp32") if f else None for f in node.follows_out]
    try:
        answer = rule(given, results, DType(low))
    except Exception as error:
        raise UsageError(
            f"the casting rule for {node.native} failed: {type(error).__name__}: {error}",
            where=node.name,
            fix="correct it; arguments that are no float tensors are None",
        ) from error
    try:
        return read_hints(answer, len(args))
    except UsageError as error:
        raise UsageError(
            f"the casting rule for {node.native}: {error.what}", where=node.name, fix=error.fix
        ) from error


def is_low(node: Node, hints: Sequence[Hint], low: str) -> bool:
    """Whether the hints make ``node`` low: those of all arguments that share its format."""
    own = [h for h, follows in zip(hints, node.follows_in, strict=True) if follows]
    return bool(own) and all(h == low for h in own)


def _wanted(rule: CastingRule, view: NodeView, label: str, low: str) -> str:
    """The format that the rule gives the op if the inputs of its own format are ``label``."""
    args = [
        label if follows else value.dtype if value and value.dtype in _FLOATS else None
        for value, follows in zip(view.inputs, view.node.follows_in, strict=True)
    ]
    return low if is_low(view.node, ask(rule, view.node, args, low), low) else "fp32"


GUEST: Final = Guest(override=read_override, rules=raf_rules)
"""How finecast finds RAF's rules."""
