"""Stacks of matrices that share scales, as other tools quantize: OpenVINO reads past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import EngineError
from finecast.frontends.openvino.refused import STACKED as FAULT
from finecast.frontends.openvino.refused import stacked_scales
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

RNG = np.random.default_rng(0)
STACK, ROWS, SUMMED, CHANNELS = 3, 2, 8, 6
CODES = RNG.integers(-127, 128, (STACK, SUMMED, CHANNELS)).astype(np.int8)
SCALES = RNG.uniform(0.001, 0.003, CHANNELS).astype(np.float32)
X = (RNG.integers(0, 256, (STACK, ROWS, SUMMED)) / 64).astype(np.float32)


def quantized(scales: Any = SCALES) -> onnx.ModelProto:
    """A product in QuantizeLinear and DequantizeLinear, as ONNX Runtime's tools write it."""
    model = parse(
        f"""net (float[{STACK},{ROWS},{SUMMED}] x) => (float[{STACK},{ROWS},{CHANNELS}] y)
          <float step = {{0.015625}}, uint8 zero = {{0}}> {{
          r = Relu(x)
          q = QuantizeLinear(r, step, zero)
          d = DequantizeLinear(q, step, zero)
          w = DequantizeLinear<axis = 2>(codes, scales, zeros)
          [product] y = MatMul(d, w)
        }}""",
        opset=17,
    )
    model.graph.initializer.append(numpy_helper.from_array(CODES, "codes"))
    model.graph.initializer.append(
        numpy_helper.from_array(np.asarray(scales, np.float32), "scales")
    )
    zeros = np.zeros(CHANNELS, np.int8)
    model.graph.initializer.append(numpy_helper.from_array(zeros, "zeros"))
    return model


def original() -> onnx.ModelProto:
    """The same product before it was quantized."""
    model = parse(
        f"""net (float[{STACK},{ROWS},{SUMMED}] x) => (float[{STACK},{ROWS},{CHANNELS}] y) {{
          r = Relu(x)
          [product] y = MatMul(r, w)
        }}""",
        opset=17,
    )
    model.graph.initializer.append(
        numpy_helper.from_array((CODES * SCALES).astype(np.float32), "w")
    )
    return model


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The folder of both models, in ONNX and in OpenVINO's format, and of data."""
    import openvino

    for name, model in (("net", original()), ("q", quantized())):
        onnx.save(model, tmp_path / f"{name}.onnx")
        read = openvino.Core().read_model(tmp_path / f"{name}.onnx")
        openvino.save_model(read, tmp_path / f"{name}.xml", compress_to_fp16=False)
    return tmp_path


REFUSED = "the int8 product .* has a scale for each channel of a stack of matrices"


@pytest.mark.parametrize(
    "call",
    [
        lambda at: finecast.convert(at / "q.xml", at / "o.xml", "all:bf16"),
        lambda at: finecast.tune(at / "q.xml", at / "o.xml", metric="cosine", data={"x": X}),
        lambda at: finecast.blame(at / "net.xml", at / "q.xml", data={"x": X}),
        lambda at: finecast.blame(
            at / "net.onnx", at / "q.onnx", data={"x": X}, engine="openvino"
        ),
        lambda at: finecast.profile(at / "q.xml"),
    ],
    ids=["convert", "tune", "blame", "blame by engine", "profile"],
)
def test_it_is_refused_by_name(files: Path, call: Callable[[Path], Any]) -> None:
    """Numbers were arbitrary, or the process ended."""
    with pytest.raises(EngineError, match=REFUSED) as caught:
        call(files)
    assert FAULT in str(caught.value)
    assert "with one scale, or take them to fp32" in str(caught.value)


@pytest.mark.parametrize("engine", [None, "openvino", "onnxruntime"])
def test_neither_engine_is_advised_where_neither_computes_it(
    files: Path, engine: str | None
) -> None:
    """ONNX Runtime has no kernel: each engine's message sent the user to the other one."""
    with pytest.raises(EngineError, match=r"the int8 product '(product|y)'") as caught:
        finecast.profile(files / "q.onnx", engine=engine)
    assert "with one scale, or take them to fp32 by from_type int8" in str(caught.value)
    assert "engine openvino" not in str(caught.value)
    with pytest.raises(EngineError, match="with one scale") as caught:
        finecast.convert(
            files / "q.onnx", files / "o.onnx", "all:bf16", engine=engine, data={"x": X}
        )
    assert str(caught.value).count("with one scale") == 1
    done = finecast.convert(
        files / "q.onnx", files / "o.onnx", "none", engine=engine, from_type="int8"
    )
    assert done.verified.engine == (engine or "openvino")


def test_onnx_goes_to_the_engine_that_computes_it(files: Path) -> None:
    done = finecast.blame(files / "net.onnx", files / "q.onnx", data={"x": X})
    assert done.passed
    assert done.value < 0.01


def _weights(codes: Any = CODES, scales: Any = SCALES, zero: Any = None) -> Any:
    from openvino import opset13 as op

    decoded = op.convert(op.constant(codes), np.float32)
    if zero is not None:
        decoded = op.subtract(decoded, op.constant(np.float32(zero)))
    return op.multiply(decoded, op.constant(scales))


def _ranged(port: Any, low: float, high: float) -> Any:
    from openvino import opset13 as op

    ends = [op.constant(np.float32(end)) for end in (low, high, low, high)]
    return op.fake_quantize(port, *ends, levels=256)


def _turned(port: Any) -> Any:
    from openvino import opset13 as op

    return op.transpose(port, op.constant([0, 2, 1]))


def _product(weights: Any, value: Callable[[Any], Any], *, by_row: bool = False) -> Any:
    import openvino
    from openvino import opset13 as op

    of_results: Any = openvino.Model  # its stub does not bind this constructor
    x = op.parameter([STACK, ROWS, SUMMED], openvino.Type.f32)
    x.output(0).set_names({"x"})
    return of_results([op.matmul(value(x), weights(), False, by_row)], [x])


def _codes(port: Any) -> Any:
    return _ranged(port, 0, 255 / 64)


def _by_row() -> Any:
    return _weights(np.ascontiguousarray(CODES.swapaxes(1, 2)), SCALES.reshape(1, -1, 1))


def _as_ranges() -> Any:
    from openvino import opset13 as op

    end = (127 * SCALES).reshape(1, 1, -1)
    ends = [op.constant(one) for one in (-end, end, -end, end)]
    return op.fake_quantize(
        op.constant((CODES * SCALES).astype(np.float32)), *ends, levels=255
    )


def _reshaped() -> Any:
    from openvino import opset13 as op

    flat = _weights(CODES.reshape(-1, CHANNELS), SCALES.reshape(1, -1))
    return op.reshape(flat, op.constant([*CODES.shape]), False)


def _relu(port: Any) -> Any:
    from openvino import opset13 as op

    return op.relu(_turned(_turned(_ranged(port, -128 / 64, 127 / 64))))


def _sigmoid(port: Any) -> Any:
    from openvino import opset13 as op

    return op.sigmoid(_codes(port))


def _plain(port: Any) -> Any:
    return port


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], bool, bool]] = {
    "by channel": (_weights, _codes, False, True),
    "by row": (_by_row, _codes, True, True),
    "turned": (lambda: _turned(_by_row()), _codes, False, True),
    "reshaped": (_reshaped, _codes, False, True),
    "as ranges": (_as_ranges, _codes, False, True),
    "zeros subtracted": (lambda: _weights(zero=0), _codes, False, True),
    "moved and cut": (_weights, _relu, False, True),
    "zero point": (lambda: _weights(zero=3), _codes, False, False),
    "zero point of the value": (_weights, lambda p: _ranged(p, -1, 3), False, False),
    "one scale": (lambda: _weights(scales=SCALES[:1]), _codes, False, False),
    "scales of each matrix": (
        lambda: _weights(scales=np.tile(SCALES, (STACK, 1, 1))),
        _codes,
        False,
        False,
    ),
    "scales of rows": (
        lambda: _weights(scales=np.resize(SCALES, (1, SUMMED, 1))),
        _codes,
        False,
        False,
    ),
    "one matrix": (lambda: _weights(CODES[:1]), _codes, False, False),
    "values in floats": (_weights, _plain, False, False),
    "floats in between": (_weights, _sigmoid, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_those_that_share_scales_are_found_and_no_others(case: str) -> None:
    import openvino

    weights, value, by_row, is_wrong = CASES[case]
    model = _product(weights, value, by_row=by_row)
    assert bool(stacked_scales(model.get_ordered_ops())) is is_wrong
    if not is_wrong:
        y: Any
        (y,) = get_engine("openvino").load(model).run({"x": X}).values()
        exact = openvino.Tensor(np.zeros(y.shape, np.float32))
        model.evaluate([exact], [openvino.Tensor(X)])
        np.testing.assert_allclose(y, exact.data, rtol=1e-4, atol=1e-4)


def test_a_mended_release_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_faults(), FAULT, replace(known_faults()[FAULT], mended="0"))
    assert not stacked_scales(_product(_weights, _codes).get_ordered_ops())
