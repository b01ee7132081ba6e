"""Real models convert, check, keep their types and run. Skipped where they are not at hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.errors import EngineError
from finecast.numbers.formats import Format
from tests.models.shared import MODELS, cases

pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason=f"{MODELS} is absent")

NAMES = [
    "cifar10_resnet20",
    "sts_minilm_l6",
    "vad_silero",
    "vad_silero_step_if",
    "vad_silero_step_ifless",
    "speaker_ge2e_lstm",
]
POLICIES = ["all:bf16", "all:fp16", "matmult:bf16", "matmult:fp16"]
# OpenVINO cannot read it, and ONNX Runtime's CPU provider has no bf16: checked, not run.
NO_ENGINE = {("vad_silero_step_if", "bf16")}
# Rounding errors add up like a random walk over the ops in line, most of them not dominant;
# an output within this many unit roundoffs is rounded, one beyond is broken.
ROUNDOFFS = 64


def loaded(model: Path) -> Session:
    try:
        return get_engine("openvino").load(model)
    except EngineError:
        return get_engine("onnxruntime").load(model)


def ports(model: onnx.ModelProto) -> list[tuple[str, int]]:
    both = (*model.graph.input, *model.graph.output)
    return [(v.name, v.type.tensor_type.elem_type) for v in both]


def float_outputs(session: Session, feeds: Feeds) -> list[NDArray[np.float64]]:
    return [a.astype(np.float64) for a in session.run(feeds).values() if a.dtype.kind == "f"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_converts_and_runs(name: str, policy: str, tmp_path: Path) -> None:
    case, low = cases()[name], Format.parse(policy.partition(":")[2])
    source, output = Path(case.model()), tmp_path / "low.onnx"
    done = api.convert(source, output, policy, verify=False)
    assert low.label in done.plan.counts

    onnx.checker.check_model(output, full_check=True)
    converted = onnx.load(output)
    assert ports(converted) == ports(onnx.load(source))
    assert source.stat().st_size > output.stat().st_size or "matmult" in policy
    if (name, low.label) in NO_ENGINE:
        return
    feeds = next(iter(case.calib(1)))
    wanted = float_outputs(loaded(source), feeds)
    got = float_outputs(loaded(output), feeds)
    for y, r in zip(got, wanted, strict=True):
        assert y.shape == r.shape
        assert np.isfinite(y).all()
        error = math.sqrt(float(np.sum((y - r) ** 2) / np.sum(r**2)))
        assert error <= ROUNDOFFS * low.unit_roundoff
