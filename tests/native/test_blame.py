"""The ops to blame for a low model's errors, in models of every library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

import finecast
from benchmarks.blame_nets import Fault, cnn, faults, lstm, to_fp16, to_int8, transformer
from finecast.data.deviation import deviation
from finecast.diagnosis.blaming import Blame
from finecast.engines.base import Array, feeds_for
from finecast.errors import ModelError, UsageError, UserCodeError
from finecast.numbers.formats import Format
from tests.frontends.tools import parse
from tests.native.networks import FRONTENDS, Frontend

LIBRARIES = [f for f in FRONTENDS if f.needs != "json"]
SIDE, DEPTH = 16, 5


@pytest.fixture(params=LIBRARIES, ids=lambda f: f.suffix or f.needs)
def frontend(request: pytest.FixtureRequest) -> Frontend:
    row: Frontend = request.param
    if find_spec(row.needs) is None:
        pytest.skip(f"{row.needs} is not installed")
    return row


def weights() -> list[NDArray[np.float32]]:
    drawn = np.random.default_rng(0).normal(size=(DEPTH, SIDE, SIDE)) / 4
    return [*drawn.astype(np.float32)]


def samples(model: Path) -> dict[str, Array]:
    (spec,) = finecast.load(model).reference().inputs
    x = np.random.default_rng(1).normal(size=(8, SIDE)).astype(np.float32)
    return {spec.name: x}


@pytest.fixture
def make(
    frontend: Frontend, tmp_path: Path
) -> Callable[..., tuple[Path, Path, dict[str, Array]]]:
    """The model, a low version in which a product computes with other weights, and data."""

    def written(policy: str, wrong: int | None = None) -> tuple[Path, Path, dict[str, Array]]:
        exact, other, low = (tmp_path / f"{n}{frontend.suffix}" for n in ("m", "o", "low"))
        given = weights()
        frontend.write(exact, given)
        if wrong is not None:
            given[wrong] = given[wrong] * 1.5
        frontend.write(other, given)
        finecast.convert(other, low, policy, verify=False, progress=False)
        return exact, low, samples(exact)

    return written


Make = Callable[..., tuple[Path, Path, dict[str, Array]]]


@pytest.mark.parametrize("fmt", [Format.BF16, Format.FP16])
def test_a_joined_model_is_the_low_one_and_the_fp32_one(make: Make, fmt: Format) -> None:
    exact, low, data = make(f"all:{fmt.label}")
    model, other = finecast.load(exact), finecast.load(low)
    beside = model.beside(other, None)
    assert len(beside.groups) == DEPTH  # products, each with the ReLU behind it
    fp32 = model.reference().run(data)
    as_it_is = other.reference()
    stated = as_it_is.run(feeds_for(as_it_is, data))
    every = frozenset(range(DEPTH))
    for returned, wanted in ((every, fp32), (frozenset[int](), stated)):
        got = beside.session(returned).run(data)
        for a, b in zip(got.values(), wanted.values(), strict=True):
            # Engines may fuse what is one op after another, and then round less.
            tolerance = 1e-6 if returned else 2 * fmt.unit_roundoff
            assert deviation(a, np.asarray(b, np.float32)).relative <= tolerance


@pytest.mark.parametrize(("fmt", "wrong"), [(Format.BF16, 0), (Format.FP16, DEPTH - 1)])
def test_a_wrong_product_is_named(make: Make, fmt: Format, wrong: int) -> None:
    exact, low, data = make(f"all:{fmt.label}", wrong)
    found = finecast.blame(exact, low, data=data, progress=False)
    beside = finecast.load(exact).beside(finecast.load(low), None)
    (culprit,) = found.culprits
    assert culprit.node == beside.graph.nodes[beside.groups[wrong].nodes[0]].name
    assert found.first is not None
    assert found.first.node == culprit.node
    assert not found.passed
    assert found.restored <= found.limit < found.value
    assert found.evaluations == 2
    assert found.is_minimal


def test_none_is_named_in_a_right_model(make: Make) -> None:
    exact, low, data = make("all:bf16")
    found = finecast.blame(exact, low, data=data, progress=False)
    assert found.passed
    assert found.culprits == ()
    assert found.keep == ""
    assert (found.evaluations, found.probes) == (1, 0)


def test_a_plan_stands_for_the_model_that_it_gives(make: Make) -> None:
    exact, low, data = make("all:bf16")
    plan = finecast.convert(exact, policy="all:bf16", verify=False, progress=False).plan
    told = [
        finecast.blame(exact, one, data=data, max_error=1e-4, progress=False)
        for one in (low, plan)
    ]
    assert told[0].spread == told[1].spread > 0  # no product rounds much more than others
    assert told[0].value == pytest.approx(told[1].value)


# Faults of all kinds, by ONNX models.


FAULTS = [*faults(transformer(layers=1), seed=3)]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.kind for f in FAULTS])
def test_planted_faults_are_found(fault: Fault) -> None:
    net = transformer(layers=1)
    found = finecast.blame(fault.fp32, fault.low, data=net.feeds, progress=False)
    named = [c.node for c in found.culprits]
    assert fault.planted & {*named[:3]}
    assert found.restored <= found.limit
    assert found.is_minimal


@pytest.mark.parametrize("net", [transformer(), lstm()], ids=lambda n: n.name)
def test_clean_models_have_no_culprit(net: Any) -> None:
    for low in (to_fp16(net.model), to_int8(net.model, net.feeds)):
        assert finecast.blame(net.model, low, data=net.feeds, progress=False).culprits == ()


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as another exporter would name it, its inputs and outputs apart."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    kept = {v.name for v in (*other.graph.input, *other.graph.output)} | {""}
    for node in other.graph.node:
        node.name = f"n_{node.name}"
        node.input[:] = [i if i in kept else f"v_{i}" for i in node.input]
        node.output[:] = [o if o in kept else f"v_{o}" for o in node.output]
    for tensor in other.graph.initializer:
        tensor.name = f"v_{tensor.name}"
    return other


def test_fp32_versions_of_a_model_have_no_culprit() -> None:
    """Fused ops and folded constants differ from what they stand for by fp32's rounding."""
    net = cnn()
    x = np.random.default_rng(4).normal(size=(4, 4, 8, 8)).astype(np.float32)
    folded = product_net(fold=False), product_net(fold=True), {"x": x}
    for exact, other, data in (
        (net.model, net.model, net.feeds),
        (net.model, renamed(net.model), net.feeds),
        folded,
    ):
        found = finecast.blame(exact, other, data=data, progress=False)
        assert found.passed
        assert found.limit < Format.FP16.unit_roundoff / 10


def test_a_wrong_op_in_fp32_is_named() -> None:
    net = cnn()
    wrong = renamed(net.model)
    weight = next(t for t in wrong.graph.initializer if len(t.dims) == 4)
    array = numpy_helper.to_array(weight) * np.float32(1 + 1e-4)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    found = finecast.blame(net.model, wrong, data=net.feeds, progress=False)
    first = next(n.name for n in net.model.graph.node if n.op_type == "Conv")
    assert [c.node for c in found.culprits] == [first]
    assert found.first is not None
    assert found.first.node == first


def test_an_error_of_all_ops_is_no_culprit() -> None:
    """The roundings of each op are as large as those of the others."""
    net = transformer(layers=1)
    low = to_fp16(net.model)
    found = finecast.blame(net.model, low, data=net.feeds, max_error=2e-5, progress=False)
    assert not found.passed
    assert found.culprits == ()
    assert found.keep == ""
    assert found.ops >= found.spread > found.ops / 4
    assert f"the error is spread: {found.spread} of {found.ops} ops" in found.verdict


def test_an_outlier_is_told() -> None:
    """One scale covers the channel that is large, and makes zeros of the others."""
    net = transformer(layers=1)
    fault = next(f for f in FAULTS if f.kind == "outlier channel")
    found = finecast.blame(fault.fp32, fault.low, data=net.feeds, progress=False)
    reasons = [text for c in found.culprits for text in c.reasons]
    assert any(text.startswith("outliers: ") and "becomes 0" in text for text in reasons)


def test_ops_harmful_only_together_are_told_as_such() -> None:
    net = transformer(layers=1)
    fault = next(f for f in FAULTS if f.kind == "together")
    found = finecast.blame(fault.fp32, fault.low, data=net.feeds, progress=False)
    (culprit,) = found.culprits
    assert {culprit.node, *found.instead} == fault.planted
    assert "harmless by itself: harmful only together with others" in culprit.reasons


def test_an_inf_is_followed_to_where_it_is_absorbed() -> None:
    net = transformer(layers=1)
    fault = next(f for f in FAULTS if f.kind == "absorbed Inf")
    found = finecast.blame(fault.fp32, fault.low, data=net.feeds, progress=False)
    assert found.first is not None
    assert found.first.node == "plant/square"
    assert found.first.absorbed == "plant/normed"
    assert "fp16 6.55e+04" in found.first.why


# Low models of other tools.


def product_net(fold: bool) -> onnx.ModelProto:
    """A convolution and a batch norm; folded into one convolution, or not."""
    rng = np.random.default_rng(2)
    w = rng.normal(size=(4, 4, 3, 3)).astype(np.float32) / 6
    gain, shift = rng.uniform(2, 3, 4), rng.normal(size=4)
    parts = {"gain": gain, "shift": shift, "mean": np.zeros(4), "var": np.ones(4)}
    text = "c = Conv(x, w)\n n = BatchNormalization(c, gain, shift, mean, var)\n"
    if fold:
        scale = (gain / np.sqrt(1 + 1e-5))[:, None, None, None]
        parts, w = {"shift": shift}, (w * scale).astype(np.float32)
        text = "c = Conv(x, w, shift)\n"
    end = "c" if fold else "n"
    body = f"{text} r = Relu({end})\n y = Mul(r, r)"
    model = parse(f"net (float[N,4,8,8] x) => (float[N,4,6,6] y) {{ {body} }}")
    for name, array in {"w": w, **parts}.items():
        tensor = numpy_helper.from_array(np.asarray(array, np.float32), name)
        model.graph.initializer.append(tensor)
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def test_a_tool_may_have_folded_ops() -> None:
    """The folded convolution is another value than the one of its name."""
    rng = np.random.default_rng(4)
    data = {"x": rng.normal(size=(4, 4, 8, 8)).astype(np.float32)}
    exact = product_net(fold=False)
    low = to_fp16(product_net(fold=True))
    assert finecast.blame(exact, low, data=data, progress=False).passed
    (end,) = (n for n in low.graph.node if n.name == "y")
    end.op_type = "Add"  # 2 r in place of r * r
    found = finecast.blame(exact, low, data=data, progress=False)
    assert [c.node for c in found.culprits] == ["y"]


def test_what_has_no_partner_is_told() -> None:
    exact = product_net(fold=False)
    low = to_fp16(exact)
    for node in low.graph.node:  # another tool's names, and another op for the last one
        node.name = ""
        node.input[:] = [f"v_{i}" if len(i) == 1 and i not in "xw" else i for i in node.input]
        node.output[:] = [f"v_{o}" if len(o) == 1 and o != "y" else o for o in node.output]
    data = {"x": np.random.default_rng(4).normal(size=(4, 4, 8, 8)).astype(np.float32)}
    assert finecast.blame(exact, low, data=data, progress=False).warnings == ()


def test_an_error_of_what_has_no_partner_is_told() -> None:
    """The low model scales its output, under another name, by an op that fp32 lacks."""
    exact = product_net(fold=False)
    low = to_fp16(exact)
    factor = numpy_helper.from_array(np.asarray(1.03, np.float32), "factor")
    low.graph.initializer.append(factor)
    read = ["y", "factor"]
    low.graph.node.append(onnx.helper.make_node("Mul", read, ["scaled"], name="scaled"))
    low.graph.output[0].name = "scaled"
    data = {"x": np.ones((4, 4, 8, 8), np.float32)}
    found = finecast.blame(exact, low, data=data, progress=False)
    (told,) = found.unexplained
    assert "run by itself has 3.28%" in told
    assert told.endswith("what has no partner in fp32 makes the difference")
    assert found.lines[0] == f"{told}; {found.verdict}"
    assert found.to_dict()["unexplained"] == [told]


def test_a_model_that_is_no_version_of_the_other_is_refused() -> None:
    other = parse("net (float[N,4,8,8] q) => (float[N,4,8,8] z) { z = Abs(q) }")
    data = {"x": np.ones((4, 4, 8, 8), np.float32)}
    with pytest.raises(
        ModelError, match="no op of the model in reduced precision is one of the fp32 model"
    ):
        finecast.blame(product_net(fold=False), other, data=data, progress=False)


# How the low model is judged.


def wrong_model() -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Array]]:
    exact = product_net(fold=False)
    low = to_fp16(exact)
    (scale,) = (t for t in low.graph.initializer if t.name == "gain")
    array = numpy_helper.to_array(scale) * np.float16(1.25)
    scale.CopyFrom(numpy_helper.from_array(array, "gain"))
    x = np.random.default_rng(4).normal(size=(4, 4, 8, 8)).astype(np.float32)
    return exact, low, {"x": x}


def test_a_metric_judges() -> None:
    exact, low, data = wrong_model()
    found = finecast.blame(
        exact, low, data=data, metric="snr_db", tolerance=40, progress=False
    )
    assert [c.node for c in found.culprits] == ["n"]
    assert found.figure == "snr_db"
    assert found.value < 40 <= found.restored


def test_a_function_of_the_user_judges_outputs_and_inner_values() -> None:
    exact, low, data = wrong_model()
    names: set[str] = set()

    def close(name: str, got: Array, wanted: Array) -> bool:
        names.add(name)
        return deviation(got, wanted).relative < 0.05

    found = finecast.blame(exact, low, data=data, check=close, progress=False)
    assert [c.node for c in found.culprits] == ["n"]
    assert found.first is not None
    assert found.first.node == "n"
    assert names == {"c", "n", "r", "y"}


def test_a_check_that_returns_no_bool_is_told() -> None:
    exact, low, data = wrong_model()
    check: Any = lambda *_: 0.5  # noqa: E731
    with pytest.raises(UserCodeError, match="returns float, not True or False"):
        finecast.blame(exact, low, data=data, check=check, progress=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "all:fp16"}, "a policy says what a device casts"),
        ({"metric": "top1", "max_error": 0.1}, "judged in two ways"),
        ({"tolerance": 0.1}, "the tolerance is that of a metric"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    exact, low, data = wrong_model()
    with pytest.raises(UsageError, match=text):
        finecast.blame(exact, low, data=data, progress=False, **options)


# Devices that are not here.


def test_a_device_s_overflow_is_found() -> None:
    net = transformer(layers=1)
    fault = next(f for f in FAULTS if f.kind == "overflow")
    found = finecast.blame(
        fault.fp32, "trn1", policy="all:fp16", data=net.feeds, progress=False
    )
    assert fault.planted >= {c.node for c in found.culprits} != set()
    assert found.first is not None
    assert found.first.node in fault.planted


def test_the_source_line_comes_from_the_exporter_s_note() -> None:
    exact, low, data = wrong_model()
    for node in exact.graph.node:
        note = node.metadata_props.add()
        note.key = "pkg.torch.onnx.stack_trace"
        note.value = (
            'File "/home/me/net.py", line 12, in forward\n'
            'File "/usr/lib/python3/site-packages/torch/nn/norm.py", line 3, in forward'
        )
    found = finecast.blame(exact, low, data=data, progress=False)
    (culprit,) = found.culprits
    assert culprit.source.startswith("/home/me/net.py:12 in forward")


def test_an_error_of_one_op_is_not_called_spread() -> None:
    """A share of decisions does not follow the squared error."""
    common = {"low": "low.onnx", "figure": "agreement", "fp32": 1.0, "value": 0.7}
    common |= {"limit": 0.99, "passed": False, "restored": 1.0, "ops": 14, "evaluations": 9}
    blame = partial(Blame, **common, spread=12)
    assert "the error is spread: 12 of 14 ops" in blame(largest_shares={"a": 0.3}).verdict
    one = blame(largest_shares={"mul": 0.92, "add": 0.02}).verdict
    assert "spread" not in one
    assert "mul makes 92% of the squared error, and does not suffice: 12 of 14 ops in" in one


BRANCHES = """
net (float[n,32] x, bool wide) => (float[n,32] y) {
  [chosen] h = If (wide) <
    then_branch = one () => (float[n,32] a) { [inner] a = MatMul(x, w) },
    else_branch = two () => (float[n,32] b) { [shrunk] b = Tanh(x) }
  >
  [last] y = Relu(h)
}"""


def in_four_bits(model: onnx.ModelProto, weight: NDArray[np.float32], by: float) -> Any:
    """The model with its product's weight in 4 bits, as ONNX Runtime packs it, scaled."""
    low = onnx.ModelProto()
    low.CopyFrom(model)
    scales = np.abs(weight).max(axis=0) / 7
    codes = (np.clip(np.rint(weight / scales), -8, 7) + 8).astype(np.uint8).T
    packed = (codes[:, ::2] | codes[:, 1::2] << 4)[:, None]
    (branch,) = (a.g for a in low.graph.node[0].attribute if a.name == "then_branch")
    product = onnx.helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["a"],
        "inner",
        domain="com.microsoft",
        K=32,
        N=32,
        bits=4,
        block_size=32,
    )
    branch.node[0].CopyFrom(product)
    del low.graph.initializer[:]
    arrays = {"codes": packed, "scales": (by * scales).astype(np.float32)}
    low.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    low.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return low


def test_weights_in_four_bits_within_a_branch() -> None:
    """They are no fp32 op, and the op in the branch is named, not the result of the If."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(32, 32)).astype(np.float32)
    exact = parse(BRANCHES)
    exact.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    x = rng.normal(size=(8, 32)).astype(np.float32)
    data = {"x": x, "wide": np.array(True)}
    found, wrong = (
        finecast.blame(exact, in_four_bits(exact, weight, by), data=data, progress=False)
        for by in (1.0, 8.0)
    )
    assert 0.05 < found.value < 0.3
    assert found.passed
    assert not wrong.passed
    (culprit,) = wrong.culprits
    assert "ops in reduced precision in its bodies: inner" in culprit.reasons
    assert any("'^(inner|chosen/" in line for line in wrong.lines)


def test_compressed_weights_of_ir(tmp_path: Path) -> None:
    """As NNCF writes them: integers less a zero point, times a scale, in fp16."""
    openvino = pytest.importorskip("openvino")
    ops = openvino.opset13
    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    lowest, scale = weight.min(), np.float16((weight.max() - weight.min()) / 255)
    codes = np.clip(np.rint((weight - lowest) / scale), 0, 255).astype(np.uint8)
    zero = np.array(np.rint(-lowest / scale), np.uint8)
    paths = [tmp_path / f"{name}.xml" for name in ("exact", "low")]
    for path in paths:
        x = ops.parameter([-1, 32], np.float32)
        x.output(0).set_names({"x"})
        stored = ops.constant(weight)
        if path.stem == "low":
            moved = ops.subtract(*(ops.convert(ops.constant(c), "f16") for c in (codes, zero)))
            stored = ops.convert(ops.multiply(moved, ops.constant(scale)), "f32")
        product = ops.matmul(x, stored, False, True)
        openvino.save_model(openvino.Model([product], [x]), path, compress_to_fp16=False)
    data = {"x": np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)}
    found = finecast.blame(*paths, data=data, progress=False)
    assert 0.002 < found.value < found.limit
    done = finecast.convert(paths[1], policy="all:int8", data=data, verify=False)
    told = "its weights came quantized in 8 bits, and stay as they are"
    assert any(told in text for text in done.warnings)


def test_an_input_may_be_an_output(tmp_path: Path) -> None:
    text = "net (float[n,4] x) => (float[n,4] y, float[n,4] x) { [last] y = Exp(x) }"
    data = {"x": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)}
    exact = parse(text)
    low = finecast.convert(exact, policy="all:bf16", verify=False, progress=False).model
    assert finecast.blame(exact, low, data=data, progress=False).passed


@pytest.mark.parametrize("opset", [7, 8])
def test_models_of_early_opsets(opset: int, tmp_path: Path) -> None:
    """The opset has no Where, by which ops are returned to fp32."""
    ports = "(float[n,8] x) => (float[n,8] y)"
    exact = onnx.parser.parse_model(
        f'<ir_version: 4, opset_import: ["" : {opset}]> net {ports} {{'
        " [product] p = MatMul(x, w) [last] y = Tanh(p) }"
    )
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 8)).astype(np.float32)
    exact.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    data = {"x": rng.normal(size=(8, 8)).astype(np.float32)}
    found = finecast.blame(exact, to_fp16(exact), data=data, progress=False)
    assert 0 < found.value < found.limit
    common: dict[str, Any] = {"metric": "cosine", "data": data, "progress": False}
    tuned = finecast.tune(exact, policy="all:fp16", target="t4", max_drop=0.1, **common)
    assert "judged" not in str(tuned)
    low = finecast.convert(exact, policy="all:fp16", data=data, progress=False).model
    assert low.opset_import[0].version == opset
