"""The compilers' options as verbs of the command line take them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finecast.errors import UsageError
from finecast.naming import Option, spelled
from finecast_neuron.flags import (
    FLAGS_VARIABLE,
    Given,
    after_environment,
    from_environment,
)

if TYPE_CHECKING:
    from finecast.devices import CastChoice, CastRequest, Emulation
    from finecast_neuron.ladder import Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFlags:
    """Options of the compilers' own that say how they and the runtime compute."""

    mixed_accumulation: bool | None = Option(
        help="Softmax, norms and the like keep fp32 inside.",
        flags=(
            "--enable-mixed-precision-accumulation/--disable-mixed-precision-accumulation",
        ),
        kind=bool,
    ).field(None)
    saturate_infinity: bool = Option(
        help="Clamp Inf in transposes (trn1, inf1).",
        flags=("--enable-saturate-infinity",),
        kind=bool,
    ).field(False)
    stochastic_rounding: bool = Option(help="Casts round stochastically.", kind=bool).field(
        False
    )
    seed: int | None = Option(help="Seed of stochastic rounding.", kind=int, least=0).field(
        None
    )
    sdk: str | None = Option(
        help="Neuron SDK whose defaults hold, as 2.26.", metavar="RELEASE"
    ).field(None)
    from_env: bool = Option(
        help="Read NEURON_CC_FLAGS; the command line comes after it.", kind=bool
    ).field(False)
    model_type: str | None = Option(
        help="Neuron's; no effect on numbers.", metavar="KIND"
    ).field(None)
    optlevel: str | None = Option(
        help="Neuron's; no effect on numbers.", flags=("--optlevel", "-O"), metavar="N"
    ).field(None)

    def given(self, request: CastRequest) -> tuple[Given, tuple[str, ...]]:
        """All options, with --from-env over those of the environment.

        Where both state one, the command line's counts. Notes tell of options without effect.

        Raises:
            UsageError: If the environment's flags cannot be read, or a seed is given for
                casts that round to nearest.
        """
        others = {"--model-type": self.model_type, "--optlevel": self.optlevel}
        given = Given(
            auto_cast=request.auto_cast,
            auto_cast_type=request.auto_cast_type,
            target=request.target,
            mixed_accumulation=self.mixed_accumulation,
            saturate_infinity=self.saturate_infinity or None,
            stochastic_rounding=self.stochastic_rounding or None,
            seed=self.seed,
            passed_over=tuple(name for name, value in others.items() if value is not None),
            **self._casts(),
        )
        notes: tuple[str, ...] = ()
        if self.from_env:
            given, notes = after_environment(given, from_environment(os.environ))
        if given.seed is not None and not given.stochastic_rounding:
            raise UsageError(
                f"--seed {given.seed} without --stochastic-rounding: casts that round to"
                " nearest draw no numbers",
                where="--seed",
                fix="leave it out, or add --stochastic-rounding",
            )
        return given, (*given.notes, *notes)

    def _casts(self) -> dict[str, Any]:
        """Options of the older compiler that say what is cast."""
        return {}

    def ladder(self, target: str | None) -> tuple[str, Sequence[Rung], tuple[str, ...]]:
        """The target that is named, the rungs of its compiler's ladder, and notes.

        Raises:
            UsageError: If no target is named, or it has no ladder.
        """
        from finecast.devices import CastRequest
        from finecast_neuron.compilers import ladder

        given, notes = self.given(CastRequest(target=target))
        named = self._needed(given)
        return spelled(named), ladder(named, given, sdk=self.sdk), notes

    def _needed(self, given: Given) -> str:
        if given.target is None:
            lacks = "no device is named"
            lacks += f", and {FLAGS_VARIABLE} has no --target" if self.from_env else ""
            raise UsageError(lacks, where="--target", fix="name one of finecast targets")
        return given.target


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerOptions(CompilerFlags):
    """All options of the compilers, beside those that any device can be asked for."""

    fast_math: str | None = Option(
        help="inf1: all, none, fp32-cast-all[-fp16], fp32-cast-matmult[-bf16|-fp16],"
        " [no-]fast-relayout.",
        metavar="KEYWORD...",
    ).field(None)
    fp32_cast: str | None = Option(
        help="inf1, the older spelling: all[-fp16], matmult[-bf16|-fp16].", metavar="KEYWORD"
    ).field(None)

    def _casts(self) -> dict[str, Any]:
        words = None if self.fast_math is None else tuple(self.fast_math.split())
        return {"fast_math": words, "fp32_cast": self.fp32_cast}

    def choice(self, request: CastRequest) -> CastChoice | None:
        """What the options ask for; None for other devices without options of these.

        Raises:
            UsageError: If options conflict.
        """
        from finecast_neuron.choice import choose

        asked = self._asked(request)
        if asked is None:
            return None
        given, notes = asked
        choice = choose(given, sdk=self.sdk, compiler=self.from_env)
        return replace(choice, notes=(*notes, *choice.notes))

    def emulation(self, request: CastRequest) -> tuple[Emulation, str, tuple[str, ...]] | None:
        """The emulation of the target; None for other devices without options of these.

        Raises:
            UsageError: If no target is named, or options conflict.
        """
        from finecast_neuron.choice import emulated

        asked = self._asked(request)
        if asked is None:
            return None
        given, notes = asked
        self._needed(given)
        emulation, label, more = emulated(given, sdk=self.sdk)
        return emulation, label, (*notes, *more)

    def _asked(self, request: CastRequest) -> tuple[Given, tuple[str, ...]] | None:
        """As ``given``; None if no option is given, and the target is none of the compilers'.

        Raises:
            UsageError: If a release of the Neuron SDK is named for another device.
        """
        from finecast_neuron.compilers import NEURON_TARGETS

        given, notes = self.given(request)
        if self.sdk is not None and given.target not in (None, *NEURON_TARGETS):
            raise UsageError(
                f"--sdk is a release of the Neuron compilers, which do not build for"
                f" {given.target}",
                where="--sdk",
                fix=f"leave it out, or name one of {', '.join(NEURON_TARGETS)}",
            )
        concerned = self != CompilerOptions() or given.target in NEURON_TARGETS
        return (given, notes) if concerned else None
