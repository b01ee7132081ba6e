"""``finecast prices``, and the runs of ``tune`` that write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finecast.errors import ExitCode
from finecast.measure import prices
from finecast.measure.prices import PriceBook
from tests.cli.conftest import Answer


def test_prices_are_listed_and_cleared(finecast: Callable[..., Answer]) -> None:
    assert "no times of kernels" in finecast("prices").out
    book = PriceBook.here("openvino", "CPU")
    assert book is not None
    book.add({"kernel": 1.0})
    told = finecast("prices", "--json").json
    assert told["path"] == str(book.path)
    assert [(m["machine"], m["prices"]) for m in told["machines"]] == [(book.label, 1)]
    assert "forgotten: 1 time of kernels" in finecast("prices", "--clear").out
    assert prices.machines(book.path) == []


def test_a_damaged_book_is_removed_and_that_is_said(finecast: Callable[..., Answer]) -> None:
    path = prices.default_path()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("garbage")
    answer = finecast("prices", "--clear")
    assert "the kept times of kernels were damaged, and start anew" in answer.err
    assert not path.exists()


def test_tune_keeps_prices(
    finecast: Callable[..., Answer], mlp: Path, data: Path, tmp_path: Path
) -> None:
    book = prices.default_path()
    assert book is not None
    book.parent.mkdir(parents=True, exist_ok=True)
    book.write_text("garbage")
    answer = finecast(
        "tune", mlp, "-o", tmp_path / "low.onnx", "--data", data, "--metric", "top1",
        "--engine", "openvino",
    )  # fmt: skip
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert "start anew" in answer.err
    assert prices.machines(book)


def test_tune_says_once_that_the_cache_folder_cannot_be_used(
    finecast: Callable[..., Answer], mlp: Path, data: Path, tmp_path: Path
) -> None:
    book = prices.default_path()
    assert book is not None
    book.parent.parent.mkdir(parents=True, exist_ok=True)
    book.parent.write_text("a file in its place")
    answer = finecast(
        "tune", mlp, "-o", tmp_path / "low.onnx", "--data", data, "--metric", "top1",
        "--engine", "openvino",
    )  # fmt: skip
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert answer.err.count(str(book)) == answer.err.count("no time is kept") == 1
    answer = finecast("prices", "--clear")
    assert answer.code == ExitCode.FAILED
    assert f"error: the timing cache cannot be used: Not a directory ({book})" in answer.err
