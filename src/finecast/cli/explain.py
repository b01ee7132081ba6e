"""``finecast explain``: why a node has its format, or what decided the formats of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
from finecast.errors import UsageError
from finecast.naming import number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finecast.graph import Node
    from finecast.tuning.explanation import Explanation

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
    from finecast.native.opening import check_options

    engine, from_type = running.engine, how.from_type
    if plan is not None:
        whole = {"--target": target, "--from-type": from_type}
        groups = casting, narrowing, ranges, rules, device, data
        _refuse_beside_plan([*given_in(*groups), *(o for o, v in whole.items() if v)])
    choice = narrowed(device.choice(casting, target), narrowing, ranges)
    stated_options = {"--engine": engine, "--from-type": from_type}
    check_options(model, {**stated_options, "--data": data.given, "--batch": data.batch})
    found = api.explain(
        model,
        node,
        plan=plan,
        policy=choice.policy,
        data=data,
        engine=engine,
        target=choice.emulation,
        user_rules=user_rules(rules),
        from_type=from_type,
        trust=how.trust,
    )
    for note in found.warnings:
        warn(note)
    if as_json:
        write_json(found.to_dict())
    elif found.node is None:
        _sum_up(found)
    else:
        _print(found, found.node)


def _refuse_beside_plan(options: Sequence[str]) -> None:
    """Raise UsageError if ``options``, which a plan leaves without effect, are any."""
    if options:
        raise UsageError(
            "the plan states what was decided, so this would change nothing",
            where=", ".join(options),
            fix="leave it out, or leave out --plan",
        )


def _sum_up(found: Explanation) -> None:
    plan = found.plan
    counts = ", ".join(f"{count} in {label}" for label, count in plan.counts.items())
    write_line(f"{number_of(len(plan.counted), 'op')}: {counts or 'nothing to decide'}")
    heads = ("ops", "format", "decided by", "for example")
    table = new_table("", heads, fold=heads[2:])
    for one in found.groups:
        example = f"{one.example}: {one.why}"
        add_row(table, str(len(one.nodes)), one.format, one.decided_by, example)
    write_table(table, *([_TIMES] if found.is_timed else []))


def _print(found: Explanation, node: Node) -> None:
    named, decision = f"{node.name} ({node.native})", found.decision
    if decision is None:
        write_line(f"{named} keeps its type")
    else:
        write_line(f"{named} is {decision.format.label}: {found.why}")
    table = new_table(
        "",
        ("rule", "permits", "verdict", "evidence"),
        fold=("verdict", "evidence"),
    )
    for row in found.verdicts:
        add_row(table, *row)
    silent = found.silent
    unsaid = [f"rules without objection: {', '.join(silent)}"] if silent else []
    write_table(table, *unsaid, *([_TIMES] if found.is_timed else []))
    inputs = new_table("reads", ("value", "from", "format", "read as"), fold="value")
    for read in found.inputs:
        add_row(inputs, read["value"], read["from"], read["format"], read["read_as"])
    write_table(inputs)
    for text in found.apart:
        write_line(f"its fp32 kernel falls apart: {text}")
