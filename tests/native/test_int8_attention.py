"""int8 where both factors of a product are computed: the two products of attention."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.engines.base import Engine, KernelFormats
from finecast.engines.onnxruntime import OnnxRuntimeEngine
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import EngineError
from finecast.frontends import onnx as frontend
from finecast.native import conversion
from finecast.native.integers import reading_floats, unfused
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from tests.kernels import skip_without_int8
from tests.native.drawn import write_drawn

INT8 = Format.INT8
# Keys are transposed in front of the product, scores get a mask; heads are moved around both.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 16, 64] x, float[n, 1, 1, 16] m) => (float[n, 16, 64] y)
<int64[4] heads = {0, 16, 4, 16}, int64[3] whole = {0, 16, 64}, float eighth = {0.25}> {
  [query] q0 = MatMul (x, wq)
  [query_bias] q1 = Add (q0, bq)
  [query_heads] q2 = Reshape (q1, heads)
  [query_turned] q = Transpose <perm = [0, 2, 1, 3]> (q2)
  [key] k0 = MatMul (x, wk)
  [key_bias] k1 = Add (k0, bk)
  [key_heads] k2 = Reshape (k1, heads)
  [key_turned] k = Transpose <perm = [0, 2, 3, 1]> (k2)
  [value] v0 = MatMul (x, wv)
  [value_bias] v1 = Add (v0, bv)
  [value_heads] v2 = Reshape (v1, heads)
  [value_turned] v = Transpose <perm = [0, 2, 1, 3]> (v2)
  [scores] s0 = MatMul (q, k)
  [scaled] s1 = Mul (s0, eighth)
  [masked] s2 = Add (s1, m)
  [soft] s = Softmax <axis = -1> (s2)
  [mixed] o0 = MatMul (s, v)
  [mixed_turned] o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
  [joined] o = Reshape (o1, whole)
  [out] y0 = MatMul (o, wo)
  [out_bias] y1 = Add (y0, bo)
  [last] y = Tanh (y1)
}"""
# The gram matrix of a value that another product reads.
SHARED = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 16, 64] x) => (float[n, 16, 16] y, float[n, 16, 64] z) {
  [turned] t = Transpose <perm = [0, 2, 1]> (x)
  [gram] g = MatMul (x, t)
  [soft] y = Softmax (g)
  [other] o = MatMul (x, w)
  [last] z = Tanh (o)
}"""
SHAPES = {f"w{name}": (64, 64) for name in "qkvo"} | {f"b{name}": (64,) for name in "qkvo"}
DRAW = np.random.default_rng(0)
DATA = {
    "x": DRAW.standard_normal((8, 16, 64)).astype(np.float32),
    "m": np.where(DRAW.random((8, 1, 1, 16)) < 0.2, np.float32(-9), np.float32(0)),
}
PRODUCTS = ["mixed", "scores"]
CODED = sorted([*PRODUCTS, "key", "out", "query", "value"])
ENGINES = {"openvino": OpenVinoEngine, "onnxruntime": OnnxRuntimeEngine}


@pytest.fixture(scope="module", params=[*ENGINES])
def engine(request: pytest.FixtureRequest) -> Engine:
    skip_without_int8(request.param)
    made: Engine = ENGINES[request.param]()
    return made


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return write_drawn(tmp_path / "net.onnx", NET, SHAPES)


def coded(plan: Plan) -> list[str]:
    return sorted(name for name, fmt in plan.formats.items() if fmt is INT8)


def run(engine: Engine, path: Path) -> NDArray[np.float32]:
    return engine.load(path).run(DATA)["y"].astype(np.float32)


def kinds(path: Path) -> Counter[str]:
    return Counter(n.op_type for n in onnx.load(path).graph.node)


def test_both_products_run_on_integers(net: Path, engine: Engine) -> None:
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8", data=DATA, engine=engine.name)
    assert coded(done.plan) == CODED
    applied = frontend.apply(frontend.load(net), done.plan)
    assert unfused(engine, done.plan, applied, DATA) == {}
    exact, low = run(engine, net), run(engine, out)
    assert 0 < np.linalg.norm(low - exact) / np.linalg.norm(exact) < 0.1
    # x, q1, k1 and v1 in front of what moves them, s, and o in front of what moves it.
    assert kinds(out)["QuantizeLinear"] == 6 + (engine.name == "onnxruntime")
    nodes = {n.name: n for n in onnx.load(out).graph.node}
    assert nodes["key_heads"].input[0] == "k1_int8_fp32"
    assert nodes["scores"].input[1] == "k"


def test_openvino_s_kernels_take_no_zero_point(net: Path, engine: Engine) -> None:
    """Codes are signed but for the scores, which softmax gives."""
    done = api.convert(net, None, "all:int8", data=DATA, engine=engine.name, verify=False)
    types = {
        (name, index): str(encoding.dtype)
        for name in PRODUCTS
        for index, encoding in done.plan.encodings[name].operands.items()
        if isinstance(encoding, Scaled)
    }
    signed = "int8" if engine.name == "openvino" else "uint8"
    assert types == {
        ("scores", 0): signed,
        ("scores", 1): signed,
        ("mixed", 0): "uint8",
        ("mixed", 1): signed,
    }


def test_a_plan_is_replayed(net: Path, engine: Engine) -> None:
    out, again = (net.with_name(f"{n}.onnx") for n in ("low", "again"))
    done = api.convert(net, out, "all:int8", data=DATA, engine=engine.name)
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    api.apply(plan, net, again, engine=engine.name)
    assert kinds(again) == kinds(out)
    assert np.array_equal(run(engine, again), run(engine, out))


def test_an_ir_has_the_same_codes(net: Path) -> None:
    skip_without_int8()
    import openvino

    source, out = net.with_suffix(".xml"), net.with_name("low.xml")
    openvino.save_model(openvino.Core().read_model(net), source, compress_to_fp16=False)
    done = api.convert(source, out, "all:int8", data=DATA, engine="openvino")
    assert {*PRODUCTS} <= {*coded(done.plan)}
    exact, low = (run(OpenVinoEngine(), path) for path in (source, out))
    assert 0 < np.linalg.norm(low - exact) / np.linalg.norm(exact) < 0.1


def test_the_second_product_alone_may_run_so(net: Path) -> None:
    skip_without_int8()
    how = replace(Policy.parse("all:int8"), exclude=(re.compile("scores"),))
    done = api.convert(net, None, how, data=DATA, engine="openvino")
    assert "mixed" in coded(done.plan)


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        (["int8", "int8", "fp32", "int8"], []),
        (["int8", "int8", "fp32", "fp32"], ["mixed"]),
        (["fp32", "fp32", "fp32", "int8"], ["scores"]),
        (["fp32"], PRODUCTS),
        ([], []),  # the engine does not tell
    ],
)
def test_a_kernel_of_two_products_reads_codes_for_both(
    net: Path, reads: list[str], says: list[str]
) -> None:
    """It tells one format, that of the narrowest value that it reads."""
    graph = frontend.prepare(frontend.load(net), Policy()).graph
    inside = ("scores", "scaled", "masked", "soft", "mixed")
    kernel = KernelFormats(ops=inside, computed="int8", stored="fp32", reads=(*reads,))
    planned = dict.fromkeys(PRODUCTS, INT8)
    assert sorted(reading_floats(graph, [kernel], planned)) == says


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The other product by x takes codes with a zero point, and values have one encoding."""
    skip_without_int8()
    return write_drawn(tmp_path / "shared.onnx", SHARED, {"w": (64, 64)})


SHIFTED = {"x": DATA["x"] + np.float32(1)}
BESIDE = "'gram' keeps bf16: planned in int8, OpenVINO runs it in fp32 all the same"


def test_a_product_that_is_not_run_so_says_why(shared: Path) -> None:
    done = api.convert(shared, None, "all:int8", data=SHIFTED, engine="openvino", verify=False)
    assert coded(done.plan) == ["other"]
    (said,) = (d.reasons[-1].text for d in done.plan.decisions if d.node == "gram")
    assert said == "planned in int8, OpenVINO runs it in fp32 all the same"


def test_a_product_that_is_not_run_so_beside_bf16_has_bf16(shared: Path) -> None:
    done = api.convert(shared, None, "all:int8,bf16", data=SHIFTED, engine="openvino")
    assert coded(done.plan) == ["other"]
    assert done.plan.formats["gram"] is Format.BF16
    assert [note for note in done.warnings if "all the same" in note] == [BESIDE]
    assert done.verified.engine == "openvino"


def test_attention_beside_bf16_runs_in_int8_whole(net: Path) -> None:
    """Values between its products are copied in front of a cast: kernels part there."""
    skip_without_int8()
    done = api.convert(net, None, "all:int8,bf16", data=DATA, engine="openvino")
    assert coded(done.plan) == CODED
    assert not any("all the same" in note for note in done.warnings)


def test_a_product_that_was_asked_for_in_int8_is_refused_there(shared: Path) -> None:
    with pytest.raises(EngineError, match=r"'gram' is planned in int8, .*runs it in fp32"):
        api.convert(
            shared,
            None,
            "all:int8,bf16",
            data=SHIFTED,
            engine="openvino",
            user_rules={"mine": lambda node: "int8" if node.name == "gram" else None},
        )


def test_a_plan_that_verification_finds_unfit_is_made_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no trial of lowest plans showed is taken out as the result is verified."""
    monkeypatch.setattr(conversion, "drop_unfit", lambda _source, planner, *_: planner)
    done = api.convert(shared, None, "all:int8,bf16", data=SHIFTED, engine="openvino")
    assert done.plan.formats["gram"] is Format.BF16
    assert BESIDE in done.warnings


def test_tune_leaves_it_out_as_convert_does(shared: Path) -> None:
    found = api.tune(
        shared,
        data=SHIFTED,
        metric="cosine",
        tolerance=0.1,
        policy="all:int8,bf16",
        objective="size",
        engine="openvino",
    )
    assert BESIDE in found.warnings
    assert not any("a plan was dropped" in note for note in found.warnings)
