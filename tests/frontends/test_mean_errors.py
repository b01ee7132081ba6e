"""Mean errors of products on codes: each shown where it arises, against numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from finecast.engines.loading import exact_session
from finecast.frontends.native_model import with_mean_errors
from finecast.frontends.onnx.editor import name_nodes
from finecast.frontends.onnx.reader import read
from finecast.frontends.onnx.types import infer
from finecast.frontends.onnx.writer import EditedModel
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.planning.biases import biases
from tests.frontends.tools import parse, tensor

INT8 = Format.INT8
# A body that captures a constant and a value of the outer graph stands between the products.
NET = """
net (float[n, 8] x) => (float[n, 4] y) <bool c = {1}, float[8] b0 = {0, 1, 2, 3, 0, 1, 2, 3}> {
  [first] m = MatMul (x, w0)
  [bias] a = Add (m, b0)
  [choose] r = If (c) <
    then_branch = left () => (float[n, 8] p) { [inner] p = Mul (a, b1) },
    else_branch = right () => (float[n, 8] q) { [other] q = Relu (a) }
  >
  [second] y = Gemm (r, w1, b2)
}"""
DRAW = np.random.default_rng(0)
W0, W1 = (DRAW.uniform(-1, 1, s).astype(np.float32) for s in ((8, 8), (8, 4)))
B1, B2 = (DRAW.uniform(1, 2, s).astype(np.float32) for s in (8, 4))
X = DRAW.uniform(0, 1, (32, 8)).astype(np.float32)


def encoding(array: np.ndarray, axis: int | None) -> Scaled:
    over = tuple(i for i in range(array.ndim) if i != axis)
    grid = INT8.grid(constant=False) if axis is None else INT8.grid(constant=True)
    # Coarse steps, so that errors are far above those of fp32.
    return Scaled.fitted(INT8, grid, 8 * array.min(axis=over), 8 * array.max(axis=over), axis)


@pytest.mark.parametrize("opset", [13, 18])
def test_an_error_is_shown_where_it_arises(opset: int) -> None:
    proto = parse(NET, opset=opset)
    named = {"w0": W0, "w1": W1, "b1": B1, "b2": B2}
    proto.graph.initializer.extend(tensor(n, a) for n, a in named.items())
    model = ir.from_proto(proto)
    name_nodes(model)
    infer(model, shapes=True)
    graph, _ = read(model)
    first, second = (graph.find(n).id for n in ("first", "second"))
    exact = X @ W0
    middle = (exact + np.array([0, 1, 2, 3] * 2, np.float32)) * B1
    codes = {
        first: Encodings(operands={0: encoding(X, None)}, constants={1: encoding(W0, 1)}),
        second: Encodings(
            operands={0: encoding(middle, None)}, constants={1: encoding(W1, 1)}
        ),
    }
    formats = dict.fromkeys(codes, INT8)
    places = biases(graph, formats)
    assert [graph.nodes[p.node].name for p in places] == ["bias", "second"]
    coded, plain = (EditedModel(*read(model.clone())) for _ in range(2))
    session = exact_session(with_mean_errors(coded, plain, formats, codes, places))
    shown = [a.reshape(-1) for a in session.run({"x": X}).values()]

    def rounded(node: int, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        at = codes[node]
        return at.operands[0].round(x) @ at.constants[1].round(w)

    error = rounded(first, X, W0) - exact
    assert shown[0] == pytest.approx(error.mean(axis=0), abs=1e-5)
    corrected = middle + (error - error.mean(axis=0)) * B1
    second_error = rounded(second, corrected, W1) - middle @ W1
    assert shown[1] == pytest.approx(second_error.mean(axis=0), abs=1e-4)
    assert np.abs(shown[1]).max() > 1e-2


def test_both_copies_may_select_other_numbers() -> None:
    """ONNX Runtime has values share memory whose open sizes have one name."""
    proto = parse(
        "net (float[n, 8] x) => (int64[2, k] y) { p = Relu (x) [selected] y = NonZero (p) }",
        opset=18,
    )
    model = ir.from_proto(proto)
    name_nodes(model)
    infer(model, shapes=True)
    coded, plain = (EditedModel(*read(model.clone())) for _ in range(2))
    coded.join(plain)
    values = [v for node in coded.binding.model.graph for v in node.outputs]
    assert [node.op_type for node in coded.binding.model.graph].count("NonZero") == 2
    sizes = [str(d) for v in values for d in v.shape or () if isinstance(d, ir.SymbolicDim)]
    assert len(sizes) == len(set(sizes)) == 4
