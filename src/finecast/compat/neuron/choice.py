"""What a command is asked to do: a policy, and a device where the options name or imply one.

Laws: without a target and options of a compiler the policy is finecast's own, for this
machine. With a compiler's options the scope is the compiler's, so that ``convert`` lowers
the ops that ``emulate`` emulates (to tf32 and fp8 only where the device gains by it).
``auto``, and several formats at once, are finecast's own on any target: a plan op by op, whose
casts the model states, for a compiler that is told to add none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from finecast.compat.neuron.compilers import Compiler, resolve
from finecast.compat.neuron.flags import Given
from finecast.devices.emulation import (
    TF32_NOTE,
    Emulation,
    check_formats,
    explicit_casts,
    having,
)
from finecast.errors import UsageError
from finecast.numbers.formats import CODED, Format
from finecast.ops import OpKind
from finecast.rules.policy import DEFAULT_POLICY, Policy, Scope, low_formats

DEFAULT_FORMAT: Final = Format.BF16
# Formats that engines on this machine may compute in.
_HERE: Final = (Format.BF16, Format.FP16, *CODED)
# Formats that a model can state: by ONNX's types, or in the case of tf32 by arithmetic.
_STATED: Final = (
    *(Format.BF16, Format.FP16, Format.TF32),
    *(Format.FP8_E4M3, Format.FP8_E5M2, *CODED),
)
_NO_TARGET: Final = "TARGET"
# Options that only the compilers have: any of them says that a device is meant.
_DEVICE_OPTIONS: Final = (
    "fast_math",
    "fp32_cast",
    "mixed_accumulation",
    "saturate_infinity",
    "stochastic_rounding",
    "target",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerChoice:
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


def choose(given: Given, *, sdk: str | None = None, compiler: bool = False) -> CompilerChoice:
    """The policy and the device that ``given`` asks for.

    Args:
        given: The options that were stated.
        sdk: Release of the Neuron SDK whose defaults hold.
        compiler: Whether a compiler's defaults hold for options that were not given; with an
            ``sdk`` they do.

    Raises:
        UsageError: If two options conflict (names both), the target lacks the format, or
            no ONNX type can state it.
    """
    device = any(getattr(given, o) is not None for o in _DEVICE_OPTIONS)
    if not (device or compiler or sdk is not None):
        return CompilerChoice(policy=_local(given))
    stated = given.fast_math is not None or given.fp32_cast is not None
    implied = _implied_device(given) if not stated else ()
    own = given.auto_cast is None and not (stated or compiler or sdk is not None)
    auto = given.auto_cast is not None and Scope.parse(given.auto_cast) is Scope.AUTO
    if own or auto or len(_labels(given)) > 1 or asks_for_codes(given):
        choice = _planned(given)
        return replace(choice, notes=(*choice.notes, *implied))
    options = resolve(given, sdk=sdk)
    emulation = options.emulation
    if emulation.scope is not Scope.NONE:
        _formats(given, options.target)
        check_formats(emulation, options.policy)
    notes = [*options.notes, *implied]
    if emulation.scope is Scope.NONE:
        notes.append(f"the compiler casts nothing with {options.label}")
    elif options.compiler is Compiler.NEURON_CC and emulation.relayout is not None:
        notes.append(
            f"fast-relayout rounds transposes to {emulation.relayout.label} in the"
            " compiler: no cast states it"
        )
    return CompilerChoice(
        policy=options.policy,
        emulation=_explicit(emulation),
        label=options.label,
        notes=tuple(notes),
        format_notes=_format_notes(emulation),
    )


def _implied_device(given: Given) -> tuple[str, ...]:
    """A note on the device that options of neuronx-cc mean where no target is named."""
    names = (o for o in _DEVICE_OPTIONS if getattr(given, o) is not None)
    option = next(names, None) if given.target is None else None
    if option is None:
        return ()
    name, target = option.replace("_", "-"), resolve(given).target
    return (f"{name} without --target: the device is {target}; name another with --target",)


def asks_for_codes(given: Given) -> bool:
    """Whether a scaled format is named: compilers have none, the model states its codes."""
    return any(Format.parse(label) in CODED for label in _labels(given))


def emulated(
    given: Given, *, sdk: str | None = None
) -> tuple[Emulation, str, tuple[str, ...]]:
    """The emulation that ``given`` asks for, its options in full, and notes for the user.

    Casts to a scaled format are finecast's own on any target: of all ops that can have it, or
    with ``--auto-cast matmult`` of products.

    Raises:
        UsageError: As ``resolve``; or if there are several formats.
    """
    if not asks_for_codes(given):
        options = resolve(given, sdk=sdk)
        return options.emulation, options.label, options.notes
    choice = _planned(given)
    assert choice.emulation is not None
    if len(choice.policy.formats) > 1:
        raise UsageError(
            f"--auto-cast-type {given.auto_cast_type}: one format is emulated",
            fix="name one, or mix them by op with finecast tune --target",
        )
    stated = choice.policy.scope
    scope = stated if stated in (Scope.NONE, Scope.MATMULT) else Scope.ALL
    label = f"--auto-cast {scope.value} --auto-cast-type {choice.policy.format.label}"
    return replace(choice.emulation, scope=scope), label, choice.notes


def _local(given: Given) -> Policy:
    """Finecast's own policy for this machine."""
    scope = Scope.parse(given.auto_cast or DEFAULT_POLICY)
    formats = _formats(given, _NO_TARGET)
    for fmt in formats:
        if fmt not in _HERE:
            have = ", ".join(having(fmt))
            raise UsageError(
                f"--auto-cast-type {fmt.label} without --target: no engine here computes in"
                " it",
                fix=f"name the device with --target ({have}), or use bf16 or fp16",
            )
    unnamed = scope is Scope.AUTO and given.auto_cast_type is None
    return Policy(scope=scope, formats=formats, open_formats=unnamed)


def _labels(given: Given) -> list[str]:
    return (given.auto_cast_type or DEFAULT_FORMAT.label).split(",")


def _formats(given: Given, target: str) -> tuple[Format, ...]:
    """The formats that casts in a model are to state, in order of preference.

    Raises:
        UsageError: If one is unknown, named twice, cannot be stated by a model, or would not
            be rounded as the device rounds.
    """
    if given.auto_cast_type is not None:
        low_formats(given.auto_cast_type)
    return tuple(_format(label, given, target) for label in _labels(given))


def _format(label: str, given: Given, target: str) -> Format:
    fmt = Format.parse(label)
    if fmt is Format.TF32 and given.stochastic_rounding:
        raise UsageError(
            "--auto-cast-type tf32 with --stochastic-rounding: arithmetic in the model rounds"
            " to nearest",
            fix="drop one of them, or see what both do with finecast emulate",
        )
    if fmt in _STATED:
        return fmt
    raise UsageError(
        f"ONNX has no type {fmt.label}: a model's casts cannot state it",
        where="--auto-cast-type",
        fix="give the option to the compiler or runtime itself (finecast emulate --target"
        f" {target} shows what it does to the accuracy, finecast ladder compares), or use"
        " bf16 or fp16",
    )


def _planned(given: Given) -> CompilerChoice:
    """Scope ``auto``, or several formats, on a target."""
    scope = Scope.parse(given.auto_cast or DEFAULT_POLICY)
    what = f"--auto-cast-type {given.auto_cast_type}"
    what = what if len(_labels(given)) > 1 else "--auto-cast auto"
    for option, written in (("fast_math", "--fast-math"), ("fp32_cast", "--fp32-cast")):
        if getattr(given, option) is not None:
            raise UsageError(
                f"{what} with {written}: either finecast chooses by op, or the"
                " compiler's options do",
                fix="keep one of them",
            )
    # The flags that touch numbers are checked as the compiler would check them.
    options = resolve(replace(given, auto_cast=None, auto_cast_type=None))
    base = _explicit(options.emulation)
    policy = Policy(scope=scope, formats=_formats(given, options.target))
    tried = policy.formats
    if scope is Scope.AUTO and given.auto_cast_type is None:
        tried = base.target.low_formats
        policy = replace(policy, formats=tried[:1], open_formats=True)
    emulations = [replace(base, format=fmt) for fmt in tried]
    check_formats(base, policy)
    formats = ",".join(f.label for f in policy.formats)
    return CompilerChoice(
        policy=policy,
        emulation=emulations[0],
        label=f"--auto-cast {scope.value} --auto-cast-type {formats}",
        notes=options.notes,
        format_notes={f: t for e in emulations for f, t in _format_notes(e).items()},
    )


def _explicit(emulation: Emulation) -> Emulation:
    """The device under the same options, but that its compiler casts nothing."""
    relayout = explicit_casts(emulation.target.name).relayout
    return replace(emulation, scope=Scope.NONE, relayout=relayout)


def _format_notes(emulation: Emulation) -> dict[Format, str]:
    fmt = emulation.format
    if fmt is Format.TF32:
        return {fmt: TF32_NOTE}
    if fmt.has_scales and not fmt.runs_on_codes:  # codes are decoded by definition
        return {}
    real = emulation.target.engine_for(OpKind.MATMUL).computes_in(fmt)
    if real is None or real is fmt or fmt.bits > 8:
        return {}
    name = emulation.target.name
    ends = f"its largest number is {real.max:g}, the model's type ends at {fmt.max:g}"
    return {fmt: f"{name} runs {fmt.label} as {real.label}: {ends}"}
