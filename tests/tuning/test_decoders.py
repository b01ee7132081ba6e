"""A decoder is tuned by tokens that it decodes one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import finecast
from finecast.data.workload import Workload
from finecast.engines import installed
from finecast.measure.racing import Effort, Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built
from tests import decoder

pytest.importorskip("torch", reason="the example trains with PyTorch")
pytestmark = pytest.mark.skipif(not installed("onnxruntime"), reason="needs ONNX Runtime")

# Low plans take half of fp32's time in a first call, and more than fp32 in a step.
FIRST_S, STEP_S = (10.0, 5.0), (1.0, 1.5)


def times(
    self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
) -> Race:
    """Stated times of the calls that the workload times."""
    lengths = [feeds["input_ids"].shape[1] for feeds in workload.timing()]

    def seconds(low: bool) -> float:
        return sum((STEP_S if length == 1 else FIRST_S)[low] for length in lengths)

    lowered = {name: one.plan.lowers for name, one in built.items()}
    return Race.stated(seconds(False), {name: seconds(low) for name, low in lowered.items()})


@pytest.mark.parametrize("objective", ["latency", "first_token", "tokens_per_second"])
def test_no_plan_loses_in_one_call_for_the_other_unasked(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSubject, "times", times)
    with np.load(decoder.folder() / "texts.npz") as data:
        texts = {name: data[name][:4] for name in data.files}
    result = finecast.tune(
        decoder.folder() / "decoder.onnx",
        tmp_path / "low.onnx",
        data=texts,
        policy="all:int8",
        engine="onnxruntime",
        objective=objective,
        metric="kld",
        tolerance=1.0,
        decode_steps=3,
        batch=4,
        progress=False,
    )
    told = "a step takes 1.5 of what fp32 takes"
    assert result.improved == (objective == "first_token")
    if objective == "first_token":
        assert result.gain == 2.0
        assert told in result.warnings
        assert 0 < result.tuned.metric <= 1
    if objective == "latency":
        assert f"by losing in the other: {told}" in result.why


def test_an_objective_of_decoding_needs_steps(tmp_path: Path) -> None:
    model = decoder.folder() / "decoder.onnx"
    with pytest.raises(finecast.UsageError, match=r"give decode_steps"):
        finecast.tune(
            model,
            data={"input_ids": np.zeros((2, 3), np.int64), **decoder.empty(2)},
            objective="first_token",
            engine="onnxruntime",
            progress=False,
        )
