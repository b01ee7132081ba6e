"""The report names what is above its bar, and how many architectures each stage ran with."""

from zoo.outcome import Outcome, Status
from zoo.report import render


def converted(network: str, error: float) -> Outcome:
    figures = {"autocast": 0.004, "all": error, "auto": 0.0}
    return Outcome(network=network, stage="convert", status=Status.OK, figures=figures)


def test_an_error_above_the_bar_is_named() -> None:
    text = render([converted("bert", 0.004), converted("vit", 0.0064)])
    assert "median 1.30, most 1.60 (vit); above the bar of 1.5: vit 1.60.\n" in text
    assert "median 0.00, most 0.00 (vit); above the bar of 1.5: none." in text


def test_each_stage_tells_how_many_it_was_run_with() -> None:
    text = render([converted("bert", 0.004), converted("vit", 0.004)])
    assert "| convert | 2 of 66 | 2 |" in text
    assert "| compile | 0 of 66 |" in text
