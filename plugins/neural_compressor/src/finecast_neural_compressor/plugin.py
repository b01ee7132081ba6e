"""What the plugin for Intel Neural Compressor adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin

PLUGIN: Final = Plugin(
    name="neural_compressor",
    summary="the calls of Intel Neural Compressor 2.6",
    packages={"finecast.compat.neural_compressor": "finecast_neural_compressor"},
)
