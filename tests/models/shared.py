"""Where the real models lie, and the cases that come with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[3] / "shared" / "models"


@lru_cache(maxsize=1)
def cases() -> Mapping[str, Any]:
    """Model, data and metric by name: ``cases.py`` beside the models."""
    spec = importlib.util.spec_from_file_location("cases", MODELS / "cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Mapping[str, Any] = module.CASES
    return found
