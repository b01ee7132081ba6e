"""The arguments of Python's verbs: their types, and options by their names.

A verb takes few values that have names of their own, as ``data``. Its ``**options`` are single
options of the dataclasses that such values are: ``tune(m, data=x, metric="top1")`` is
``tune(m, data=DataOptions(data=x, metric="top1"))``. Editors and ``help`` list them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from finecast.calls import checking, keywords_of
from finecast.data.criterion import Criterion, CriterionKind
from finecast.devices.emulation import Emulation
from finecast.errors import UsageError
from finecast.naming import default_of, options_of
from finecast.native.artefact import Destination
from finecast.planning.plan import Plan
from finecast.tuning.goal import Goal

C = TypeVar("C", bound=Callable[..., Any])
G = TypeVar("G")

# What None means is each function's own; arguments that are not here are checked where they
# are read.
_EXPECTED: Final[Mapping[str, tuple[Any, str]]] = {
    "output": ((str, Path, Destination), "a path"),
    "plan": ((str, Path, Plan), "a plan or its path"),
    "goal": (Goal, "a Goal"),
    "criterion": ((str, CriterionKind, Criterion), "relative, absolute or a Criterion"),
    "engine": (str, "a name"),
    "node": (str, "the name of an op (plan= is for a plan)"),
    "target": ((str, Emulation), "the name of a device, or one with options,"),
    "progress": ((Callable, bool), "True, False or a function of each step"),
}


def checked(*groups: type, verb: str = "") -> Callable[[C], C]:
    """A decorator of a verb that checks its arguments, as ``calls.checks``.

    Args:
        groups: The dataclasses among whose options are the verb's typed keywords.
        verb: What messages call it; by default the function's name.
    """

    def decorated(function: C) -> C:
        stated = keywords_of(function) or ()
        options = {
            keyword: (group, name, option)
            for group in groups
            for name, option in options_of(group).items()
            for keyword in option.keywords or (name,)
            if keyword in stated
        }
        expected = {k: option.expected for k, (_, _, option) in options.items()} | _EXPECTED
        call: Any = checking(function, expected=expected, name=verb)
        signature = inspect.signature(function)
        listed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed += [
            inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
            for keyword in stated
            if keyword in _EXPECTED and keyword not in options
        ]
        listed += [_listed(keyword, group, n) for keyword, (group, n, _) in options.items()]
        call.__signature__ = signature.replace(parameters=listed)
        return cast("C", call)

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
            if value is not argument and value != default_of(group, name):
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
