"""What finecast leaves in the SavedModels that it writes, for whoever reads one again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

NOTES_FILE: Final = Path("assets.extra") / "finecast.json"
POLICY: Final = "policy"
"""The note of the policy that the model was converted by."""


def notes_in(folder: Path) -> dict[str, str]:
    """The notes in a SavedModel; none where there are none that can be read."""
    try:
        found: Any = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    notes = cast("dict[str, object]", found)
    return {key: str(value) for key, value in notes.items()}


def converted_to(notes: Mapping[str, str]) -> str:
    """The policy of the conversion that left such notes; empty if there was none."""
    return notes.get(POLICY, "")


def stays_low(folder: Path) -> str:
    """What is to be said of a SavedModel by who takes no conversion back; empty if of none."""
    policy = converted_to(notes_in(folder))
    if not policy:
        return ""
    return (
        f"the SavedModel was converted by finecast before, to {policy}, and OpenVINO reads it"
        " as it is: what is low in it stays low; give the model that it was made from"
    )
