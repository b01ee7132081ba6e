"""An ONNX model behind the seam that a device's model asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import finecast
from finecast import Policy, api
from finecast.devices.neuron import explicit_casts
from finecast.numbers.formats import Format
from tests.engines.emulator import models


def test_the_steps_of_an_op_have_its_format(tmp_path: Path) -> None:
    """A device computes some ops in steps: what a plan says of the op holds for each."""
    path = models.mlp(tmp_path / "m.onnx")
    _, plan = api.judge(path, Policy.parse("all:bf16"))
    program = finecast.load(path).program(
        replace(explicit_casts("trn1"), mixed_accumulation=False)
    )
    formats = program.formats(plan)
    whole, steps = set(plan.formats), {n.name for n in program.graph.float_nodes}
    assert len(steps - whole) > len(whole - steps) > 0
    assert set(formats) >= {n.id for n in program.graph.float_nodes}
    assert set(formats.values()) == {Format.BF16}
