"""A model in parts gives what the whole model gives, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import parser

from finecast.engines.emulator.in_parts import PartsSession
from finecast.engines.loading import exact_session
from finecast.frontends.onnx.parts import ModelInParts

# Two products that do not depend on one another, one of their sum, one of constants alone; a
# body that reads a product and a value of an earlier part; a weight that is an input, too;
# products that are outputs, and read as well; a weight and an input that are outputs.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 4] x, bool c, float[4, 4] v)
=> (float[N, 4] y, float[N, 4] q, float[N, 4] e, float[4, 4] w, float[N, 4] x)
<float[4, 4] v = {2,0,0,1, 0,1,0,3, 1,0,0,0, 0,0,4,1},
 float[4, 4] w = {1,0,2,0, 0,3,0,0, 0,0,1,1, 5,0,0,1}>
{
    r = Relu(x)
    k = Constant<value = float {2.0}>()
    p = MatMul(r, w)
    q = MatMul(x, v)
    s = Add(p, q)
    u = MatMul(w, w)
    t = MatMul(s, u)
    e = If(c) <
        then_branch = g1 () => (float[N, 4] a) { a = Add(t, r) },
        else_branch = g2 () => (float[N, 4] b) { b = Mul(q, k) }
    >
    y = Sub(t, e)
}"""
PRODUCTS = ("p", "q", "u", "t")


def product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    return a @ b


def in_parts(chosen: tuple[str, ...]) -> ModelInParts:
    model = ir.from_proto(parser.parse_model(NET))
    functions: dict[ir.Node, Callable[..., NDArray[np.float32]]] = {
        node: product for node in model.graph if node.outputs[0].name in chosen
    }
    assert len(functions) == len(chosen)
    return ModelInParts(model=model, functions=functions)


@pytest.mark.parametrize(
    "chosen", [c for n in range(1, 5) for c in combinations(PRODUCTS, n)], ids="".join
)
def test_parts_give_what_the_whole_gives(chosen: tuple[str, ...]) -> None:
    model = in_parts(chosen)
    whole, parts = exact_session(model.model), PartsSession(model)
    x = np.random.default_rng(0).integers(-9, 9, (3, 4)).astype(np.float32)
    for condition in (True, False):
        feeds = {"x": x, "c": np.array(condition)}
        got, wanted = parts.run(feeds), whole.run(feeds)
        assert [*got] == [*wanted]
        assert all(np.array_equal(got[name], wanted[name]) for name in got)


def test_parts_are_few_and_drop_what_nobody_reads() -> None:
    steps = in_parts(PRODUCTS).steps()
    # Those before the first products, between them and t, and after t.
    assert sum(not callable(step.run) for step in steps) == 3
    dropped = [name for step in steps for name in step.last]
    assert len({*dropped}) == len(dropped)
    assert {"p", "u", "s", "t"} <= {*dropped}
    assert not {"y", "q", "e"} & {*dropped}
