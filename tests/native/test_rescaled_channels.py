"""Channels rescaled for int8: nothing in fp32, and less error in codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from finecast import api
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.native.adjusting import Adjuster
from finecast.native.observing import observe
from finecast.planning.plan import Plan
from finecast.planning.rescaling import SMOOTHING
from finecast.rules import UserRule
from finecast.rules.policy import Adjust
from tests.kernels import skip_without_int8

# A convolution's channels of very different sizes behind a Relu, as after folded norms.
CONVS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, 12, 12] x) => (float[n, 10] y) {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [act] r = Relu (a)
  [depthwise] c = Conv <pads = [1, 1, 1, 1], group = 16> (r, k, kb)
  [act1] d = Relu (c)
  [pointwise] e = Conv (d, w1, b1)
  [pool] p = GlobalAveragePool (e)
  [flatten] f = Flatten (p)
  [head] y = Gemm (f, w2, b2)
}"""
CONV_SHAPES = {
    "w0": (16, 3, 3, 3), "b0": (16,), "k": (16, 1, 3, 3), "kb": (16,), "w1": (24, 16, 1, 1),
    "b1": (24,), "w2": (24, 10), "b2": (10,),
}  # fmt: skip
# Products behind norms with some large channels: one norm for it alone, one for others, too.
NORMS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 64] x) => (float[n, 64] y) {
  [own] h = LayerNormalization (x, g, o)
  [up] i = MatMul (h, w0)
  [up_bias] j = Add (i, b0)
  [residual] k = Add (j, x)
  [shared] l = LayerNormalization (k, g1, o1)
  [first] q = MatMul (l, w1)
  [second] v = MatMul (l, w2)
  [gate] s = Tanh (q)
  [mixed] m = Mul (s, v)
  [sum] y = Add (m, l)
}"""
NORM_SHAPES = {
    "g": (64,), "o": (64,), "w0": (64, 64), "b0": (64,), "g1": (64,), "o1": (64,),
    "w1": (64, 64), "w2": (64, 64),
}  # fmt: skip
LARGE = (3, 17, 40)
DATA = {
    "convolutions": np.random.default_rng(0).uniform(0, 1, (64, 3, 12, 12)).astype(np.float32),
    "norms": np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32),
}


@pytest.fixture(scope="module", autouse=True)
def _integers() -> None:
    skip_without_int8()


def constants_of(kind: str) -> dict[str, NDArray[np.float32]]:
    draw = np.random.default_rng(1)
    shapes = CONV_SHAPES if kind == "convolutions" else NORM_SHAPES
    found = {
        n: (draw.standard_normal(s) / np.sqrt(max(np.prod(s[1:]), 4))).astype(np.float32)
        for n, s in shapes.items()
    }
    if kind == "convolutions":
        spread = np.exp(draw.uniform(-4, 4, 16)).astype(np.float32)
        found["w0"] *= spread[:, None, None, None]
        found["b0"] *= spread
        found["k"] /= spread[:, None, None, None]
    else:
        for gain in ("g", "g1"):
            found[gain] = np.ones(64, np.float32)
            found[gain][[*LARGE]] = 60.0
        for weights in ("w0", "w1", "w2"):
            found[weights][[*LARGE]] /= 60.0
    return found


def written(path: Path, kind: str) -> Path:
    made = parser.parse_model(CONVS if kind == "convolutions" else NORMS)
    for name, array in constants_of(kind).items():
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, path)
    return path


@pytest.fixture(params=["convolutions", "norms"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def net(tmp_path: Path, kind: str) -> Path:
    return written(tmp_path / "net.onnx", kind)


def run(path: Path, kind: str) -> NDArray[np.float32]:
    return OpenVinoEngine().load(path).run({"x": DATA[kind]})["y"].astype(np.float32)


def constants(path: Path) -> list[NDArray[np.float32]]:
    model = onnx.load(path)
    of_nodes = (n.attribute[0].t for n in model.graph.node if n.op_type == "Constant")
    arrays = [numpy_helper.to_array(t) for t in (*model.graph.initializer, *of_nodes)]
    return [a for a in arrays if a.dtype == np.float32]


def off(path: Path, net: Path, kind: str) -> float:
    exact = run(net, kind)
    return float(np.linalg.norm(run(path, kind) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_codes_err_less(net: Path, kind: str, engine: str) -> None:
    plain, out = net.with_name("plain.onnx"), net.with_name("low.onnx")
    data = {"x": DATA[kind]}
    api.convert(net, plain, "all:int8", data=data, engine=engine)
    done = api.convert(net, out, "all:int8+smooth", data=data, engine=engine)
    (gain,) = done.gains
    assert (gain.kind, gain.gains) == (Adjust.SMOOTH, True)
    assert done.plan.formats == Plan.load(plan_of(plain, net, kind, engine)).formats
    assert gain.error_with < 0.6 * gain.error_without
    if engine == "openvino":
        assert off(out, net, kind) < 0.6 * off(plain, net, kind)
        # It was measured on a part of the data.
        assert off(out, net, kind) == pytest.approx(gain.error_with, rel=0.2)


def plan_of(plain: Path, net: Path, kind: str, engine: str) -> Path:
    done = api.convert(
        net, plain, "all:int8", data={"x": DATA[kind]}, engine=engine, force=True
    )
    path = plain.with_suffix(".json")
    path.write_text(done.plan.to_json())
    return path


def test_in_fp32_no_bit_changes(net: Path, kind: str) -> None:
    """All ops of the adjusted plan in fp32 again: its operands alone are left."""
    done = api.convert(net, None, "all:int8+smooth", data={"x": DATA[kind]})
    assert done.plan.adjustments
    file = frontend.load(net)
    bare = Plan(
        model=done.plan.model,
        policy=done.plan.policy,
        opset=done.plan.opset,
        decisions=(),
        adjustments=done.plan.adjustments,
    )
    onnx.save(frontend.to_proto(frontend.apply(file, bare).model), net.with_name("bare.onnx"))
    np.testing.assert_array_equal(run(net.with_name("bare.onnx"), kind), run(net, kind))


@pytest.mark.parametrize(
    "policy", ["all:int8+smooth", "all:int8,bf16+smooth", "all:int8+smooth+bias"]
)
def test_what_scales_is_one_node(net: Path, kind: str, policy: str) -> None:
    low = net.with_name("low.onnx")
    made = api.convert(net, low, policy, data={"x": DATA[kind]})
    assert made.plan.adjustments
    scaled = [n for n in onnx.load(low).graph.node if n.name.startswith("finecast_scale")]
    assert len(scaled) == (1 if kind == "norms" else 0)  # one for both products


def keeping(name: str) -> UserRule:
    """A rule that leaves ops whose name contains ``name`` in fp32."""
    return lambda node: "fp32" if name in node.name else None


def test_a_plan_replays_to_the_same_model(net: Path, kind: str) -> None:
    out, again = net.with_name("low.onnx"), net.with_name("again.onnx")
    done = api.convert(net, out, "all:int8+smooth+bias", data={"x": DATA[kind]})
    plan = Plan.from_json(done.plan.to_json())
    assert plan.version == 5
    api.apply(plan, net, again, data={"x": DATA[kind]})
    assert out.read_bytes() == again.read_bytes()
    assert SMOOTHING in {r.rule for r in plan.reasons}


def test_weights_of_constant_nodes(net: Path, kind: str) -> None:
    model = onnx.load(net)
    made = [
        helper.make_node("Constant", [], [t.name], value=t, name=f"constant_{t.name}")
        for t in model.graph.initializer
    ]
    nodes = [*made, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, net)
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8+smooth", data={"x": DATA[kind]})
    assert any(gain.gains for gain in done.gains)
    assert off(out, net, kind) == pytest.approx(done.gains[0].error_with, rel=0.2)


def test_a_model_with_data_of_its_own(net: Path, kind: str) -> None:
    model = onnx.load(net)
    onnx.save(model, net, save_as_external_data=True, location="w.bin", size_threshold=64)
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8+smooth", data={"x": DATA[kind]})
    assert any(gain.gains for gain in done.gains)
    assert off(out, net, kind) == pytest.approx(done.gains[0].error_with, rel=0.2)


def test_an_old_model_lists_initializers_among_inputs(net: Path, kind: str) -> None:
    model = onnx.load(net)
    model.ir_version = 3
    for t in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    onnx.save(model, net)
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8+smooth", data={"x": DATA[kind]})
    assert any(gain.gains for gain in done.gains)
    onnx.checker.check_model(onnx.load(out), full_check=True)


def test_where_nothing_can_be_scaled_it_is_said(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 64] x) => (float[n, 8] y) { [one] y = MatMul (x, w) }"""
    made = parser.parse_model(text)
    weights = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(made, tmp_path / "net.onnx")
    done = api.convert(
        tmp_path / "net.onnx",
        None,
        "all:int8+smooth",
        data={"x": DATA["norms"]},
    )
    assert any("no product in int8 has an operand" in note for note in done.warnings)
    assert done.plan.adjustments == ()


def test_a_device_that_is_not_here_refuses_it_in_tune(net: Path, kind: str) -> None:
    with pytest.raises(
        UsageError, match="in models of ONNX and OpenVINO alone, as engines run them"
    ):
        api.tune(
            net,
            data={"x": DATA[kind]},
            evaluate=lambda run: float(sum(y.sum() for y in run({"x": DATA[kind]}).values())),
            policy="auto:int8+smooth",
            target="inf1",
        )


def test_values_that_no_rescaling_changed_need_no_new_facts(
    net: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Adjuster, Any]] = []
    smoothed = Adjuster._smoothed

    def seen(self: Adjuster) -> Any:
        made.append((self, smoothed(self)))
        return made[-1][1]

    monkeypatch.setattr(Adjuster, "_smoothed", seen)
    api.convert(net, None, "all:int8+smooth", data={"x": DATA[kind]}, engine="openvino")
    ((adjuster, found),) = made
    whole = observe(found.model, adjuster.batches)
    assert found.facts.keys() == whole.keys()
    for value, facts in whole.items():
        ranges = found.facts[value].lowest, found.facts[value].highest
        assert ranges == pytest.approx((facts.lowest, facts.highest), rel=1e-6)
