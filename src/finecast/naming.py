"""Reading the words, names and options that users give, in one way everywhere.

Laws: a word of a fixed vocabulary is read in any case and with blanks around it; an unknown
name is an error that gives the closest known names. An option is stated once, at the field of
a dataclass; the command line, the keywords of Python and the reference are made of these.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeVar

from finecast.errors import UsageError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

# Similarity (difflib's ratio) from which a name is offered for an unknown one: half of the
# letters are the same.
_ALIKE: Final = 0.5
_MOST_OFFERED: Final = 3
# A vocabulary of at most this many words is listed in full.
_MOST_LISTED: Final = 20
# Only so many names are compared: each takes microseconds, a model may have 100,000 nodes.
_MOST_COMPARED: Final = 20_000

# Figure dash, en dash, em dash, horizontal bar, hyphen, non-breaking hyphen, minus sign.
_TYPESET_DASHES: Final = "\u2012\u2013\u2014\u2015\u2010\u2011\u2212"

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})


def spelled(word: str) -> str:
    """A word of a fixed vocabulary as its table has it: lower case, no blanks around."""
    return word.strip().lower()


def stated(word: str, option: str) -> str:
    """What an option states, as ``spelled``.

    Raises:
        UsageError: If it is empty.
    """
    if not spelled(word):
        raise UsageError("the value is empty", where=option, fix="give one, or leave it out")
    return spelled(word)


def plain_dashes(word: str) -> str:
    """An option that starts with a typeset dash, with two hyphens in its place.

    AWS's guide prints an em dash and ``-auto-cast-type`` where ``--auto-cast-type`` is meant.
    Words that are no name of an option are returned as they are.
    """
    rest = word.lstrip("-" + _TYPESET_DASHES)
    dashes, name = word[: len(word) - len(rest)], rest.partition("=")[0].replace("-", "")
    return f"--{rest}" if name.isalpha() and not dashes.isascii() else word


def number_of(count: int, noun: str) -> str:
    """``1 trial``, ``2 trials``, ``1,500 trials``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def excluding(names: Sequence[str]) -> str:
    """The option that keeps the ops of these names in fp32: ``--exclude '^(a|b)$'``."""
    pattern = "|".join(map(re.escape, names))
    return f"--exclude {shlex.quote(f'^({pattern})$' if len(names) > 1 else f'^{pattern}$')}"


def an(noun: str) -> str:
    """A noun with its article: ``a Linear``, ``an object``."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def kind_of(value: object) -> str:
    """What a value is, by its type: ``an object``."""
    return an(type(value).__name__)


_LARGEST_PLAIN: Final = 1e9
"""Figures from here on have an exponent: nobody counts so many digits."""


_LARGEST_SHARE: Final = 1e4


def percent(share: float, digits: int = 3) -> str:
    """``2.5%`` for .025, with so many digits; ``inf`` and ``nan`` as they are.

    Of an error that is so many times the value, as of numbers of nothing, no digit counts.
    """
    if not math.isfinite(share):
        return f"{share}"
    if abs(share) > _LARGEST_SHARE:
        return f"over {100 * math.copysign(_LARGEST_SHARE, share):,.0f}%"
    large = abs(share) >= 10.0 ** (digits - 2)  # more digits rather than 4e+02
    return f"{100 * share:,.0f}%" if large else f"{100 * share:.{digits}g}%"


def plain(figure: float) -> str:
    """A figure with three digits, or all before its point: ``3,031``, and not ``3.03e+03``."""
    large = 1000 <= abs(figure) < _LARGEST_PLAIN
    return f"{figure:,.0f}" if large else f"{figure:.3g}"


def percents(*shares: float) -> list[str]:
    """Shares in percent, with as many digits as tell different ones apart, five at most."""
    texts = [percent(share) for share in shares]
    for digits in (4, 5):
        if len(set(texts)) < len(set(shares)):
            texts = [percent(share, digits) for share in shares]
    return texts


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` texts, and how many are left out: ``a, b and 3 more``."""
    return " ".join([separator.join(texts[:most]), *left_out(len(texts), most)])


def left_out(count: int, most: int, what: str = "") -> list[str]:
    """``and 3 more``, then ``what``, if only the first ``most`` of ``count`` are shown."""
    return [f"and {count - most} more{what}"] if count > most else []


def enumerated(things: Sequence[object]) -> str:
    """All of them: ``a``, ``a and b``, ``a, b and c``."""
    *others, last = map(str, things)
    return f"{', '.join(others)} and {last}" if others else last


def look_up(word: str, table: Mapping[str, T], *, what: str, where: str = "") -> T:
    """The entry of ``table`` for a word in any case.

    Args:
        word: As the user wrote it.
        table: The vocabulary; its keys are in lower case.
        what: What the word is, for the error: ``format``, ``scope``.
        where: The option or variable that it came in.

    Raises:
        UsageError: If the table has no such word; gives the closest ones, or all.
    """
    try:
        return table[spelled(word)]
    except KeyError:
        raise unknown_name(word, table, what=what, where=where) from None


def member_of(kind: type[E], given: E | str, *, what: str) -> E:
    """A member of an enum, given as such or as its value in any case.

    ``what`` is its word in errors, and the name of its option.

    Raises:
        UsageError: If there is none of that value; gives the closest ones, or all.
    """
    if isinstance(given, kind):
        return given
    named = {str(one.value): one for one in kind}
    return look_up(str(given), named, what=what, where=f"--{what}")


def switch(word: str, *, where: str) -> bool:
    """Whether a word switches something on: ``1``, ``true``, ``yes`` or ``on``, in any case.

    Raises:
        UsageError: If it is neither of those nor ``0``, ``false``, ``no``, ``off`` or empty.
    """
    if spelled(word) in _TRUE | _FALSE:
        return spelled(word) in _TRUE
    raise UsageError(f"{word!r} is neither on nor off", where=where, fix="write 1 or 0")


def share_of(
    given: float | str | None, *, where: str, example: float, most: float = math.inf
) -> float | None:
    """A share, given as a number or as text, in percent, too: ``5%``; None stays None.

    ``example`` is one to give, for the error.

    Raises:
        UsageError: If it is none from 0 to ``most``.
    """
    if given is None:
        return None
    text = given.strip() if isinstance(given, str) else f"{float(given):g}"
    try:
        number, of = (text[:-1], 100) if text.endswith("%") else (given, 1)
        share = float(number) / of
    except ValueError:
        share = math.nan
    if 0 <= share <= most and share < math.inf:
        return share
    bounds = "of at least 0" if math.isinf(most) else f"from 0 to {most:g}"
    raise UsageError(
        f"{text!r} is not a number {bounds}, nor such a percentage",
        where=where,
        fix=f"give {example:g} or {100 * example:g}%",
    )


def assignments(
    given: Mapping[str, T] | Sequence[str] | None,
    read: Callable[[str], T],
    *,
    where: str,
    form: str,
    fix: str,
    at_first: bool = False,
) -> dict[str, T]:
    """Values by name: a dict as it is, or one made of ``NAME=VALUE`` texts.

    The last ``=`` of a text ends the name, or the first ``at_first``. ``read`` makes a value
    of the rest, and raises ValueError if it is none.

    Raises:
        UsageError: If a text is not of the ``form``, as ``NAME=SIZE``; tells the ``fix``, with
            the user's own name in it.
    """
    if isinstance(given, Mapping):
        return dict(given)
    values: dict[str, T] = {}
    for text in given or ():
        name, equals, value = text.partition("=") if at_first else text.rpartition("=")
        with suppress(ValueError):
            if equals and name.strip():
                values[name.strip()] = read(value.strip())
                continue
        own = (name if equals else text).strip() or "NAME"
        advice = fix.replace("NAME", own)
        raise UsageError(f"{text!r} is not {form}", where=where, fix=advice)
    return values


def unknown_name(
    name: str, known: Collection[str], *, what: str, where: str = "", fix: str = ""
) -> UsageError:
    """The error for a name that is not in ``known``: ``unknown format 'bf61' …``.

    Args:
        name: As the user wrote it.
        known: The names that exist.
        what: What kind of name it is: ``format``, ``op``, ``node``.
        where: The option, argument or file that it came in.
        fix: Further advice, given after the names.
    """
    advice = "; ".join(part for part in (suggestion(name, known), fix) if part)
    return UsageError(f"unknown {what} {name!r}", where=where, fix=advice)


def suggestion(name: str, known: Collection[str]) -> str:
    """Advice for an unknown ``name``: the closest of ``known``, or a few of them."""
    if len(known) <= _MOST_LISTED:
        close = close_names(name, known)[:1]
        listed = f"use one of {', '.join(known)}" if known else "there are none"
        return f"did you mean {close[0]}? {listed}" if close and len(known) > 2 else listed
    close = close_names(name, known)
    if close:
        return f"did you mean {', '.join(close)}?"
    some = ", ".join(list(known)[:_MOST_OFFERED])
    return f"there are {len(known)}: {some}, ..."


def close_names(name: str, known: Collection[str]) -> list[str]:
    """At most three of ``known``: that start with ``name``, are similar, or have it inside."""
    folded: dict[str, str] = {}
    for one in list(known)[:_MOST_COMPARED]:
        folded.setdefault(spelled(one), one)
    wanted = spelled(name)
    within = [one for one in folded if wanted and wanted in one]
    started = [one for one in within if one.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, folded, _MOST_OFFERED, _ALIKE)
    matches = [*dict.fromkeys((*started, *alike))] or within
    return [folded[one] for one in matches[:_MOST_OFFERED]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option that users give, in a shell or in Python, stated at a dataclass's field.

    For example ``batch: int = Option(help="Samples of a call, as 32.", kind=int).field(32)``.

    Attributes:
        help: What it does, with its unit and an example.
        flags: Its names in a shell, with their dashes; by default the field's. A field that is
            True by default may have the flag ``--no-NAME``, which makes it False.
        metavar: What stands for its value in ``--help``.
        kind: The type of its value in a shell.
        many: Whether a shell may give it several times: the field then gets the list.
        least: The least number that it may be.
        python: The types that it may have in Python, and words for them in an error; by
            default those of ``kind``.
        convert: Makes the field's value of what was given, in a shell or in Python.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    kind: type = str
    many: bool = False
    least: float | None = None
    python: tuple[Any, str] | None = None
    keywords: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None

    def field(self, default: T) -> T:
        """The dataclass field of this option.

        Its type is that of the default value, as type checkers see fields.
        """
        dataclass_field: Any
        if isinstance(default, dict):
            dataclass_field = field(default_factory=dict, metadata={_OPTION: self})
        else:
            dataclass_field = field(default=default, metadata={_OPTION: self})
        return dataclass_field

    @property
    def expected(self) -> tuple[Any, str]:
        """The types that it may have in Python, and words for them."""
        return self.python or EXPECTED[self.kind]


_OPTION: Final = "option"
EXPECTED: Final[Mapping[type, tuple[Any, str]]] = {
    str: (str, "a name"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: ((bool, Integral), "True or False"),
    Path: ((str, Path), "a path"),
}


_UNITS: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(size: str | int | None, *, where: str) -> int | None:
    """The bytes that ``120MB`` states, or a number of bytes; None for None.

    Raises:
        UsageError: If it is no size, or nothing fits into it.
    """
    if size is None:
        return None
    number = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    unit = None if number is None else _UNITS.get(number[2].upper() or "B")
    count = 0.0 if number is None or unit is None else float(number[1]) * unit
    if not 1 <= count < math.inf:
        raise UsageError(
            f"{size!r} is no size",
            where=where,
            fix=f"give a number of {', '.join(_UNITS)}, as 120MB",
        )
    return int(count)


def options_of(group: type) -> dict[str, Option]:
    """The options that the fields of a dataclass state, by the field's name."""
    return {f.name: f.metadata[_OPTION] for f in fields(group) if _OPTION in f.metadata}


def default_of(group: type, name: str) -> Any:
    """The default value of a dataclass's field; ``dataclasses.MISSING`` if it has none."""
    (own_field,) = (f for f in fields(group) if f.name == name)
    return (
        own_field.default
        if own_field.default_factory is MISSING
        else own_field.default_factory()
    )


def path_of(given: str | Path | None) -> Path | None:
    """A path that may be given as text; None stays None."""
    return None if given is None else Path(given)


def convert_options(made: Any) -> None:
    """Convert and check the options of a frozen dataclass, as its ``__post_init__``.

    Raises:
        UsageError: If a number is below the least that it may be.
    """
    for name, option in options_of(type(made)).items():
        value = getattr(made, name)
        if option.convert is not None:
            object.__setattr__(made, name, option.convert(value))
        if value is not None and option.least is not None and not value >= option.least:
            raise UsageError(
                f"{value} is less than {option.least:g}, the least that it may be",
                where=option.flags[0] if option.flags else f"--{name.replace('_', '-')}",
                fix=f"give {option.least:g} or more",
            )
