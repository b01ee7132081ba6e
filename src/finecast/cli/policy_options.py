"""The options by which ``convert``, ``tune`` and ``explain`` take a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from finecast.policy import Policy
    from finecast.rules import UserRule

AutoCast = Annotated[
    str,
    typer.Option("--auto-cast", help="none, matmult (or matmul), all, auto.", metavar="SCOPE"),
]
AutoCastType = Annotated[
    str, typer.Option("--auto-cast-type", help="bf16 or fp16.", metavar="FORMAT")
]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Lower only nodes whose name matches; repeatable.", metavar="REGEX"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Keep nodes whose name matches; repeatable.", metavar="REGEX"),
]
OpFormat = Annotated[
    list[str] | None,
    typer.Option(
        "--op", help="Format of an op, as Softmax=fp32; repeatable.", metavar="OP=FORMAT"
    ),
]
Rules = Annotated[
    list[Path] | None,
    typer.Option(
        help="Python file whose functions named rule* judge nodes; repeatable.",
        metavar="FILE.py",
    ),
]
Io = Annotated[
    list[str] | None,
    typer.Option(
        help="'low', or NAME=FORMAT for one input or output; default: types are kept.",
        metavar="low|NAME=FORMAT",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", help="openvino or onnxruntime, with :DEVICE if not the CPU."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


def make_policy(
    auto_cast: str,
    auto_cast_type: str,
    *,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    op: Sequence[str] | None,
    io: Sequence[str] | None,
) -> Policy:
    """The policy that the options state.

    Raises:
        UsageError: If one of them is not valid.
    """
    from finecast.policy import Policy, Scope, assignments, low_format, patterns

    ports = list(io or ())
    return Policy(
        scope=Scope.parse(auto_cast),
        format=low_format(auto_cast_type),
        include=patterns(tuple(include or ()), option="--include"),
        exclude=patterns(tuple(exclude or ()), option="--exclude"),
        op_formats=assignments(tuple(op or ()), option="--op"),
        io_low="low" in ports,
        io=assignments(tuple(p for p in ports if p != "low"), option="--io"),
    )


def load_rules(files: Sequence[Path] | None) -> dict[str, UserRule]:
    """Functions whose name starts with ``rule`` in each file, by ``FILE:NAME``.

    Raises:
        UsageError: If a file cannot be imported or has no such function.
    """
    from finecast.errors import UsageError
    from finecast.measure.functions import load_module

    found: dict[str, UserRule] = {}
    for file in files or ():
        module = load_module(file)
        functions = {
            f"{file.name}:{name}": value
            for name, value in vars(module).items()
            if name.startswith("rule") and callable(value)
        }
        if not functions:
            raise UsageError(
                "the file has no function whose name starts with 'rule'",
                where=str(file),
                fix="write def rule(node): return 'fp32' or None",
            )
        found |= cast("dict[str, UserRule]", functions)
    return found
