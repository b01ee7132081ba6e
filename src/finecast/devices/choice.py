"""What a command is asked to do: a policy, and a device where one is named.

Laws: without a target the policy is finecast's own, for this machine. On a target finecast
chooses by op, unless a scope is named: a plan op by op, whose casts the model states, for a
compiler that is told to add none. Options that a plugin adds for the compilers of some devices
are that plugin's to read (``finecast.plugin.OptionGroup``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from finecast.devices.emulation import (
    TF32_NOTE,
    Emulation,
    check,
    check_formats,
    explicit_casts,
    having,
    with_share,
)
from finecast.devices.targets import target_named
from finecast.errors import UsageError
from finecast.naming import stated
from finecast.numbers.formats import BLOCKS, CODED, Format
from finecast.numbers.roundmodes import Rounding
from finecast.ops import OpKind
from finecast.rules.policy import DEFAULT_POLICY, Policy, Scope, low_formats

DEFAULT_FORMAT: Final = Format.BF16
# Formats that engines on this machine may compute in.
_HERE: Final = (Format.BF16, Format.FP16, *CODED)
# Formats that a model can state: by ONNX's types, or in the case of tf32 by arithmetic.
_STATED: Final = (
    *(Format.BF16, Format.FP16, Format.TF32),
    *(Format.FP8_E4M3, Format.FP8_E5M2, *CODED, *BLOCKS),
)
_NO_TARGET: Final = "TARGET"
_NOTE_ON_BLOCKS: Final = (
    "{}: the model has such weights in blocks, by DequantizeLinear, which no engine here runs:"
    " its numbers were computed by finecast. Where a device multiplies blocks, its kernels"
    " round the values that meet them, which no ONNX model says"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRequest:
    """What is cast, in a user's words, and the device; None where nothing was said.

    ``share`` is what ``target`` states behind the name of the device.

    Law: words that differ only in case or in blanks around them are equal; none is empty.

    Raises:
        UsageError: If an option has an empty value.
    """

    auto_cast: str | None = None
    auto_cast_type: str | None = None
    target: str | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        """Normalize words to the spelling of the tables that they are looked up in."""
        for name in ("auto_cast", "auto_cast_type", "target"):
            value = getattr(self, name)
            if value is not None:
                word = stated(value, "--" + name.replace("_", "-"))
                object.__setattr__(self, name, word)
        if self.target is not None:
            name, share = with_share(self.target)
            object.__setattr__(self, "target", target_named(name))
            object.__setattr__(self, "share", self.share if share is None else share)

    @property
    def labels(self) -> list[str]:
        """The formats that are named; by default bf16."""
        return (self.auto_cast_type or DEFAULT_FORMAT.label).split(",")

    @property
    def asks_for_codes(self) -> bool:
        """Whether a scaled format is named: it is stated in the model, compilers have none."""
        return any(Format.parse(label).has_scales for label in self.labels)

    @property
    def chooses_by_op(self) -> bool:
        """Whether finecast chooses by op: scope ``auto``, several formats, or a scaled one."""
        auto = self.auto_cast is not None and Scope.parse(self.auto_cast) is Scope.AUTO
        return auto or len(self.labels) > 1 or self.asks_for_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class CastChoice:
    """A policy and an emulation of its target; None where the device is this machine.

    ``emulation`` is for models with explicit casts: the compiler adds none. ``notes`` tell the
    user what the casts of a model cannot state, ``format_notes`` what to know of a format if
    the plan has it.
    """

    policy: Policy
    emulation: Emulation | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    format_notes: Mapping[Format, str] = field(default_factory=dict[Format, str])

    def told(self, used: Collection[Format]) -> tuple[str, ...]:
        """The notes for a plan that has the formats ``used``."""
        return (*self.notes, *(t for f, t in self.format_notes.items() if f in used))


class CastOptions(Protocol):
    """Options of a plugin that say what is cast, or how a device's compiler computes."""

    def choice(self, request: CastRequest) -> CastChoice | None:
        """What the options ask for, beside ``request``; None if they say nothing of it."""

    def emulation(self, request: CastRequest) -> tuple[Emulation, str, tuple[str, ...]] | None:
        """What they do on the device: as ``emulated``; None if they say nothing of it."""


def choose(request: CastRequest, options: Sequence[CastOptions] = ()) -> CastChoice:
    """The policy and the device that are asked for, here and by options of plugins.

    Raises:
        UsageError: If the target lacks the format, or no ONNX type can state it.
    """
    choice = _chosen(request, options)
    if request.share is None or choice.emulation is None:
        return choice
    return replace(choice, emulation=replace(choice.emulation, share=request.share))


def _chosen(request: CastRequest, options: Sequence[CastOptions]) -> CastChoice:
    for group in options:
        choice = group.choice(request)
        if choice is not None:
            return choice
    if request.target is None:
        return CastChoice(policy=_local(request))
    base = explicit_casts(request.target)
    if request.auto_cast is None or request.chooses_by_op:
        return planned(request, base)
    emulation, label, _ = _emulated(request)
    policy = Policy(scope=emulation.scope, formats=stated_formats(request, request.target))
    check_formats(emulation, policy)
    nothing = emulation.scope is Scope.NONE
    return CastChoice(
        policy=policy,
        emulation=base,
        label=label,
        notes=(f"the compiler casts nothing with {label}",) if nothing else (),
        format_notes=format_notes(emulation),
    )


def emulated(
    request: CastRequest, options: Sequence[CastOptions] = ()
) -> tuple[Emulation, str, tuple[str, ...]]:
    """The emulation of a device that is asked for, the options in full, and notes.

    Casts to a scaled format are finecast's own on any target: of all ops that can have it, or
    with ``--auto-cast matmult`` of products. Without ``--auto-cast`` nothing is cast.

    Raises:
        UsageError: If no device is named, there are several formats, or it lacks them.
    """
    emulation, label, notes = _emulated(request, options)
    return replace(emulation, share=request.share), label, notes


def _emulated(
    request: CastRequest, options: Sequence[CastOptions] = ()
) -> tuple[Emulation, str, tuple[str, ...]]:
    for group in options:
        emulation = group.emulation(request)
        if emulation is not None:
            return emulation
    if request.target is None:
        raise UsageError(
            "no device is named", where="--target", fix="name one of finecast targets"
        )
    base = explicit_casts(request.target)
    if request.asks_for_codes:
        return emulated_codes(request, planned(request, base))
    scope = Scope.parse(request.auto_cast or Scope.NONE.value)
    if scope not in (Scope.NONE, Scope.MATMULT, Scope.ALL):
        raise UsageError(
            f"{scope.value!r} is no scope of a compiler",
            where="--auto-cast",
            fix="use none, matmult or all",
        )
    emulation = replace(base, scope=scope, format=_one_format(request))
    check(emulation)
    return emulation, _label(scope, emulation.format), ()


def _label(scope: Scope, fmt: Format) -> str:
    words = f"--auto-cast {scope.value}"
    return words if scope is Scope.NONE else f"{words} --auto-cast-type {fmt.label}"


def _one_format(request: CastRequest) -> Format:
    if len(request.labels) > 1:
        raise UsageError(
            f"--auto-cast-type {request.auto_cast_type}: one format is emulated",
            fix="name one, or mix them by op with finecast tune --target",
        )
    return Format.parse(request.labels[0])


def emulated_codes(
    request: CastRequest, choice: CastChoice
) -> tuple[Emulation, str, tuple[str, ...]]:
    """``emulated`` of a scaled format, whose policy and device are ``choice``."""
    assert choice.emulation is not None
    _one_format(request)
    stated = choice.policy.scope
    scope = stated if stated in (Scope.NONE, Scope.MATMULT) else Scope.ALL
    label = f"--auto-cast {scope.value} --auto-cast-type {choice.policy.format.label}"
    return replace(choice.emulation, scope=scope), label, choice.notes


def _local(request: CastRequest) -> Policy:
    """Finecast's own policy for this machine."""
    scope = Scope.parse(request.auto_cast or DEFAULT_POLICY)
    formats = stated_formats(request, _NO_TARGET)
    for fmt in formats:
        if fmt not in _HERE:
            have = ", ".join(having(fmt))
            raise UsageError(
                f"--auto-cast-type {fmt.label} without --target: no engine here computes in"
                " it",
                fix=f"name the device with --target ({have}), or use bf16 or fp16",
            )
    unnamed = scope is Scope.AUTO and request.auto_cast_type is None
    return Policy(scope=scope, formats=formats, open_formats=unnamed)


def stated_formats(
    request: CastRequest, target: str, *, drawn: bool = False
) -> tuple[Format, ...]:
    """The formats that casts in a model are to state, in order of preference.

    Raises:
        UsageError: If one is unknown, named twice, cannot be stated by a model, or would not
            be rounded as the device rounds.
    """
    if request.auto_cast_type is not None:
        low_formats(request.auto_cast_type)
    return tuple(_format(label, target, drawn=drawn) for label in request.labels)


def _format(label: str, target: str, *, drawn: bool) -> Format:
    fmt = Format.parse(label)
    if fmt is Format.TF32 and drawn:
        raise UsageError(
            "--auto-cast-type tf32 with --stochastic-rounding: arithmetic in the model rounds"
            " to nearest",
            fix="drop one of them, or see what both do with finecast emulate",
        )
    if fmt in _STATED:
        return fmt
    raise UsageError(
        f"ONNX has no type {fmt.label}: a model cannot cast to it",
        where="--auto-cast-type",
        fix="give the option to the compiler or runtime itself (finecast emulate --target"
        f" {target} shows what it does to the accuracy, finecast ladder compares), or use"
        " bf16 or fp16",
    )


def planned(request: CastRequest, base: Emulation, notes: tuple[str, ...] = ()) -> CastChoice:
    """Scope ``auto``, several formats or a scaled one, on the device ``base``."""
    scope = Scope.parse(request.auto_cast or DEFAULT_POLICY)
    drawn = base.rounding is Rounding.STOCHASTIC
    formats = stated_formats(request, base.target.name, drawn=drawn)
    policy = Policy(scope=scope, formats=formats)
    tried = policy.formats
    if scope is Scope.AUTO and request.auto_cast_type is None:
        tried = base.target.low_formats
        policy = replace(policy, formats=tried[:1], open_formats=True)
    emulations = [replace(base, format=fmt) for fmt in tried]
    check_formats(base, policy)
    labels = ",".join(f.label for f in policy.formats)
    return CastChoice(
        policy=policy,
        emulation=emulations[0],
        label=f"--auto-cast {scope.value} --auto-cast-type {labels}",
        notes=notes,
        format_notes={f: t for e in emulations for f, t in format_notes(e).items()},
    )


def format_notes(emulation: Emulation) -> dict[Format, str]:
    """What to know of the emulation's format, if a plan has it."""
    fmt = emulation.format
    if fmt is Format.TF32:
        return {fmt: TF32_NOTE}
    if fmt.blocks is not None:
        return {fmt: _NOTE_ON_BLOCKS.format(fmt.label)}
    if fmt.has_scales and not fmt.runs_on_codes:  # codes are decoded by definition
        return {}
    real = emulation.target.engine_for(OpKind.MATMUL).computes_in(fmt)
    if real is None or real is fmt or fmt.bits > 8:
        return {}
    name = emulation.target.name
    ends = f"its largest number is {real.max:g}, the model's type ends at {fmt.max:g}"
    return {fmt: f"{name} runs {fmt.label} as {real.label}: {ends}"}
