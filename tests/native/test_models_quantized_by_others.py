"""Models that ONNX Runtime's tools quantized: that stays, and the float rest is planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from onnxruntime import quantization

import finecast
from finecast import api
from finecast.engines import get_engine
from finecast.errors import UsageError
from finecast.measure.racing import Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.kernels import skip_without_int8

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, 8, 8] x) => (float[n, 10] y)
<int64[2] flat = {-1, 128}> {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [act] r = Relu (a)
  [one] c = Conv <pads = [1, 1, 1, 1]> (r, w1, b1)
  [join] f = Add (c, r)
  [pool] h = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (f)
  [flatten] i = Reshape (h, flat)
  [head] k = MatMul (i, w2)
  [soft] s = Softmax (k)
  [next] t = MatMul (s, w3)
  [tanh] u = Tanh (t)
  [tail] y = MatMul (u, w3)
}"""
SHAPES = {
    "w0": (8, 3, 3, 3), "b0": (8,), "w1": (8, 8, 3, 3), "b1": (8,), "w2": (128, 10),
    "w3": (10, 10),
}  # fmt: skip
FLOATS = ["next", "soft", "tail", "tanh"]
X = np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32)
KINDS = ("qdq", "qoperator", "dynamic")


class Batches(quantization.CalibrationDataReader):
    def __init__(self) -> None:
        self.left: Iterator[dict[str, NDArray[np.float32]]] = iter([{"x": X}])

    def get_next(self) -> dict[str, NDArray[np.float32]]:
        """Nothing behind the last one, as the tool's own readers have it."""
        return next(self.left, {})


@pytest.fixture(scope="module", params=KINDS)
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    made = parser.parse_model(NET)
    draw = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        array = draw.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 4))
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    fp32, out = folder / "net.onnx", folder / f"{request.param}.onnx"
    onnx.save(made, fp32)
    if request.param == "dynamic":
        quantization.quantize_dynamic(
            fp32, out, op_types_to_quantize=["MatMul"], nodes_to_exclude=FLOATS
        )
        return out
    formats = quantization.QuantFormat
    quantization.quantize_static(
        fp32,
        out,
        Batches(),
        quant_format=formats.QDQ if request.param == "qdq" else formats.QOperator,
        per_channel=request.param == "qdq",  # OpenVINO 2026.4 reads no QLinearConv by channel
        nodes_to_exclude=FLOATS,
    )
    return out


def kinds(path: Path) -> Counter[str]:
    """Ops of the main graph; casts apart, which plans put in, and what rounds for them."""
    nodes = [n for n in onnx.load(path).graph.node if n.op_type != "Cast"]
    rounding = {n.name for n in nodes for m in n.metadata_props if m.value.startswith("bf16 ")}
    return Counter(n.op_type for n in nodes if n.name not in rounding)


def run(path: Path) -> NDArray[np.float32]:
    return get_engine("onnxruntime").load(path).run({"x": X})["y"].astype(np.float32)


def test_what_came_quantized_stays_and_the_rest_is_planned(
    quantized: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    done = api.convert(quantized, out, "all:bf16", engine="openvino")
    assert {n for n, f in done.plan.formats.items() if f is Format.BF16} >= set(FLOATS)
    assert kinds(out) == kinds(quantized)
    assert [w for w in done.warnings if "ops came quantized by another tool" in w]
    assert done.verified.reference == "the model given"
    decided = quantized.stem != "qoperator"  # its ops of integers are no ops on floats
    assert done.counts.get("quantized", 0) >= decided, "not fp32, as its plan has them"
    assert sum(done.counts.values()) == sum(done.plan.counts.values())
    integers = {n.name for n in onnx.load(quantized).graph.node if "Quantize" in n.op_type}
    assert not {n for n, f in done.plan.formats.items() if f is not Format.FP32} & integers
    fp32 = api.convert(quantized, tmp_path / "same.onnx", "none", engine="openvino")
    assert fp32.plan.counts.keys() == {"fp32"}
    assert kinds(tmp_path / "same.onnx") == kinds(quantized)


def test_the_advice_to_take_it_to_fp32_can_be_followed(quantized: Path) -> None:
    """Of ops on codes there is no fp32 form, and the advice ended in an error."""
    warnings = api.convert(quantized, policy="all:bf16", verify=False).warnings
    advised = any("from_type int8" in text for text in warnings)
    assert advised == (quantized.stem == "qdq")
    if not advised:
        with pytest.raises(
            UsageError, match=r"ops on quantized integers: .*quantize with QuantFormat\.QDQ"
        ):
            api.convert(quantized, policy="all:bf16", from_type="int8")


def test_every_op_is_counted_in_a_type(qdq: Path) -> None:
    """In older opsets a DequantizeLinear has no type to follow, and was counted in none."""
    everything = api.convert(qdq, policy="none", verify=False).counts
    nothing = api.convert(qdq, policy="all:bf16", verify=False, user_rules={"keep": _keep})
    assert "" not in {**everything, **nothing.counts}


def _keep(_node: object) -> str:
    return "fp32"


def test_what_came_quantized_is_counted(quantized: Path) -> None:
    types = Counter[str]()
    for row in api.inspect(quantized).classes:
        types.update(row.types)
    stays = types["quantized"] + types["other"]
    assert stays >= 3, "two convolutions and a product, or what scales one"
    assert types["fp32"] >= len(FLOATS)


def test_the_rest_may_run_on_integers_too(quantized: Path, tmp_path: Path) -> None:
    skip_without_int8("onnxruntime")
    out = tmp_path / "low.onnx"
    done = api.convert(quantized, out, "all:int8", data={"x": X}, engine="onnxruntime")
    coded = {n for n, f in done.plan.formats.items() if f is Format.INT8}
    assert {"next", "tail"} <= coded
    before, after = kinds(quantized), kinds(out)
    own = {k for k in before if k not in ("QuantizeLinear", "DequantizeLinear")}
    assert {k: after[k] for k in own} == {k: before[k] for k in own}
    exact = run(quantized)
    assert 0 < np.linalg.norm(run(out) - exact) / np.linalg.norm(exact) < 0.1


@pytest.fixture
def qdq(quantized: Path) -> Path:
    """What QuantizeLinear and DequantizeLinear state."""
    if quantized.stem != "qdq":
        pytest.skip("ops on integers themselves stay what they are")
    return quantized


def int8(path: Path, out: Path, engine: str, **options: object) -> dict[str, Format]:
    """The model planned anew; the formats of its ops."""
    skip_without_int8(engine)
    policy = replace(Policy.parse("all:int8"), **options)  # pyright: ignore[reportArgumentType]
    done = api.convert(path, out, policy, data={"x": X}, from_type="int8", engine=engine)
    return dict(done.plan.formats)


def error(path: Path) -> float:
    exact = run(path.with_name("net.onnx"))
    return float(np.linalg.norm(run(path) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_it_is_planned_anew_by_its_own_scales(qdq: Path, engine: str) -> None:
    """The products run on integers as they did; the tool left out a Relu, which is kept."""
    out, fp32 = qdq.with_name("again.onnx"), qdq.with_name("fp32.onnx")
    formats = int8(qdq, out, engine, exclude=(re.compile("next|tail"),))
    assert {n for n, f in formats.items() if f is Format.INT8} == {
        *("stem", "one", "join", "head")
    }
    api.convert(qdq, fp32, "none", from_type="int8", engine=engine, force=True)
    assert error(fp32) < 0.7 * error(qdq), "values are not rounded any more"
    assert error(out) < 1.2 * error(qdq)
    scales = {
        k: sorted(
            float(numpy_helper.to_array(t).reshape(-1)[0])
            for t in onnx.load(p).graph.initializer
            if "scale" in t.name and t.dims in ([], [8])
        )
        for k, p in (("given", qdq), ("made", out))
    }
    assert set(scales["made"]) <= set(scales["given"])
    out.unlink()


def test_single_ops_are_taken_out_of_int8(qdq: Path) -> None:
    out = qdq.with_name("again.onnx")
    formats = int8(qdq, out, "openvino", exclude=(re.compile("one|next|tail"),))
    assert formats["one"] is Format.FP32
    assert formats["head"] is Format.INT8
    assert error(out) < error(qdq)
    out.unlink()


def test_the_tuner_says_what_the_model_given_does(qdq: Path) -> None:
    skip_without_int8()
    found = api.tune(
        qdq, None, data={"x": X}, metric="cosine", policy="auto:int8", engine="openvino",
        from_type="int8", tolerance=0.5,
    )  # fmt: skip
    assert found.baseline.metric == pytest.approx(1.0, abs=1e-6)
    (given,) = (a for a in found.baselines if a.name == "the model given")
    assert given.metric < 1.0
    assert any("taken from int8" in text for text in found.warnings)


def test_a_hint_for_the_model_in_fp32_is_not_advised_for_the_file_in_int8(
    qdq: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed code loaded the file in int8, which was off by 22 points under the hint."""
    hint = "the engine's bf16 hint"

    def times(self: EngineSubject, built: Mapping[str, Built], *_: object) -> Race:
        del self
        return Race.stated(1.0, {name: 0.7 if name == hint else 1.2 for name in built})

    monkeypatch.setattr(EngineSubject, "times", times)
    found = api.tune(
        qdq, None, policy="auto:bf16", engine="openvino", from_type="int8", tolerance=0.5,
        evaluate=lambda run: round(float(abs(run({"x": X})["y"]).mean()), 1), calib={"x": X},
    )  # fmt: skip
    if hint not in {one.name for one in found.baselines}:
        pytest.skip("OpenVINO's hint lowers nothing on this CPU")
    (advice,) = (text for text in found.warnings if "use it instead" in text)
    assert "an output NAME.xml holds it" in advice
    assert "compile_model" not in advice


def test_what_is_of_integers_itself_is_not_taken(quantized: Path) -> None:
    if quantized.stem == "qdq":
        pytest.skip("that is")
    with pytest.raises(UsageError, match="the model has no QuantizeLinear"):
        api.convert(quantized, None, "all:bf16", from_type="int8", engine="openvino")


def test_tune_takes_it_for_the_model_to_keep(quantized: Path) -> None:
    found = api.tune(
        quantized, None, data={"x": X}, metric="cosine", policy="auto:bf16",
        engine="openvino", tolerance=0.01,
    )  # fmt: skip
    assert found.baseline.metric == pytest.approx(1.0, abs=1e-6)
    assert found.tuned.metric >= 0.99
    assert any("came quantized by another tool" in text for text in found.warnings)
    assert found.reference == "the model given"
    assert found.counts.get("quantized", 0) >= (quantized.stem != "qoperator")


def test_tune_of_codes_says_that_the_model_given_is_no_fp32_model(
    tmp_path: Path,
) -> None:
    skip_without_int8()
    path, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[n, 10] x) => (float[n, 10] y) { y = MatMul (x, w) }"""
    )
    w = np.random.default_rng(1).standard_normal((10, 10)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(made, path)
    x = {"x": X.reshape(-1)[:160].reshape(16, 10)}
    api.convert(path, low, "all:int8", data=x, engine="openvino", verify=False)
    others = onnx.load(low)
    for entry in (others, *others.graph.node):
        del entry.metadata_props[:]  # another tool notes nothing of finecast's
    onnx.save(others, low)
    found = api.tune(low, None, data=x, metric="cosine", policy="auto:bf16", tolerance=0.1)
    assert found.reference == "the model given"
    assert (
        api.tune(path, None, data=x, metric="cosine", policy="auto:bf16").reference == "fp32"
    )


@pytest.mark.parametrize(("kind", "zero"), [("uint16", 0), ("int16", -32768), ("uint8", 0)])
def test_a_relu_that_codes_stand_for_is_kept(kind: str, zero: int) -> None:
    """Its saturation is that of the codes, however many bits they have."""
    steps = 2**16 - 1 if "16" in kind else 255
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 8] x) => (float[n, 8] y)'
        f" <float s = {{{4 / steps}}}, {kind} z = {{{zero}}}> {{"
        " [product] p = MatMul(x, w) q = QuantizeLinear(p, s, z)"
        " d = DequantizeLinear(q, s, z) [last] y = MatMul(d, w) }"
    )
    weight = np.eye(8, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)
    done = finecast.convert(model, policy="none", from_type="int8", data={"x": x})
    (got,) = finecast.load(done.model).reference().run({"x": x}).values()
    assert np.allclose(np.asarray(got, np.float32), np.maximum(x, 0), atol=1e-6)


def test_the_last_step_of_a_mask_stays_finite() -> None:
    """Rounded up, it is beyond fp32: times 0 it would be NaN."""
    scale = np.nextafter(np.float32(np.finfo(np.float32).max / 65535), np.float32(np.inf))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 2] x) => (float[n, 2] y)'
        " <uint16 z = {65535}, uint16[2] c = {0, 65535}> {"
        " m = DequantizeLinear(c, s, z) [masked] y = Mul(x, m) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(scale), "s"))
    x = np.zeros((2, 2), np.float32)
    done = finecast.convert(model, policy="none", from_type="int8", verify=False)
    (got,) = finecast.load(done.model).reference().run({"x": x}).values()
    assert not np.asarray(got, np.float32).any()


def test_ir_that_is_not_what_a_quantized_file_says_is_told(tmp_path: Path) -> None:
    """OpenVINO rounds to codes of 16 bits, and forgets that they end at 0."""
    made = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
net (float[4, 8] x) => (float[4, 8] y) <float s = {0.01}, uint16 z = {0}> {
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  [product] m = MatMul (d, w)
  [tail] y = MatMul (m, w)
}""")
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(made, tmp_path / "q.onnx")
    told = r"(?s)otherwise than its ops say.*: write ONNX, and run it"
    done = finecast.convert(tmp_path / "q.onnx", tmp_path / "q.xml", "all:bf16")
    assert re.search(told, str(done))
    assert any(w.startswith("4 of 5 ops came quantized") for w in done.warnings)
    data = {"x": np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)}
    tuned = finecast.tune(
        tmp_path / "q.onnx", tmp_path / "t.xml", data=data, metric="snr_db", tolerance=20.0,
        preset="fast",
    )  # fmt: skip
    assert any(re.search(told, w) for w in tuned.warnings)


def test_codes_in_fp8_are_emulated_as_what_they_are() -> None:
    """They were taken for numbers in a low format, and ONNX Runtime refused the graph."""
    made = parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
net (float[n, 8] x) => (float[n, 8] y) <float s = {0.01}> {
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  e = DequantizeLinear (w, s, z)
  [product] m = MatMul (d, e)
  [tail] y = Tanh (m)
}""")
    draw = np.random.default_rng(0)
    helper, fp8 = onnx.helper, onnx.TensorProto.FLOAT8E4M3FN
    made.graph.initializer.extend([
        helper.make_tensor("z", fp8, [], [0.0]),
        helper.make_tensor("w", fp8, [8, 8], (40 * draw.standard_normal(64)).tolist()),
    ])  # fmt: skip
    x = draw.standard_normal((64, 8)).astype(np.float32)
    done = finecast.emulate(made, "trn1", policy="all:bf16", data={"x": x}, metric="snr_db")
    assert 0 < max(done.errors.values()) < 0.02
