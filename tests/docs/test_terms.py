"""Messages and pages have the words of the field."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from scripts import terms


def test_no_term_of_finecasts_own_is_left() -> None:
    assert [str(use) for use in terms.uses()] == []


@cache
def texts() -> tuple[str, ...]:
    return tuple(text for _, _, text in terms.texts())


@pytest.mark.parametrize("pattern", terms.ALLOWED)
def test_each_allowed_use_is_used(pattern: str) -> None:
    assert any(re.search(pattern, text, re.I) for text in texts())


def test_terms_are_found_in_messages_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "docs").mkdir()
    source = (
        '"""A low docstring."""\nx = f"the low {1} model"\nraise ValueError("it was told")\n'
    )
    source += 'progress("rungs", 1)\nTable(left=("op", "unit"))\nkeys = {"low": 1}\n'
    (tmp_path / "src" / "m.py").write_text(source)
    script = 'const key = "low", text = `the low ${plan} model`; // "a low comment"\n'
    (tmp_path / "src" / "m.js").write_text(script)
    page = "Two plans race.\n```\nlow = 1\n```\n`low` and a race-free [low](low.md).\n"
    page += "In openvino it is 1.64 x as fast; --engine openvino: x1.64.\n"
    (tmp_path / "docs" / "page.md").write_text(page)
    (tmp_path / "README.md").write_text("exit codes")
    monkeypatch.setattr(terms, "ROOT", tmp_path)
    found = [(use.file.name, use.line, use.term) for use in terms.uses()]
    code = [("m.py", 2, "low"), ("m.py", 3, "told"), ("m.py", 4, "rungs"), ("m.py", 5, "unit")]
    page = [("page.md", 1, "race"), ("page.md", 5, "low")]
    page += [("page.md", 6, "1.64 x"), ("page.md", 6, "openvino")]
    assert found == [*code, ("m.js", 1, "low"), *page]
