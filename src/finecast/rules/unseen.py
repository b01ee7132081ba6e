"""Ops of which the data shows nothing keep fp32: no error of theirs can be observed.

Such are the ops of a branch that no sample takes, of a loop without a step, and those that
read no element, as those of an expert that gets no token. Rounding them changes no output on
the data, which says nothing of other data: there a square may be Inf in fp16. Without data the
rule has no opinion.

Codes of 8 bits for constants alone stay permitted, as their error is known without data: it is
at most half a step, which is no more than bf16's epsilon of a channel's largest weight, and
what is computed has the range and the digits of fp32. Half a step of 4 bits is a fourteenth of
that weight, and only data shows what that does to outputs.
"""

from __future__ import annotations

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops.bodies import body_owners
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.facts import Facts


def _judge(node: Node, context: Context) -> Ruling | None:
    graph = context.graph
    if not is_unseen(graph, node, context.facts) or _is_known_by_constants(context.low):
        return None
    owner = graph.once(body_owners).get(node.region)
    evidence = {"body of": owner.name} if owner is not None else {}
    return Ruling(permits=KEEP, text="no sample of the data runs it", evidence=evidence)


def is_unseen(graph: Graph, node: Node, facts: Facts) -> bool:
    """Whether no element was observed of any value that the node gives, or reads."""
    made = [facts[i].count for i in node.output_ids if i in facts]
    read = [v for v in graph.following_inputs(node) if v.constant is None]
    counts = [facts[v.id].count if v.id in facts else None for v in read]
    return any(known and all(n == 0 for n in known) for known in (made, counts))


def _is_known_by_constants(fmt: Format) -> bool:
    """Whether the error of an op in the format is known without data, and small."""
    if fmt.encodes_values or fmt.dynamic_group is not None:
        return False
    return 0.5 / fmt.grid(constant=True).highest <= Format.BF16.epsilon


UNSEEN = Rule(name="unseen", judge=_judge)
