"""Models in which one property of the device decides, through whole ladders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.data.criterion import Criterion, CriterionKind
from finecast.data.sources import workload_of
from finecast.engines import get_engine
from finecast.engines.emulator import exact_session
from finecast_neuron.compilers import ladder
from finecast_neuron.flags import Given
from finecast_neuron.ladder import LadderOutcome, LadderWalk, search_per_op
from tests.engines.emulator import models

TF32 = {"--auto-cast matmult --auto-cast-type tf32", "--auto-cast all --auto-cast-type tf32"}
FP16 = {"--auto-cast matmult --auto-cast-type fp16", "--auto-cast all --auto-cast-type fp16"}
BF16 = {"--auto-cast matmult --auto-cast-type bf16", "--auto-cast all --auto-cast-type bf16"}
NONE = {"--auto-cast none"}


def walk(
    model: Path,
    target: str,
    x: NDArray[np.float32],
    labels: NDArray[np.int64],
    base: Given | None = None,
    tolerance: float = 0.0,
) -> LadderWalk:
    data = model.with_suffix(".npz")
    np.savez(data, x=x, label=labels)
    options = api.DataOptions(data=data, metric="top1")
    workload = workload_of(options, get_engine("onnxruntime").load(model))
    return LadderWalk(
        model=api.load(model),
        reference=exact_session(model),
        workload=workload,
        criterion=Criterion(kind=CriterionKind.ABSOLUTE, tolerance=tolerance),
        rungs=ladder(target, base),
    )


def passing(outcome: LadderOutcome) -> set[str]:
    return {r.rung.name for r in outcome.rungs if r.passed}


def close_scores(lead: float, n: int = 64) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(3)
    labels = rng.integers(1, 4, n)
    x = np.ones((n, 4), np.float32)
    x[np.arange(n), labels] += np.float32(lead)
    return x, labels


def test_lossless_transpose(tmp_path: Path) -> None:
    model = models.lossless_transpose(tmp_path / "m.onnx")
    x, labels = models.labelled_ties()
    outcome = walk(model, "inf1", x[..., None], labels).walk()
    assert outcome.baseline == 1
    assert passing(outcome) == {
        "--fast-math none",
        "--fast-math fp32-cast-matmult no-fast-relayout",
    }
    assert outcome.best is not None


@pytest.mark.parametrize("flag", [False, True])
def test_saturation(tmp_path: Path, flag: bool) -> None:
    model = models.masked(tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 4, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 32)
    x[np.arange(32), :, labels] += 4
    outcome = walk(
        model, "trn1", x, labels, Given(saturate_infinity=flag or None), tolerance=0.5
    ).walk()
    assert len(passing(outcome)) == (len(outcome.rungs) if flag else 0)
    assert (outcome.best is not None) is flag
    if flag:
        assert outcome.best is not None
        assert "--enable-saturate-infinity" in outcome.best.rung.command()


def test_dynamic_range(tmp_path: Path) -> None:
    model = models.scaled_product(tmp_path / "m.onnx", 2.0**20)
    outcome = walk(model, "trn1", *close_scores(0.25)).walk()
    assert passing(outcome) == NONE | TF32 | BF16


def test_digits(tmp_path: Path) -> None:
    model = models.plain_product(tmp_path / "m.onnx")
    outcome = walk(model, "trn1", *close_scores(2.0**-9)).walk()
    assert passing(outcome) == NONE | TF32 | FP16


def test_tf32_has_the_range_of_one_and_the_digits_of_the_other(tmp_path: Path) -> None:
    model = models.scaled_product(tmp_path / "m.onnx", 2.0**20)
    outcome = walk(model, "trn1", *close_scores(2.0**-9)).walk()
    assert passing(outcome) == NONE | TF32


def test_the_recommendation_is_the_fastest_that_passes(tmp_path: Path) -> None:
    model = models.plain_product(tmp_path / "m.onnx")
    walked = walk(model, "trn1", *close_scores(2.0**-9))
    outcome = walked.walk()
    assert outcome.best is not None
    fastest = min(r.time_s for r in outcome.rungs if r.passed)
    assert outcome.best.time_s == fastest
    plan, why = search_per_op(walked, outcome)
    assert why
    if plan is not None:
        assert plan.time_s < fastest
        assert plan.metric == outcome.baseline
