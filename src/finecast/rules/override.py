"""Overrides in ``with`` blocks: functions that give ops a format.

A rule is a function ``rule(node) -> "fp32" | ["fp32", "bf16"] | None``, with ``node`` a
``NodeView``, or is in the notation of a guest (``rules/guests.py``).

An op computes in one format. Scales and statistics that kernels read in fp32 beside low values
stay fp32, whatever a rule says.

``bias_add`` is any op that adds a bias to what a product gives. PyTorch's linear layers and
convolutions leave their biases to such ops where an override names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from finecast.errors import UsageError
from finecast.graph import Graph, Node
from finecast.naming import suggestion
from finecast.ops.patterns import adds_bias
from finecast.rules.base import NodeView, UserRule
from finecast.rules.guests import GUESTS, Override, Overrides, guest_of
from finecast.rules.user_rules import matches, op_names

_ACTIVE: ContextVar[Overrides] = ContextVar("overrides", default={})  # noqa: B039
_BIAS_ADD: Final = "bias_add"


@contextmanager
def override(rules: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Let ``rules`` judge the ops that they are named after (canonical, native, or a guest's).

    Laws: after the block, also on exceptions, the earlier overrides hold again; an inner
    block replaces an outer one's rule for the same op, and keeps its others; other threads
    are not affected. What ``finecast.torch.compile`` returns keeps the overrides of the
    blocks around that call.

    Raises:
        UsageError: If a rule is not a function of one argument, or in a guest's notation.
    """
    read = {name: _read(name, rule) for name, rule in rules.items()}
    token = _ACTIVE.set({**_ACTIVE.get(), **read})
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current() -> Overrides:
    """The overrides of the blocks around the caller, inner ones last."""
    return _ACTIVE.get()


def active(overrides: Overrides | None = None) -> tuple[tuple[str, UserRule], ...]:
    """``overrides`` (by default the current ones) in the form of ``Context.user_rules``."""
    held = current() if overrides is None else overrides
    return tuple((name, _for_op(name, held)) for name in held)


def check_overrides(graph: Graph) -> None:
    """Refuse current overrides of ops that ``graph`` does not have.

    Raises:
        UsageError: If one names no op of the graph; gives the closest names.
    """
    for name in unmatched(current(), [graph]):
        raise UsageError(
            f"{name!r} does not match any op of the model",
            where="rules.override",
            fix=suggestion(name.rpartition("::")[2], op_names(graph.nodes)),
        )


def unmatched(overrides: Overrides, graphs: Sequence[Graph]) -> Overrides:
    """Those of the overrides that match no op of any graph."""
    return {
        name: rule
        for name, rule in overrides.items()
        if not any(_is_for(rule, node, graph) for graph in graphs for node in graph.nodes)
    }


def names_biases(overrides: Overrides | None = None) -> bool:
    """Whether an override is for additions of biases, which products must then not do."""
    held = current() if overrides is None else overrides
    return any(_BIAS_ADD in one.ops for one in held.values())


def innermost(graph: Graph, node: Node, overrides: Overrides | None = None) -> str | None:
    """The name of the override that counts for an op; None if no block names the op."""
    held = current() if overrides is None else overrides
    return next((n for n in reversed(tuple(held)) if _is_for(held[n], node, graph)), None)


def parameters(rule: Callable[..., Any]) -> int:
    """How many arguments a rule function takes; 0 if it is no function."""
    try:
        return len(inspect.signature(rule).parameters)
    except (TypeError, ValueError):
        return 0


def _read(name: str, rule: Callable[..., Any]) -> Override:
    for guest in map(guest_of, GUESTS):
        own_override = guest.override(name, rule)
        if own_override is not None:
            return own_override
    if parameters(rule) != 1:
        raise UsageError(
            "a rule takes a node, or (args, ret_type, amp_dtype)",
            where=name,
            fix="write def rule(node) or def rule(args, ret_type, amp_dtype)",
        )
    return Override(ops=(name,), rule=rule)


def _is_for(one: Override, node: Node, graph: Graph) -> bool:
    return any(
        adds_bias(graph, node) if op == _BIAS_ADD else matches(op, node) for op in one.ops
    )


def _for_op(name: str, held: Overrides) -> UserRule:
    def judge(view: NodeView) -> str | list[str] | None:
        counts = innermost(view.context.graph, view.node, held) == name
        return held[name].rule(view) if counts else None

    return judge
