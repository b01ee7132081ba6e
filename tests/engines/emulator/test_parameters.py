"""A bias is added to the sum: casting products does not cast it, in one node or in two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from finecast.devices.emulation import Emulation, setting_of, setting_of_plan
from finecast.devices.targets import load_target
from finecast.engines.emulator import EmulatorEngine, prepare
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.rules.policy import Scope
from tests.engines.emulator import models

X = np.ones((1, 2), np.float32)
BIAS = np.array([0.1, 3.3], np.float32)


@pytest.fixture(params=["one", "two"])
def biased(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """``x + bias`` by a product with one, in one node or in two."""
    constants = {"w": np.eye(2, dtype=np.float32), "b": BIAS}
    nodes = (
        [models.node("Gemm", "x w b", "y")]
        if request.param == "one"
        else [models.node("MatMul", "x w", "m"), models.node("Add", "m b", "y")]
    )
    path = tmp_path / "m.onnx"
    return models.save(path, nodes, {"x": ["n", 2]}, {"y": ["n", 2]}, constants)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("target", "scope", "rounds"),
    [
        ("trn1", Scope.MATMULT, False),
        ("trn1", Scope.ALL, True),
        # inf1's fp32 products run in bf16: their operands do.
        ("inf1", Scope.NONE, False),
        ("inf1", Scope.ALL, True),
    ],
)
def test_the_bias_is_cast_with_everything_alone(
    biased: Path, target: str, scope: Scope, rounds: bool, fixed: bool
) -> None:
    how = Emulation(target=load_target(target), scope=scope)
    prepared = prepare(frontend.load(biased), how)
    setting = setting_of(prepared.graph, how)
    engine = EmulatorEngine(emulation=how)
    session = engine.session(prepared, fixed=setting if fixed else None).apply(setting)
    bias = round_to(BIAS, Format.BF16) if rounds else BIAS
    expected = round_to(X + bias, Format.BF16) if rounds else X + bias
    assert np.array_equal(session.run({"x": X})["y"], expected)


def test_a_plans_product_has_all_its_inputs_low(biased: Path) -> None:
    how = Emulation(target=load_target("trn1"), scope=Scope.NONE)
    prepared = prepare(frontend.load(biased), how)
    formats = dict.fromkeys((n.id for n in prepared.graph.float_nodes), Format.BF16)
    setting = setting_of_plan(formats, how)
    session = EmulatorEngine(emulation=how).session(prepared, fixed=setting)
    expected = round_to(X + round_to(BIAS, Format.BF16), Format.BF16)
    assert np.array_equal(session.run({"x": X})["y"], expected)
