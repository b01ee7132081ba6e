"""What the plugin for Hugging Face adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin

PLUGIN: Final = Plugin(
    name="huggingface",
    summary="causal language models of Hugging Face's transformers",
    packages={"finecast.huggingface": "finecast_huggingface.language_models"},
)
