"""The arguments of public functions and classes, checked before the call.

Laws: a name that a function does not take is a UsageError that gives the nearest that it does,
and so is a value of another kind than is expected; too many or too few arguments are a
TypeError that says which the function takes. Which names it takes, and of which kinds, say its
own signature and the typed keywords (``Unpack[...]``) of its last parameter.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeAlias, TypeVar, cast

from finecast.errors import UsageError
from finecast.naming import EXPECTED, options_of, unknown_name

C = TypeVar("C", bound=Callable[..., Any])
Kinds: TypeAlias = tuple[Any, str]
"""The types that a value may have, and words for them."""

_KINDS: Final[Mapping[Any, Kinds]] = {
    **EXPECTED,
    Path: ((str, os.PathLike), "a path"),
    Callable: (Callable, "a function"),
    Iterable: (Iterable, "a list"),
    Mapping: (Mapping, "a dict"),
    Sequence: (Sequence, "a tuple or a list, as (x,),"),
}
_SHOWN: Final = 40
"""Characters of a value that a message shows."""


def checks(target: C) -> C:
    """A decorator of a public function, or of a class, that checks the arguments of calls.

    Fields of a dataclass that are an ``Option`` have the kinds that the option states. One
    that is converted may have another before than after, and is left to what converts it.
    """
    if not isinstance(target, type):
        return cast("C", checking(target))
    options = options_of(target) if is_dataclass(target) else {}
    expected = {
        name: (object, "")
        if option.convert and (option.many or not option.python)
        else option.expected
        for name, option in options.items()
    }
    created = checking(target.__init__, expected=expected, name=target.__name__)
    target.__init__ = created  # type: ignore[misc]
    return cast("C", target)


def checking(function: C, *, expected: Mapping[str, Kinds] | None = None, name: str = "") -> C:
    """``function``, whose arguments are checked.

    Args:
        function: The function.
        expected: Kinds of arguments by name, before those of annotations. None as a value is
            the function's own matter.
        name: What messages call it; by default the function's name.
    """
    called, kinds_by_name = name or function.__name__, expected or {}
    signature = inspect.signature(function)
    kinds = {n: p.kind for n, p in signature.parameters.items() if n != "self"}
    named = [n for n in kinds if kinds[n] is not _VARIABLE]
    first = [n for n in named if kinds[n] is _POSITIONAL]
    variable = next((n for n in kinds if n not in named), "")
    positional = f"without names it takes {', '.join(first) or 'none'}; all else by name"

    @functools.cache
    def keywords() -> tuple[str, ...] | None:
        return keywords_of(function)

    @functools.cache
    def annotated() -> Mapping[str, Kinds]:
        read = {n: _kinds(function, signature.parameters[n].annotation) for n in named}
        return {n: kinds for n, kinds in read.items() if kinds is not None}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        more = keywords()
        if more is not None:
            _check_names(kwargs, [*named, *more], called)
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{called}: {error}; {positional}") from error
        arguments |= arguments.pop(variable, {})
        for word, value in arguments.items():
            if word in kinds_by_name:
                if value is not None:
                    _check(word, value, *kinds_by_name[word])
            elif word in annotated():
                _check(word, value, *annotated()[word])
        return function(*args, **kwargs)

    return cast("C", call)


_POSITIONAL: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_VARIABLE: Final = inspect.Parameter.VAR_KEYWORD


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of the typed keywords of a function; None if it takes any name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is _VARIABLE:
            node = ast.parse(str(parameter.annotation), mode="eval").body
            if not isinstance(node, ast.Subscript):
                return None
            stated = _named(function, node.slice)
            return (*stated.__required_keys__, *sorted(stated.__optional_keys__))
    return ()


def _kinds(function: Callable[..., Any], annotation: object) -> Kinds | None:
    """What an annotation expects; None if it is not of plain types, which are checked here.

    Text may stand for another type, as for a policy: what reads it says what it may be.
    """
    if not isinstance(annotation, str):
        return None
    members = [*_members(ast.parse(annotation, mode="eval").body)]
    types: list[Any] = []
    for member in members:
        try:
            types.append(_named(function, member))
        except (NameError, AttributeError):
            return None
    if str in types and Path in types:  # text is a path
        types.remove(str)
    if str in types and {*types} - {str, NoneType}:  # text stands for what it is read as
        return None
    accepted: list[Any] = []
    words: list[str] = []
    for kind in types:
        if kind not in _KINDS and kind is not NoneType and not is_dataclass(kind):
            return None
        own, word = _KINDS.get(kind) or (kind, f"a {getattr(kind, '__name__', '')}")
        accepted += own if isinstance(own, tuple) else (own,)
        words += [word] * (kind is not NoneType)
    return tuple(accepted), " or ".join(words)


def _members(node: ast.expr) -> Iterator[ast.expr]:
    """The types of a union, without their parameters."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(left)
            yield from _members(right)
        case ast.Subscript(value=value):
            yield value
        case _:
            yield node


def _named(function: Callable[..., Any], node: ast.expr) -> Any:
    """What an annotation of a function names; None's type for None."""
    code = compile(ast.Expression(node), "annotation", "eval")
    value = eval(code, inspect.unwrap(function).__globals__)
    return NoneType if value is None else value


def _check_names(words: Iterable[str], known: Sequence[str], called: str) -> None:
    for word in words:
        if word not in known:
            raise unknown_name(word, known, what=f"argument of {called}")


def _check(name: str, value: object, kinds: Any, words: str) -> None:
    known: tuple[Any, ...] = kinds if isinstance(kinds, tuple) else (kinds,)
    counted = isinstance(value, bool) and not {bool, object} & {*known}
    if counted or not isinstance(value, known):
        raise UsageError(
            f"{words} is expected for {name}, not a value of type {type(value).__name__}",
            where=f"{name}={_short(value)}",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
