"""What the plugin for reports adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin, Verb

PLUGIN: Final = Plugin(
    name="report",
    summary="reports as pages, files for Model Explorer, pictures of the frontier",
    verbs=(
        Verb(
            "report",
            "What tune found and why, as one page that opens without network.",
            "finecast_report.command",
        ),
    ),
    names={
        "finecast.reports.page_of": "finecast_report.page:page_of",
        "finecast.reports.picture": "finecast_report.frontier:picture",
        "finecast.reports.write_model_explorer": (
            "finecast_report.model_explorer:write_model_explorer"
        ),
    },
)
