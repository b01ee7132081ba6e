"""``finecast diff``, and ``apply`` of a plan to another version of its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from finecast.cli import VERBS
from finecast.errors import ExitCode
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]
LOWERED = ("--auto-cast", "all", "--auto-cast-type", "bf16", "--no-verify")


@pytest.fixture
def again(net: Path) -> Path:
    """The net with other names of its nodes."""
    model = onnx.load(net)
    for number, node in enumerate(model.graph.node):
        node.name = f"op_{number}\x1b[31m"
    onnx.save(model, net.parent / "again.onnx")
    return net.parent / "again.onnx"


@pytest.fixture
def plan(finecast: Finecast, net: Path) -> Path:
    path = net.parent / "low.plan.json"
    answer = finecast(
        "convert", net, "-o", net.parent / "l.onnx", *LOWERED, "--plan-out", path
    )
    assert answer.code == ExitCode.DONE, answer.err
    return path


def test_a_model_and_itself(finecast: Finecast, net: Path) -> None:
    answer = finecast("diff", net, net)
    assert answer.code == ExitCode.DONE
    assert answer.out.splitlines()[-2:] == [
        "3 ops in both; 3 without a change",
        "nothing differs",
    ]


def test_a_model_and_its_conversion(
    finecast: Finecast, net: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(net.parent)
    low = Path("l.onnx")
    answer = finecast("diff", net.name, low)
    assert "fp32 -> bf16" in answer.out
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    every = finecast("diff", net, low, "--all").out
    assert all(name in every for name in ("product", "bias", "soft"))
    content = finecast("diff", net, low, "--json").json
    assert content["counts"]["type"] == 3
    assert {o["after"]["format"] for o in content["ops"] if o["before"]} == {"bf16"}
    reverse = finecast("diff", low, net, "--json").json
    assert reverse["counts"]["gone"] == content["counts"]["new"]


def test_a_plan_and_a_new_version(
    finecast: Finecast, net: Path, plan: Path, again: Path
) -> None:
    answer = finecast("diff", plan, again)
    assert "3 ops in both, 3 of them by other names" in answer.out
    assert "if it is applied: 3 of its 3 ops are here" in answer.out
    out = net.parent / "again_low.onnx"
    applied = finecast("apply", plan, again, "-o", out, "--no-verify")
    assert applied.code == ExitCode.DONE, applied.err
    assert "of this model, read from elsewhere: 3 of its 3 ops" in " ".join(
        applied.err.split()
    )
    assert "\x1b" not in answer.out + applied.err
    types = finecast("diff", again, out, "--json").json
    assert types["counts"]["type"] == 3


def test_a_plan_and_another_model(
    finecast: Finecast, mlp: Path, plan: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.onnx"
    answer = finecast("apply", plan, mlp, "-o", out, "--no-verify")
    assert answer.code == ExitCode.FAILED
    assert "made for another model" in answer.err
    assert not out.exists()


def test_what_cannot_be_compared(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    answer = finecast("diff", net, tmp_path / "none.onnx")
    assert answer.code == ExitCode.USAGE
    (tmp_path / "other.json").write_text("{}")
    answer = finecast("diff", tmp_path / "other.json", net)
    assert answer.code == ExitCode.USAGE
    assert "not a finecast plan" in answer.err


def test_a_plan_explains_another_file_of_its_model(
    finecast: Finecast, plan: Path, again: Path, mlp: Path
) -> None:
    """A plan made in Python of an object is one of another file, with the same ops."""
    answer = finecast("explain", again, "--plan", plan)
    assert answer.code == ExitCode.DONE, answer.err
    assert "of this model, read from elsewhere" in answer.err
    if "report" in VERBS:
        assert finecast("report", plan, again).code == ExitCode.DONE
    refused = finecast("explain", mlp, "--plan", plan)
    assert refused.code == ExitCode.FAILED
    assert "made for another model" in refused.err
