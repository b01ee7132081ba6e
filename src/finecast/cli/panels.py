"""The order in which ``--help`` lists options, and how many of them it lists.

Laws: every option of a verb is in one panel, by the name of its parameter; one that no panel
names is listed at the end. Of a verb with many options ``--help`` lists the first panel alone,
each option by the first sentence of its help; ``--help-all`` lists all in full.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from finecast.naming import options_of
from finecast.plugin import load, plugins

HELP_ALL: Final = "help_all"
_PLAIN: Final = {
    "<str>": "TEXT",
    "<path>": "FILE",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
}
_BRACED: Final = re.compile(r"\{(.+?)(?:\.{3})?\}")
_FIRST: Final = "Options"
PANELS: Final[dict[str, tuple[str, ...]]] = {
    _FIRST: (
        *(
            "to",
            "path",
            "model",
            "output",
            "plan",
            "data",
            "metric",
            "evaluate",
            "calib",
            "max_drop",
        ),
        *("check", "max_error", "auto_cast", "auto_cast_type", "exclude", "engine", "target"),
        *("preset", "dims", "verify", "force", "report", "ops", "every", "clear"),
        *("settings", "strict"),
        *("values", "verbose", "as_json", "help", "help_all"),
    ),
    "Accuracy": (
        *("confidence", "groups", "score_range", "lower_is_better", "of", "slices"),
        "tolerance",
    ),
    "Data": ("labels", "sample_axes", "batch", "decode_steps", "state"),
    "Formats of ops": (
        *("include", "op_formats", "io", "keep_ops", "by_hint"),
        *("adjust", "calibration", "user_rules", "per_op"),
    ),
    "Search": (
        *("objective", "max_size", "max_bits", "max_trials", "timeout_s", "start", "resume"),
        "executor",
    ),
    "Timing": ("runs", "seconds", "memory"),
    "The model and files": (
        *("from_type", "freeze_inputs", "trust", "external_data"),
        *("plan_out", "study", "lock", "diff", "blame", "explorer"),
        *("compile_with",),
    ),
}
"""Names of parameters by the panel's heading; options of plugins have panels of their own."""
FIRST: Final[dict[str, tuple[str, ...]]] = {
    "tune": (
        *("path", "data", "metric", "evaluate", "calib", "max_drop", "preset"),
        *("engine", "target", "report", "force", "as_json", "help", "help_all"),
    ),
}
"""The first panel of verbs that have another one. What it leaves out is in ``_LATER``."""
_LATER: Final = dict.fromkeys(("auto_cast_type", "auto_cast", "exclude"), "Formats of ops")
"""The panels of what the first panel of a verb leaves out."""
_OTHERS: Final = "Other options"
_MANY: Final = 20
"""Options from which on ``--help`` lists the first panel alone."""
_ADDED = re.compile(r"  \[[^][]*\]$")
"""What Typer adds to a help text: the default, or that an option is required."""


def _of_plugins(verb: str) -> dict[str, tuple[str, ...]]:
    """The options that plugins add to a verb, by heading; those of other verbs stay unread."""
    groups = (group for plugin in plugins() for group in plugin.options if verb in group.verbs)
    return {group.heading: tuple(options_of(load(group.options))) for group in groups}


def panels_of(verb: str) -> dict[str, tuple[str, ...]]:
    """The names of parameters by heading for one verb."""
    first = FIRST.get(verb, PANELS[_FIRST])
    panels = {**PANELS, _FIRST: first}
    for name, heading in _LATER.items():
        if name not in first:
            panels[heading] = (name, *panels[heading])
    return {**panels, **_of_plugins(verb)}


def _first_sentence(text: str) -> str:
    """The first sentence of a help text, and what Typer adds to it."""
    added = _ADDED.search(text)
    body = text if added is None else text[: added.start()]
    sentence, stop, _ = body.partition(". ")
    return sentence + stop.strip() + ("" if added is None else added.group())


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        command: Any = context.command
        command.shows_all = True
        typer.echo(context.get_help())
        raise typer.Exit


def helping(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the option by which a verb prints its whole help."""
    option = typer.Option(
        "--help-all", help="Show all options.", callback=_show_all, is_eager=True
    )
    signature, keyword = inspect.signature(run), inspect.Parameter.KEYWORD_ONLY
    added = inspect.Parameter(
        HELP_ALL, keyword, default=False, annotation=Annotated[bool, option]
    )

    @functools.wraps(run)
    def call(**given: Any) -> Any:
        del given[HELP_ALL]
        return run(**given)

    call.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[*signature.parameters.values(), added]
    )
    call.__annotations__ = {**run.__annotations__, HELP_ALL: added.annotation}
    return call


def plain_value(name: str) -> str:
    """An option or argument with plain words for the types of its values, not Typer's."""
    if not name.startswith("-"):
        return name.partition(" ")[0]
    for typed, plain in _PLAIN.items():
        name = name.replace(f" {typed}", f" {plain}")
    return name


class PanelledCommand(TyperCommand):
    """A verb whose options are listed by panels, in the panels' order."""

    shows_all = False

    @property
    def is_long(self) -> bool:
        """Whether it has so many options that the first ones are listed alone."""
        return len([p for p in self.params if p.param_type_name == "option"]) > _MANY

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; Typer puts names of required arguments in braces."""
        pieces = super().collect_usage_pieces(ctx)
        return [_BRACED.sub(r"\1", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section for each panel that has options."""
        records = {
            param.name: (plain_value(record[0]), record[1])
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
            and (self.is_long or param.name != HELP_ALL)
        }
        arguments = [p.name or "" for p in self.params if p.param_type_name == "argument"]
        sections = {"Arguments": tuple(arguments), **panels_of(self.name or "")}
        listed = {name for names in sections.values() for name in names}
        sections[_OTHERS] = tuple(name or "" for name in records if name not in listed)
        short = self.is_long and not self.shows_all
        if short:
            more = len(
                [name for name in records if name not in {*arguments, *sections[_FIRST]}]
            )
            flag, _ = records[HELP_ALL]
            records[HELP_ALL] = flag, f"Show all options, {more} more."
        for heading, names in sections.items():
            named = names if heading == "Arguments" else set(names).difference(arguments)
            rows = [records[name] for name in names if name in records and name in named]
            if short and heading not in ("Arguments", _FIRST):
                continue
            if short:
                rows = [(name, _first_sentence(text)) for name, text in rows]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
