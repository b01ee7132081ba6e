"""Scales come from observed values; an op that lacks one keeps fp32, and names the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.graph import ConstantStats, Graph, Node, Value
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.rules import Context, permit
from finecast.rules.calibration import calibrated
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from tests import toy_encoding
from tests.graph.text import from_text

X = np.array([[-1, 0.5], [3, 0]], np.float32)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    return toy_encoding.install(monkeypatch)


def product(weight: NDArray[np.float32], op: str = "matmul") -> Graph:
    stats = ConstantStats(size=weight.size, read=lambda: weight)
    fp32 = Format.FP32
    return Graph(
        nodes=(
            Node(
                id=0,
                name="product",
                op=op,
                native="onnx::MatMul",
                inputs=(0, 1),
                outputs=(2,),
                follows_in=(True, True),
                follows_out=(True,),
                format=fp32,
                admits=frozenset({fp32}),
            ),
        ),
        values=(
            Value(id=0, name="x", dtype="fp32", is_input=True, uses=(0,)),
            Value(id=1, name="w", dtype="fp32", shape=weight.shape, constant=stats, uses=(0,)),
            Value(id=2, name="y", dtype="fp32", producer=0, is_output=True),
        ),
    )


def test_values_are_fitted_as_a_whole_and_weights_by_channel(toy: Format) -> None:
    weight = np.array([[1, -7, 0], [-3.5, 2, 0]], np.float32)
    found = calibrated(product(weight), _only(product(weight)), toy, {0: ValueFacts.of(X)})
    x, w = found.operands[0], found.constants[1]
    assert isinstance(x, Scaled)
    assert isinstance(w, Scaled)
    assert x.axis is None
    assert x.range == pytest.approx((-1, 3), abs=x.scale[0])
    assert (w.axis, w.zero_point) == (1, 0)
    assert w.scale == (0.5, 1.0, 1.0)


def test_scales_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, fmt, calls = product(np.eye(2, dtype=np.float32)), Format.INT8_WEIGHTS, 0

    def counted(*given: Any, **named: Any) -> Encodings:
        nonlocal calls
        calls += 1
        return calibrated(*given, **named)

    monkeypatch.setattr("finecast.rules.calibration.calibrated", counted)
    policy = Policy("all:int8_weights")
    found = permit(Context(graph=graph, policy=policy, casts_around=frozenset({fmt})))
    assert found[0].encodings[fmt].constants
    assert calls == 1


@pytest.mark.parametrize(
    ("op", "shape", "axis"),
    [
        ("conv", (4, 3, 2), 0),
        ("matmul", (5, 3), 1),
        ("matmul", (5, 3, 2), None),  # a stack of matrices
        ("matmul", (3,), None),  # its one axis is summed over
        ("gemm", (5, 3), 1),
    ],
)
def test_only_channels_of_results_have_scales_of_their_own(
    op: str, shape: tuple[int, ...], axis: int | None, toy: Format
) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    graph = product(weight, op)
    found = calibrated(graph, _only(graph), toy, {0: ValueFacts.of(X)}).constants[1]
    assert isinstance(found, Scaled)
    assert found.axis == axis
    assert len(found.scale) == (1 if axis is None else shape[axis])


VALUES = """\
input %0 x fp32[1, 4, 8]
input %1 y fp32[1, 8, 4]
node turned transpose onnx::Transpose fp32 (%1) -> (%3 t fp32[1, 4, 8])
node back transpose onnx::Transpose fp32 (%3) -> (%4 b fp32[1, 8, 4])
node both matmul onnx::MatMul fp32 (%0, %4) -> (%2 z fp32[1, 4, 4])
output %2
"""


@pytest.mark.parametrize(
    ("least", "results", "types"),
    [
        (-2.0, False, ["int8", "int8"]),
        (0.0, False, ["uint8", "int8"]),  # a second operand is signed in any case
        (-2.0, True, ["uint8", "uint8"]),
    ],
)
def test_factors_have_no_zero_point_where_kernels_take_none(
    least: float, results: bool, types: list[str]
) -> None:
    graph = from_text(VALUES)
    seen = ValueFacts.of(np.array([least, 1.0], np.float32))
    node, facts = graph.find("both"), {0: seen, 1: seen}
    encodings = calibrated(graph, node, Format.INT8, facts, results=results)
    found = [e for e in encodings.operands.values() if isinstance(e, Scaled)]
    assert [str(e.dtype) for e in found] == types
    assert results or not any(e.zero_point for e in found)
    assert all(e.range[0] <= least and e.range[1] >= 1 - 1e-6 for e in found)
    assert Encodings.from_dict(Format.INT8, encodings.to_dict()) == encodings


@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_values_are_signed_where_the_device_takes_nothing_else(op: str) -> None:
    """GPUs multiply signed codes, whatever the numbers are: their largest code is 127."""
    graph = product(np.eye(4, dtype=np.float32), op)
    facts = {0: ValueFacts.of(np.array([0.0, 2.54], np.float32))}
    found = calibrated(graph, _only(graph), Format.INT8, facts, signed=True).operands[0]
    assert isinstance(found, Scaled)
    assert (found.dtype, found.zero_point) == (np.dtype(np.int8), 0)
    assert found.scale == pytest.approx([0.02])


@pytest.mark.parametrize(
    ("seen", "weight", "says"),
    [
        (None, [[1.0]], "x has no toy8 scale: nothing was observed of it"),
        ([np.nan, 1], [[1.0]], "x has no toy8 scale: NaN or Inf was observed"),
        ([np.inf, 1], [[1.0]], "x has no toy8 scale: NaN or Inf was observed"),
        ([0, 0, 0], [[1.0]], "x has no toy8 scale: the data has the same number"),
        ([], [[1.0]], "x has no toy8 scale: nothing was observed of it"),
        ([1], [[np.inf]], "w has no toy8 scale: a range that is not finite"),
        ([1], [[np.nan]], "w has no toy8 scale: a range that is not finite"),
        ([1], [[]], "w has no toy8 scale: it is empty"),
    ],
)
def test_what_cannot_be_scaled_keeps_fp32_whatever_the_user_says(
    seen: list[float] | None, weight: list[list[float]], says: str, toy: Format
) -> None:
    facts = {} if seen is None else {0: ValueFacts.of(np.array(seen, np.float32))}
    graph = product(np.array(weight, np.float32))
    policy = Policy(scope=Scope.ALL, formats=(toy,))
    context = Context(graph=graph, policy=policy, facts=facts, casts_around=frozenset({toy}))
    found = permit(context)[0]
    assert found.formats == {Format.FP32}
    assert found.encodings == {}
    assert any(r.text.startswith(says) for r in found.reasons if r.rule == "calibration")


def test_each_format_of_a_policy_is_judged_by_itself(toy: Format) -> None:
    graph = product(np.ones((2, 2), np.float32))
    policy = Policy.parse("all:toy8,fp8_e4m3")
    assert policy.label == "all:toy8,fp8_e4m3"
    both = frozenset(policy.formats)
    facts = {0: ValueFacts.of(X)}
    seen = permit(Context(graph=graph, policy=policy, facts=facts, casts_around=both))[0]
    assert both < seen.formats
    assert seen.encodings.keys() == {toy}
    unseen = permit(Context(graph=graph, policy=policy, casts_around=both))[0]
    assert unseen.formats == {Format.FP32, Format.FP8_E4M3}
    assert unseen.encodings == {}


def _only(graph: Graph) -> Node:
    return graph.nodes[0]
