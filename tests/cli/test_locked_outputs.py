"""A command is refused, before any work, where another one is writing its outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finecast.errors import ExitCode
from tests.cli.conftest import Answer
from tests.test_locks import held_elsewhere


@pytest.mark.parametrize(
    ("busy", "options"),
    [
        ("out.onnx", []),
        ("out.onnx", ["--force"]),
        ("out.plan.json", []),
        ("out.study.db", []),
    ],
)
def test_tune_is_refused(
    finecast: Callable[..., Answer],
    net: Path,
    data: Path,
    tmp_path: Path,
    busy: str,
    options: list[str],
) -> None:
    given = [o if o.startswith("--") else tmp_path / o for o in options]
    before = set(tmp_path.iterdir())
    with held_elsewhere(tmp_path / busy):
        answer = finecast(
            "tune",
            net,
            "-o",
            tmp_path / "out.onnx",
            "--data",
            data,
            "--metric",
            "top1",
            *given,
        )
    assert answer.code == ExitCode.USAGE
    assert "is being written by another finecast" in answer.err
    assert {p for p in tmp_path.iterdir() if p.suffix != ".lock"} == before


@pytest.mark.parametrize("busy", ["out.onnx", "low.json"])
def test_convert_is_refused(
    finecast: Callable[..., Answer], net: Path, tmp_path: Path, busy: str
) -> None:
    output, plan = tmp_path / "out.onnx", tmp_path / "low.json"
    with held_elsewhere(tmp_path / busy):
        answer = finecast("convert", net, "-o", output, "--plan-out", plan)
    assert answer.code == ExitCode.USAGE
    assert "is being written by another finecast" in answer.err
    assert not output.exists()


@pytest.mark.parametrize("verb", ["convert", "apply", "tune"])
def test_what_another_command_writes_is_not_called_stale(
    finecast: Callable[..., Answer], net: Path, data: Path, tmp_path: Path, verb: str
) -> None:
    output, plan = tmp_path / "out.onnx", tmp_path / "low.json"
    finecast("convert", net, "-o", output, "--plan-out", plan, "--auto-cast", "all")
    before = output.read_bytes()
    given = {
        "convert": [net],
        "apply": [plan, net],
        "tune": [net, "--data", data, "--metric", "top1"],
    }[verb]
    with held_elsewhere(output):
        answer = finecast(verb, *given, "-o", output, "--force")
    assert answer.code == ExitCode.USAGE
    assert "is being written by another finecast" in answer.err
    assert "STALE" not in answer.err
    assert output.read_bytes() == before
