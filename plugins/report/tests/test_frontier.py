"""The picture of a search."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import finecast
from finecast.errors import UsageError
from finecast.tuning.goal import TuneRequest
from finecast_report.frontier import (
    baselines_of,
    picture,
    points_of,
    predicted_of,
)

SVG = "{http://www.w3.org/2000/svg}"


def step(name: str, ms: float, error: float, **known: Any) -> dict[str, Any]:
    measured = {"ms": known.get("latency_ms"), "relative_error": known.get("measured")}
    return {
        "name": name,
        "predicted": {"ms": ms, "relative_error": error},
        "measured": measured,
        "latency_ms": known.get("latency_ms"),
        "passed": known.get("passed"),
        "changes": known.get("changes", {"a": "fp32"}),
    }


@pytest.fixture
def found() -> dict[str, Any]:
    """A search over three steps: ops with a choice take 6 of fp32's 10 ms."""
    return {
        "verdict": "improved",
        "conditions": {},
        "baseline": {"latency_ms": 10.0},
        "tuned": {"latency_ms": 8.0},
        "frontier": [step("plan 0", 6, 0), step("plan 1", 4, 0.01), step("plan 2", 1, 0.05)],
        "candidates": [
            step("plan 1", 4, 0.01, latency_ms=8.0, measured=0.011, passed=True, changes={}),
            step("plan 2", 1, 0.05, latency_ms=5.0, passed=False),
            step("plan 3", 1, 0.06),
        ],
        "baselines": [{"name": "the hint", "latency_ms": 4.0, "metric": 0.9, "passed": True}],
    }


def test_times_of_ops_without_a_choice_are_part_of_each_prediction(
    found: dict[str, Any],
) -> None:
    assert predicted_of(found) == [(0, 1.0), (0.01, 10 / 8), (0.05, 2.0)]


def test_points_are_what_was_timed_with_measured_errors_where_there_are(
    found: dict[str, Any],
) -> None:
    points = {p.name: (p.kind, p.error, p.speed) for p in points_of(found)}
    assert points == {
        "fp32": ("passed", 0.0, 1.0),
        "plan 1": ("passed", 0.011, 1.25),
        "plan 2": ("failed", 0.05, 2.0),
    }
    assert baselines_of(found) == [("the hint", 2.5)]


def test_plans_keep_their_distance_from_the_chosen_one_in_the_last_race(
    found: dict[str, Any],
) -> None:
    """The chosen plan took 8 ms in the first race and 4 ms in the last one."""
    found["candidates"][0]["final_benchmark"] = {"gain": 2.5, "latency_ms": 4.0}
    speeds = {p.name: p.speed for p in points_of(found)}
    assert speeds == {"fp32": 1.0, "plan 1": 2.5, "plan 2": 4.0}


def test_the_picture_is_one_drawing_without_scripts_or_requests(found: dict[str, Any]) -> None:
    found["candidates"][0]["name"] = "<script>alert(1)</script>\x1b[31m"
    text = picture(found, "a & b <i>")
    drawn = ElementTree.fromstring(text)
    assert "<script" not in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert (
        len([c for c in drawn.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]) == 3
    )
    assert "the hint: x2.50" in [t.text for t in drawn.iter(f"{SVG}text")]
    assert "chosen: x1.25" in [t.text for t in drawn.iter(f"{SVG}text")]


def test_every_point_lies_inside(found: dict[str, Any]) -> None:
    drawn = ElementTree.fromstring(picture(found, "net"))
    for circle in drawn.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 720
        assert 0 <= float(circle.attrib["cy"]) <= 400


def test_a_search_that_found_nothing_has_a_picture(found: dict[str, Any]) -> None:
    found |= {"verdict": "unchanged", "candidates": [], "baselines": [], "frontier": []}
    drawn = ElementTree.fromstring(picture(found, "net"))
    assert "chosen: x1.00" in [t.text for t in drawn.iter(f"{SVG}text")]


def test_another_suffix_is_an_error_before_any_work() -> None:
    with pytest.raises(UsageError, match=r"written as .html, .svg or .json"):
        TuneRequest(report=Path("a.png"))


@pytest.mark.parametrize("objective", ["latency", "size", "memory"])
def test_a_search_draws_its_frontier(tmp_path: Path, objective: str) -> None:
    digits = Path(__file__).parents[3] / "examples" / "digits"
    result = finecast.tune(
        digits / "digits.onnx",
        data=digits / "digits_calib.npz",
        target="avx512-vnni",
        max_trials=1,
        objective=objective,
        report=tmp_path / "plans.svg",
    )
    drawn = (tmp_path / "plans.svg").read_text()
    assert "digits.onnx" in drawn
    assert "<svg" in result._repr_html_()
