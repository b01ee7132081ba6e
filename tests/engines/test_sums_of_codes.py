"""Two small int8 products, which OpenVINO computes wrongly on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import finecast
from finecast import api
from finecast.engines import get_engine
from finecast.engines.base import Array, Feeds
from finecast.engines.faults import sums_of_codes
from finecast.errors import WrongNumbersError
from finecast.frontends.dry_run import DryRun
from finecast.native.onnx import take
from finecast.native.source import AS_IT_IS
from finecast.numbers.formats import Format
from tests.kernels import skip_without_int8

openvino = pytest.importorskip("openvino")

from finecast.engines.openvino import OpenVinoEngine, OpenVinoSession  # noqa: E402

WIDTH = 16
FIRST, SECOND = "[first] a = MatMul(x, w)", "[second] y = MatMul({}, v)"


def net(between: str = "h = Relu(a)", read: str = "h", rows: str = "2") -> onnx.ModelProto:
    """Two products by constants, with some ops between them."""
    rng = np.random.default_rng(0)
    made = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]>'
        f" g (float[{rows}, {WIDTH}] x) => (float[{rows}, {WIDTH}] y)"
        f" {{ {FIRST} {between} {SECOND.format(read)} }}"
    )
    arrays = {
        "w": rng.standard_normal((WIDTH, WIDTH)) / 4,
        "v": rng.standard_normal((WIDTH, WIDTH)) / 4,
        "b": rng.standard_normal(WIDTH),
        "k": np.asarray(1.5),
    }
    used = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in arrays.items()
        if name in used
    )
    return made


def data(rows: int = 2) -> dict[str, Array]:
    x = np.random.default_rng(1).standard_normal((rows, WIDTH))
    return {"x": x.astype(np.float32)}


@pytest.mark.parametrize(
    ("between", "read", "rows", "kept"),
    [
        ("h = Relu(a)", "h", "2", {"second"}),
        ("", "a", "2", {"second"}),
        ("m = Mul(a, k) h = Relu(m)", "h", "8", {"second"}),
        ("s = Add(a, k)", "s", "2", {"second"}),
        ("s = Add(a, b) h = Relu(s)", "h", "2", {"second"}),
        ("h = Relu(a)", "h", "9", set[str]()),
        ("h = Relu(a)", "h", "n", set[str]()),
        ("[third] t = MatMul(a, v) h = Relu(t)", "h", "2", {"third", "second"}),
    ],
)
def test_a_small_product_behind_another_one_is_found(
    between: str, read: str, rows: str, kept: set[str]
) -> None:
    graph = take(net(between, read, rows)).prepare(AS_IT_IS).graph
    assert {graph.nodes[n].name for n in sums_of_codes(graph, Format.INT8)} == kept


def test_the_second_of_two_small_products_keeps_fp32() -> None:
    skip_without_int8()
    done = api.convert(net(), policy="matmult:int8", engine="openvino", data=data())
    (second,) = (d for d in done.plan.decisions if d.node == "second")
    assert second.format is Format.FP32
    assert any("sums of" in r.text for r in second.reasons)
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.1


def test_openvino_takes_sums_of_codes_for_floats() -> None:
    """When a release does not, the row in ``engines.faults`` can go."""
    skip_without_int8()
    from openvino import opset13 as ops

    def product(value: Any, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        codes = ops.constant(rng.integers(-127, 128, (WIDTH, WIDTH), np.int8))
        scales = ops.constant(rng.uniform(0.001, 0.003, (1, WIDTH)).astype(np.float32))
        weights = ops.multiply(ops.convert(codes, np.float32), scales)
        ends = [scalar(e) for e in (-4.0, 4.0, -4.0, 4.0)]
        return ops.matmul(ops.fake_quantize(value, *ends, levels=256), weights, False, False)

    def scalar(number: float) -> Any:
        return ops.constant(np.float32(number))

    x = ops.parameter([2, WIDTH], np.float32, name="x")
    model = openvino.Model([product(product(x, 0), 1)], [x], "two")
    core, hint = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    alone = core.compile_model(model, "CPU", {**hint, "INFERENCE_NUM_THREADS": 1})
    assert np.abs(alone(data())[0]).max() > 1e6


class Faulty:
    """A session that is wrong; all else is OpenVINO's."""

    def __init__(self, session: OpenVinoSession) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, feeds: Feeds) -> Mapping[str, Array]:
        return {
            n: a.astype(np.float32) * np.float32(1e9)
            for n, a in self.session.run(feeds).items()
        }


@pytest.fixture
def wrong_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with casts or codes are computed wrongly by all engines on one thread."""
    load = OpenVinoEngine._load

    def loaded(self: OpenVinoEngine, model: Any, *args: Any, **options: Any) -> Any:
        session = load(self, model, *args, **options)
        text = model.read_bytes() if isinstance(model, Path) else model
        low = isinstance(text, bytes) and b"finecast.plan" in text
        return Faulty(session) if low and self._threads == 1 else session

    monkeypatch.setattr(OpenVinoEngine, "_load", loaded)
    monkeypatch.setattr(DryRun, "keep", lambda _: None)  # models are verified here


@pytest.mark.usefixtures("wrong_on_one_thread")
def test_a_model_that_is_wrong_on_one_thread_is_not_written(tmp_path: Path) -> None:
    source, out = tmp_path / "net.onnx", tmp_path / "low.onnx"
    onnx.save(net("h = Sigmoid(a)"), source)
    with pytest.raises(WrongNumbersError, match="on one thread output 'y'"):
        api.convert(source, out, "all:bf16", engine="openvino")
    assert not out.exists()


@pytest.mark.usefixtures("wrong_on_one_thread")
def test_a_model_without_a_low_op_is_not_compiled_for_one_thread(tmp_path: Path) -> None:
    source, out = tmp_path / "net.onnx", tmp_path / "same.onnx"
    onnx.save(net("h = Sigmoid(a)"), source)
    api.convert(source, out, "none:bf16", engine="openvino")
    assert out.exists()


@pytest.mark.usefixtures("wrong_on_one_thread")
def test_tune_drops_plans_on_codes_that_are_wrong_on_one_thread(tmp_path: Path) -> None:
    skip_without_int8()
    source = tmp_path / "net.onnx"
    onnx.save(net("h = Sigmoid(a)"), source)
    outcome = finecast.tune(
        source,
        data=data(),
        metric="cosine",
        policy="auto:int8",
        engine="openvino",
        objective="memory",
    )
    assert not outcome.improved
    assert any("on one thread OpenVINO computes" in w for w in outcome.warnings)


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_engines_on_one_thread_and_as_one_stream_compute_the_same(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip(name)

    source = tmp_path / "net.onnx"
    onnx.save(net(), source)
    engine = get_engine(name)
    wanted: Any
    got: Any
    (wanted,) = engine.load(source).run(data()).values()
    for other in (engine.on_one_thread(), engine.as_one_stream()):
        assert other is not None
        assert (other.name, other.device) == (engine.name, engine.device)
        (got,) = other.load(source).run(data()).values()
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
