"""A plan from anywhere: read as it is, or refused in words of finecast's, and short ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import finecast
from finecast.errors import ExitCode, FinecastError, UsageError
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from tests.kernels import state_kernels
from tests.tampered import PYTHON, tampered

DIGITS = Path("examples/digits/digits.onnx")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of several formats, with scales, reasons and the model's structure."""
    with np.load("examples/digits/digits_calib.npz") as data:
        samples = {"image": data["image"][:8]}
    with pytest.MonkeyPatch.context() as patch:
        state_kernels(patch, "openvino", {Format.INT8: True})  # it is not run
        return finecast.convert(DIGITS, None, "all:int8,bf16", data=samples, verify=False).plan


def test_any_value_in_a_plan_is_read_or_refused_in_plain_words(plan: Plan) -> None:
    refused: dict[str, FinecastError] = {}
    for what, text in tampered(plan.to_json()):
        try:
            read = Plan.from_json(text)
            finecast.diff(read, plan)
            repr(finecast.report(read))
        except FinecastError as error:
            refused[what] = error
    assert len(refused) > 100
    for what, found in refused.items():
        assert found.exit_code == ExitCode.USAGE, what
        assert not PYTHON.search(found.line), (what, found.line)
        assert len(found.what) <= 200, (what, found.what)
        assert len(found.line) < 700, (what, found.line)


def test_a_value_is_named_by_its_place(plan: Plan) -> None:
    content = json.loads(plan.to_json())
    content["decisions"][1]["op"] = None
    with pytest.raises(UsageError) as raised:
        Plan.from_json(json.dumps(content), where="my.plan.json")
    assert raised.value.line == (
        "not a finecast plan: op is None, expected text"
        " (my.plan.json, decisions[1]): give a file that `finecast tune` or"
        " `convert --plan-out` wrote, unchanged"
    )


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", "[]", "7", '"a"', "{}"])
def test_what_is_no_plan_at_all(text: str) -> None:
    with pytest.raises(UsageError, match="not a finecast plan") as raised:
        Plan.from_json(text)
    assert not PYTHON.search(raised.value.line)
