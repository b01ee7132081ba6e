"""The page: one well-formed file that asks nobody; names are text and nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finecast.errors import UsageError
from finecast_report.page import page_of
from tests.reports import made

CONTENT = made.content()
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    '"><img src=x onerror=alert(1)>',
    "\u2028\u202egnp.exe",
    "&lt;b&gt;",
)
VOID = {"meta", "link", "br", "img", "input"}


class Outline(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


EXPECTED = [tag for tag, _ in outline(page_of(CONTENT)).seen]


@given(st.sampled_from(HOSTILE) | st.text(max_size=40))
@settings(max_examples=60)
def test_no_name_is_markup(name: str) -> None:
    content = made.renamed(CONTENT, name)
    found = outline(page_of(content))
    assert [tag for tag, _ in found.seen] == EXPECTED
    assert json.loads(found.scripts[0]) == content


def test_a_page_asks_nobody_for_anything() -> None:
    page = page_of(CONTENT)
    found = outline(page)
    assert not any(
        {"src", "href", "srcset", "action"} & attributes.keys()
        for tag, attributes in found.seen
        if tag != "a"
    )
    assert [a["href"] for tag, a in found.seen if tag == "a"] == ["#report"]
    policy = next(a["content"] for _, a in found.seen if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_scripts_insert_text_and_no_markup() -> None:
    code = outline(page_of(CONTENT)).scripts[1]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in code
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", code)


@pytest.mark.long
def test_ten_thousand_ops_take_a_few_megabytes() -> None:
    page = page_of(made.content(10_000))
    assert len(page) < 12_000_000


def test_a_result_writes_its_page_and_data_once(tmp_path: Path) -> None:
    result = made.result()
    result.report(tmp_path / "r.html")
    result.report(tmp_path / "r.json")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "r.json").read_text()) == CONTENT
    with pytest.raises(UsageError, match="output exists"):
        result.report(tmp_path / "r.html")
    result.report(tmp_path / "r.html", force=True)
