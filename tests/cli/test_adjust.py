"""``--adjust``: asked for, told, explained, and refused where it would do nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finecast.errors import ExitCode
from finecast.planning.biases import RULE
from tests.cli.conftest import Answer
from tests.kernels import skip_without_int8
from tests.native.test_adjusting import BIASES, X, written

Finecast = Callable[..., Answer]
INT8 = ["--auto-cast", "all", "--auto-cast-type", "int8", "--engine", "openvino"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    skip_without_int8()
    np.savez(tmp_path / "x.npz", x=X)
    return written(tmp_path / "net.onnx"), tmp_path / "x.npz"


def test_it_is_told_and_explained(finecast: Finecast, files: tuple[Path, Path]) -> None:
    net, data = files
    out, plan = net.with_name("low.onnx"), net.with_name("plan.json")
    asked = [*INT8, "--data", data, "--adjust", "bias", "--plan-out", plan]
    found = finecast("convert", net, "-o", out, *asked, "--json").json
    (gain,) = found["adjustments"]
    assert (gain["kind"], gain["operands"]) == ("bias", len(BIASES))
    errors = gain["relative_error"]
    assert errors["with"] < errors["without"]
    told = finecast("convert", net, "-o", out, *asked, "--force").out
    assert f"bias: {len(BIASES)} operands, relative output error" in told
    for node in ("head", "bias", "one"):
        said = finecast("explain", net, node, "--plan", plan, "--json").json
        assert RULE in {verdict["rule"] for verdict in said["verdicts"]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--auto-cast-type", "bf16", "--adjust", "bias"], "--auto-cast-type int8"),
        (["--auto-cast-type", "int8", "--adjust", "biass"], "did you mean bias"),
        (["--auto-cast-type", "int8", "--adjust", "equalise"], "range, bias, none"),
        (["--auto-cast-type", "int8", "--adjust", "bias,none"], "name each once"),
        (["--auto-cast-type", "int8", "--adjust", "bias,bias"], "name each once"),
    ],
)
def test_what_it_cannot_be_for_is_refused(
    finecast: Finecast, files: tuple[Path, Path], options: list[str], says: str
) -> None:
    net, data = files
    answer = finecast(
        "convert", net, "-o", net.with_name("low.onnx"), "--data", data, *options
    )
    assert answer.code == ExitCode.USAGE
    assert says in answer.err
