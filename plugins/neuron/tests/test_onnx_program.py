"""An ONNX model behind the seam that a device's model asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import finecast
from finecast.data.criterion import Criterion
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.devices.emulation import explicit_casts
from finecast.numbers.formats import Format
from finecast.progress import silent
from finecast.rules.policy import Policy
from finecast_neuron.compilers import ladder
from finecast_neuron.ladder import LadderWalk
from tests.engines.emulator import models

TRN1 = explicit_casts("trn1")


def test_the_steps_of_an_op_have_its_format(tmp_path: Path) -> None:
    """A device computes some ops in steps: what a plan says of the op holds for each."""
    path = models.mlp(tmp_path / "m.onnx")
    plan = finecast.explain(path, policy="all:bf16").plan
    program = finecast.load(path).program(replace(TRN1, mixed_accumulation=False))
    formats = program.formats(plan)
    whole, steps = set(plan.formats), {n.name for n in program.graph.float_nodes}
    assert len(steps - whole) > len(whole - steps) > 0
    assert set(formats) >= {n.id for n in program.graph.float_nodes}
    assert set(formats.values()) == {Format.BF16}


def test_what_is_emulated_is_not_judged_by_reputation(tmp_path: Path) -> None:
    """A softmax may be low where every plan is evaluated; by itself it keeps fp32."""
    path, policy = models.mlp(tmp_path / "m.onnx"), Policy.parse("auto:bf16")
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    model = finecast.load(path)
    reference = model.reference()
    workload = workload_of(DataOptions(data={"x": x}, metric="snr_db"), reference)
    planner = model.subject(None, TRN1).examine(policy, (), workload, silent).planner
    (softmax,) = (n.name for n in planner.graph.nodes if n.op == "softmax")
    assert planner.lowest().formats[softmax] is Format.BF16
    assert finecast.explain(path, policy=policy).plan.formats[softmax] is Format.FP32


def test_what_a_ladder_tells_of_its_work_stays_within_it(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    model = finecast.load(models.plain_product(tmp_path / "m.onnx"))
    reference = model.reference()
    workload = workload_of(
        DataOptions(data={"x": np.eye(4, dtype=np.float32)}, metric="snr_db"), reference
    )
    rungs = ladder("inf1")
    LadderWalk(
        model=model,
        reference=reference,
        workload=workload,
        criterion=Criterion(),
        rungs=rungs,
        progress=tell,
    ).walk()
    assert {stage for stage, _, _ in told} >= {r.name for r in rungs}
    assert all(stage and 0 <= done <= total >= 1 for stage, done, total in told)
