"""Overflows that change no result: what absorbs them, and what does not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.engines.loading import exact_session
from finecast.frontends.onnx import Prepared
from finecast.native.observing import observe
from finecast.numbers.formats import Format
from finecast.rules import Context, permit
from finecast.rules.observed import OBSERVED, absorbing
from finecast.rules.policy import Policy
from tests.planning import nets

X = (np.random.default_rng(5).standard_normal((4, 8)) * 3e5).astype(np.float32)
TEXT = """net (float[4, 8] x) => (float[4, 8] y) {{
  [first] v = Mul (x, one)
  {ops}
}}"""
NUMBERS = {"one": 1.0, "few": 1 / 30, "tiny": 1e-4, "zero": 0.0, "low": -6.0, "high": 6.0}
CONSTANTS = {name: np.array(number, np.float32) for name, number in NUMBERS.items()}

ABSORBED = {
    "tanh": "[end] y = Tanh (v)",
    "sigmoid": "[end] y = Sigmoid (v)",
    "erf": "[end] y = Erf (v)",
    "clip": "[end] y = Clip (v, low, high)",
    "moved": "[a] a = Transpose <perm = [1, 0]> (v) [b] b = Transpose <perm = [1, 0]> (a)"
    " [end] y = Tanh (b)",
    "scaled": "[a] a = Mul (v, few) [b] b = Add (a, high) [end] y = Tanh (b)",
    "divided": "[a] a = Div (v, high) [b] b = Neg (a) [end] y = Tanh (b)",
    "two": "[a] a = Tanh (v) [b] b = Sigmoid (v) [end] y = Add (a, b)",
}
READ = {
    "an output": "[end] y = Neg (v)",
    "softmax": "[end] y = Softmax (v)",
    "too small": "[a] a = Mul (v, tiny) [end] y = Tanh (a)",
    "times 0": "[a] a = Mul (v, zero) [end] y = Tanh (a)",
    "times values": "[a] a = Mul (v, x) [end] y = Tanh (a)",
    "less infinity": "[a] a = Sub (v, x) [end] y = Tanh (a)",
    "twice": "[a] a = Sub (v, v) [end] y = Tanh (a)",
    "half a clip": "[end] y = Clip (v, low)",
    "one reader": "[a] a = Tanh (v) [end] y = Add (a, v)",
}


def prepared(ops: str) -> Prepared:
    return nets.prepared(TEXT.format(ops=ops), CONSTANTS)


@pytest.mark.parametrize("case", [*ABSORBED])
def test_an_op_that_saturates_absorbs_it(case: str) -> None:
    """Law: with an Inf in its place every result is the same, bit for bit."""
    model = prepared(ABSORBED[case])
    graph, facts = model.graph, observe(model, lambda: [{"x": X}])
    value = next(v for v in graph.values if v.name == "v")
    assert absorbing(graph, facts, value, Format.FP16) is not None
    found = permit(Context(graph=graph, policy=Policy("all:fp16"), facts=facts), (OBSERVED,))
    first = next(n for n in graph.nodes if n.name == "first")
    (reason,) = found[first.id].reasons
    assert "v may overflow in fp16" in reason.text
    assert Format.FP16 in found[first.id].formats
    session = exact_session(model.with_outputs(["y"]), optimizing=False)
    over = np.abs(X) > Format.FP16.max
    exact, (got,) = session.run({"x": X})["y"], session.run({"x": infinite(X)}).values()
    np.testing.assert_array_equal(got[over], exact[over])


def infinite(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("case", [*READ])
def test_other_ops_do_not(case: str) -> None:
    model = prepared(READ[case])
    graph, facts = model.graph, observe(model, lambda: [{"x": X}])
    value = next(v for v in graph.values if v.name == "v")
    assert absorbing(graph, facts, value, Format.FP16) is None
