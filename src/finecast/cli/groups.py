"""Groups of options that verbs share: a dataclass whose fields are options.

Law: Typer reads from ``expanded(run)`` the parameters of ``run``, each one whose type is a
dataclass replaced by that dataclass's fields, in order. ``run`` is called with dataclasses
made of the values given for these fields.

The dataclasses of the Python API state an ``Option`` at each field that users give: its help,
its names, and how it is read. ``Annotated[DataOptions, Only("data", "labels")]`` takes some of
these. Options that a shell alone has, as those of the Neuron compilers, are such dataclasses,
too.

Law: ``given_in`` names the options of such dataclasses that have other values than their
defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_type_hints

import typer

from finecast.naming import Option, default_of, options_of
from finecast.plugin import option_groups

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Only:
    """Names the fields of a dataclass that a verb takes, and those that it needs.

    Without names it takes all.
    """

    def __init__(self, *names: str, required: tuple[str, ...] = ()) -> None:
        self.names = names
        self.required = required


class FromPlugins:
    """Marks the parameter that takes a verb's options of plugins: a list of dataclasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A dataclass in a verb's signature, and the fields of it that are options."""

    made: type
    only: Only

    @classmethod
    def of(cls, hint: Any) -> _Group | None:
        """The group that a parameter's type states; None for a parameter of its own."""
        kind, *stated = get_args(hint) if get_args(hint) else (hint,)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            return None
        only = next((one for one in stated if isinstance(one, Only)), Only())
        return cls(made=kind, only=only)

    @property
    def options(self) -> dict[str, Option]:
        """The options that its fields state, by name."""
        names = self.only.names
        return {n: o for n, o in options_of(self.made).items() if not names or n in names}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """What Typer reads."""
        for name, option in self.options.items():
            required = name in self.only.required
            default = default_of(self.made, name)
            shown = inspect.Parameter.empty if required else _shown(option, default)
            kind = _annotation(name, option, default, optional=shown is None)
            yield inspect.Parameter(name, _KEYWORD, default=shown, annotation=kind)

    def make(self, given: dict[str, Any]) -> Any:
        """The dataclass of the values that Typer gives, which are taken out of ``given``."""
        values: dict[str, Any] = {}
        for name, option in self.options.items():
            value, default = given.pop(name), default_of(self.made, name)
            if value not in (_shown(option, default), []):
                values[name] = not value if _negated(option, default) else value
        return self.made(**values)


def expanded(run: Callable[..., Any], verb: str = "") -> Callable[..., Any]:
    """``run`` with parameters that Typer can read: none is a dataclass.

    A parameter with the mark ``FromPlugins`` becomes the options of plugins for the ``verb``.
    """
    hints = get_type_hints(run, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, _Group] = {}
    added: dict[str, list[_Group]] = {}
    for name, parameter in inspect.signature(run).parameters.items():
        if any(isinstance(mark, FromPlugins) for mark in get_args(hints[name])):
            added[name] = [_Group(made=kind, only=Only()) for kind in option_groups(verb)]
            parameters += [p for group in added[name] for p in group.parameters()]
            continue
        group = _Group.of(hints[name])
        if group is None:
            parameters.append(parameter.replace(annotation=hints[name], kind=_KEYWORD))
            continue
        groups[name] = group
        parameters += group.parameters()

    @functools.wraps(run)
    def call(**given: Any) -> Any:
        instances: dict[str, Any] = {name: g.make(given) for name, g in groups.items()}
        instances |= {
            name: [g.make(given) for g in several] for name, several in added.items()
        }
        return run(**given, **instances)

    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def given_in(*groups: Any) -> list[str]:
    """The options of these dataclasses that were given: values that are not the defaults."""
    return [
        "--" + (option.flags or (name,))[0].lstrip("-").partition("/")[0].replace("_", "-")
        for group in groups
        for name, option in options_of(type(group)).items()
        if getattr(group, name) != default_of(type(group), name)
    ]


def _negated(option: Option, default: Any) -> bool:
    """Whether the option makes False what is True by default."""
    return default is True and option.flags != () and "/" not in option.flags[0]


def _shown(option: Option, default: Any) -> Any:
    """The default value as Typer shows it, before an option is converted."""
    if _negated(option, default):
        return False
    if option.many:
        return None
    return default.value if isinstance(default, Enum) else default


def _annotation(name: str, option: Option, default: Any, *, optional: bool) -> Any:
    """The type of an option for Typer, with its help."""
    kind: Any = list[option.kind] if option.many else option.kind
    switch = "--" + name.replace("_", "-")
    flags = option.flags or ((switch,) if default is False else ())
    stated = typer.Option(*flags, metavar=option.metavar, help=option.help, min=option.least)
    return Annotated[kind | None if optional else kind, stated]
