"""``finecast explain``: why a node has its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.common import EngineName, FromType, Json, Model, Trust
from finecast.cli.data_options import Data
from finecast.cli.groups import given_in
from finecast.cli.output import add_row, new_table, warn, write_json, write_line, write_table
from finecast.cli.policy_options import Casting, Device, Narrowing, Target
from finecast.errors import EngineError, UsageError
from finecast.naming import unknown_name
from finecast.numbers.encodings import SCALED
from finecast.numbers.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finecast.graph import Graph, Node
    from finecast.pipeline.model import OpenedModel
    from finecast.planning.plan import Decision, Plan
    from finecast.rules.reason import Reason


def run(
    model: Model,
    node: Annotated[str, typer.Argument(help="The node's name.")],
    casting: Casting,
    narrowing: Narrowing,
    device: Device,
    data: Data,
    plan: Annotated[
        Path | None, typer.Option(help="The plan; without it the policy's rules are asked.")
    ] = None,
    target: Target = None,
    engine: EngineName = None,
    from_type: FromType = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Why a node has its format: every rule's verdict, with its evidence.

    Examples:
      finecast explain m.onnx /encoder/Softmax --plan tuned.plan.json

      finecast explain m.onnx /encoder/Softmax --auto-cast-type fp16
    """
    from finecast import api
    from finecast.planning.plan import Plan
    from finecast.subjects import check_options, opened

    if plan is not None:
        whole = {"--target": target, "--from-type": from_type}
        _refuse_beside_plan(
            [*given_in(casting, narrowing, device, data), *(o for o, v in whole.items() if v)]
        )
    choice = narrowing.narrowed(device.choice(casting, target))
    stated = Plan.load(plan) if plan is not None else None
    stated_options = {"--engine": engine, "--from-type": from_type}
    check_options(model, {**stated_options, "--data": data.given, "--batch": data.batch})
    read = opened(model, trust=trust, plan=stated)
    if stated is not None:
        graph, given = api.graph_for(read, stated), stated
    else:
        graph, given = api.judge(
            read,
            choice.policy,
            engine=engine,
            target=choice.emulation,
            data=data.if_given(),
            user_rules=narrowing.user_rules(),
            from_type=from_type,
        )
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
    from finecast.pipeline.model import TellsKernels

    if not isinstance(model, TellsKernels):
        return []
    try:
        own = plan.engine if plan.engine in ENGINES else None
        found = model.fallen_apart(plan, engine or own)
    except EngineError as error:
        warn(f"kernels were not compared: {error.line}")
        return []
    return [one.text for one in found if any(node.name in part for part in one.parts)]


def _verdicts(node: Node, decision: Decision | None) -> list[tuple[str, str, str, str]]:
    """A row (rule, formats it permits, text, evidence) for every verdict.

    Rules without a verdict have one row each, which permits any format.
    """
    from finecast.rules import RULES

    if decision is None:
        kept = node.format.label if node.format else "no float type"
        return [("", kept, "the node carries no fp32 that could change", "")]
    said: dict[str, list[Reason]] = {r.name: [] for r in RULES}
    for reason in decision.reasons:
        said.setdefault(reason.rule, []).append(reason)
    rows: list[tuple[str, str, str, str]] = []
    for name, reasons in said.items():
        if not reasons:
            rows.append((name, "any", "no objection", ""))
        rows += [_row(reason) for reason in reasons]
    return rows


def _row(reason: Reason) -> tuple[str, str, str, str]:
    evidence = ", ".join(
        f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}"
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
        if stored is not None and stored.operands_only:
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
    if fmt in SCALED and decision.encodings.at(port) is None:
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
        "verdicts": [
            {"rule": rule, "permits": permits, "text": text, "evidence": evidence}
            for rule, permits, text, evidence in _verdicts(node, decision)
        ],
        "inputs": _neighbours(graph, node, decision, plan),
    }


def _print(graph: Graph, node: Node, decision: Decision | None, plan: Plan) -> None:
    fmt = decision.format.label if decision else "keeps its type"
    table = new_table(
        f"{node.name} ({node.native}): {fmt}",
        ("rule", "permits", "verdict", "evidence"),
        fold=("verdict", "evidence"),
    )
    for row in _verdicts(node, decision):
        add_row(table, *row)
    write_table(table)
    inputs = new_table("reads", ("value", "from", "format", "read as"), fold="value")
    for row in _neighbours(graph, node, decision, plan):
        add_row(inputs, row["value"], row["from"], row["format"], row["read_as"])
    write_table(inputs)
