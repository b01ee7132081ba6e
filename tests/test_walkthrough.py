"""docs/architecture/ and the goldens show what the code prints today."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
STAGES = [
    "graph",
    "facts",
    "permissions",
    "permissions-measured",
    "units",
    "costs",
    "frontier",
    "plan",
    "edits",
    "onnx",
]


@pytest.fixture(scope="module")
def walkthrough() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walkthrough", DOCS / "walkthrough.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def artefacts(walkthrough: ModuleType) -> dict[str, str]:
    found: dict[str, str] = walkthrough.stages()
    return found


def test_every_stage_has_its_golden(artefacts: dict[str, str]) -> None:
    assert list(artefacts) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_stage(
    stage: str, artefacts: dict[str, str], check_golden: Callable[[str, str], None]
) -> None:
    check_golden(f"matmul_softmax/{stage}.txt", artefacts[stage])


def test_the_pages_are_up_to_date(walkthrough: ModuleType, artefacts: dict[str, str]) -> None:
    pages = [p.read_text(encoding="utf-8") for p in walkthrough.PAGES]
    shown = re.findall("<!-- walkthrough: ([^ ]+) -->", "".join(pages))
    assert sorted(shown) == sorted(STAGES)
    for page in pages:
        assert walkthrough.render(page, artefacts) == page, "run python -m docs.walkthrough"


def test_the_page_describes_every_layer() -> None:
    root = DOCS.parent
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers: list[str] = next(c for c in contracts["contracts"] if c["id"] == "layers")[
        "layers"
    ]
    page = (DOCS / "architecture" / "index.md").read_text(encoding="utf-8")
    table = page.partition("## Layers")[2].partition("## What a new")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    listed = {name for layer in layers for name in re.split(r"\s*[|:]\s*", layer)}
    modules = {p.stem for p in (root / "src" / "finecast").iterdir()}
    assert len(described) == len(set(described))
    assert listed <= set(described) <= modules
