"""What the plugin for other tools' configurations adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin, Verb

PLUGIN: Final = Plugin(
    name="export",
    summary="plans in the words of torchao, NNCF, ModelOpt and other tools",
    verbs=(
        Verb(
            "export",
            "Write a plan in the words of another tool.",
            "finecast_export.command",
        ),
    ),
    names={"finecast.export": "finecast_export.exporting:export"},
)
