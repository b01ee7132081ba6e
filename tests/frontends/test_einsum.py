"""Einsums in bf16 are MatMuls of the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

import finecast
from finecast.engines import get_engine
from finecast.errors import ModelError
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.frontends.tools import parse, tensor

RNG = np.random.default_rng(0)
LENGTHS = dict(zip("bhijd", (2, 3, 4, 5, 8), strict=True))
# Equations, and whether the second operand is a constant.
EQUATIONS = {
    "bhid,bhjd->bhij": False,
    "bhij,bhjd->bhid": False,
    "bihd,bjhd->bhij": False,
    "bid,dhj->bihj": True,
    "bihd,hdj->bij": True,
    "bihd,hdj->bij ": False,
    "hdj,bihd->bij": True,
    "bid,djh->bihj": False,
}


def model(equation: str, *, constant: bool) -> onnx.ModelProto:
    """``z = tanh(einsum(sin(x), w))``, where the first operand may be the constant."""
    terms = "".join(equation.split()).partition("->")
    first = terms[0].split(",")
    shapes = [[LENGTHS[label] for label in term] for term in (*first, terms[2])]
    swapped = constant and len(first[0]) == 3 and first[0] == "hdj"
    x, w = (1, 0) if swapped else (0, 1)
    operands = "w, a" if swapped else "a, w"

    def kind(shape: list[int]) -> str:
        return f"float[{', '.join(map(str, shape))}]"

    given = f"{kind(shapes[x])} x" + ("" if constant else f", {kind(shapes[w])} w")
    proto = parse(
        f"g ({given}) => ({kind(shapes[2])} z) {{ [before] a = Sin(x)"
        f' [sum] y = Einsum<equation = "{equation}">({operands}) [after] z = Tanh(y) }}',
        opset=22,
    )
    if constant:
        proto.graph.initializer.append(tensor("w", RNG.standard_normal(shapes[w]) / 4))
    return proto


MODELS = {e: model(e, constant=constant) for e, constant in EQUATIONS.items()}


def converted(proto: onnx.ModelProto, policy: Policy | str = "all:bf16") -> onnx.ModelProto:
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    onnx.checker.check_model(done.model, full_check=True)
    return done.model


def ops(proto: onnx.ModelProto) -> dict[str, str]:
    return {n.name: n.op_type for n in proto.graph.node if n.op_type != "Cast"}


def outputs(proto: onnx.ModelProto) -> np.ndarray:
    rng = np.random.default_rng(1)
    feeds = {
        v.name: rng.standard_normal(
            [d.dim_value for d in v.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for v in proto.graph.input
    }
    return get_engine("openvino").load(proto.SerializeToString()).run(feeds)["z"]


@pytest.mark.parametrize("equation", MODELS)
def test_a_low_einsum_is_a_product(equation: str) -> None:
    proto = MODELS[equation]
    low = converted(proto)
    assert ops(low)["sum"] == "MatMul"
    assert "Einsum" not in ops(low).values()
    wanted, got = outputs(proto), outputs(low)
    # Each of the operands and of the three results is rounded once.
    roundoff = 5 * Format.BF16.unit_roundoff * np.linalg.norm(wanted)
    assert np.linalg.norm(got - wanted) <= roundoff


def test_ops_that_are_kept_stay_fp32() -> None:
    policy = replace(Policy.parse("all:bf16"), keep_ops=True)
    assert ops(converted(MODELS["bhid,bhjd->bhij"], policy))["sum"] == "Einsum"


def test_the_reason_is_told() -> None:
    proto = MODELS["bhid,bhjd->bhij"]
    done = finecast.convert(proto, policy="all:bf16", verify=False)
    assert any("Einsum has no bf16" in text and "sum" in text for text in done.restated)


def test_an_einsum_inside_a_body() -> None:
    proto = parse(
        """g (bool c, float[2, 4, 8] x, float[2, 5, 8] w) => (float[2, 4, 5] z) {
          z = If (c) <
            then_branch = t () => (float[2, 4, 5] a) {
              [sum] a = Einsum<equation = "bid,bjd->bij">(x, w) },
            else_branch = e () => (float[2, 4, 5] b) {
              [other] b = Einsum<equation = "bid,bjd->bij">(w, x) }
          >
        }""".replace("(w, x)", "(x, w)"),
        opset=22,
    )
    low = converted(proto)
    bodies = [a.g for n in low.graph.node for a in n.attribute if a.type == a.GRAPH]
    kinds = [n.op_type for body in bodies for n in body.node]
    assert kinds.count("MatMul") == 2
    assert "Einsum" not in kinds


def test_a_plan_of_what_is_no_product_is_refused() -> None:
    proto = parse(
        """g (float[4, 4] x, float[4, 4] w) => (float[4] z) {
          [sum] z = Einsum<equation = "ij,kj->k">(x, w)
        }""",
        opset=22,
    )
    plan = finecast.convert(proto, policy="all:bf16", verify=False).plan
    decisions = tuple(replace(d, format=Format.BF16) for d in plan.decisions)
    with pytest.raises(ModelError, match="one operand alone"):
        frontend.apply(frontend.from_model(proto), replace(plan, decisions=decisions))
