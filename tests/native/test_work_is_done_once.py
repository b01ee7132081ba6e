"""What takes time is not done again for the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines.onnxruntime import OnnxRuntimeEngine
from finecast.frontends import onnx as onnx_frontend
from finecast.native.openvino import read
from finecast.processes.worker import Worker
from finecast.rules.policy import Policy
from tests.frontends.tools import parse
from tests.native.networks import FRONTENDS

RNG = np.random.default_rng(0)
WEIGHTS = [(RNG.normal(size=(8, 8)) / 4).astype(np.float32) for _ in range(2)]


def net(folder: Path, suffix: str) -> Path:
    path = folder / f"net{suffix}"
    next(f for f in FRONTENDS if f.suffix == suffix).write(path, WEIGHTS)
    return path


def test_tune_for_a_device_prepares_an_onnx_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Policy] = []
    prepare = onnx_frontend.prepare

    def counted(file: Any, policy: Policy, **options: Any) -> Any:
        prepared.append(policy)
        return prepare(file, policy, **options)

    monkeypatch.setattr(onnx_frontend, "prepare", counted)
    policy = Policy.parse("auto:bf16")
    x = RNG.normal(size=(8, 8)).astype(np.float32)
    finecast.tune(net(tmp_path, ".onnx"), data={"x": x}, target="trn1", policy=policy)
    assert prepared.count(policy) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_exported_program_is_edited_once_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from finecast.frontends import torch as torch_frontend

    path = net(tmp_path, ".pt2")
    plan = finecast.convert(path, policy="all:bf16").plan
    edited: list[str] = []
    planned_edits = torch_frontend.planned_edits

    def counted(captured: Any, plan: finecast.Plan, where: str = "") -> Any:
        edited.append(plan.digest)
        return planned_edits(captured, plan, where)

    monkeypatch.setattr(torch_frontend, "planned_edits", counted)
    done = finecast.apply(plan, path)
    assert edited == [plan.digest]
    assert done.casts == 0


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_convert_compiles_each_model_once_and_in_another_process(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fp32 model, the converted one, and the converted one on one thread."""
    openvino = pytest.importorskip("openvino")
    here: list[object] = []
    there: list[str] = []
    compile_model, call = openvino.Core.compile_model, Worker.call

    def counted(core: Any, model: Any, *given: Any) -> Any:
        here.append(model)
        return compile_model(core, model, *given)

    def listen(self: Worker, request: dict[str, Any], *rest: Any) -> Any:
        if request.get("call") == "run" or request.get("settings", {}).get("compile"):
            there.append(request["call"])
        return call(self, request, *rest)

    policy, model = "all:bf16", net(tmp_path, suffix)
    finecast.convert(model, policy=policy)  # asks what the engine has
    monkeypatch.setattr(openvino.Core, "compile_model", counted)
    monkeypatch.setattr(Worker, "call", listen)
    done = finecast.convert(model, tmp_path / f"low{suffix}", policy)
    assert done.verified.engine == "openvino"
    assert here == []
    assert there.count("keep") == 3
    assert "load" not in there
    assert there.count("run") == 4  # with fp32's on other inputs


def test_a_model_that_explains_a_plan_is_compiled_in_the_other_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino")
    here: list[object] = []
    compile_model = openvino.Core.compile_model

    def counted(core: Any, model: Any, *given: Any) -> Any:
        here.append(model)
        return compile_model(core, model, *given)

    path = net(tmp_path, ".xml")
    plan = finecast.convert(path, policy="all:bf16").plan
    source, x = read(path), RNG.normal(size=(8, 8)).astype(np.float32)
    built = source.build(plan)
    wanted = source.rounded_session(plan).run({"x": x})
    monkeypatch.setattr(openvino.Core, "compile_model", counted)
    found = source.explained(built, path, plan, {"x": x})
    assert here == []
    assert {n: a.tobytes() for n, a in found.items()} == {
        n: a.tobytes() for n, a in wanted.items()
    }


def test_a_second_engine_loads_the_given_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses sizes that do not fit, which bodies hide, and gives a second opinion."""
    pytest.importorskip("openvino")
    body = "{name} () => (float[8, 8] {name}_out) {{ {name}_out = {op}(x, w) }}"
    branches = [body.format(name=name, op=op) for name, op in (("a", "MatMul"), ("b", "Add"))]
    text = f"""net (float[8, 8] x, bool c) => (float[8, 8] y) {{
        h = If(c) <then_branch = {branches[0]}, else_branch = {branches[1]}>
        y = MatMul(h, w)
    }}"""
    model = parse(text, opset=17)
    model.graph.initializer.append(numpy_helper.from_array(WEIGHTS[0], "w"))
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    loaded: list[object] = []
    load = OnnxRuntimeEngine.load

    def counted(self: OnnxRuntimeEngine, model: Any, **options: Any) -> Any:
        loaded.append(model)
        return load(self, model, **options)

    monkeypatch.setattr(OnnxRuntimeEngine, "load", counted)
    done = finecast.convert(path, tmp_path / "low.onnx", "all:bf16", engine="openvino")
    assert done.verified.relative_error
    assert loaded.count(path) == 1
