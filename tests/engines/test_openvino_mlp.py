"""Casts beside a block of small products end the process in OpenVINO; no model has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast import api
from finecast.engines import installed
from finecast.engines.faults import faults
from finecast.errors import ExitCode
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.frontends.tools import parse, tensor

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="openvino is not installed")

POLICY = Policy.parse("all:bf16")
# A user's own program; how many threads there are decides what is compiled into a block.
USER = """
import sys, openvino
for threads in (1, 2):
    openvino.Core().compile_model(sys.argv[1], "CPU", {
        "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads})
"""
BLOCK = """
  p = MatMul(x, w)
  s = Add(p, b)
  r = Relu(s)
  q = MatMul(r, v)
  t = Add(q, b)
"""
# What follows the block, and nodes that a user keeps in fp32.
ENDS = {
    "residual": ("y = Add(x, t)", ""),
    "gate": ("g = Sigmoid(t) y = Mul(g, x)", ""),
    "product": ("z = MatMul(x, w) y = Add(z, t)", "make_z"),
    "behind": ("z = MatMul(x, w) a = Tanh(z) y = Max(a, t)", "make_a"),
}


def block(end: str, rows: str = "8", width: int = 16) -> onnx.ModelProto:
    text = f"g (float[{rows}, {width}] x) => (float[{rows}, {width}] y) {{ {BLOCK} {end} }}"
    proto = parse(text)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (width, width)), ("v", (width, width)), ("b", (width,))):
        proto.graph.initializer.append(tensor(name, rng.standard_normal(shape) / 4))
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    return proto


def exit_code(model: Path) -> int:
    return subprocess.run([sys.executable, "-c", USER, str(model)], check=False).returncode


@pytest.mark.parametrize("name", ENDS)
def test_a_written_model_leaves_its_users_alive(tmp_path: Path, name: str) -> None:
    end, kept = ENDS[name]
    source, written = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(block(end), source)
    policy = replace(POLICY, exclude=(re.compile(f"^{kept}$"),) if kept else ())
    api.convert(source, written, policy, engine="openvino", verify=False)
    assert exit_code(source) == 0
    assert exit_code(written) == 0


@pytest.mark.parametrize("rows", ["1", "8"])
def test_openvino_still_crashes(tmp_path: Path, rows: str) -> None:
    """It does so in fp32 as well, on more CPUs; when it does not, the row of FAULTS goes."""
    path = tmp_path / "model.onnx"
    onnx.save(block("h = Tanh(x) y = Add(h, t)", rows), path)
    assert exit_code(path) != 0


def test_an_engine_that_ends_the_process_is_named(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(block("h = Tanh(x) y = Add(h, t)"), path)
    words = ["convert", str(path), "-o", str(output), "--engine", "openvino"]
    done = subprocess.run(
        [sys.executable, "-m", "finecast", *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == ExitCode.FAILED
    assert "OpenVINO crashed (SIGSEGV) as it compiled the model" in done.stderr
    assert "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("end", "rows", "width", "kept"),
    [
        ("y = Add(x, t)", "8", 16, "y"),
        ("y = Sub(x, t)", "8", 16, "y"),
        ("y = Sub(t, x)", "8", 16, "psrqty"),
        ("y = Add(x, t)", "n", 16, ""),
        ("y = Add(x, t)", "9", 16, ""),
        ("y = Add(x, t)", "8", 257, ""),
        ("y = Add(t, b)", "8", 16, ""),
    ],
)
def test_only_what_may_be_a_block_keeps_fp32(
    tmp_path: Path, end: str, rows: str, width: int, kept: str
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(block(end, rows, width), path)
    graph = frontend.prepare(frontend.load(path), POLICY).graph
    found = faults("openvino", "CPU", graph, (Format.BF16,))[Format.BF16]
    assert {graph.nodes[n].name for n in found} == {f"make_{n}" for n in kept}
