"""What the compilers' options mean: defaults, legality, effects on numbers; their ladders.

Sources: AWS Neuron SDK, command line references of neuronx-cc and neuron-cc; release notes
of Neuron 2.27.0 (19 December 2025) for the change of neuronx-cc's defaults.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeVar

from finecast import Format, Policy, Scope
from finecast.calls import checks
from finecast.devices import Emulation, Relayout, check, load_target, target_named
from finecast.errors import UsageError
from finecast.naming import look_up, spelled
from finecast.numbers import SEEDS, Rounding
from finecast_neuron.flags import Given, read
from finecast_neuron.ladder import Rung

T = TypeVar("T")


class Compiler(Enum):
    """Whose options these are."""

    NEURONX_CC = "neuronx-cc"
    NEURON_CC = "neuron-cc"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """A cast keyword of neuron-cc: what is cast to which format, and that of transposes."""

    scope: Scope
    format: Format
    transposes: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronOptions:
    """The options in force, with the compiler's defaults filled in.

    Attributes:
        compiler: Whose options they are.
        target: The device, as the compiler calls it.
        emulation: What they do to numbers there.
        arguments: The options in full, for the compiler's own command line.
        notes: What to tell the user of options that have no effect.
    """

    compiler: Compiler
    target: str
    emulation: Emulation
    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> Policy:
        """A policy of this scope and format."""
        return Policy(scope=self.emulation.scope, formats=(self.emulation.format,))

    @property
    def label(self) -> str:
        """The options as on the compiler's command line."""
        return " ".join(self.arguments)


_INF1: Final = "inf1"

CASTS: Final = {
    "all": _Cast(scope=Scope.ALL, format=Format.BF16, transposes=Format.BF16),
    "all-fp16": _Cast(scope=Scope.ALL, format=Format.FP16, transposes=Format.FP16),
    "matmult": _Cast(scope=Scope.MATMULT, format=Format.BF16, transposes=Format.FP16),
    "matmult-bf16": _Cast(scope=Scope.MATMULT, format=Format.BF16, transposes=Format.BF16),
    "matmult-fp16": _Cast(scope=Scope.MATMULT, format=Format.FP16, transposes=Format.FP16),
}
"""Keywords of ``--fp32-cast``; in ``--fast-math`` they start with ``fp32-cast-``."""
_CAST_PREFIX: Final = "fp32-cast-"
_RELAYOUTS: Final = {
    "fast-relayout": Relayout.MATMUL,
    "no-fast-relayout": Relayout.BYTE_MOVE,
}
# The cast keyword and the relayout that ``all`` and ``none`` stand for.
_SHORTHANDS: Final = {
    "all": ("all", Relayout.MATMUL),
    "none": ("matmult-bf16", Relayout.BYTE_MOVE),
}
FAST_MATH_KEYWORDS: Final = (*_SHORTHANDS, *(_CAST_PREFIX + c for c in CASTS), *_RELAYOUTS)
"""Every keyword of ``--fast-math``."""

_TYPES: Final = {f.label: f for f in (Format.BF16, Format.FP16, Format.TF32, Format.FP8_E4M3)}
_SCOPES: Final = (Scope.NONE, Scope.MATMULT, Scope.ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    since: tuple[int, int]
    scope: Scope
    mixed_accumulation: bool


# Defaults of neuronx-cc by release of the Neuron SDK, newest first.
_DEFAULTS: Final = (
    _Defaults(since=(2, 27), scope=Scope.NONE, mixed_accumulation=True),
    _Defaults(since=(0, 0), scope=Scope.MATMULT, mixed_accumulation=False),
)
_OPTIONS_OF: Final = {
    Compiler.NEURONX_CC: ("auto_cast", "auto_cast_type", "mixed_accumulation"),
    Compiler.NEURON_CC: ("fast_math", "fp32_cast"),
}
_SPELLED: Final = {
    "auto_cast": "--auto-cast",
    "auto_cast_type": "--auto-cast-type",
    "fast_math": "--fast-math",
    "fp32_cast": "--fp32-cast",
    "mixed_accumulation": "--enable/disable-mixed-precision-accumulation",
}


@checks
def compiler_for(target: str) -> Compiler:
    """Which compiler builds for ``target``."""
    return Compiler.NEURON_CC if spelled(target) == _INF1 else Compiler.NEURONX_CC


@checks
def resolve(
    given: Given, *, sdk: str | None = None, target: str | None = None
) -> NeuronOptions:
    """Fill in defaults and check legality.

    Args:
        given: What was stated.
        sdk: Release of the Neuron SDK whose defaults hold, as ``2.26``; the newest if None.
        target: The target if ``given`` names none. If both are None, it is ``inf1`` for
            neuron-cc's options and ``trn1`` otherwise.

    Raises:
        UsageError: If two options conflict (names both), a value is none of its option's, or
            the target cannot do what is asked.
    """
    stated = {
        c: [o for o in names if getattr(given, o) is not None]
        for c, names in _OPTIONS_OF.items()
    }
    old = stated[Compiler.NEURON_CC]
    chosen = given.target or (target_named(target) if target else _INF1 if old else "trn1")
    device = load_target(chosen)
    compiler = compiler_for(chosen)
    for other, names in stated.items():
        if other is not compiler and names:
            own = ", ".join(_SPELLED[o] for o in _OPTIONS_OF[compiler])
            clash = [_SPELLED[o] for o in stated[compiler]] or [f"--target {chosen}"]
            raise UsageError(
                f"{_SPELLED[names[0]]} with {clash[0]}: the first is {other.value}'s",
                fix=f"for {chosen} use {own}",
            )
    if given.seed is not None and not 0 <= given.seed < SEEDS:
        raise UsageError(
            f"{given.seed} is no seed", where="--seed", fix="give a number from 0 to 2^128 - 1"
        )
    base = Emulation(
        target=device,
        saturate_infinity=bool(given.saturate_infinity),
        rounding=Rounding.STOCHASTIC if given.stochastic_rounding else Rounding.NEAREST_EVEN,
        seed=given.seed or 0,
    )
    if compiler is Compiler.NEURONX_CC:
        options = _neuronx(given, chosen, base, sdk)
    else:  # its defaults never changed
        options = _neuron(given, chosen, base)
    check(options.emulation)
    return options


def _neuronx(given: Given, target: str, base: Emulation, sdk: str | None) -> NeuronOptions:
    defaults = next(d for d in _DEFAULTS if d.since <= _release(sdk))
    scope = Scope.parse(given.auto_cast) if given.auto_cast is not None else defaults.scope
    if scope not in _SCOPES:
        raise UsageError(
            f"{scope.value!r} is no scope of neuronx-cc",
            where="--auto-cast",
            fix="use none, matmult or all",
        )
    notes: tuple[str, ...] = ()
    if scope is Scope.NONE and given.auto_cast is None and given.auto_cast_type is not None:
        alone = f"--auto-cast-type {given.auto_cast_type} alone casts nothing"
        notes = (f"{alone}: --auto-cast none is the default; add --auto-cast matmult or all",)
    mixed = given.mixed_accumulation
    mixed = defaults.mixed_accumulation if mixed is None else mixed
    fmt = _choice(given.auto_cast_type or "bf16", _TYPES, "--auto-cast-type")
    words = ["--auto-cast", scope.value]
    words += [] if scope is Scope.NONE else ["--auto-cast-type", fmt.label]
    if mixed is not defaults.mixed_accumulation:
        words.append(f"--{'enable' if mixed else 'disable'}-mixed-precision-accumulation")
    saturate = base.saturate_infinity and base.target.saturate_infinity
    if base.saturate_infinity and not saturate:  # the compiler accepts it as well
        unused = f"--enable-saturate-infinity with --target {target} has no effect"
        notes = (*notes, f"{unused}: only trn1 and inf1 have it")
    words += ["--enable-saturate-infinity"] if saturate else []
    emulation = replace(
        base,
        scope=scope,
        format=fmt,
        # A transpose by product computes in its operand's type: exact in fp32, but for Inf.
        relayout=Format.FP32 if Relayout.MATMUL in base.target.relayouts else None,
        mixed_accumulation=mixed,
        saturate_infinity=saturate,
    )
    return NeuronOptions(
        compiler=Compiler.NEURONX_CC,
        target=target,
        emulation=emulation,
        arguments=tuple(words),
        notes=notes,
    )


def _neuron(given: Given, target: str, base: Emulation) -> NeuronOptions:
    cast, relayout = fast_math(given.fast_math or ("all",))
    # The older option, by its documentation, overrides the casts of --fast-math.
    cast = given.fp32_cast or cast
    how = _choice(cast, CASTS, "--fp32-cast")
    words = ["--fast-math", _CAST_PREFIX + cast]
    words.append(next(name for name, kind in _RELAYOUTS.items() if kind is relayout))
    words += ["--enable-saturate-infinity"] if base.saturate_infinity else []
    emulation = replace(
        base,
        scope=how.scope,
        format=how.format,
        relayout=how.transposes if relayout is Relayout.MATMUL else None,
    )
    return NeuronOptions(
        compiler=Compiler.NEURON_CC,
        target=target,
        emulation=emulation,
        arguments=tuple(words),
    )


def fast_math(keywords: Sequence[str]) -> tuple[str, Relayout]:
    """The cast keyword (one of ``--fp32-cast``) and the relayout that ``keywords`` choose.

    ``all`` and ``none`` set both; a cast or relayout keyword overrides its part of them.

    Raises:
        UsageError: If a keyword is unknown, or two exclude each other; names both.
    """
    for keyword in keywords:
        _choice(keyword, dict.fromkeys(FAST_MATH_KEYWORDS, True), "--fast-math")
    shorthand = _only_one([k for k in keywords if k in _SHORTHANDS])
    cast = _only_one([k for k in keywords if k.startswith(_CAST_PREFIX)])
    relayout = _only_one([k for k in keywords if k in _RELAYOUTS])
    # Without a keyword the defaults hold, which are those of ``all``.
    chosen, how = _SHORTHANDS[shorthand or "all"]
    return (
        cast.removeprefix(_CAST_PREFIX) if cast else chosen,
        _RELAYOUTS[relayout] if relayout else how,
    )


def _only_one(keywords: list[str]) -> str | None:
    distinct = list(dict.fromkeys(keywords))
    if len(distinct) > 1:
        raise UsageError(
            f"--fast-math {distinct[0]} with {distinct[1]}: they exclude each other",
            where="--fast-math",
            fix="keep one of them",
        )
    return distinct[0] if distinct else None


def _choice(name: str, known: Mapping[str, T], option: str) -> T:
    return look_up(name, known, what="value", where=option)


def _release(sdk: str | None) -> tuple[int, int]:
    if sdk is None:
        return _DEFAULTS[0].since
    parts = spelled(sdk).removeprefix("v").split(".")
    if len(parts) < 2 or not all(p.isdecimal() for p in parts):
        raise UsageError(f"{sdk!r} is no SDK release", where="--sdk", fix="write it as 2.27")
    return int(parts[0]), int(parts[1])


# ---------------------------------------------------------------- options in order of accuracy

LADDERS: Final[dict[Compiler, tuple[str, ...]]] = {
    Compiler.NEURONX_CC: (
        "--auto-cast none",
        "--auto-cast matmult --auto-cast-type tf32",
        "--auto-cast all --auto-cast-type tf32",
        "--auto-cast matmult --auto-cast-type fp16",
        "--auto-cast all --auto-cast-type fp16",
        "--auto-cast matmult --auto-cast-type bf16",
        "--auto-cast all --auto-cast-type bf16",
    ),
    Compiler.NEURON_CC: (
        "--fast-math none",
        "--fast-math fp32-cast-matmult no-fast-relayout",
        "--fast-math fp32-cast-matmult",
        "--fast-math all",
    ),
}
"""The options that each compiler's guide lists, most accurate first."""

NEURON_TARGETS: Final = ("trn1", "trn1n", "inf2", "trn2", "trn3", "inf1")
"""The devices that the two compilers build for."""

# How a framework takes the options: {arguments} as a list, {flags} as one string.
_SNIPPETS: Final = {
    Compiler.NEURONX_CC: (
        "torch_neuronx.trace(model, example_inputs, compiler_args={arguments})"
        "  # or NEURON_CC_FLAGS={flags}"
    ),
    Compiler.NEURON_CC: "torch.neuron.trace(model, example_inputs, compiler_args={arguments})",
}
# Neither compiler reads ONNX: a framework traces the model and passes it as HLO.
_COMMANDS: Final = {
    Compiler.NEURONX_CC: (
        "neuronx-cc compile {{model}} --framework XLA --target {target} {arguments}"
        " --output {{output}}"
    ),
    Compiler.NEURON_CC: (
        "neuron-cc compile {{model}} --framework XLA {arguments} --output {{output}}"
    ),
}


@checks
def ladder(target: str, base: Given | None = None, *, sdk: str | None = None) -> list[Rung]:
    """All rungs of the compiler for ``target``, most accurate first.

    Args:
        target: The target.
        base: Options that hold on every rung: saturation, accumulation, rounding. Its
            options about casts are ignored.
        sdk: Release of the Neuron SDK.

    Raises:
        UsageError: If no compiler's ladder is known for the target.
    """
    name = target_named(target)
    if name not in NEURON_TARGETS:
        raise UsageError(
            f"{target!r} has no ladder of compiler options",
            where="--target",
            fix=f"use one of {', '.join(NEURON_TARGETS)}; finecast emulate takes every target",
        )
    target, compiler = name, compiler_for(name)
    held = replace(
        base or Given(),
        auto_cast=None,
        auto_cast_type=None,
        fast_math=None,
        fp32_cast=None,
        target=None,
    )
    rungs: list[Rung] = []
    for name in LADDERS[compiler]:
        options = resolve(read(name.split()).over(held), sdk=sdk, target=target)
        # The rung's own options, then the flags that were asked for on all rungs.
        flags = (a for a in options.arguments if a.startswith(("--enable", "--disable")))
        words = (*name.split(), *flags)
        together = shlex.join(words)
        rungs.append(
            Rung(
                name=name,
                emulation=options.emulation,
                template=_COMMANDS[compiler].format(target=target, arguments=together),
                snippet=_SNIPPETS[compiler].format(
                    arguments=json.dumps(list(words)), flags=json.dumps(together)
                ),
            )
        )
    return rungs
