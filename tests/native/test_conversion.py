"""What ``convert`` says of the formats that were asked for: slow ones, and those not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.engines.base import Engine
from finecast.engines.probe import Speed
from finecast.errors import UsageError
from finecast.native import conversion, engine_model
from finecast.numbers.formats import Format
from tests.frontends.tools import bf16_convolution


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 64])],
        [numpy_helper.from_array(weights, "w")],
    )
    opset = helper.make_opsetid("", 17)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> set[Format]:
    """Formats that gain in every engine; measured ones differ from machine to machine."""
    gaining: set[Format] = set()

    def speed(engine: Engine, fmt: Format) -> Speed:
        return Speed(gains=fmt in gaining, text=f"{fmt.label} in {engine.name}")

    monkeypatch.setattr(engine_model, "speed_of", speed)
    monkeypatch.setattr(conversion, "speed_of", speed)
    return gaining


def told(model: Path, policy: str) -> tuple[dict[str, int], tuple[str, ...]]:
    done = finecast.convert(model, model.with_name("low.onnx"), policy, force=True)
    return dict(done.plan.counts), done.warnings


def test_ops_in_fp64_are_counted(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    wide (float[4] x) => (float[4] y) {
      d = Cast<to = 11>(x)
      [one] e = Exp(d)
      [two] f = Neg(e)
      g = Cast<to = 1>(f)
      [three] y = Neg(g)
    }"""
    path = tmp_path / "wide.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert any("2 ops compute in fp64" in w for w in told(path, "all:bf16")[1])
    assert not any("fp64" in w for w in told(path, "none:bf16")[1])


SLOW = "in openvino: no speed is gained here"


def test_of_the_formats_used_the_slow_ones_are_named(model: Path, fast: set[Format]) -> None:
    assert told(model, "all:bf16") == ({"bf16": 1}, (f"bf16 {SLOW}",))
    fast.add(Format.BF16)
    assert told(model, "all:bf16") == ({"bf16": 1}, ())


def test_what_is_left_out_is_named(model: Path, fast: set[Format]) -> None:
    fast.add(Format.BF16)
    counts, warnings = told(model, "auto:fp16,bf16")
    assert "fp16" not in counts
    assert "skipped: fp16 in openvino" in warnings


def test_a_format_asked_for_and_not_used_is_named(model: Path, fast: set[Format]) -> None:
    fast.add(Format.BF16)
    # The first of the formats is permitted everywhere; that the other is slow matters not.
    counts, warnings = told(model, "all:bf16,fp16")
    assert counts == {"bf16": 1}
    assert warnings == ("no op is in fp16, which was asked for, too",)


def test_who_asks_for_no_format_misses_none(model: Path, fast: set[Format]) -> None:
    assert not fast
    assert told(model, "none:bf16") == ({"fp32": 1}, ())


def test_what_stays_low_is_not_run_in_an_engine_without_it(tmp_path: Path) -> None:
    model = tmp_path / "low.onnx"
    onnx.save(bf16_convolution(), model)
    x = np.ones((1, 1, 4, 4), np.float32)
    done = finecast.convert(model, tmp_path / "same.onnx", "none:bf16", data={"x": x})
    assert done.verified.relative_error == 0


def test_sizes_are_for_free_dimensions(model: Path) -> None:
    proto = onnx.load(model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    onnx.save(proto, model)
    done = finecast.convert(model, model.with_name("low.onnx"), dims={"rows": 3})
    assert done.verified.sizes == {"rows": 3}
    with pytest.raises(UsageError, match="columns"):
        finecast.convert(model, model.with_name("other.onnx"), dims={"columns": 3})
