"""What the plugin for the Model Context Protocol adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin, Verb

PLUGIN: Final = Plugin(
    name="mcp",
    summary="the verbs as tools for assistants",
    verbs=(
        Verb(
            "mcp",
            "Serve the verbs as tools of the Model Context Protocol.",
            "finecast_mcp.server",
        ),
    ),
)
