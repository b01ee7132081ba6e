"""A new engine is one row: the verbs take it by name, and nothing else knows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import finecast
from finecast import engines
from finecast.numbers.formats import Format
from tests.engines import toy

WEIGHTS = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
NET = """<ir_version: 10, opset_import: ["" : 22]>
net (float[N,8] x) => (float[N,8] y) <float[8,8] w0 = {W0}, float[8,8] w1 = {W1}> {
  [first] a = MatMul(x, w0)
  [relu] b = Relu(a)
  [second] y = MatMul(b, w1)
}"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    return toy.install(monkeypatch)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    text = NET
    for number, array in enumerate(WEIGHTS):
        text = text.replace(f"W{number}", ",".join(str(w) for w in array.ravel()))
    path = tmp_path / "net.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    return path


def test_its_file_is_short() -> None:
    assert len(Path(toy.__file__).read_text(encoding="utf-8").splitlines()) < 150


def test_convert_verifies_in_it(engine: str, net: Path, tmp_path: Path) -> None:
    done = finecast.convert(net, tmp_path / "low.onnx", "all:bf16", engine=engine)
    assert done.verified.engine == engine
    assert done.plan.engine == engine
    assert done.verified.relative_error is not None
    assert 0 < done.verified.relative_error < 8 * Format.BF16.unit_roundoff


def test_tune_takes_its_times(engine: str, net: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)
    outcome = finecast.tune(
        net,
        tmp_path / "tuned.onnx",
        data={"x": x},
        metric="agreement",
        tolerance=0.5,
        engine=engine,
    )
    assert outcome.improved
    assert outcome.tuned.metric >= 0.5
    # Three steps; in bf16 with a cast in and one out. Ticks are of the clock.
    steps = 3 * toy.STEP_S
    assert outcome.baseline.latency_s == pytest.approx(steps, abs=10 * toy.TICK_S)
    low = steps / toy.SPEED["bf16"] + 2 * toy.CAST_S
    assert outcome.tuned.latency_s == pytest.approx(low, abs=10 * toy.TICK_S)
    assert (tmp_path / "tuned.onnx").is_file()


def test_doctor_probes_it(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finecast.cli import doctor

    monkeypatch.setattr(engines, "ENGINES", {engine: toy.ROW})
    assert doctor.engine_specs() == ["toy:CPU"]
    doctor.run(as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["engines"]
    assert (row["engine"], row["device"]) == ("toy", "CPU")
    # Four times as fast in one step, and beside it casts of what comes in and goes out.
    assert row["formats"]["bf16"]["worthwhile"]
    assert not row["formats"]["fp16"]["worthwhile"]


def test_a_device_that_it_has_not(engine: str, net: Path) -> None:
    with pytest.raises(finecast.EngineError, match="no device 'GPU'"):
        finecast.convert(net, policy="all:bf16", engine=f"{engine}:GPU")
