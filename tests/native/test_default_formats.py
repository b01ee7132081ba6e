"""Formats that ``tune`` tries where none is named: those that the engine computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import finecast
from finecast.engines import probe
from finecast.engines.probe_models import Probe
from finecast.numbers.formats import Format
from tests.frontends.tools import parse

NET = "g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }"


def test_codes_that_are_computed_wrongly_here_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without VNNI: int8, for which nobody asked, is no reason to refuse a model."""
    attempt = probe._attempt

    def without_integers(engine: Any, model: Probe, fmt: Format) -> Any:
        if fmt.has_scales:
            return probe._Attempt(run=None, reason="wrong by 71.5 unit roundoffs")
        return attempt(engine, model, fmt)

    monkeypatch.setattr(probe, "_attempt", without_integers)
    monkeypatch.setattr(probe, "_cache", {})
    model = parse(NET)
    weight = np.eye(4, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    data = {"x": np.ones((4, 4), np.float32)}
    found = finecast.tune(tmp_path / "net.onnx", data=data, metric="max_abs", tolerance=0.5)
    assert Format.INT8 not in found.plan.formats.values()
