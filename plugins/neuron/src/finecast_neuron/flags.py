"""Reading a compiler's arguments into options and values; the right-most of each wins.

Law: ``read(a + b)`` is ``read(a)`` overridden by ``read(b)``, option by option.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from finecast.devices import CastRequest
from finecast.errors import UsageError
from finecast.naming import plain_dashes, spelled, stated, switch

FLAGS_VARIABLE: Final = "NEURON_CC_FLAGS"
STOCHASTIC_VARIABLE: Final = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
SEED_VARIABLE: Final = "NEURON_RT_STOCHASTIC_ROUNDING_SEED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options that were given; None for those that were not, whose defaults differ.

    ``passed_over`` are names of other options of the compilers, which do not change numbers:
    the level of optimization, the kind of model. ``unknown`` are names of options that are in
    no guide of theirs.

    Law: words that differ only in case or in blanks around them are equal; none is empty.

    Raises:
        UsageError: If an option has an empty value.
    """

    auto_cast: str | None = None
    auto_cast_type: str | None = None
    fast_math: tuple[str, ...] | None = None
    fp32_cast: str | None = None
    target: str | None = None
    mixed_accumulation: bool | None = None
    saturate_infinity: bool | None = None
    stochastic_rounding: bool | None = None
    seed: int | None = None
    passed_over: tuple[str, ...] = field(default=(), compare=False)
    unknown: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Normalize words to the spelling of the tables that they are looked up in."""
        for name in _STATED:
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if isinstance(value, str):
                object.__setattr__(self, name, stated(value, option))
            elif isinstance(value, tuple):
                stated(" ".join(value), option)
                object.__setattr__(self, name, tuple(spelled(word) for word in value))

    def over(self, other: Given) -> Given:
        """The options given here, and those of ``other`` that are not given here."""
        stated = {n: v for n in _STATED if (v := getattr(self, n)) is not None}
        named = {
            name: tuple(dict.fromkeys((*getattr(other, name), *getattr(self, name))))
            for name in ("passed_over", "unknown")
        }
        return replace(other, **stated, **named)

    @property
    def request(self) -> CastRequest:
        """What any device can be asked for, of these options."""
        return CastRequest(
            auto_cast=self.auto_cast, auto_cast_type=self.auto_cast_type, target=self.target
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user about ``passed_over`` and ``unknown``."""
        names = ", ".join(self.passed_over)
        told = [f"{names}: for the compiler, no effect on numbers"] if names else []
        for name in self.unknown:
            near = difflib.get_close_matches(name, (*_KNOWN, *_HARMLESS), cutoff=_NEAR)
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            told.append(
                f"unknown compiler option {name}{meant}: left out, and what it does to numbers"
                " is not known"
            )
        return tuple(told)


_STATED: Final = tuple(f.name for f in fields(Given) if f.compare)
# Options with a value: the field that each sets.
_VALUES: Final = {
    "--auto-cast": "auto_cast",
    "--auto-cast-type": "auto_cast_type",
    "--fp32-cast": "fp32_cast",
    "--target": "target",
}
# Options without a value: the field that each sets, and to what.
_SWITCHES: Final = {
    "--enable-mixed-precision-accumulation": ("mixed_accumulation", True),
    "--disable-mixed-precision-accumulation": ("mixed_accumulation", False),
    "--enable-saturate-infinity": ("saturate_infinity", True),
}
_FAST_MATH: Final = "--fast-math"
_KNOWN: Final = (*_VALUES, *_SWITCHES, _FAST_MATH)
# Other options in the guides of neuronx-cc and neuron-cc, and those that PyTorch's plugin for
# Neuron reads from the same variable.
_HARMLESS: Final = (
    *("--framework", "--model-type", "--optlevel", "-O", "--distribution-strategy"),
    *("--logical-nc-config", "--lnc", "-lnc", "--enable-fast-context-switch"),
    *("--enable-fast-loading-neuron-binaries", "--tensorizer-options"),
    *("--output", "--logfile", "--verbose", "--help", "--dump", "--compile_workdir"),
    *("--cache_dir", "--no_cache", "--retry_failed_compilation"),
    *("--io-config", "--neuroncore-pipeline-cores"),
)
# Similarity (as difflib's) from which an unknown option counts as a misspelt one: one or two
# letters in ten differ. The compilers' other options are less similar to these.
_SLIP: Final = 0.85
# Similarity from which a known option is offered in place of an unknown one.
_NEAR: Final = 0.75


def read(arguments: Sequence[str], *, lenient: bool = False) -> Given:
    """Read arguments as the compilers take them, ``--option value`` or ``--option=value``.

    Names of options are read in any case. Several options that were quoted as one word are
    read one by one, unless the word gives them to another tool (``--tensorizer-options=--x``).

    Args:
        arguments: The words of a command line.
        lenient: Accept options that do not change numbers (``--model-type``, ``-O1``), and
            note those that are unknown.

    Raises:
        UsageError: If an option lacks its value, is misspelt, or is unknown and ``lenient``
            is not set.
    """
    options: dict[str, object] = {}
    others: list[str] = []
    words = [part for word in arguments for part in _parts(word)]
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if word in _VALUES:
            if at == len(words) or words[at].startswith("-"):
                raise UsageError(
                    f"{word} needs a value", where=word, fix=f"write {word} VALUE"
                )
            options[_VALUES[word]], at = words[at], at + 1
        elif word in _SWITCHES:
            name, value = _SWITCHES[word]
            options[name] = value
        elif word == _FAST_MATH:
            end = next(
                (i for i in range(at, len(words)) if words[i].startswith("-")), len(words)
            )
            if end == at:
                raise UsageError(
                    f"{word} needs a keyword", where=word, fix=f"write {word} all, or none"
                )
            options["fast_math"], at = tuple(words[at:end]), end
        else:
            _check_unknown(word, lenient=lenient)
            others += [_name(word)] if word.startswith("-") else []
    passed_over = tuple(name for name in others if name in _HARMLESS)
    unknown = tuple(name for name in others if name not in _HARMLESS)
    return Given(**options, passed_over=passed_over, unknown=unknown)  # pyright: ignore[reportArgumentType]


def _name(word: str) -> str:
    """An option without its value: ``--lnc`` of ``--lnc=2``, ``-O`` of ``-O1``."""
    return "-O" if word.startswith("-O") else spelled(word.partition("=")[0])


def _check_unknown(word: str, *, lenient: bool) -> None:
    name = spelled(word.partition("=")[0])
    slip = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_SLIP)
    if slip:
        raise UsageError(
            f"unknown compiler option {word!r}", where=word, fix=f"did you mean {slip[0]}?"
        )
    if not lenient:
        raise UsageError(
            f"unknown compiler option {word!r}", fix=f"use one of {', '.join(_KNOWN)}"
        )


def from_environment(environ: Mapping[str, str]) -> Given:
    """What ``NEURON_CC_FLAGS`` and the runtime's rounding variables state.

    Raises:
        UsageError: If one of them cannot be read.
    """
    given = read(_unquoted(environ.get(FLAGS_VARIABLE, "")), lenient=True)
    enabled = environ.get(STOCHASTIC_VARIABLE)
    if enabled is not None:
        on = switch(enabled, where=STOCHASTIC_VARIABLE)
        given = replace(given, stochastic_rounding=on)
    seed = environ.get(SEED_VARIABLE)
    if seed is not None and given.stochastic_rounding:
        if not seed.strip().isdecimal():
            raise UsageError(f"{seed!r} is no seed", where=SEED_VARIABLE, fix="give a number")
        given = replace(given, seed=int(seed))
    return given


def after_environment(given: Given, environment: Given) -> tuple[Given, tuple[str, ...]]:
    """The command line's options, those of the environment that it leaves open, and notes.

    Where both state what is cast, the command line's counts: ``--fp32-cast`` of the
    environment does not override the casts of ``--fast-math``, though it would within one
    command line.
    """
    keywords = given.fast_math or ()
    casts = [k for k in keywords if not k.endswith("fast-relayout")]
    if not casts or given.fp32_cast is not None or environment.fp32_cast is None:
        return given.over(environment), ()
    left_out = f"--fp32-cast {environment.fp32_cast} of the environment"
    note = f"{left_out} is left out: --fast-math {casts[0]} of the command line counts"
    return given.over(replace(environment, fp32_cast=None)), (note,)


def _parts(word: str) -> list[str]:
    word = plain_dashes(word.strip())
    name, equals, value = word.partition("=")
    head, *more = name.split() or [""]
    if head.startswith("-") and (more or (equals and " " in value and value[:1] != "-")):
        return [part for one in _unquoted(word) for part in _parts(one)]
    if spelled(name) not in _KNOWN:
        return [word]
    return [spelled(name), *value.split()] if equals else [spelled(name)]


def _unquoted(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError as error:
        raise UsageError(f"cannot read the flags: {error}", where=FLAGS_VARIABLE) from error
