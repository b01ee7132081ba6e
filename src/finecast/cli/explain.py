"""``finecast explain``: why a node has its format, or what decided the formats of all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from finecast.cli.common import Engine, Json, Model, Read, Samples
from finecast.cli.groups import given_in
from finecast.cli.output import warn, write_report
from finecast.cli.policy_options import (
    Casting,
    Narrowing,
    OfDevice,
    Ranges,
    Rules,
    Target,
    narrowed,
    user_rules,
)
from finecast.devices.choice import choose
from finecast.errors import UsageError

_MOST_OPS: Final = 20


def run(
    model: Model,
    casting: Casting,
    narrowing: Narrowing,
    ranges: Ranges,
    rules: Rules,
    device: OfDevice,
    data: Samples,
    running: Engine,
    how: Read,
    node: Annotated[
        str | None,
        typer.Argument(metavar="OP", help="The name of an op; without it a table of all ops."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The plan; without it what the rules permit is shown.")
    ] = None,
    target: Target = None,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Json = False,
) -> None:
    """Why an op has its format: what decided, and what each rule says with its evidence.

    Without an op: a table of all ops, those that take most time first.

    Examples:
      finecast explain m.onnx --plan tuned.plan.json

      finecast explain m.onnx /encoder/Softmax --plan tuned.plan.json

      finecast explain m.onnx /encoder/Softmax --auto-cast-type fp16
    """
    from finecast import api

    engine, from_type = running.engine, how.from_type
    if plan is not None:
        whole = {"--target": target, "--from-type": from_type}
        groups = casting, narrowing, ranges, rules, *device, data
        idle = [*given_in(*groups), *(o for o, v in whole.items() if v)]
        if idle:
            raise UsageError(
                "the plan has what was decided, so this would change nothing",
                where=", ".join(idle),
                fix="leave it out, or leave out --plan",
            )
    choice = narrowed(choose(casting.request(target), device), narrowing, ranges)
    explanation = api.explain(
        model,
        node,
        plan=plan,
        policy=choice.policy,
        data=data,
        engine=engine,
        target=choice.emulation,
        user_rules=user_rules(rules),
        from_type=from_type,
        freeze_inputs=how.freeze_inputs,
        trust=how.trust,
    )
    lowered = () if plan is not None else choice.told(set(explanation.plan.formats.values()))
    warn(*explanation.warnings, *lowered)
    tables = [explanation.by_op(ops)] if node is None else []
    write_report(explanation, *tables, as_json=as_json)
