"""What a plan's error is predicted as, whatever else the policy permits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.reports.summary import prediction_off
from finecast.tuning.result import Result
from tests.frontends.tools import parse

WIDTH, EXPERTS = 256, 8


def router(depth: int, *, residual: bool) -> onnx.ModelProto:
    """A net that scales each token by a mixture of two of eight experts' vectors."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def add(op: str, reads: list[str], *results: str, **attributes: Any) -> str:
        node = helper.make_node(op, reads, [*results], name=results[-1], **attributes)
        nodes.append(node)
        return results[-1]

    def constant(name: str, array: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weights(name: str, *shape: int) -> str:
        return constant(name, (rng.normal(size=shape) / 16).astype(np.float32))

    stream = "x"
    for layer in range(depth):
        product = add("MatMul", [stream, weights(f"w{layer}", WIDTH, WIDTH)], f"mm{layer}")
        block = add("Relu", [product], f"relu{layer}")
        stream = add("Add", [stream, block], f"add{layer}") if residual else block
    add("MatMul", [stream, weights("gates", WIDTH, EXPERTS)], "gate")
    add("Softmax", ["gate"], "shares", axis=-1)
    add("TopK", ["shares", constant("two", [2])], "values", "chosen", axis=-1)
    vectors = constant("experts", rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32))
    add("Gather", [vectors, "chosen"], "picked", axis=0)
    add("Unsqueeze", ["values", constant("last", [-1])], "factors")
    add("Mul", ["picked", "factors"], "scaled")
    add("ReduceSum", ["scaled", constant("row", [1])], "mixed", keepdims=0)
    add("Mul", ["mixed", stream], "routed")
    add("MatMul", ["routed", weights("head", WIDTH, WIDTH)], "y")
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", WIDTH]) for n in ("x", "y")
    )
    graph = helper.make_graph(nodes, "router", [x], [y], constants)
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def tuned(model: onnx.ModelProto, formats: str, max_drop: float) -> Result:
    data = {"x": np.random.default_rng(1).normal(size=(1024, WIDTH)).astype(np.float32)}
    return finecast.tune(
        model,
        data=data,
        metric="cosine",
        max_drop=max_drop,
        target="avx512-bf16",
        policy=f"auto:{formats}",
    )


def test_a_plan_s_error_is_the_same_whatever_else_is_permitted() -> None:
    """The net's decisions make errors add up in bf16 otherwise than in int8."""
    model = router(2, residual=True)
    alone, beside = (tuned(model, formats, 1e-4) for formats in ("bf16", "bf16,int8"))
    assert set(alone.counts) == {"bf16", "fp32"}
    assert alone.plan.digest == beside.plan.digest
    assert alone.predicted_error == pytest.approx(beside.predicted_error)
    assert alone.measured_error == pytest.approx(beside.measured_error)
    assert not prediction_off(beside.to_dict())


def test_a_prediction_that_is_far_off_is_told() -> None:
    """No rounding alone sends a token to another expert, but several together do."""
    result = tuned(router(2, residual=False), "bf16,int8", 0.01)
    assert result.measured_error > 4 * result.predicted_error
    told = prediction_off(result.to_dict())
    assert f"{result.measured_error / result.predicted_error:.3g} times the predicted" in told
    assert told in str(result)
    assert told in result.report().content["summary"]["heading"]


def test_a_share_of_classes_is_not_held_against_a_predicted_error() -> None:
    """A share of 0% was told beside a predicted error, and to be 1/781 of it."""
    rng = np.random.default_rng(0)
    model = parse(
        "net (float[n,64] x) => (int64[n] y) "
        "{ a = MatMul(x, w1) b = Relu(a) s = MatMul(b, w2)"
        " y = ArgMax<axis=1, keepdims=0>(s) }",
        opset=17,
    )
    for name, shape in (("w1", (64, 512)), ("w2", (512, 10))):
        array = (rng.standard_normal(shape) / 10).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    data = {"x": rng.standard_normal((1000, 64)).astype(np.float32)}
    result = finecast.tune(model, data=data, tolerance=0.5, target="trn1", policy="auto:bf16")
    assert result.improved
    errors = result.to_dict()["relative_error"]
    assert errors["figure"] == "share of numbers that differ"
    assert errors["samples"] == result.error_samples == 128
    off = result.predicted_error / max(result.measured_error, 1e-5)
    assert not 0.25 < off < 4
    assert not prediction_off(result.to_dict())
    told = str(result)
    assert "share of numbers that differ: emulated" in told
    assert "predicted" not in told.partition("share of numbers")[2].splitlines()[0]
    report = finecast.emulate(model, "trn1", "all:bf16", data=data)
    assert "share of numbers that differ on 128 samples" in str(report)


@pytest.mark.parametrize(
    ("predicted", "measured", "told"),
    [
        (0.01, 0.03, ""),
        (0.03, 0.01, ""),
        (0.01, 0.05, "the output error is 5 times the predicted one"),
        (0.05, 0.01, "the output error is 1/5 of the predicted one"),
        (1e-9, 3e-5, ""),
        (0.0, 0.01, "the output error is 1e+03 times the predicted one"),
        (0.01, float("nan"), ""),
        (0.01, None, ""),
    ],
)
def test_what_counts_as_far_off(predicted: float, measured: float | None, told: str) -> None:
    errors = {"predicted": predicted, "measured": measured, "outputs": {"y": measured}}
    found = prediction_off({"relative_error": errors})
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_what_was_not_measured_is_not_far_off() -> None:
    assert not prediction_off(None)
    assert not prediction_off({"verdict": "unchanged"})
    errors = {"predicted": 0.1, "measured": 0.0, "outputs": {}}
    assert not prediction_off({"relative_error": errors})
