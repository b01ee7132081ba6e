"""What the plugin for Ray adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin

PLUGIN: Final = Plugin(
    name="ray",
    summary="evaluations on the machines of a Ray cluster",
    executors={"ray": "finecast_ray.cluster:ray_workers"},
)
