"""Groups of options that verbs share: a dataclass whose fields are options.

Law: Typer reads from ``expanded(run)`` the parameters of ``run``, each one whose type is a
dataclass replaced by that dataclass's fields, in order. ``run`` is called with dataclasses
made of the values given for these fields.

Law: ``given_in`` names the options of such dataclasses that have other values than their
defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def expanded(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with parameters that Typer can read: none is a dataclass."""
    hints = get_type_hints(run, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    for name, given in inspect.signature(run).parameters.items():
        kind = hints[name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(given.replace(annotation=kind, kind=_KEYWORD))
            continue
        groups[name] = kind, tuple(f.name for f in fields(kind))
        inner = get_type_hints(kind, include_extras=True)
        parameters += [_parameter(f, inner[f.name]) for f in fields(kind)]

    @functools.wraps(run)
    def call(**given: Any) -> Any:
        made = {
            name: kind(**{field: given.pop(field) for field in names})
            for name, (kind, names) in groups.items()
        }
        return run(**given, **made)

    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def given_in(*groups: Any) -> list[str]:
    """The options of these dataclasses that were given: values that are not the defaults."""
    return [
        _option(type(group), field)
        for group in groups
        for field in fields(group)
        if field.default is MISSING or getattr(group, field.name) != field.default
    ]


def _option(group: type, field: Field[Any]) -> str:
    """The name of a field's option: the first that it states, or the field's own."""
    (stated,) = get_type_hints(group, include_extras=True)[field.name].__metadata__
    # Typer keeps an option's first name where a function's default would stand.
    name = stated.default if isinstance(stated.default, str) else field.name
    return "--" + name.lstrip("-").partition("/")[0].replace("_", "-")


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, _KEYWORD, default=default, annotation=annotation)
