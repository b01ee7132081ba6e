"""What a command is asked to do by options of the Neuron compilers.

Laws: with a compiler's options the scope is the compiler's, so that ``convert`` lowers the ops
that ``emulate`` emulates (to tf32 and fp8 only where the device gains by it). ``auto``, and
several formats at once, are finecast's own on any target: a plan op by op, whose casts the
model states, for a compiler that is told to add none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from finecast import Scope
from finecast.devices import (
    CastChoice,
    Emulation,
    check_formats,
    emulated_codes,
    explicit_casts,
    format_notes,
    planned,
    stated_formats,
)
from finecast.devices import choose as choose_casts
from finecast.errors import UsageError
from finecast_neuron.compilers import Compiler, resolve
from finecast_neuron.flags import Given

# Options that only the compilers have: any of them says that a device is meant.
_DEVICE_OPTIONS: Final = (
    "fast_math",
    "fp32_cast",
    "mixed_accumulation",
    "saturate_infinity",
    "stochastic_rounding",
    "target",
)


def choose(given: Given, *, sdk: str | None = None, compiler: bool = False) -> CastChoice:
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
        return choose_casts(given.request)
    stated = given.fast_math is not None or given.fp32_cast is not None
    implied = _implied_device(given) if not stated else ()
    own = given.auto_cast is None and not (stated or compiler or sdk is not None)
    if own or given.request.chooses_by_op:
        choice = _planned(given)
        return replace(choice, notes=(*choice.notes, *implied))
    options = resolve(given, sdk=sdk)
    emulation = options.emulation
    if emulation.scope is not Scope.NONE:
        drawn = bool(given.stochastic_rounding)
        stated_formats(given.request, options.target, drawn=drawn)
        check_formats(emulation, options.policy)
    notes = [*options.notes, *implied]
    if emulation.scope is Scope.NONE:
        notes.append(f"the compiler casts nothing with {options.label}")
    elif options.compiler is Compiler.NEURON_CC and emulation.relayout is not None:
        notes.append(
            f"fast-relayout rounds transposes to {emulation.relayout.label} in the"
            " compiler: no cast can say so"
        )
    return CastChoice(
        policy=options.policy,
        emulation=explicit(emulation),
        label=options.label,
        notes=tuple(notes),
        format_notes=format_notes(emulation),
    )


def _implied_device(given: Given) -> tuple[str, ...]:
    """A note on the device that options of neuronx-cc mean where no target is named."""
    names = (o for o in _DEVICE_OPTIONS if getattr(given, o) is not None)
    option = next(names, None) if given.target is None else None
    if option is None:
        return ()
    name, target = option.replace("_", "-"), resolve(given).target
    return (f"{name} without --target: the device is {target}; name another with --target",)


def emulated(
    given: Given, *, sdk: str | None = None
) -> tuple[Emulation, str, tuple[str, ...]]:
    """The emulation that ``given`` asks for, its options in full, and notes for the user.

    Raises:
        UsageError: As ``resolve``; or if there are several formats.
    """
    if not given.request.asks_for_codes:
        options = resolve(given, sdk=sdk)
        return options.emulation, options.label, options.notes
    return emulated_codes(given.request, _planned(given))


def _planned(given: Given) -> CastChoice:
    """Scope ``auto``, or several formats, on a target."""
    what = f"--auto-cast-type {given.auto_cast_type}"
    what = what if len(given.request.labels) > 1 else "--auto-cast auto"
    for option, written in (("fast_math", "--fast-math"), ("fp32_cast", "--fp32-cast")):
        if getattr(given, option) is not None:
            raise UsageError(
                f"{what} with {written}: either finecast chooses by op, or the"
                " compiler's options do",
                fix="keep one of them",
            )
    # The flags that touch numbers are checked as the compiler would check them.
    options = resolve(replace(given, auto_cast=None, auto_cast_type=None))
    return planned(given.request, explicit(options.emulation), options.notes)


def explicit(emulation: Emulation) -> Emulation:
    """The device under the same options, but that its compiler casts nothing."""
    relayout = explicit_casts(emulation.target.name).relayout
    return replace(emulation, scope=Scope.NONE, relayout=relayout)
