"""A plan on another version of its model: retrained, changed or exported anew.

Laws: each op of the version that is an op of the plan's model, by ``graph.matching``, has
the format that it had there, if the op may have it here; an op that only moves numbers follows
what it reads; any other op stays fp32. Scales of constants are made of the version's own
numbers, scales of values are those of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from finecast.errors import ModelError
from finecast.graph import Graph, Node
from finecast.graph.matching import Matching, match
from finecast.graph.structure import OpStructure, Structure, other_weights, structure_of
from finecast.graph.wiring import other_wiring
from finecast.naming import listed, number_of
from finecast.numbers.encodings import Dynamic, Encodings, Scaled, Stored, stored_as
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECISION, Reason
from finecast.rules.policy import BY_HINT, Policy
from finecast.rules.scaled_operands import coded_result, rounded_operands, scaled_operands

_LEAST_PLACED: Final = 0.5
"""The least share of a plan's ops that another version of its model has, and of the version's
ops that the plan knows. Two exporters' files of one net are above it, different nets below
(``benchmarks/RESULTS-diff.md``)."""
_MOST_NAMED: Final = 3

NEW: Final = "the plan that was applied does not name it"
MOVES: Final = "it only moves numbers, and what it reads has this format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What became of a plan's decisions on another version of its model.

    Attributes:
        plan: The plan of the version.
        placed: The version's ops that have a decision of the plan: the op's name there by
            its name here.
        found: Ops of the plan that are placed, alone or as a group.
        moving: The version's ops that follow what they read, as they only move numbers.
        new: The version's ops that the plan does not know, and that stay fp32.
        refused: The version's ops that cannot have the plan's format and stay fp32, with why.
        gone: Ops of the plan that the version has not.
        changed: Ops of the plan that are here with other weights or attributes, or read other
            values. None if the plan does not say what they were.
        outputs: Outputs of the model that are results of other ops, in a few words.
        restated: Ops of the plan in whose place other ops are. Whether these compute the same,
            as five ops may in place of a Gelu, is not known.
    """

    plan: Plan
    placed: Mapping[str, str]
    found: frozenset[str]
    moving: tuple[str, ...]
    new: tuple[str, ...]
    refused: Mapping[str, str]
    gone: tuple[str, ...]
    changed: tuple[str, ...] | None = None
    outputs: tuple[str, ...] = ()
    restated: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all that the plan tells of its model is so here: one model, given twice."""
        lost = self.gone or self.new or self.refused or self.restated or self.outputs
        return self.changed == () and not lost

    @property
    def note(self) -> str:
        """What to tell the user of a plan that was not made for this file or object."""
        if self.same:
            return f"of this model, read from elsewhere: {self.text}, with the same weights"
        return f"of another version of the model: {self.text}"

    @property
    def share(self) -> float:
        """The lesser share: of the plan's ops that are here, or of the ops here it knows."""
        known = len(self.placed) + len(self.moving)
        shares = (len(self.found), len(self.gone)), (known, len(self.new))
        return min(one / (one + lacking) if one + lacking else 1.0 for one, lacking in shares)

    @property
    def text(self) -> str:
        """How many ops were placed, and what the others are in."""
        renamed = sum(name != old for name, old in self.placed.items())
        total = number_of(len(self.found) + len(self.gone), "op")
        parts = [f"{len(self.found)} of its {total} are here"]
        parts += [f"{renamed} by other names"] if renamed else []
        parts += (
            [f"with other weights, attributes or inputs: {_some(self.changed)}"]
            if self.changed
            else []
        )
        parts += self.outputs
        parts += [f"written as other ops: {_some(self.restated)}"] if self.restated else []
        parts += [f"gone: {_some(self.gone)}"] if self.gone else []
        parts += [f"new, in fp32: {_some(self.new)}"] if self.new else []
        parts += [f"in fp32, {why}: {_some(names)}" for why, names in self._refused().items()]
        return "; ".join(parts)

    def _refused(self) -> dict[str, list[str]]:
        by_why: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            by_why.setdefault(why, []).append(name)
        return by_why

    def check(self, *, where: str) -> None:
        """Check that the plan is for a version of the model.

        Raises:
            ModelError: If the share is less than ``_LEAST_PLACED``.
        """
        if self.share >= _LEAST_PLACED:
            return
        raise ModelError(
            f"the plan was made for another model: {self.text}",
            where=where,
            fix="make a plan for this model",
        )


def _some(names: Collection[str]) -> str:
    """The number of the names, and the first of them."""
    return f"{len(names)} ({listed([*names], _MOST_NAMED)})"


def structure_in(plan: Plan) -> Structure:
    """The structure that a plan keeps of its model; of an older plan the names alone."""
    if plan.structure:
        return plan.structure
    return tuple(OpStructure(name=d.node, op=d.op) for d in plan.decisions)


def policy_of(plan: Plan) -> Policy:
    """The policy that a model is prepared for so that ``plan`` can be placed on it."""
    policy = Policy.parse(plan.policy.replace(BY_HINT, ""))
    return replace(policy, keep_ops=plan.keep_ops, by_hint=plan.by_hint)


def place(plan: Plan, graph: Graph, opset: Callable[[Mapping[int, Format]], int]) -> Placement:
    """Put the decisions of ``plan`` on ``graph``, another version of its model.

    ``opset`` gives the ONNX opset that formats, by node id, need; 0 for other models.
    """
    before = structure_in(plan)
    matching = match(before, structure_of(graph))
    decided = {d.node: d for d in plan.decisions}
    sources, kept = _sources(before, decided, matching)
    decisions_by_node: dict[int, Decision] = {}
    placed: dict[str, str] = {}
    refused: dict[str, str] = {}
    rest: list[Node] = []
    for node in graph.float_nodes:
        if node.format is not Format.FP32:
            continue
        old = sources.get(node.id)
        if old is None:
            rest.append(node)
            continue
        placed[node.name] = old.node
        decision, why = _decision(graph, node, old)
        decisions_by_node[node.id] = decision
        if why:
            refused[node.name] = why
    moving, new = _follow(graph, rest, decisions_by_node)
    decisions = tuple(
        decisions_by_node[n.id] for n in graph.float_nodes if n.id in decisions_by_node
    )
    names = {old: name for name, old in placed.items()}
    moved = replace(
        plan,
        model=graph.digest,
        opset=opset({i: d.format for i, d in decisions_by_node.items()}),
        decisions=decisions,
        io={n: f for n, f in plan.io.items() if n in _ports(graph)},
        adjustments=tuple(
            there
            for one in plan.adjustments
            if (there := replace(one, node=names.get(one.node, ""))).edit(
                graph, {n.name: n for n in graph.nodes}
            )
            is not None
        ),
        structure=structure_of(graph),
    )
    counted = {d.node for d in plan.counted}
    changed, outputs = _changed(before, graph, matching)
    return Placement(
        plan=moved,
        placed={n: o for n, o in placed.items() if o in counted},
        found=frozenset(kept & counted),
        moving=moving,
        new=new,
        refused=refused,
        gone=tuple(d.node for d in plan.counted if d.node not in kept),
        changed=changed if plan.structure else None,
        outputs=outputs,
        restated=tuple(before[i].name for g in matching.regroupings for i in g.before),
    )


def _changed(
    before: Structure, after: Graph, found: Matching
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ops of ``before`` whose weights, attributes or inputs are others, and other outputs."""
    rewired, outputs = other_wiring(before, after, found)
    structure = structure_of(after)
    pairs = ((n, before[n], structure[other]) for n, other in found.pairs.items())
    changed = tuple(
        old.name
        for n, old, new in pairs
        if n in rewired or old.attributes != new.attributes or other_weights(old, new)
    )
    return changed, outputs


def _ports(graph: Graph) -> set[str]:
    return {v.name for v in (*graph.inputs, *graph.outputs) if v.format is not None}


def _sources(
    before: Structure, decided: Mapping[str, Decision], found: Matching
) -> tuple[dict[int, Decision], set[str]]:
    """The old decision of each op of the version that has one, by its number; and their names.

    Ops that stand for old ones as a group have the decision of these, if it is one format for
    all of them, which needs no scales.
    """
    sources = {
        other: decided[before[n].name]
        for n, other in found.pairs.items()
        if before[n].name in decided
    }
    kept = {d.node for d in sources.values()}
    for group in found.regroupings:
        old = [decided[before[n].name] for n in group.before if before[n].name in decided]
        formats = {d.format for d in old}
        if len(formats) == 1 and not old[0].format.has_scales:
            kept |= {d.node for d in old}
            sources |= dict.fromkeys(group.after, old[0])
    return sources, kept


def _decision(graph: Graph, node: Node, old: Decision) -> tuple[Decision, str]:
    """The old decision on ``node``; or fp32, and why."""
    fmt = old.format
    if fmt is not Format.FP32 and fmt.encodes_results and fmt.storage not in node.admits:
        why = f"its definition here does not allow {fmt.label}"
        return _fp32(node, why), why
    try:
        encodings = _encodings(graph, node, old) if fmt.has_scales else Encodings()
    except ValueError as error:
        return _fp32(node, str(error)), str(error)
    decision = replace(old, node=node.name, op=node.op, encodings=encodings)
    return decision, ""


def _fp32(node: Node, why: str) -> Decision:
    return _stated(node, Format.FP32, why)


def _stated(node: Node, fmt: Format, why: str) -> Decision:
    reason = Reason(rule=DECISION, text=why, permits=(fmt.label,))
    return Decision(node=node.name, op=node.op, format=fmt, reasons=(reason,))


def _encodings(graph: Graph, node: Node, old: Decision) -> Encodings:
    """The encodings of an op on codes: of values those of the plan, of constants new ones.

    Raises:
        ValueError: If the op reads other kinds of operands than the plan's.
    """
    values = [scaled for _, scaled in sorted(old.encodings.operands.items())]
    constants: dict[int, Stored] = {}
    operands: dict[int, Scaled | Dynamic] = {
        index: values.pop(0) for index in rounded_operands(graph, node, old.format) if values
    }
    for index, axes in scaled_operands(graph, node, old.format).items():
        value = graph.read(node, index)
        assert value is not None
        if value.constant is not None:
            constants[index] = stored_as(old.format, value.constant.read(), axes)
        elif values:
            operands[index] = values.pop(0)
        else:
            raise ValueError(f"the plan has no {old.format.label} scale for its operand")
    if values or len(constants) != len(old.encodings.constants):
        raise ValueError("its operands are others than in the plan")
    result = old.encodings.result
    if not isinstance(result, Format) and coded_result(graph, node) is None:
        raise ValueError("its result cannot be quantized")
    return Encodings(operands=operands, constants=constants, result=result)


def _follow(
    graph: Graph, rest: Iterable[Node], made: dict[int, Decision]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Decide the ops that the plan does not know; names of those that follow, and the rest."""
    moving: list[str] = []
    new: list[str] = []
    for node in rest:
        makers = (v.producer for v in graph.following_inputs(node) if v.constant is None)
        read = Counter(made[m].format if m in made else None for m in makers)
        fmt = next(iter(read), None) if len(read) == 1 else None
        follows = by_name(node.op).places and fmt is not None and fmt in node.admits
        made[node.id] = _stated(node, fmt, MOVES) if follows and fmt else _fp32(node, NEW)
        if fmt is None or not follows:
            new += [node.name] if by_name(node.op).has_numbers else []
        elif by_name(node.op).has_numbers:
            moving.append(node.name)
    return tuple(moving), tuple(new)
