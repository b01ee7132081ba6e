"""Rules that hold for a block: ``with override({"aten::softmax": rule}): ...``.

A rule may be ours, ``rule(node) -> "fp32" | ["fp32", "bf16"] | None``, with ``node`` a
``NodeView``, or RAF's, ``rule(args, ret_type, amp_dtype) -> [hint, ...]``: one hint for each
argument, a format's label or None for "leave it as it was".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias, cast

from finecast.errors import UsageError
from finecast.graph import Node
from finecast.rules.base import NodeView, UserRule
from finecast.rules.op_formats import matches

Hint: TypeAlias = "str | None"
CastingRule: TypeAlias = Callable[[Sequence[Hint], Sequence[Hint], str], Sequence[Hint]]

AnyRule: TypeAlias = "UserRule | CastingRule"

_ACTIVE: ContextVar[Mapping[str, AnyRule]] = ContextVar("overrides", default={})  # noqa: B039
_RAF_PARAMETERS: Final = 3


@contextmanager
def override(rules: Mapping[str, AnyRule]) -> Generator[None]:
    """Let ``rules`` judge the ops that they are named for, canonical or native.

    Laws: what held before holds again after the block, on exceptions too; an inner block
    wins over an outer one for the same op, and all others stay; other threads see nothing.

    Raises:
        UsageError: If a rule is not a function of one or of three arguments.
    """
    for name, rule in rules.items():
        _parameters(name, rule)
    token = _ACTIVE.set({**_ACTIVE.get(), **rules})
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active() -> tuple[tuple[str, UserRule], ...]:
    """The overrides of the blocks around the caller, as ``Context.user_rules`` takes them."""
    return tuple((name, _for_op(name, rule)) for name, rule in _ACTIVE.get().items())


def find_override(node: Node) -> CastingRule | None:
    """The override for an op as a rule of arguments; None if no block names it.

    Raises:
        UsageError: If it is a rule of nodes: a pass that goes forwards cannot ask those.
    """
    for name, rule in reversed(tuple(_ACTIVE.get().items())):
        if matches(name, node):
            if _parameters(name, rule) != _RAF_PARAMETERS:
                raise UsageError(
                    "RAF's rule set takes rules of (args, ret_type, amp_dtype)", where=name
                )
            return cast("CastingRule", rule)
    return None


def _for_op(name: str, rule: AnyRule) -> UserRule:
    count = _parameters(name, rule)
    simple = (
        cast("UserRule", rule) if count == 1 else from_casting_rule(cast("CastingRule", rule))
    )

    def judge(view: NodeView) -> str | list[str] | None:
        return simple(view) if matches(name, view.node) else None

    return judge


def _parameters(name: str, rule: Callable[..., Any]) -> int:
    try:
        count = len(inspect.signature(rule).parameters)
    except (TypeError, ValueError):
        count = 0
    if count not in (1, _RAF_PARAMETERS):
        raise UsageError(
            "a rule takes a node, or (args, ret_type, amp_dtype)",
            where=name,
            fix="write def rule(node) or def rule(args, ret_type, amp_dtype)",
        )
    return count


def from_casting_rule(rule: CastingRule) -> UserRule:
    """Our kind of rule from RAF's: what it hints for the arguments is what the op may take.

    A rule that answers the same whatever it is given leaves one format; one that follows
    its inputs leaves both, and the plan decides.
    """

    def judge(view: NodeView) -> str | list[str] | None:
        low = view.context.low.label
        answers = {_wanted(rule, view.node, view, label, low) for label in ("fp32", low)}
        found = sorted(label for label in answers if label is not None)
        return found or None

    return judge


def _wanted(rule: CastingRule, node: Node, view: NodeView, label: str, low: str) -> str | None:
    """What the rule makes of the op if its following inputs are ``label``."""
    follows = dict(zip(range(len(node.inputs)), node.follows_in, strict=True))
    args = [
        label if follows[k] else (v.dtype if v is not None else None)
        for k, v in enumerate(view.inputs)
    ]
    results = [label if f else None for f in node.follows_out]
    hints = [h for k, h in enumerate(rule(args, results, low)) if h and follows.get(k)]
    if not hints:
        return label
    return low if all(h == low for h in hints) else "fp32"
