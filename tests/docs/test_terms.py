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
    return tuple(text for _, _, text in (*terms.messages(), *terms.pages()))


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
    (tmp_path / "src" / "m.py").write_text(source)
    page = "Two plans race.\n```\nlow = 1\n```\n`low` and a race-free [low](low.md).\n"
    (tmp_path / "docs" / "page.md").write_text(page)
    (tmp_path / "README.md").write_text("exit codes")
    monkeypatch.setattr(terms, "ROOT", tmp_path)
    found = [(use.file.name, use.line, use.term) for use in terms.uses()]
    expected = [("m.py", 2, "low"), ("m.py", 3, "told"), ("page.md", 1, "race")]
    assert found == [*expected, ("page.md", 5, "low")]
