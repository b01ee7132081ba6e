"""Memory and environment: what is measured of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast.engines import ONNX, installed, reading
from finecast.errors import EngineError
from finecast.measure import memory
from finecast.measure.environment import environment, local_target
from finecast.measure.memory import peak_memory, resident_peak_bytes

ELEMENTS = 8_000_000
ENDED = """
import os, signal

def answer(*asked):
    os.write(2, b"a warning of the engine")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("engine", reading(ONNX))
def test_memory_is_that_of_the_model_in_a_process_of_its_own(
    engine: str, tmp_path: Path
) -> None:
    if not installed(engine):
        pytest.skip(f"{engine} is not installed")
    ballast = np.ones(200_000_000, np.uint8)  # this process's own size must not count
    path = tmp_path / "large.onnx"
    path.write_bytes(_large())
    x = np.ones(1, ml_dtypes.bfloat16)
    use = peak_memory(path, engine, {"x": x})
    assert use.model_bytes == use.peak_bytes - use.idle_bytes
    assert use.peak_bytes < resident_peak_bytes()
    assert 4 * ELEMENTS < use.model_bytes < 40 * ELEMENTS
    assert ballast[0] == 1


def test_a_model_that_does_not_load_says_why(tmp_path: Path) -> None:
    engine = next(name for name in reading(ONNX) if installed(name))
    with pytest.raises(EngineError, match="cannot measure memory: cannot read the model"):
        peak_memory(tmp_path / "none.onnx", engine, {})


def test_a_measurement_that_the_kernel_ends_names_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where memory runs out; what the engine wrote before is not the reason.
    (tmp_path / "ended.py").write_text(ENDED)
    monkeypatch.setattr(memory, "__file__", str(tmp_path / "ended.py"))
    with pytest.raises(EngineError, match=r"memory: its process crashed \(SIGKILL\)"):
        peak_memory(tmp_path / "model.onnx", "onnxruntime", {})


def test_the_environment_is_json() -> None:
    found = environment().as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"]
    assert found["cores"] >= 1
    assert "numpy" in found["libraries"]


@pytest.mark.parametrize(
    ("limit", "target"),
    [
        (None, "amx"),
        ("ALL", "amx"),
        ("AVX512_CORE_AMX", "amx"),
        ("avx512_core_bf16", "avx512-bf16"),
        ("AVX512_CORE_VNNI", "avx512-vnni"),
        ("AVX2_VNNI", "avx2-vnni"),
        ("AVX512_CORE", "avx2"),
        ("SSE41", "avx2"),
    ],
)
def test_the_target_of_a_cpu_held_to_older_instructions(
    limit: str | None, target: str
) -> None:
    machine = replace(
        environment(),
        flags=("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16"),
        isa_limit=None if limit is None else f"ONEDNN_MAX_CPU_ISA={limit}",
    )
    assert local_target(machine) == target


def _large() -> bytes:
    weights = np.arange(ELEMENTS, dtype=np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "w"], ["p"], name="mul"),
        helper.make_node("ReduceMax", ["p"], ["y"], name="max", keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(weights, "w")],
    )
    net = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return net.SerializeToString()
