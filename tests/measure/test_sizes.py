"""Shapes for one call: stated, inferred or observed, and linear in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from finecast import api
from finecast.engines.onnxruntime import OnnxRuntimeEngine
from finecast.numbers.formats import Format
from tests.frontends.tools import parse

STATED = "g (float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Tanh(a) }"
OBSERVED = """g (float[N,4] x) => (float[M,4] y) <bool[3] k = {1, 0, 1}> {
  f = Compress<axis = 0>(x, k) y = Relu(f) }"""


@pytest.mark.parametrize(("text", "runs"), [(STATED, 0), (OBSERVED, 1)])
def test_a_model_is_run_only_where_nothing_else_tells_its_shapes(
    text: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    load = OnnxRuntimeEngine.load

    def counted(self: OnnxRuntimeEngine, model: Any, *, profiling: bool = False) -> Any:
        loaded.append(model)
        return load(self, model, profiling=profiling)

    monkeypatch.setattr(OnnxRuntimeEngine, "load", counted)
    onnx.save(parse(text), tmp_path / "m.onnx")
    census = api.inspect(tmp_path / "m.onnx", batch=3)
    assert len(loaded) == runs
    assert sum(c.unknown for c in census.classes) == 0


def test_values_are_shown_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session for 300 values: a session per 64 made time grow with the square."""
    loaded: list[object] = []
    load = OnnxRuntimeEngine.load

    def counted(self: OnnxRuntimeEngine, model: Any, *, profiling: bool = False) -> Any:
        loaded.append(model)
        return load(self, model, profiling=profiling)

    steps = " ".join(f"v{i + 1} = Tanh(v{i})" for i in range(300))
    text = f"g (float[N,4] v0) => (float[N,4] y) {{ {steps} y = Relu(v300) }}"
    onnx.save(parse(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", v0=np.full((5, 4), 1e39 / 1e2, np.float32))
    low = Format.FP16
    monkeypatch.setattr(OnnxRuntimeEngine, "load", counted)
    census = api.inspect(tmp_path / "m.onnx", data=tmp_path / "d.npz", low=low)
    assert [w.value for w in census.warnings] == ["v0"]
    assert len(loaded) <= 2  # one more may tell the data's reader of the inputs
