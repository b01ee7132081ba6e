"""The order in which ``--help`` lists options: those that most commands have first.

Law: every option of a verb is in one panel, by the name of its parameter; one that no panel
names is listed at the end.
"""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand

from finecast.naming import options_of
from finecast.plugin import load, plugins

PANELS: Final[dict[str, tuple[str, ...]]] = {
    "Options": (
        *("to", "path", "output", "plan", "data", "metric", "evaluate", "calib", "tolerance"),
        *("keep", "auto_cast_type", "engine", "target", "force", "resume", "ops", "every"),
        *("settings", "strict"),
        *("values", "as_json", "help"),
    ),
    "Data and metric": (
        *("labels", "sample_axes", "batch", "dims", "lower_is_better", "of"),
        *("slices",),
        *("decode_steps", "state", "kind", "max_drop", "confidence", "groups"),
        *("score_range",),
    ),
    "What is lowered": (
        *("auto_cast", "include", "exclude", "op_formats", "io", "keep_ops", "by_hint"),
        *("adjust", "calibration", "user_rules", "per_op"),
    ),
    "Search": (
        *("objective", "max_trials", "timeout_s", "start"),
        *("jobs", "executor", "check", "max_error"),
    ),
    "Timing": ("runs", "seconds", "memory"),
    "The model and files": (
        *("from_type", "freeze_inputs", "trust", "external_data", "verify", "clear"),
        *(
            "plan_out",
            "study",
            "lock",
            "report",
            "diff",
            "blame",
            "explorer",
        ),
        *("compile_with",),
    ),
}
"""Names of parameters by the panel's heading; options of plugins have panels of their own."""
_OTHERS: Final = "Other options"


def _of_plugins(verb: str) -> dict[str, tuple[str, ...]]:
    """The options that plugins add to a verb, by heading; those of other verbs stay unread."""
    groups = (group for plugin in plugins() for group in plugin.options if verb in group.verbs)
    return {group.heading: tuple(options_of(load(group.options))) for group in groups}


class PanelledCommand(TyperCommand):
    """A verb whose options are listed by panels, in the panels' order."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section for each panel that has options."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        arguments = [p.name or "" for p in self.params if p.param_type_name == "argument"]
        sections = {"Arguments": tuple(arguments), **PANELS, **_of_plugins(self.name or "")}
        listed = {name for names in sections.values() for name in names}
        sections[_OTHERS] = tuple(name or "" for name in records if name not in listed)
        for heading, names in sections.items():
            rows = [records[name] for name in names if name in records]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
