"""``finecast explain``: why a node has its format, or what decided the formats of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from finecast.cli.common import Engine, Json, Model, Read, Samples
from finecast.cli.groups import given_in
from finecast.cli.output import add_row, new_table, warn, write_json, write_line, write_table
from finecast.cli.policy_options import (
    Casting,
    Device,
    Narrowing,
    Ranges,
    Rules,
    Target,
    narrowed,
    user_rules,
)
from finecast.errors import EngineError, UsageError
from finecast.naming import number_of, unknown_name
from finecast.numbers.formats import Format
from finecast.rules import RULES
from finecast.rules.base import DECIDED_BY, DECISION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from finecast.graph import Graph, Node
    from finecast.pipeline.model import OpenedModel
    from finecast.planning.plan import Decision, Plan
    from finecast.rules.base import Reason

_FP32_TIME: Final = "fp32 us"
_TIMES: Final = (
    "times are those of an op's kernel and of casts as the plan was made: they add up to no"
    " latency of the model, which tune measures"
)


def run(
    model: Model,
    casting: Casting,
    narrowing: Narrowing,
    ranges: Ranges,
    rules: Rules,
    device: Device,
    data: Samples,
    running: Engine,
    how: Read,
    node: Annotated[
        str | None, typer.Argument(help="The node's name; without it all are summed up.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The plan; without it the policy's rules are asked.")
    ] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Why a node has its format: what decided, and every rule's verdict with its evidence.

    Without a node: how many nodes have which format, and what decided.

    Examples:
      finecast explain m.onnx --plan tuned.plan.json

      finecast explain m.onnx /encoder/Softmax --plan tuned.plan.json

      finecast explain m.onnx /encoder/Softmax --auto-cast-type fp16
    """
    from finecast import api
    from finecast.planning.plan import Plan
    from finecast.subjects import check_options, opened

    engine, from_type = running.engine, how.from_type
    if plan is not None:
        whole = {"--target": target, "--from-type": from_type}
        groups = casting, narrowing, ranges, rules, device, data
        _refuse_beside_plan([*given_in(*groups), *(o for o, v in whole.items() if v)])
    choice = narrowed(device.choice(casting, target), narrowing, ranges)
    stated = Plan.load(plan) if plan is not None else None
    stated_options = {"--engine": engine, "--from-type": from_type}
    check_options(model, {**stated_options, "--data": data.given, "--batch": data.batch})
    read = opened(model, replace(how, from_type=None), plan=stated)
    if stated is not None:
        graph, given = api.graph_for(read, stated), stated
    else:
        graph, given = api.judge(
            read,
            choice.policy,
            engine=engine,
            target=choice.emulation,
            data=data,
            user_rules=user_rules(rules),
            from_type=from_type,
        )
    if node is None:
        _sum_up(given, as_json=as_json)
        return
    found = _find(graph, node)
    decision = given.decision(found.name)
    apart: Sequence[str] = ()
    if not choice.emulation and decision is not None and decision.format is not Format.FP32:
        apart = _apart(read, found, given, engine)
    if as_json:
        write_json({**_to_dict(graph, found, decision, given), "fallen_apart": apart})
        return
    _print(graph, found, decision, given)
    for text in apart:
        write_line(f"its fp32 kernel falls apart: {text}")


def _refuse_beside_plan(options: Sequence[str]) -> None:
    """Raise UsageError if ``options``, which a plan leaves without effect, are any."""
    if options:
        raise UsageError(
            "the plan states what was decided, so this would change nothing",
            where=", ".join(options),
            fix="leave it out, or leave out --plan",
        )


def _find(graph: Graph, name: str) -> Node:
    names = [n.name for n in graph.nodes]
    if name not in names:
        raise unknown_name(name, names, what="node")
    return graph.find(name)


def _apart(model: OpenedModel, node: Node, plan: Plan, engine: str | None) -> Sequence[str]:
    """Kernels of the fp32 model with ``node`` that the plan's model runs in several.

    They are those of ``engine``, by default of the one that the plan was made in. Where
    kernels cannot be compared a warning says so; the node is explained all the same.
    """
    from finecast.engines import ENGINES

    try:
        own = plan.engine if plan.engine in ENGINES else None
        found = model.fallen_apart(plan, engine or own)
    except EngineError as error:
        warn(f"kernels were not compared: {error.line}")
        return []
    return [one.text for one in found if any(node.name in part for part in one.parts)]


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
    found: dict[tuple[str, str], list[Decision]] = {}
    for decision in plan.decisions:
        key = decision.format.label, _decided_by(decision)
        found.setdefault(key, []).append(decision)
    made: list[Group] = []
    for (fmt, decided_by), decisions in sorted(found.items(), key=lambda f: -len(f[1])):
        example = max(decisions, key=_time_us)
        made.append(
            Group(
                format=fmt,
                decided_by=decided_by,
                nodes=[d.node for d in decisions],
                example=example.node,
                why=_why(example),
            )
        )
    return made


def _decided_by(decision: Decision) -> str:
    """What decided, in a word or two; several rules are named together."""
    names = (
        str(reason.evidence.get(DECIDED_BY, "plan"))
        if reason.rule == DECISION
        else f"rule {reason.rule}"
        for reason in decision.deciding
    )
    return ", ".join(dict.fromkeys(names)) or "not stated"


def _why(decision: Decision) -> str:
    return "; ".join(r.text for r in decision.deciding) or "the plan states no reason"


def _time_us(decision: Decision) -> float:
    """The fp32 time of the node's kernel, by the evidence; 0 where there is none."""
    times = (reason.evidence.get(_FP32_TIME, 0.0) for reason in decision.deciding)
    return max((t for t in times if isinstance(t, float)), default=0.0)


def _sum_up(plan: Plan, *, as_json: bool) -> None:
    found = groups(plan)
    if as_json:
        kinds = [{**asdict(one), "nodes": list(one.nodes)} for one in found]
        write_json({"policy": plan.policy, "formats": plan.counts, "groups": kinds})
        return
    counts = ", ".join(f"{count} in {label}" for label, count in plan.counts.items())
    write_line(f"{number_of(len(plan.decisions), 'op')}: {counts or 'nothing to decide'}")
    heads = ("ops", "format", "decided by", "for example")
    table = new_table("", heads, fold=heads[2:])
    for one in found:
        example = f"{one.example}: {one.why}"
        add_row(table, str(len(one.nodes)), one.format, one.decided_by, example)
    write_table(table, *_notes(plan.decisions))


def _notes(decisions: Iterable[Decision]) -> list[str]:
    """What the times in reasons are, if there are any."""
    return [_TIMES] if any(_time_us(d) for d in decisions) else []


def _verdicts(node: Node, decision: Decision | None) -> list[tuple[str, str, str, str]]:
    """A row (rule, formats it permits, text, evidence) for every verdict."""
    if decision is None:
        kept = node.format.label if node.format else "no float type"
        return [("", kept, "the node carries no fp32 that could change", "")]
    order = {rule.name: number for number, rule in enumerate(RULES)}
    reasons = sorted(decision.reasons, key=lambda r: order.get(r.rule, len(order)))
    return [_row(reason) for reason in reasons]


def _silent(decision: Decision | None) -> list[str]:
    """The rules without a verdict on a node, which permit it any format."""
    said = {reason.rule for reason in decision.reasons} if decision else set[str]()
    return [rule.name for rule in RULES if rule.name not in said] if decision else []


def _row(reason: Reason) -> tuple[str, str, str, str]:
    evidence = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in reason.evidence.items()
    )
    permits = "any" if len(reason.permits) > 4 else " ".join(reason.permits)
    return reason.rule, permits, reason.text, evidence


def _neighbours(
    graph: Graph, node: Node, decision: Decision | None, plan: Plan
) -> list[dict[str, str]]:
    """For each input of a node: what makes it, the format it is stored in and is read in."""
    formats = plan.formats
    rows: list[dict[str, str]] = []
    for port, index in enumerate(node.inputs):
        if index is None:
            continue
        value = graph.values[index]
        maker = graph.nodes[value.producer] if value.producer is not None else None
        stored = formats.get(maker.name) if maker else None
        what = "constant" if value.constant else maker.name if maker else "model input"
        if stored is not None and not stored.encodes_results:
            stored = None  # the op's results are stored in its own type
        label = value.dtype if stored is None or value.format is None else stored.label
        read_as = _read_as(node, port, decision) or label
        rows.append({"value": value.name, "from": what, "format": label, "read_as": read_as})
    return rows


def _read_as(node: Node, port: int, decision: Decision | None) -> str:
    """The format that an input is cast or encoded to; empty if it is read as stored."""
    if decision is None or not node.follows_in[port]:
        return ""
    fmt = decision.format
    if fmt.has_scales and decision.encodings.at(port) is None:
        return ""
    return fmt.label


def _to_dict(
    graph: Graph, node: Node, decision: Decision | None, plan: Plan
) -> dict[str, Any]:
    return {
        "node": node.name,
        "op": node.op,
        "native": node.native,
        "format": decision.format.label if decision else None,
        "decided_by": _decided_by(decision) if decision else None,
        "why": _why(decision) if decision else None,
        "verdicts": [
            {"rule": rule, "permits": permits, "text": text, "evidence": evidence}
            for rule, permits, text, evidence in (
                *_verdicts(node, decision),
                *((rule, "any", "no objection", "") for rule in _silent(decision)),
            )
        ],
        "inputs": _neighbours(graph, node, decision, plan),
    }


def _print(graph: Graph, node: Node, decision: Decision | None, plan: Plan) -> None:
    named = f"{node.name} ({node.native})"
    if decision is None:
        write_line(f"{named} keeps its type")
    else:
        write_line(f"{named} is {decision.format.label}: {_why(decision)}")
    table = new_table(
        "",
        ("rule", "permits", "verdict", "evidence"),
        fold=("verdict", "evidence"),
    )
    for row in _verdicts(node, decision):
        add_row(table, *row)
    silent = _silent(decision)
    unsaid = [f"rules without objection: {', '.join(silent)}"] if silent else []
    write_table(table, *unsaid, *_notes([decision] if decision else []))
    inputs = new_table("reads", ("value", "from", "format", "read as"), fold="value")
    for row in _neighbours(graph, node, decision, plan):
        add_row(inputs, row["value"], row["from"], row["format"], row["read_as"])
    write_table(inputs)
