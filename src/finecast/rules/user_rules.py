"""What the user asks for, as rules: a scope, patterns of names, formats by op, functions.

Names that match nothing in the model are refused: a misspelt one would have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from finecast.errors import UsageError
from finecast.graph import Graph, Node
from finecast.naming import suggestion
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, NodeView, Reason, Rule, Ruling, only
from finecast.rules.policy import Policy, Scope
from finecast.usercode import guarded


def _judge_scope(node: Node, context: Context) -> Ruling | None:
    scope = context.policy.scope
    if scope is Scope.NONE:
        return Ruling(permits=KEEP, text="scope none changes nothing")
    if scope is Scope.MATMULT and not by_name(node.op).matmul_engine:
        return Ruling(
            permits=KEEP, text=f"scope matmult: {node.op} does not run on the matmul engine"
        )
    return None


SCOPE = Rule(name="scope", judge=_judge_scope)


def _judge_names(node: Node, context: Context) -> Ruling | None:
    policy = context.policy
    for pattern in policy.exclude:
        if pattern.search(node.name):
            return Ruling(
                permits=KEEP, text=f"name matches --exclude {pattern.pattern!r}", waives=True
            )
    if policy.include and not any(p.search(node.name) for p in policy.include):
        return Ruling(permits=KEEP, text="name matches no --include")
    return None


NAMES = Rule(name="names", judge=_judge_names)


def matches(name: str, node: Node) -> bool:
    """Whether ``name`` names the op: canonical, native, or native without its domain."""
    return name in (node.op, node.native, node.native.rpartition("::")[2])


def _judge_op_formats(node: Node, context: Context) -> Ruling | None:
    """The user's formats by op: ``--op Softmax=fp32``."""
    for name, fmt in context.policy.op_formats.items():
        if matches(name, node):
            return Ruling(
                permits=only(fmt), text=f"the user chose {name}={fmt.label}", waives=True
            )
    return None


OP_FORMATS = Rule(name="op_formats", judge=_judge_op_formats)


_SAID: Final = "user rule "


def _judge_user(node: Node, context: Context) -> Ruling | None:
    verdicts: list[tuple[str, frozenset[Format]]] = []
    view = NodeView(node=node, context=context)
    for name, function in context.user_rules:
        with guarded(f"user rule {name} failed", where=node.name, fix="correct its file"):
            answer = function(view)
        if answer is None:
            continue
        labels = [answer] if isinstance(answer, str) else answer
        try:
            permits = frozenset(Format.parse(label) for label in labels)
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"user rule {name} returned {answer!r}",
                where=node.name,
                fix="return a format's name, a list of them, or None",
            ) from error
        except UsageError as error:
            raise UsageError(
                f"user rule {name}: {error.what}", where=node.name, fix=error.fix
            ) from error
        verdicts.append((name, permits))
    if not verdicts:
        return None
    permits = frozenset[Format].intersection(*(p for _, p in verdicts))
    names = ", ".join(n for n, _ in verdicts)
    return Ruling(permits=permits, text=f"{_SAID}{names}", waives=True)


USER = Rule(name="user", judge=_judge_user)


def without_opinion(names: Iterable[str], reasons: Iterable[Reason]) -> tuple[str, ...]:
    """A warning for each of the user's rules without a verdict among a plan's ``reasons``.

    That may be intended; most often the rule tests for a misspelt name.
    """
    heard = {
        name
        for reason in reasons
        if reason.rule == USER.name
        for name in reason.text.removeprefix(_SAID).split(", ")
    }
    return tuple(
        f"user rule {name} had no opinion on any op: if it should have one, see the ops' names"
        " with finecast explain"
        for name in names
        if name not in heard
    )


def check_names(policy: Policy, graph: Graph) -> None:
    """Refuse a policy that names what ``graph`` does not have.

    Raises:
        UsageError: If a pattern matches no node's name, an op's name matches no op, or no
            float input or output has a given name; gives the closest names. Also if an op is
            given a format that is none of the policy's.
    """
    names = [n.name for n in graph.nodes]
    for option, patterns in (("--include", policy.include), ("--exclude", policy.exclude)):
        for pattern in patterns:
            if not any(map(pattern.search, names)):
                raise _nothing(pattern.pattern, names, "the name of any node", option)
    for name, fmt in policy.op_formats.items():
        if not any(matches(name, node) for node in graph.nodes):
            raise _nothing(name, op_names(graph.nodes), "any op of the model", "--op")
        if fmt is not Format.FP32 and fmt not in policy.formats:
            formats = ",".join(f.label for f in (*policy.formats, fmt))
            raise UsageError(
                f"{name}={fmt.label}: {fmt.label} is none of the formats to lower to",
                where="--op",
                fix=f"name it among them: --auto-cast-type {formats}",
            )
    ports = {v.name: v for v in (*graph.inputs, *graph.outputs) if v.format is not None}
    for name in policy.io:
        if name not in ports:
            raise _nothing(name, ports, "any float input or output", "--io")


def op_names(nodes: Collection[Node]) -> dict[str, None]:
    """Names of the ops as people write them, native before canonical, each once."""
    native = (n.native.rpartition("::")[2] for n in nodes)
    return dict.fromkeys((*native, *(n.op for n in nodes)))


def _nothing(name: str, known: Collection[str], what: str, option: str) -> UsageError:
    return UsageError(
        f"{name!r} does not match {what}", where=option, fix=suggestion(name, known)
    )
