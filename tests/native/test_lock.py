"""Locks of models of each library, as their engines load them from files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.engines import get_engine
from finecast.engines.numerics import openvino_settings
from finecast.errors import UsageError, UserCodeError
from finecast.native.drift import State, VerifyOptions
from finecast.native.lock import Deployed, Lock, Runner
from finecast.native.opening import lock_beside
from tests.kernels import computes_bf16
from tests.native.networks import FRONTENDS, Weights
from tests.tampered import PYTHON, tampered

ROWS = {".onnx": ("openvino", "onnxruntime"), ".xml": ("openvino",), ".pt2": ("torch-eager",)}
CASES = [
    pytest.param(row, engine, id=f"{row.suffix or 'folder'} in {engine}")
    for row in FRONTENDS
    if row.suffix != ".toy"
    for engine in ROWS.get(row.suffix, ("tensorflow",))
    if importlib.util.find_spec(row.needs)
]


def weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) for s in pairwise((16, 32, 8))]


def locked(row: Any, engine: str, folder: Path) -> Path:
    """A net of the row, with its lock."""
    path = folder / f"net{row.suffix}"
    row.write(path, weights())
    runner = Runner.of(f"{engine}:CPU")
    session = get_engine(runner.name).load(path)
    x = np.random.default_rng(1).normal(size=(20, 16)).astype(np.float32)
    calls = [{session.inputs[0].name: x}]
    deployed = Deployed(path=path, runner=runner, reference=session, calls=calls)
    deployed.lock("", {}, None).write(lock_beside(path))
    return path


@pytest.mark.parametrize(("row", "engine"), CASES)
def test_a_model_holds_what_its_lock_says(row: Any, engine: str, tmp_path: Path) -> None:
    path = locked(row, engine, tmp_path)
    lock = Lock.load(lock_beside(path))
    assert lock.observed.runner.version
    assert lock.observed.settings
    assert bool(lock.observed.kernels) == (not engine.startswith("torch"))
    found = finecast.verify(path)
    assert set(found.drifted) <= {"speed"}, found
    assert max(found.deviations.values()) < 1e-6


@pytest.mark.parametrize(("row", "engine"), CASES)
def test_a_changed_weight_is_caught(row: Any, engine: str, tmp_path: Path) -> None:
    path = locked(row, engine, tmp_path)
    other = weights()
    other[0][3, 3] += 0.5
    if row.suffix == "":
        import shutil

        shutil.rmtree(path)
    row.write(path, other)
    found = finecast.verify(path)
    assert not found.holds
    assert {"model", "numbers"} <= set(found.drifted)


def test_convert_writes_a_lock_with_samples_of_the_data(tmp_path: Path) -> None:
    path, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    FRONTENDS[0].write(path, weights())
    data = {"x": np.random.default_rng(1).normal(size=(40, 16)).astype(np.float32)}
    options: dict[str, Any] = {"policy": "all:bf16", "lock": True, "progress": False}
    done = finecast.convert(path, low, data=data, **options)
    assert done.lock == tmp_path / "low.lock.json"
    lock = Lock.load(lock_beside(low))
    assert lock.speedup is None
    assert lock.samples is not None
    assert 20 <= lock.samples.count <= 40
    assert set(finecast.verify(low).drifted) <= {"speed"}
    with pytest.raises(UsageError, match="a deployment manifest has samples of data"):
        finecast.convert(path, tmp_path / "other.onnx", **options)


def test_a_lock_of_a_module_allows_what_its_own_error_is(tmp_path: Path) -> None:
    """Its outputs have other names than fp32's; a module of the caller's is verified, too."""
    torch = pytest.importorskip("torch")
    path, low = tmp_path / "net.pt2", tmp_path / "low.pt2"
    next(row for row in FRONTENDS if row.suffix == ".pt2").write(path, weights())
    data = {"x": np.random.default_rng(1).normal(size=(20, 16)).astype(np.float32)}
    options: dict[str, Any] = {"policy": "all:bf16", "lock": True, "progress": False}
    finecast.convert(path, low, data=data, **options)
    samples = Lock.load(lock_beside(low)).samples
    assert samples is not None
    assert samples.tolerances.keys() == samples.outputs[0].keys()
    assert all(1e-4 < allowed < 0.1 for allowed in samples.tolerances.values())
    same = finecast.verify(low, deployed=torch.export.load(low).module())
    assert set(same.drifted) <= {"speed"}
    other = finecast.verify(low, deployed=torch.export.load(path).module())
    assert "numbers" in other.drifted


SETTINGS = {
    "openvino": {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "u8",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32",
        "CPU_DENORMALS_OPTIMIZATION": "YES",
        "INFERENCE_NUM_THREADS": "1",
    },
    "onnxruntime": {
        "session.set_denormal_as_zero": "1",
        "session.qdq_matmulnbits_accuracy_level": "4",
        "threads": "1",
    },
}


@pytest.mark.parametrize("engine", SETTINGS)
def test_settings_of_the_deployment_are_compared(engine: str, tmp_path: Path) -> None:
    path = locked(FRONTENDS[0], engine, tmp_path)
    threads = {"INFERENCE_NUM_THREADS", "threads"}
    for name, value in SETTINGS[engine].items():
        found = finecast.verify(path, settings={name: value})
        if name in threads and Lock.load(lock_beside(path)).observed.machine.cores == 1:
            continue
        if name == "INFERENCE_PRECISION_HINT" and not computes_bf16():
            assert "settings" not in found.drifted  # OpenVINO stays in fp32
            continue
        assert "settings" in found.drifted, name
        told = next(c.texts for c in found.checks if c.name == "settings")
        assert name in told[0]
        assert found.holds == (name in threads and "speed" not in found.drifted)


def test_what_is_deployed_is_verified_itself(tmp_path: Path) -> None:
    import onnxruntime
    import openvino

    path = locked(FRONTENDS[0], "openvino", tmp_path)
    core = openvino.Core()
    careless = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = finecast.verify(path, deployed=careless)
    assert {"settings"} <= set(found.drifted) <= {"settings", "speed"}
    assert "EXECUTION_MODE_HINT" in str(found)
    exact = openvino_settings("f32") | {"PERFORMANCE_HINT": "LATENCY"}
    right = core.compile_model(path, "CPU", exact)
    assert set(finecast.verify(path, deployed=right).drifted) <= {"speed"}

    session = onnxruntime.InferenceSession(path)
    by_function = finecast.verify(path, deployed=lambda feeds: session.run(None, feeds))
    assert (
        {"kernels", "settings"} <= set(by_function.drifted) <= {"kernels", "settings", "speed"}
    )
    assert all(c.state is not State.DRIFTED for c in by_function.checks if c.name != "speed")
    wrong = finecast.verify(path, deployed=lambda feeds: [feeds["x"][:, :8]])
    assert not wrong.holds
    assert "numbers" in wrong.drifted
    with pytest.raises(UsageError, match="runs no model"):
        finecast.verify(path, deployed=3)
    with pytest.raises(UserCodeError, match="what is deployed failed"):
        finecast.verify(path, deployed=lambda feeds: 1 / 0)

    other = locked(FRONTENDS[0], "onnxruntime", tmp_path)
    own = finecast.verify(other, deployed=session)
    assert (
        "settings" in own.drifted
    )  # an entry of 4-bit weights that is not ONNX Runtime's own


def test_settings_that_an_engine_does_not_have_are_refused(tmp_path: Path) -> None:
    path = locked(FRONTENDS[0], "openvino", tmp_path)
    with pytest.raises(UsageError, match="unknown property"):
        finecast.verify(path, settings={"INFERENCE_PRECISION": "bf16"})
    with pytest.raises(UsageError, match="is not NAME=VALUE"):
        VerifyOptions(settings=["INFERENCE_PRECISION_HINT"])  # pyright: ignore[reportArgumentType]  # as the shell gives it


def test_a_cpu_without_newer_instructions_is_told_apart(tmp_path: Path) -> None:
    path = locked(FRONTENDS[0], "openvino", tmp_path)
    sets = Lock.load(lock_beside(path)).observed.machine.instruction_sets
    if "avx512f" not in sets:
        pytest.skip("this CPU has no newer instructions that could be forbidden")
    command = [sys.executable, "-m", "finecast", "verify", str(path), "--json"]
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    states = {c["name"]: c["state"] for c in json.loads(done.stdout)["checks"]}
    assert states["instruction sets"] == states["kernels"] == "drifted"
    assert states["model"] == states["engine"] == states["numbers"] == "holds"


def test_any_value_in_a_lock_is_read_or_refused_in_plain_words(tmp_path: Path) -> None:
    source, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    FRONTENDS[0].write(source, weights())
    data = {"x": np.random.default_rng(1).normal(size=(40, 16)).astype(np.float32)}
    finecast.convert(source, low, "all:bf16", data=data, lock=True, progress=False)
    path, refused = lock_beside(low), dict[str, str]()
    whole = json.loads(path.read_text(encoding="utf-8"))
    no_manifest = "not a deployment manifest"
    for change, says in (
        ({"version": 9}, f"deployment manifest version 9 is newer than 2 ({path})"),
        ({"engine": {}}, f"{no_manifest}: engine has no 'name' ({path})"),
        (
            {"kernels": [["a", "b"], []]},
            f"{no_manifest}: kernels[1] is [], expected a list of length >= 1 ({path})",
        ),
        (
            {"kind": "finecast.report"},
            f"{no_manifest}: it is a report of version 2 ({path})",
        ),
    ):
        path.write_text(json.dumps(whole | change), encoding="utf-8")
        with pytest.raises(UsageError) as raised:
            Lock.load(path)
        assert says in raised.value.line
    plan = finecast.convert(source, None, "all:bf16", verify=False).plan.to_json()
    path.write_text(plan, encoding="utf-8")
    with pytest.raises(
        UsageError, match="not a deployment manifest: it is a plan of version 11"
    ):
        Lock.load(path)
    path.write_text(json.dumps(whole), encoding="utf-8")
    for what, text in tampered(path.read_text(encoding="utf-8")):
        path.write_text(text, encoding="utf-8")
        try:
            Lock.load(path)
        except UsageError as error:
            refused[what] = error.line
    assert len(refused) > 50
    for what, line in refused.items():
        assert not PYTHON.search(line), (what, line)
        assert len(line) < 2500, what
