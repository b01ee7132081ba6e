"""Notes that finecast writes into its SavedModels, and reads when it is given one again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

NOTES_FILE: Final = Path("assets.extra") / "finecast.json"
POLICY: Final = "policy"
"""The key of the note that names the policy of the conversion."""


def notes_in(folder: Path) -> dict[str, str]:
    """The notes in a SavedModel; empty if there are none, or they cannot be read."""
    try:
        found: Any = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    notes = cast("dict[str, object]", found)
    return {key: str(value) for key, value in notes.items()}


def converted_to(notes: Mapping[str, str]) -> str:
    """The policy of the conversion that wrote the notes; empty if there was none."""
    return notes.get(POLICY, "")


def stays_low(folder: Path) -> str:
    """The warning for a converted SavedModel whose reader takes no conversion back.

    Empty if finecast did not convert it.
    """
    policy = converted_to(notes_in(folder))
    if not policy:
        return ""
    return (
        f"the SavedModel was converted by finecast before, to {policy}, and OpenVINO reads it"
        " as it is: what is low in it stays low; give the model that it was made from"
    )
