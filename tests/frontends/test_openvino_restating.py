"""Norms in OpenVINO's IR stated so that bf16 ones run in one kernel, as fp32 ones do."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as ov

from finecast import api
from finecast.rules.policy import Policy
from tests.frontends.openvino_graphs import CONFIG, model_of

WIDTH = 16
X = np.random.default_rng(1).normal(size=(3, 5, WIDTH)).astype(np.float32)


def net(*, shown: bool = False, first: bool = False) -> openvino.Model:
    """A norm by ``rsqrt`` between two products; ``shown``: the inverse is an output, too."""
    random = np.random.default_rng(0)

    def weights() -> Any:
        return ov.constant(random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4)

    x = ov.parameter([-1, -1, WIDTH], np.float32, name="x")
    before = ov.matmul(x, weights(), False, False, name="before")
    mean = ov.reduce_mean(ov.power(before, np.float32(2)), [-1], keep_dims=True)
    root = ov.sqrt(ov.add(mean, np.float32(1e-5)), name="root")
    inverse = ov.divide(ov.constant(np.float32(1)), root, name="inverse")
    operands = (inverse, before) if first else (before, inverse)
    product = ov.multiply(*operands, name="product")
    scale = ov.constant(random.uniform(0.5, 1.5, WIDTH).astype(np.float32))
    scaled = ov.multiply(product, scale, name="scaled")
    after = ov.matmul(scaled, weights(), False, False, name="after")
    return model_of([ov.result(after), *([ov.result(inverse)] if shown else [])], [x])


def outputs(model: openvino.Model) -> np.ndarray[Any, np.dtype[np.float32]]:
    found: np.ndarray[Any, np.dtype[np.float32]] = openvino.compile_model(
        model, "CPU", CONFIG
    )([X])[0]
    return found


def kinds(model: openvino.Model) -> dict[str, str]:
    return {op.get_friendly_name(): op.get_type_name() for op in model.get_ordered_ops()}


@pytest.mark.parametrize("first", [False, True])
def test_a_norm_is_one_kernel(*, first: bool) -> None:
    done = api.convert(net(first=first), policy="all:bf16", engine="openvino")
    assert not done.verified.apart
    assert any("product" in told and "quotient" in told for told in done.restated)
    assert kinds(done.model)["product"] == "Divide"
    kept = Policy.parse("all:bf16")
    apart = api.convert(
        net(first=first), policy=Policy(scope=kept.scope, formats=kept.formats, keep_ops=True)
    )
    assert "inverse" in apart.verified.apart[0]
    assert not any("quotient" in told for told in apart.restated)


def test_an_inverse_that_is_read_otherwise_stays() -> None:
    done = api.convert(net(shown=True), policy="all:bf16", engine="openvino")
    assert kinds(done.model)["product"] == "Multiply"
    assert kinds(done.model)["inverse"] == "Divide"
