"""Groups of options, stated once: a parameter whose type is a dataclass stands for its fields.

Law: for the command line ``expanded(run)`` has the parameters of ``run`` with every dataclass
replaced by its fields, in order; ``run`` itself gets the dataclasses, made of what was given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

_NAMED = inspect.Parameter.KEYWORD_ONLY


def expanded(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as Typer reads it: with plain annotated parameters alone."""
    hints = get_type_hints(run, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    for name, given in inspect.signature(run).parameters.items():
        kind = hints[name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(given.replace(annotation=kind, kind=_NAMED))
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


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, _NAMED, default=default, annotation=annotation)
