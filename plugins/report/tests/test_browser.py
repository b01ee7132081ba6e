"""The page in a browser: it draws itself without an error and without a request.

Skipped where there is no Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from finecast_report.page import page_of
from plugins.report.tests.test_page import HOSTILE
from tests.reports import made

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.slow,
]


def drawn(page: str, folder: Path) -> str:
    """The page's elements once its script has run."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    # The console is not printed by a browser without a window: errors are put into the page.
    trap = (
        "<script>addEventListener('error',e=>document.documentElement.dataset.error=e.message);"
        "addEventListener('securitypolicyviolation',"
        "e=>document.documentElement.dataset.error=e.violatedDirective)</script>"
    )
    policy = re.compile(r"script-src 'sha256-[^']*'")
    file.write_text(
        policy.sub("script-src 'unsafe-inline'", page).replace("<title>", f"{trap}<title>")
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, timeout=120, check=True
    )
    found = done.stdout.decode()
    assert "data-error" not in found
    return found


def test_each_section_is_drawn(tmp_path: Path) -> None:
    found = drawn(page_of(made.everything()), tmp_path)
    sections = re.findall(r'<section id="(\w+)"', found)
    assert sections == [
        "plans",
        "limits",
        "repairs",
        "blame",
        "diff",
        "time",
        "choices",
        "values",
        "ops",
        "graph",
        "tuning",
    ]
    assert "as fast, measured" in found
    assert found.count('class="dot') == 3  # fp32 and two plans
    assert "bar over" in found  # a value out of fp16's range
    assert "input 0 times 2<sup>-2</sup>" in found
    assert "by itself in reduced precision it makes an error of 40% of the output" in found
    assert "[object" not in found


def test_a_bin_up_to_half_of_the_smallest_number_becomes_zero(tmp_path: Path) -> None:
    """In fp16 all magnitudes up to 2**-25 do, so one of the two bins around that."""
    content = made.content()
    for value in content["values"]:
        value["facts"] = value["facts"] | {
            "first": -26,
            "binades": [1, 3],
            "count": 4,
            "infs": 0,
        }
    assert "25% become zero" in drawn(page_of(content), tmp_path)


def test_a_plan_alone_has_a_page(tmp_path: Path) -> None:
    report = made.without_search(made.result()).report()
    found = drawn(page_of(report.content), tmp_path)
    assert "Its speed and accuracy are in the study of its run" in found
    assert "not known: " in found


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    content = made.renamed(made.everything(), "".join(HOSTILE))
    found = drawn(page_of(content), tmp_path)
    assert "<img" not in found
    assert found.count("<script") == 3
    assert "\\u202e" in found


def test_ten_thousand_ops_are_drawn(tmp_path: Path) -> None:
    found = drawn(page_of(made.content(10_000)), tmp_path)
    assert "10,000 ops" in found
    assert found.count('role="row"') < 300  # only rows in sight are elements
