"""Checks that what a policy names is in the model: a misspelt name would have no effect."""

from __future__ import annotations

from collections.abc import Collection

from finecast.errors import UsageError
from finecast.graph import Graph, Node
from finecast.naming import suggestion
from finecast.numbers.formats import Format
from finecast.rules.op_formats import matches
from finecast.rules.policy import Policy


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
