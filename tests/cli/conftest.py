"""A small model, its data, and the command line as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from finecast.cli import VERBS, main
from tests.engines.emulator import models

NET = """<ir_version: 10, opset_import: ["" : 17]>
net (float[N,16] x) => (float[N,4] y) <float[16,4] w = {WEIGHTS}, float[4] b = {0,0,0,1}> {
  [product] m = MatMul(x, w)
  [bias] s = Add(m, b)
  [soft] y = Softmax(s)
}"""


OF_PLUGINS = {"ladder", "mcp", "report"}
"""Verbs of plugins that tests of the core call among others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """x -> MatMul -> Add -> Softmax -> y, 16 features, 4 classes."""
    weights = np.random.default_rng(0).normal(size=64)
    text = NET.replace("WEIGHTS", ",".join(f"{w:.4f}" for w in weights))
    path = tmp_path / "net.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """64 samples with labels."""
    rng = np.random.default_rng(1)
    path = tmp_path / "data.npz"
    x = rng.normal(size=(64, 16)).astype(np.float32)
    np.savez(path, x=x, label=rng.integers(0, 4, 64))
    return path


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """A small perceptron for the emulating verbs."""
    return models.mlp(tmp_path / "mlp.onnx")


@pytest.fixture
def mlp_data(tmp_path: Path) -> Path:
    """64 samples for it, without labels."""
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    np.savez(tmp_path / "mlp.npz", x=x)
    return tmp_path / "mlp.npz"


@pytest.fixture
def finecast(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run a command line in this process."""

    def call(*args: object) -> Answer:
        if args and args[0] in OF_PLUGINS - VERBS.keys():
            pytest.skip("the plugin with this verb is not here")
        code = main([str(a) for a in args])
        captured = capsys.readouterr()
        return Answer(code=code, out=captured.out, err=captured.err)

    return call
