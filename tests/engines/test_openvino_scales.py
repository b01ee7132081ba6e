"""OpenVINO multiplies an int8 convolution of open shape, without bias, twice by its scale."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from finecast import api
from finecast.numbers.thresholds import ENGINE_LIMIT, NOTICED, excused
from tests.kernels import skip_without_int8

openvino = pytest.importorskip("openvino")

WIDTH = 8
PADS = "<pads = [1, 1, 1, 1]>"
VECTOR = f"s = Constant<value_ints = [1, {WIDTH}, 1, 1]>() o = Reshape(v, s)"
TWO_READERS = "e = Softmax<axis = 1>(c) y = Add(e, c)"
X = np.random.default_rng(1).normal(size=(2, WIDTH, 6, 6)).astype(np.float32)


def net(body: str, batch: str = "n") -> onnx.ModelProto:
    """A model of convolutions by the constants ``w`` and ``b``."""
    random = np.random.default_rng(0)
    made = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]>'
        f" g (float[{batch}, {WIDTH}, 6, 6] x) => (float[{batch}, {WIDTH}, 6, 6] y)"
        f" {{ {body} }}"
    )
    arrays = {
        "w": random.normal(size=(WIDTH, WIDTH, 3, 3)) / 8,
        "b": random.normal(size=WIDTH),
        "none": np.zeros(WIDTH),
        "k": random.uniform(0.5, 1.5, (1, WIDTH, 1, 1)),
        "v": random.uniform(0.5, 1.5, WIDTH),
    }
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in arrays.items()
        if name in read
    )
    return made


@pytest.mark.parametrize(
    ("body", "batch", "low"),
    [
        (f"[conv] c = Conv{PADS}(x, w) {TWO_READERS}", "n", "fp32"),
        (f"[conv] c = Conv{PADS}(x, w, none) {TWO_READERS}", "n", "fp32"),
        (f"[conv] a = Conv{PADS}(x, w) c = Mul(a, k) {TWO_READERS}", "n", "fp32"),
        (f"[conv] c = Conv{PADS}(x, w) y = Mul(c, c)", "n", "fp32"),
        (f"[conv] c = Conv{PADS}(x, w) {TWO_READERS}", "2", "int8"),
        (f"[conv] c = Conv{PADS}(x, w, b) {TWO_READERS}", "n", "int8"),
        (f"[conv] a = Conv{PADS}(x, w) c = Relu(a) {TWO_READERS}", "n", "int8"),
        (f"[conv] c = Conv{PADS}(x, w) y = Softmax<axis = 1>(c)", "n", "int8"),
        (f"o = Identity(none) [conv] c = Conv{PADS}(x, w, o) {TWO_READERS}", "n", "fp32"),
        (f"o = Identity(b) [conv] c = Conv{PADS}(x, w, o) {TWO_READERS}", "n", "int8"),
        (
            f"o = Mul(k, k) [conv] a = Conv{PADS}(x, w) c = Mul(a, o) {TWO_READERS}",
            "n",
            "fp32",
        ),
        (f"{VECTOR} [conv] a = Conv{PADS}(x, w) c = Mul(a, o) {TWO_READERS}", "n", "fp32"),
        (f"{VECTOR} [conv] a = Conv{PADS}(x, w) c = Add(a, o) {TWO_READERS}", "n", "int8"),
    ],
)
def test_such_convolutions_keep_fp32(body: str, batch: str, low: str) -> None:
    skip_without_int8()
    done = api.convert(net(body, batch), policy="all:int8", engine="openvino", data={"x": X})
    formats = {d.node: d.format.label for d in done.plan.decisions}
    assert formats["conv"] == low
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.05


@pytest.mark.parametrize(
    "same",
    [
        *("Identity(a)", "Dropout(a)", "Neg(a)", "Sum(a)", "Max(a)", "Cast<to = 1>(a)"),
        *("Concat<axis = 1>(a)", "Expand(a, ones)", "Tile(a, ones)", "Pad(a, zeros)"),
        *("Transpose<perm = [0, 1, 2, 3]>(a)", "Slice(a, first, last, axis)"),
        "ReduceSum<noop_with_empty_axes = 1>(a)",
    ],
)
def test_ops_that_change_nothing_are_seen_through(same: str) -> None:
    skip_without_int8()
    lists = {
        "ones": [1, 1, 1, 1],
        "zeros": [0] * 8,
        "first": [0],
        "last": [2**63 - 1],
        "axis": [2],
    }
    known = [f"{n} = Constant<value_ints = {v}>()" for n, v in lists.items() if n in same]
    body = f"{' '.join(known)} [conv] a = Conv{PADS}(x, w) c = {same} {TWO_READERS}"
    done = api.convert(net(body), policy="all:int8", engine="openvino", data={"x": X})
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.05


def test_openvino_scales_twice() -> None:
    """When a release does not, the row in ``engines.faults`` can go."""
    skip_without_int8()
    codes = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
    weights = "p = QuantizeLinear<axis = 0>(w, t, o) v = DequantizeLinear<axis = 0>(p, t, o)"
    made = net(f"{codes} {weights} c = Conv{PADS}(d, v) {TWO_READERS}")
    scales = {
        "s": np.float32(0.04),
        "z": np.uint8(128),
        "t": np.full(WIDTH, 0.004, np.float32),
        "o": np.zeros(WIDTH, np.int8),
    }
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in scales.items()
    )
    core, hint = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    read = core.read_model(made.SerializeToString())
    free = core.compile_model(read, "CPU", hint)(X)[0].copy()
    read.reshape(X.shape)
    fixed = core.compile_model(read, "CPU", hint)(X)[0]
    assert np.linalg.norm(free - fixed) > 0.5 * np.linalg.norm(fixed)


@pytest.mark.parametrize(
    ("predicted", "limit"),
    [(0.0, NOTICED), (0.005, 0.08), (0.02, ENGINE_LIMIT), (0.025, ENGINE_LIMIT), (0.1, 0.4)],
)
def test_an_engine_may_err_more_than_its_types_but_not_by_all_digits(
    predicted: float, limit: float
) -> None:
    assert excused(predicted) == pytest.approx(limit)
