"""``finecast cache``, and the runs of ``tune`` that write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finecast.errors import ExitCode
from finecast.measure import timing_cache
from finecast.measure.timing_cache import TimingCache
from tests.cli.conftest import Answer


def test_times_are_listed_and_cleared(finecast: Callable[..., Answer]) -> None:
    assert "no times of kernels" in finecast("cache").out
    cache = TimingCache.here("openvino", "CPU")
    assert cache is not None
    cache.add({"kernel": 1.0})
    told = finecast("cache", "--json").json
    assert told["path"] == str(cache.path)
    assert [(m["machine"], m["kernels"]) for m in told["machines"]] == [(cache.label, 1)]
    assert "forgotten: 1 time of kernels" in finecast("cache", "--clear").out
    assert timing_cache.machines(cache.path) == []


def test_a_damaged_book_is_removed_and_that_is_said(finecast: Callable[..., Answer]) -> None:
    path = timing_cache.default_path()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("garbage")
    answer = finecast("cache", "--clear")
    assert "the kept times of kernels were damaged, and start anew" in answer.err
    assert not path.exists()


def test_tune_uses_timing_cache(
    finecast: Callable[..., Answer], mlp: Path, data: Path, tmp_path: Path
) -> None:
    cache = timing_cache.default_path()
    assert cache is not None
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("garbage")
    answer = finecast(
        "tune", mlp, "-o", tmp_path / "low.onnx", "--data", data, "--metric", "top1",
        "--engine", "openvino",
    )  # fmt: skip
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert "start anew" in answer.err
    assert timing_cache.machines(cache)


def test_tune_says_once_that_the_cache_folder_cannot_be_used(
    finecast: Callable[..., Answer], mlp: Path, data: Path, tmp_path: Path
) -> None:
    cache = timing_cache.default_path()
    assert cache is not None
    cache.parent.parent.mkdir(parents=True, exist_ok=True)
    cache.parent.write_text("a file in its place")
    answer = finecast(
        "tune", mlp, "-o", tmp_path / "low.onnx", "--data", data, "--metric", "top1",
        "--engine", "openvino",
    )  # fmt: skip
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert answer.err.count(str(cache)) == answer.err.count("no time is kept") == 1
    answer = finecast("cache", "--clear")
    assert answer.code == ExitCode.FAILED
    assert f"error: the timing cache cannot be used: Not a directory ({cache})" in answer.err
