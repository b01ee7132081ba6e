"""What the plugin for RAF adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import Plugin

PLUGIN: Final = Plugin(
    name="raf",
    summary="RAF's casting rules, and rule functions in its notation",
    packages={"finecast.compat.raf": "finecast_raf"},
    rule_sets={"raf": "finecast_raf.rule_set:GUEST"},
)
