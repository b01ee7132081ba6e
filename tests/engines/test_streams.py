"""Several requests in flight, in the engines that serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from finecast.engines import get_engine
from finecast.engines.base import cpus
from finecast.errors import EngineError, UsageError
from finecast.numbers.formats import Format

NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 16] a, float[n, 16] b) => (float[n, 16] y) {
    c = Add(a, b)
    y = Sub(c, b)
}
"""
ENGINES = ["openvino", "onnxruntime"]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(parser.parse_model(NET), path)
    return path


@pytest.mark.parametrize("name", ENGINES)
def test_all_requests_are_served(name: str, net: Path) -> None:
    engine = get_engine(name)
    streams = engine.load_streams(net)
    assert 1 <= streams.requests <= 4 * cpus()
    x = np.ones((3, 16), np.float32)
    streams.serve([{"a": x, "b": x}] * 50)
    streams.serve([])


@pytest.mark.parametrize("name", ENGINES)
def test_feeds_that_do_not_fit_are_refused(name: str, net: Path) -> None:
    engine = get_engine(name)
    streams = engine.load_streams(net)
    x = np.ones((3, 16), np.float32)
    with pytest.raises(UsageError, match="b"):
        streams.serve([{"a": x}])
    with pytest.raises((EngineError, UsageError)):
        streams.serve([{"a": x, "b": np.ones((3, 5), np.float32)}])


def test_a_hint_that_an_engine_lacks_is_refused(net: Path) -> None:
    engine = get_engine("onnxruntime")
    with pytest.raises(EngineError, match="no precision hint for bf16"):
        engine.load_streams(net, Format.BF16)
    engine = get_engine("openvino")
    with pytest.raises(EngineError, match="no precision hint for int8"):
        engine.load_streams(net, Format.INT8)


def test_nothing_runs_before_all_feeds_are_checked(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request that runs reads arrays, which are freed when an error leaves ``serve``.
    from finecast.engines.openvino import OpenVinoEngine

    streams = OpenVinoEngine().load_streams(net)
    started: list[object] = []

    class Queue:
        def start_async(self, feeds: object, **options: object) -> None:
            started.append(feeds)

    monkeypatch.setattr(streams, "_queue", Queue())
    x = np.ones((3, 16), np.float32)
    with pytest.raises(UsageError, match="b"):
        streams.serve([{"a": x, "b": x}, {"a": x}])
    assert not started


def test_a_model_that_keeps_a_state_is_refused() -> None:
    openvino = pytest.importorskip("openvino")
    from openvino import opset13

    from finecast.engines.openvino import OpenVinoEngine

    x = opset13.parameter([1, 4], np.float32, name="x")
    read = opset13.read_value(opset13.constant(np.zeros((1, 4), np.float32)), "state")
    total = opset13.add(read, x)
    kept = opset13.assign(total, "state")
    model = openvino.Model([opset13.result(total)], [kept], [x], "counter")
    with pytest.raises(EngineError, match="keeps a state"):
        OpenVinoEngine().load_streams(model)


@pytest.mark.parametrize("name", ENGINES)
def test_inputs_that_have_to_be_copied_are_read_whole(name: str, net: Path) -> None:
    """Read-only arrays and slices are copied for the engine: each lives until it ran."""
    session = get_engine(name).load(net)
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (rng.standard_normal((4096, 32)).astype(np.float32)[:, ::2] for _ in "ab")
        (y,) = session.run({"a": a, "b": b}).values()
        np.testing.assert_array_equal(y, (a + b) - b)
