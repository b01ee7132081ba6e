"""Int8 ops behind reductions, into which OpenVINO fuses their quantization wrongly."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from finecast import api
from finecast.engines import faults
from finecast.engines.base import Array
from finecast.errors import WrongNumbersError
from finecast.native import engine_subject
from finecast.numbers.formats import Format
from finecast.tuning.result import Result
from tests.kernels import skip_without_int8

pytest.importorskip("openvino")

WIDTH = 32


def net(reduction: str) -> tuple[onnx.ModelProto, Array]:
    """Two products and a reduction between them, with its input."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]>'
        f" g (float[n, 16, {WIDTH}] x) => (float[m, k] y) <int64[1] rows = {{1}}> {{"
        f" [first] a = MatMul(x, w) [reduced] r = {reduction}"
        " [second] z = MatMul(r, v) y = Flatten(z) }"
    )
    random = np.random.default_rng(0)
    channels = np.exp(random.standard_normal(WIDTH)) / WIDTH**0.5  # of unlike size
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in (
            ("w", random.standard_normal((WIDTH, WIDTH)) * channels),
            ("v", random.standard_normal((WIDTH, 64)) / WIDTH**0.5),
        )
    )
    x = random.standard_normal((8, 16, WIDTH)).astype(np.float32)
    return model, x


@pytest.mark.parametrize(
    ("reduction", "kept"),
    [
        ("ReduceMean <keepdims: int = 0> (a, rows)", True),
        ("ReduceMax <keepdims: int = 0> (a, rows)", True),
        ("ReduceMin <keepdims: int = 1> (a, rows)", True),
        ("ReduceMean <keepdims: int = 1> (a, rows)", False),
        ("ReduceSum <keepdims: int = 0> (a, rows)", True),
    ],
)
def test_an_op_behind_a_reduction_is_computed_rightly(reduction: str, kept: bool) -> None:
    skip_without_int8()
    model, x = net(reduction)
    done = api.convert(model, policy="matmult:int8", engine="openvino", data={"x": x})
    assert done.plan.formats["first"] is Format.INT8
    reasons = {d.node: " ".join(r.text for r in d.reasons) for d in done.plan.decisions}
    assert (done.plan.formats.get("second") is not Format.INT8) is kept
    assert ("of the result of reduced wrongly" in reasons["second"]) is kept
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.03


def tuned(monkeypatch: pytest.MonkeyPatch) -> Result:
    """``tune`` of a net with the fault, as if no table had it."""
    skip_without_int8()
    others = tuple(f for f in faults.FAULTS if f.name != "openvino-reduced-codes")
    monkeypatch.setattr(faults, "FAULTS", others)
    model, x = net("ReduceMean <keepdims: int = 0> (a, rows)")
    return api.tune(
        model,
        data={"x": x},
        metric="cosine",
        tolerance=0.05,
        policy="matmult:int8",
        objective="size",
        engine="openvino",
    )


def test_the_search_finds_an_op_that_no_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is not taken for that of all ops."""
    outcome = tuned(monkeypatch)
    said = "'second' keeps fp32: planned in int8, OpenVINO computes it wrongly"
    assert any(note.startswith(said) for note in outcome.warnings)
    assert outcome.plan.formats["first"] is Format.INT8
    (error,) = outcome.output_errors.values()
    assert outcome.predicted_error == pytest.approx(error, rel=0.5)


def test_the_search_goes_on_where_no_op_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise WrongNumbersError("no digit is right")

    monkeypatch.setattr(engine_subject, "accept", refuse)
    outcome = tuned(monkeypatch)
    assert outcome.trials
    assert not any("keeps fp32" in note for note in outcome.warnings)
