"""The arguments of Python's verbs: their types, and options by their names.

A verb takes few values that have names of their own, as ``data``. Its ``**options`` are single
options of the dataclasses that such values are: ``tune(m, data=x, metric="top1")`` is
``tune(m, data=DataOptions(data=x, metric="top1"))``. Editors and ``help`` list them all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from finecast.data.criterion import Criterion, CriterionKind
from finecast.devices.emulation import Emulation
from finecast.errors import UsageError
from finecast.naming import default_of, options_of, unknown_name
from finecast.native.artefact import Destination
from finecast.planning.plan import Plan
from finecast.tuning.goal import Goal

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G")

# What None means is each function's own; arguments that are not here are checked where they
# are read.
_EXPECTED: Final[Mapping[str, tuple[Any, str]]] = {
    "output": ((str, Path, Destination), "a path"),
    "plan": ((str, Path, Plan), "a plan or its path"),
    "goal": (Goal, "a Goal"),
    "criterion": ((str, CriterionKind, Criterion), "relative, absolute or a Criterion"),
    "engine": (str, "a name"),
    "target": ((str, Emulation), "the name of a device, or one with options,"),
    "progress": ((Callable, bool), "True, False or a function of each step"),
}


def checked(
    *groups: type, without: tuple[str, ...] = (), verb: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a verb that checks the types of its arguments.

    Args:
        groups: The dataclasses whose options are keywords of the verb.
        without: Names of options that the verb has not, or has as parameters.
        verb: What messages call it; by default the function's name.
    """
    options = {
        keyword: (group, name, option)
        for group in groups
        for name, option in options_of(group).items()
        for keyword in option.keywords or (name,)
        if keyword not in without
    }
    expected = {**{k: option.expected for k, (_, _, option) in options.items()}, **_EXPECTED}

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        called = verb or function.__name__
        signature = inspect.signature(function)
        names = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        first = [
            n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        positional = f"without names it takes {', '.join(first)}; all else by name"

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names and name not in options:
                    what = f"argument of {called}"
                    raise unknown_name(name, [*names, *options], what=what)
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{called}: {error}; {positional}") from error
            for name, value in {**bound, **bound.get("options", {})}.items():
                if name in expected and value is not None:
                    _check(name, value, *expected[name])
            return function(*args, **kwargs)

        listed = [p for n, p in signature.parameters.items() if n in names]
        listed += [
            _listed(keyword, group, name)
            for keyword, (group, name, _) in options.items()
            if keyword not in names
        ]
        call.__signature__ = signature.replace(parameters=listed)  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorated


def group_of(group: type[G], options: Mapping[str, Any], **named: Any) -> G:
    """The dataclass of a group of options.

    Args:
        group: The dataclass.
        options: Options by their names in Python, of this group and of others.
        named: What the verb's own parameter has: the group itself, or the value of a field.

    Raises:
        UsageError: If the group itself is given, and options of it.
    """
    values: dict[str, Any] = {}
    for name, option in options_of(group).items():
        for keyword in option.keywords or (name,):
            if options.get(keyword) is not None:
                values[name] = options[keyword]
    for field, argument in named.items():
        if not isinstance(argument, group):
            values |= {} if argument is None else {field: argument}
            continue
        for name, value in values.items():
            if value != default_of(group, name):
                raise UsageError(
                    f"{name} is given beside {group.__name__}", fix=f"set its {name}"
                )
        return argument
    return group(**values)


def _listed(keyword: str, group: type, name: str) -> inspect.Parameter:
    """An option as a parameter, for what lists parameters."""
    default = default_of(group, name)
    shown = default.value if isinstance(default, Enum) else default
    kind = group.__annotations__[name]
    return inspect.Parameter(
        keyword, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=kind
    )


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
    return text if len(text) <= 40 else f"{text[:40]}…"
