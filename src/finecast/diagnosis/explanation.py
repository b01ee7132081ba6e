"""Why ops have their formats: what decided, and every rule's verdict with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from finecast.errors import in_shell
from finecast.graph import Graph, Node
from finecast.naming import left_out, number_of, percent, plain
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.alternatives import Decider
from finecast.planning.contributions import (
    ERROR_IF,
    MEASURED,
    TIME_IN,
    Contributions,
    precision_groups,
)
from finecast.planning.plan import Decision, Plan
from finecast.reports.base import Report, TextTable
from finecast.rules import RULES
from finecast.rules.base import DECIDED_BY, DECISION, Reason
from finecast.rules.calibration import CALIBRATION
from finecast.rules.ranges import Calibration

_FP32: Final = Format.FP32.label
_FP32_TIME: Final = TIME_IN.format(_FP32)
_US: Final = " us"
_ERRORS: Final = (ERROR_IF.format(""), MEASURED)
"""What the names of relative errors start with among the evidence."""
_TIMES: Final = (
    "times are those of an op's kernel and of casts as the plan was made: they add up to no"
    " latency of the model, which tune measures"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that have one format for reasons of one kind.

    Attributes:
        format: The format's label.
        decided_by: What decided: the name of a rule, or of what the formats were chosen by.
        nodes: The nodes' names.
        example: The node that takes the most time, or the first one where no time is known.
        why: What decided the example's format.
    """

    format: str
    decided_by: str
    nodes: Sequence[str]
    example: str
    why: str


def groups(plan: Plan) -> list[Group]:
    """The decisions of a plan, grouped by format and by what decided; large groups first."""
    decisions_by_group: dict[tuple[str, str], list[Decision]] = {}
    for decision in plan.counted:
        key = decision.format.label, decider_of(decision)
        decisions_by_group.setdefault(key, []).append(decision)
    made: list[Group] = []
    for (fmt, decided_by), decisions in sorted(
        decisions_by_group.items(), key=lambda f: -len(f[1])
    ):
        example = max(decisions, key=_time_us)
        made.append(
            Group(
                format=fmt,
                decided_by=decided_by,
                nodes=[d.node for d in decisions],
                example=example.node,
                why=example.why,
            )
        )
    return made


def decider_of(decision: Decision) -> str:
    """What decided, in a word or two: ``casts``, ``rule kernel``, ``rules kernel, names``."""
    rules = dict.fromkeys(r.rule for r in decision.deciding if r.rule != DECISION)
    chosen = dict.fromkeys(
        str(r.evidence.get(DECIDED_BY, "policy"))
        for r in decision.deciding
        if r.rule == DECISION
    )
    named = [f"{'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)}"] if rules else []
    return ", ".join((*named, *chosen)) or "no reason is known"


_NOTES: Final = {
    Decider.KERNEL.value: "kernel: the op runs in one kernel with others, which decide",
    Decider.WHOLE.value: "whole plan: all ops got their formats at once, as by a hint",
}
"""What the names of some deciders stand for."""


def _in_words(decider: str) -> str:
    """What decided, as it is called within a sentence."""
    return decider.replace(Decider.WHOLE.value, "the plan as a whole")


def _time_us(decision: Decision) -> float:
    """The fp32 time of the node's kernel, by the evidence; 0 where there is none."""
    times = (reason.evidence.get(_FP32_TIME, 0.0) for reason in decision.deciding)
    return max((t for t in times if isinstance(t, float)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedOp:
    """An op, or several that were decided together as they run in one kernel.

    Attributes:
        node: The name of the op, or of the product among them.
        others: How many others were decided with it.
        op: What it computes.
        format: The format's label.
        decided_by: What decided, as in ``Group``.
        us: Time of the kernel as it is planned; None where that is not known.
        fp32_us: The same in fp32.
        share: The share of the plan's squared error; None of ops in fp32.
    """

    node: str
    others: int
    op: str
    format: str
    decided_by: str
    us: float | None = None
    fp32_us: float | None = None
    share: float | None = None

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of its row in a table."""
        more = f" +{self.others}" if self.others else ""
        share = "" if self.share is None else f"{self.share:.0%}"
        times = (self.us, self.fp32_us)
        figures = ("" if us is None else plain(us) for us in times)
        return (f"{self.node}{more}", self.format, self.decided_by, *figures, share)


def explained_ops(plan: Plan) -> list[ExplainedOp]:
    """The ops of a plan, those that take the most time first; then those of unknown time."""
    together = {name: group for group in precision_groups(plan) for name in group.ops}
    rows: list[ExplainedOp] = []
    for decision in plan.counted:
        group = together.get(decision.node)
        if group is not None and group.main != decision.node:
            continue
        row = ExplainedOp(
            node=decision.node,
            others=0,
            op=decision.op,
            format=decision.format.label,
            decided_by=decider_of(decision),
        )
        if group is not None:
            row = replace(
                row,
                others=len(group.ops) - 1,
                op=group.kind,
                format=group.format,
                us=group.times_us.get(group.format),
                fp32_us=group.times_us.get(_FP32),
                share=group.known_share if group.is_low and group.errors else None,
            )
        rows.append(row)
    return sorted(rows, key=lambda one: -1.0 if one.us is None else one.us, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Report):
    """Why the ops of a plan have their formats; of one op if there is a ``node``.

    Attributes:
        graph: The graph whose nodes the plan names.
        plan: The plan, or what the rules alone permit.
        node: The node that is explained; None for a summary of all.
        apart: Texts on kernels of the fp32 model with the node that run in several now.
        warnings: Notes for the user.
    """

    graph: Graph
    plan: Plan
    node: Node | None = None
    apart: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def decision(self) -> Decision | None:
        """The node's decision; None if it carries no fp32 that could change."""
        if self.node is None or not by_name(self.node.op).has_numbers:
            return None
        return self.plan.decision(self.node.name)

    @property
    def groups(self) -> list[Group]:
        """The decisions of the plan by format and by what decided; large groups first."""
        return groups(self.plan)

    @property
    def why(self) -> str:
        """What decided the node's format."""
        decision = self.decision
        return "the node keeps its type" if decision is None else decision.why

    @property
    def is_timed(self) -> bool:
        """Whether reasons have times of kernels."""
        decisions = [self.decision] if self.node is not None else self.plan.counted
        return any(_time_us(d) for d in decisions if d is not None)

    @property
    def silent(self) -> list[str]:
        """The rules without a verdict on the node, which permit it any format."""
        decision = self.decision
        said = {reason.rule for reason in decision.reasons} if decision else set[str]()
        return [rule.name for rule in RULES if rule.name not in said] if decision else []

    @property
    def lines(self) -> list[str]:
        """What decided the node's format, or the formats of all nodes."""
        warnings = [f"warning: {text}" for text in in_shell(self.warnings)]
        if self.node is not None:
            decision, named = self.decision, f"{self.node.name} ({self.node.native})"
            if decision is None:
                return [f"{named} keeps its type", *warnings]
            return [f"{named} is {decision.format.label}: {self.why}", *warnings]
        counts = ", ".join(f"{count} in {label}" for label, count in self.plan.counts.items())
        total = number_of(len(self.plan.counted), "op")
        head = f"{total}: {counts or 'nothing to decide'}"
        return [head, *self.plan.declared, *Contributions.of(self.plan).lines] + [
            f"{number_of(len(g.nodes), 'op')} in {g.format} by {_in_words(g.decided_by)}, as"
            f" {g.example}: {g.why}"
            for g in self.groups
        ]

    @property
    def tables(self) -> Sequence[TextTable]:
        """The rules' verdicts on the node and what it reads; or all ops."""
        times = [_TIMES] if self.is_timed else []
        if self.node is None:
            return [self.by_op(None)]
        count = number_of(len(self.silent), "other rule")
        unsaid = [f"{count} without objection: --json names them"] if self.silent else []
        apart = [f"its fp32 kernel is not fused any more: {text}" for text in self.apart]
        heads = ("rule", "permits", "verdict", "evidence")
        verdicts = TextTable(
            left=heads, rows=self._shown, fold=heads[2:], notes=(*unsaid, *times)
        )
        reads = TextTable(
            title="reads",
            left=("value", "from", "format", "read as"),
            rows=[(r["value"], r["from"], r["format"], r["read_as"]) for r in self.inputs],
            fold=("value",),
            notes=apart,
        )
        return [verdicts, reads]

    def by_op(self, most: int | None) -> TextTable:
        """The ops, those that take the most time first, at most so many."""
        ops = explained_ops(self.plan)
        timed = any(one.us is not None for one in ops)
        shown = ops if most is None else ops[:most]
        rows = [one.row if timed else one.row[:3] for one in shown]
        counts = Counter((g.format, g.decided_by) for g in self.groups for _ in g.nodes)
        decided = "; ".join(
            f"{n} {fmt} by {_in_words(why)}" for (fmt, why), n in counts.most_common()
        )
        notes = [*left_out(len(ops), len(shown), ": --ops N shows more")]
        notes += ["+N: so many ops run in its kernel"] if any(o.others for o in shown) else []
        notes += [f"what decided: {decided}"] if decided else []
        notes += [text for why, text in _NOTES.items() if any(why in key for key in counts)]
        notes += ["finecast explain MODEL OP says why an op has its format"]
        notes += [*self.plan.declared, *Contributions.of(self.plan).lines]
        notes += [_TIMES] if timed else []
        return TextTable(
            left=("op", "format", "decided by"),
            right=("us", "fp32\nus", "error\nshare") if timed else (),
            rows=rows,
            fold=("op", "decided by"),
            notes=notes,
        )

    def _content(self) -> dict[str, Any]:
        node, decision, plan = self.node, self.decision, self.plan
        if node is None:
            kinds = [{**asdict(one), "nodes": list(one.nodes)} for one in self.groups]
            ops = [asdict(one) for one in explained_ops(plan)]
            return {
                "policy": plan.policy,
                "formats": plan.counts,
                "declared": list(plan.declared),
                "contributions": Contributions.of(plan).to_dict(),
                "ops": ops,
                "groups": kinds,
            }
        rows = (*self.verdicts, *((rule, "any", "no objection", "") for rule in self.silent))
        return {
            "node": node.name,
            "op": node.op,
            "native": node.native,
            "format": decision.format.label if decision else None,
            "decided_by": decider_of(decision) if decision else None,
            "why": self.why if decision else None,
            "verdicts": [
                {"rule": rule, "permits": permits, "text": text, "evidence": evidence}
                for rule, permits, text, evidence in rows
            ],
            "inputs": self.inputs,
            "fallen_apart": list(self.apart),
        }

    @property
    def verdicts(self) -> list[tuple[str, str, str, str]]:
        """A row (rule, formats it permits, text, evidence) for every verdict on the node."""
        decision, node = self.decision, self.node
        if decision is None:
            numbers = node is not None and by_name(node.op).has_numbers
            kept = node.format.label if node and node.format and numbers else "no float type"
            return [("", kept, "the node has no fp32 that could change", "")]
        order = {rule.name: number for number, rule in enumerate(RULES)}
        reasons = sorted(decision.reasons, key=lambda r: order.get(r.rule, len(order)))
        return [_row(reason) for reason in reasons]

    @property
    def _shown(self) -> list[tuple[str, str, str, str]]:
        """The verdicts but that on weights, of an op without any where it decided nothing."""
        node, decision = self.node, self.decision
        if node is None or decision is None:
            return self.verdicts
        values = [self.graph.values[i] for i in node.input_ids]
        decided = any(reason.rule == CALIBRATION.name for reason in decision.deciding)
        if decided or any(value.constant for value in values):
            return self.verdicts
        return [row for row in self.verdicts if row[0] != CALIBRATION.name]

    @property
    def inputs(self) -> list[dict[str, str]]:
        """For each input of the node: what makes it, and the formats it has and is read in."""
        if self.node is None:
            return []
        graph, formats = self.graph, self.plan.formats
        rows: list[dict[str, str]] = []
        for port, index in enumerate(self.node.inputs):
            if index is None:
                continue
            value = graph.values[index]
            maker = graph.nodes[value.producer] if value.producer is not None else None
            stored = formats.get(maker.name) if maker else None
            what = "constant" if value.constant else maker.name if maker else "model input"
            if stored is not None and not stored.encodes_results:
                stored = None  # the op's results are stored in its own type
            low = None if value.format is None else stored
            label = value.dtype if low is None else low.storage.label
            read_as = _read_as(self.node, port, self.decision) or label
            rows.append(
                {"value": value.name, "from": what, "format": label, "read_as": read_as}
            )
        return rows


def _row(reason: Reason) -> tuple[str, str, str, str]:
    evidence = ", ".join(_figure(name, figure) for name, figure in reason.evidence.items())
    permits = "any" if len(reason.permits) > 4 else " ".join(reason.permits)
    return reason.rule, permits, reason.text, evidence


def _figure(name: str, figure: float | str) -> str:
    """A figure with its unit: errors are relative ones."""
    if not isinstance(figure, float):
        return f"{name} {figure}"
    if name.startswith(_ERRORS):
        return f"{name} {percent(figure)}"
    return f"{name.removesuffix(_US)} {plain(figure)}{_US if name.endswith(_US) else ''}"


def _read_as(node: Node, port: int, decision: Decision | None) -> str:
    """The format that an input is cast or encoded to; empty if it is read as stored."""
    if decision is None or not node.follows_in[port]:
        return ""
    fmt, encoding = decision.format, decision.encodings.at(port)
    if fmt.has_scales and encoding is None:
        return fmt.result.label if fmt.encodes_results else ""
    by_data = isinstance(encoding, Scaled) and encoding.shifts
    return f"{fmt.label}, by {Calibration.GPTQ.value}" if by_data else fmt.label
