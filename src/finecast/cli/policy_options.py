"""Options for what may be cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from finecast.cli.groups import FromPlugins, Only
from finecast.devices.choice import CastChoice, CastOptions, CastRequest
from finecast.devices.emulation import refuse_share
from finecast.naming import Option, default_of, options_of
from finecast.native.model import RunOptions
from finecast.rules.policy import Policy

if TYPE_CHECKING:
    from finecast.rules import UserRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """Options that say what is cast."""

    auto_cast: str | None = Option(
        help="Which ops change: none, matmult (or matmul), all; auto (default): finecast"
        " chooses by op; like-autocast, like-grappler: those that PyTorch's autocast or"
        " TensorFlow's grappler would.",
        metavar="SCOPE",
    ).field(None)
    auto_cast_type: str | None = Option(
        help="Formats that ops may have, as bf16,int8; default: those that gain here. int8"
        " needs --data. Quantized weights with fp32 activations: int8_weights, int4_weights;"
        " with activations quantized at run time: int8_dynamic, int4_dynamic; with bf16:"
        " int8_weights_bf16, int4_weights_bf16. ONNX Runtime also has int8_dynamic_128 and"
        " int4_dynamic_128, PyTorch int8_dynamic_row, fp8 and fp8_dynamic_row; some targets"
        " fp8_e4m3, tf32, or blocks: mxfp8_e4m3, mxfp4, nvfp4, nvfp4_weights_bf16 and the"
        " like. auto mixes formats, other scopes take the first that an op may have.",
        metavar="FORMAT[,FORMAT]",
    ).field(None)

    def request(self, target: str | None) -> CastRequest:
        """What is asked for, of the device ``target`` or of this machine."""
        return CastRequest(
            auto_cast=self.auto_cast, auto_cast_type=self.auto_cast_type, target=target
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerCasting(Casting):
    """The same options where a compiler's own are meant: one format, and no choice by op."""

    auto_cast: str | None = Option(
        help="Which ops are cast: none, matmult (or matmul), all.", metavar="SCOPE"
    ).field(None)
    auto_cast_type: str | None = Option(
        help="The format that they are cast to: bf16 or fp16; if the device has it tf32,"
        " fp8_e4m3, int8 or int8_weights.",
        metavar="FORMAT",
    ).field(None)


OfDevice = Annotated[list[CastOptions], FromPlugins()]
"""Options that plugins add for the compilers of devices."""


Narrowing = Annotated[
    Policy,
    Only(
        *("include", "exclude", "op_formats", "io", "keep_ops", "by_hint", "adjust"),
    ),
]
"""Options that narrow a policy: which ops it keeps or forces, and how int8 is encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """How the range of a value in int8 is chosen; None where nothing was asked for."""

    calibration: str | None = options_of(Policy)["calibration"].field(None)


Rules = Annotated[RunOptions, Only("user_rules")]


def narrowed(
    choice: CastChoice, narrowing: Policy, ranges: Ranges | None = None
) -> CastChoice:
    """``choice`` with its policy narrowed.

    Raises:
        UsageError: If an option does not apply to the policy's formats.
    """
    stated: dict[str, Any] = {
        field.name: getattr(narrowing, field.name)
        for field in fields(Policy)
        if getattr(narrowing, field.name) != default_of(Policy, field.name)
    }
    policy = choice.policy
    if ranges is not None and ranges.calibration is not None:
        policy = policy.calibrated(ranges.calibration)
    if "adjust" in stated and not (policy.adjusts or policy.open_formats):
        from finecast.errors import UsageError

        raise UsageError(
            f"{','.join(f.label for f in policy.formats)} has no errors that are worth an"
            " adjustment",
            where="--adjust",
            fix="leave it out, or add --auto-cast-type int8",
        )
    return replace(choice, policy=replace(policy, **stated))


def rule_files(rules: RunOptions) -> Sequence[Path]:
    """The files of --rules, as the command line has them before they are imported."""
    return cast("Sequence[Path]", rules.user_rules or ())


def user_rules(rules: RunOptions) -> dict[str, UserRule]:
    """The functions in the files of --rules whose names start with ``rule``.

    They are by ``FILE:NAME``, with the file's whole path where two have the same name.

    Raises:
        UsageError: If a file cannot be imported or has no such function.
    """
    files = rule_files(rules)
    names = Counter(file.name for file in dict.fromkeys(files))
    rules_by_label: dict[str, UserRule] = {}
    for file in files:
        label = file.name if names[file.name] == 1 else str(file)
        rules_by_label |= {f"{label}:{name}": rule for name, rule in _rules_in(file)}
    return rules_by_label


def _without_share(target: str | None) -> str | None:
    """``target``, which has no share of orders: verbs that try none refuse one."""
    if target is not None and ":" in target:
        refuse_share(target)
    return target


_ORDERS = (
    " With :SHARE, as h100:90%, orders of summation are tried however long it takes{}; :0"
    " tries none."
)
Target = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Plan for a device that is not here, as h100 or trn1 (see finecast targets)."
        " Accuracy is emulated, times are modelled.",
        callback=_without_share,
    ),
]
TunedFor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:SHARE]",
        help="Plan for a device that is not here, as h100 or trn1 (see finecast targets)."
        " Accuracy is emulated, times are modelled."
        + _ORDERS.format(", and a plan has to keep the limit in that share of them"),
    ),
]
NeededTarget = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:SHARE]",
        help="A device: finecast targets. Needed, here or by the environment."
        + _ORDERS.format(""),
    ),
]


def _rules_in(file: Path) -> list[tuple[str, UserRule]]:
    from finecast.data.functions import load_module
    from finecast.errors import UsageError

    names: dict[str, Any] = vars(load_module(file))
    functions = [(n, f) for n, f in names.items() if n.startswith("rule") and callable(f)]
    if not functions:
        raise UsageError(
            "the file has no function whose name starts with 'rule'",
            where=str(file),
            fix="write def rule(node): return 'fp32' or None",
        )
    return cast("list[tuple[str, UserRule]]", functions)
