"""Older CPUs than this one: oneDNN held to their instructions, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from finecast.engines import installed
from finecast.measure.environment import environment

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 16, 16, 16] x) => (float[n, 10] y)
<int64[2] flat = {-1, 4096}> {
  [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w)
  [act] r = Relu (a)
  [flatten] i = Reshape (r, flat)
  [head] y = MatMul (i, v)
}"""
SHAPES = {"w": (16, 16, 3, 3), "v": (4096, 10)}
# By the limit: the CPU's flag that it leaves, and a part of its kernels' names.
LIMITS = {
    "AVX512_CORE_VNNI": ("avx512_vnni", "avx512_I8"),
    "AVX2_VNNI": ("avx_vnni", "avx2_I8"),
}
# What runs in the held process: the converted model's kernels, of its products alone.
PROFILE = """
import json, sys, numpy
from pathlib import Path
from finecast.engines.openvino import OpenVinoEngine
session = OpenVinoEngine().load(Path(sys.argv[1]), profiling=True)
found = session.profile(dict(numpy.load(sys.argv[2])))
print(json.dumps({n: k.kind for k in found for n in k.ops if n in ("conv", "head")}))
"""


def held(isa: str, *arguments: str) -> Any:
    """The JSON that a Python process prints that is held to ``isa``."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    made = parser.parse_model(NET)
    draw = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        array = draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, tmp_path / "net.onnx")
    x = draw.standard_normal((8, 16, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    return tmp_path / "net.onnx", tmp_path / "x.npz"


@pytest.mark.slow
@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize("isa", LIMITS)
def test_int8_runs_in_the_kernels_of_an_older_cpu(isa: str, files: tuple[Path, Path]) -> None:
    flag, kernels = LIMITS[isa]
    if flag not in environment().flags:
        pytest.skip(f"this CPU has no {flag}")
    net, data = (str(path) for path in files)
    out = str(files[0].with_name("low.onnx"))
    options = ["--auto-cast", "all", "--auto-cast-type", "int8", "--data", data, "--json"]
    made = held(isa, "-m", "finecast", "convert", net, "-o", out, *options)
    assert made["ops"]["int8"] == 2
    ran = held(isa, "-c", PROFILE, out, data)
    assert set(ran) == {"conv", "head"}
    assert all(kind.endswith(kernels) for kind in ran.values()), ran
    figures = held(isa, "-m", "finecast", "profile", out, "--data", data, "--json")
    assert figures["environment"]["isa_limit"] == f"ONEDNN_MAX_CPU_ISA={isa}"
