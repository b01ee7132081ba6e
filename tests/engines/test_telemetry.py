"""Engines report nothing to their makers, and leave no identifiers in the user's folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.frontends.tools import parse

_SET = ("ORT_DISABLE_TELEMETRY", "CI", "TF_BUILD", "JENKINS_URL")
"""Variables by which an engine reports nothing anyway."""


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_an_engine_that_finecast_imports_leaves_no_identifiers(
    name: str, tmp_path: Path
) -> None:
    model, home = tmp_path / "m.onnx", tmp_path / "home"
    onnx.save(parse("m (float[4] x) => (float[4] y) { y = Relu(x) }"), model)
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in _SET}
    subprocess.run(
        [sys.executable, "-m", "finecast", "profile", str(model), "--engine", name],
        env=environment | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
        check=True,
        capture_output=True,
    )
    assert [*home.rglob("*")] == []
