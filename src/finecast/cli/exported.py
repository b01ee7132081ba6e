"""The verbs on ``.pt2`` files: programs that ``torch.export.save`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.errors import UsageError

if TYPE_CHECKING:
    from finecast.cli.data_options import Tolerance
    from finecast.frontends.torch.file import ExportedFile
    from finecast.graph import Graph
    from finecast.pipeline.census import Census
    from finecast.pipeline.conversion import Conversion
    from finecast.pipeline.sources import DataOptions
    from finecast.pipeline.tuning import Outcome
    from finecast.planning.plan import Plan
    from finecast.rules import UserRule
    from finecast.rules.policy import Policy

Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Unpickle and run what a .pt2 file brings: if you know who made it."
    ),
]


def is_exported(model: Path) -> bool:
    """Whether ``model`` is an exported program, by its name."""
    return model.suffix == ".pt2"


def refuse(options: Mapping[str, object]) -> None:
    """Options, by name, that say nothing of an exported program.

    Raises:
        UsageError: If one of them is given.
    """
    for name, value in options.items():
        if value:
            raise UsageError(f"{name} does not apply to .pt2 files", fix="leave it out")


def open_exported(model: Path, *, trust: bool) -> ExportedFile:
    """The program in ``model``.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    from finecast.frontends.torch.file import load_file

    return load_file(model, trust=trust)


def write_planned(file: ExportedFile, plan: Plan, output: Path) -> None:
    """Write the program that ``plan`` makes of ``file``."""
    from finecast.frontends import torch as frontend
    from finecast.torch import export, save

    save(export(frontend.apply(file.captured, plan), file.program), output, plan=plan)


def convert_exported(
    model: Path,
    output: Path,
    policy: Policy,
    *,
    user_rules: Mapping[str, UserRule],
    trust: bool,
    force: bool,
) -> Conversion:
    """``finecast convert`` of a program.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    from finecast.torch import convert_file

    return convert_file(model, output, policy, user_rules=user_rules, trust=trust, force=force)


def tune_exported(
    model: Path,
    output: Path,
    data: DataOptions,
    tolerance: Tolerance,
    policy: Policy,
    *,
    user_rules: Mapping[str, UserRule],
    trust: bool,
    force: bool,
) -> Outcome:
    """``finecast tune`` of a program, timed under ``torch.compile`` where that works here.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    from finecast.data.criterion import Criterion, CriterionKind
    from finecast.torch import tune_file

    kind = CriterionKind.parse(tolerance.criterion)
    return tune_file(
        model,
        output,
        data,
        Criterion(kind=kind, tolerance=tolerance.tolerance),
        policy,
        user_rules=tuple(user_rules.items()),
        trust=trust,
        force=force,
    )


def inspect_exported(model: Path, *, trust: bool) -> Census:
    """``finecast inspect`` of a program: the sizes are those of its example inputs."""
    from finecast.torch.exported import census

    return census(model, trust=trust)


def judge_exported(
    model: Path,
    policy: Policy,
    plan: Plan | None,
    user_rules: Mapping[str, UserRule],
    *,
    trust: bool,
) -> tuple[Graph, Plan]:
    """The graph of a program and the plan to explain: the one given, or the rules' word."""
    from finecast.torch.exported import judge

    return judge(model, policy, plan, user_rules=tuple(user_rules.items()), trust=trust)
