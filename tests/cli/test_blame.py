"""``finecast blame`` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.blame_nets import to_fp16
from finecast.errors import ExitCode
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]


@pytest.fixture
def low(net: Path) -> Path:
    """The net in fp16."""
    path = net.with_name("low.onnx")
    onnx.save(to_fp16(onnx.load(net)), path)
    return path


@pytest.fixture
def wrong(low: Path) -> Path:
    """The same, whose product has other weights."""
    model = onnx.load(low)
    (weight,) = (t for t in model.graph.initializer if t.name == "w")
    rolled = np.ascontiguousarray(np.roll(numpy_helper.to_array(weight), 1, axis=1))
    weight.CopyFrom(numpy_helper.from_array(rolled, "w"))
    path = low.with_name("wrong.onnx")
    onnx.save(model, path)
    return path


def test_the_culprit_is_named_with_what_to_do(
    finecast: Finecast, net: Path, wrong: Path, data: Path
) -> None:
    done = finecast("blame", str(net), str(wrong), "--data", str(data))
    assert done.code == ExitCode.NOT_IMPROVED
    assert done.out.startswith("1 op to blame: relative output error ")
    assert "to keep fp32: --exclude '^product$'" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    told = finecast("blame", str(net), str(wrong), "--data", str(data), "--json")
    assert told.code == ExitCode.NOT_IMPROVED
    (culprit,) = told.json["culprits"]
    assert (culprit["node"], culprit["format"]) == ("product", "fp16")
    assert told.json["first_wrong"]["node"] == "product"
    assert told.json["restored"] <= told.json["limit"] < told.json["value"]


def test_a_right_model_ends_with_0(
    finecast: Finecast, net: Path, low: Path, data: Path
) -> None:
    done = finecast("blame", str(net), str(low), "--data", str(data))
    assert done.code == ExitCode.DONE
    assert done.out.startswith("nothing to blame: relative output error ")
    assert "evaluation" in done.out


def test_a_check_from_a_file(
    finecast: Finecast, net: Path, wrong: Path, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "check.py"
    file.write_text("def close(name, low, fp32):\n    return abs(low - fp32).max() < 0.1\n")
    line = ("blame", str(net), str(wrong), "--data", str(data))
    done = finecast(*line, "--check", f"{file}:close", "--json")
    assert done.code == ExitCode.NOT_IMPROVED
    assert [c["node"] for c in done.json["culprits"]] == ["product"]
    file.write_text("def close(name, low, fp32):\n    return 1 / 0\n")
    failed = finecast(*line, "--check", f"{file}:close")
    assert failed.code == ExitCode.USER_CODE
    assert "the check function failed: ZeroDivisionError" in failed.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "there is no low model"),
        (("LOW", "--plan", "p.json"), "there is more than one low model"),
        (("LOW", "--auto-cast", "all"), "options of a compiler need its device"),
        (("LOW", "--metric", "top1", "--max-error", "1"), "judged in two ways"),
    ],
)
def test_options_that_do_not_fit(
    finecast: Finecast, net: Path, low: Path, data: Path, words: tuple[str, ...], text: str
) -> None:
    given = [str(low) if word == "LOW" else word for word in words]
    done = finecast("blame", str(net), *given, "--data", str(data))
    assert done.code == ExitCode.USAGE
    assert text in done.err
