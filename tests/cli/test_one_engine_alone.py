"""Models that the first engine does not load: every verb takes the one that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast.engines import installed
from finecast.errors import ExitCode
from finecast.planning.plan import Plan
from tests.cli.conftest import Answer
from tests.frontends.tools import parse, tensor
from tests.kernels import skip_without_int8

Finecast = Callable[..., Answer]
pytestmark = pytest.mark.skipif(not installed("openvino"), reason="it is the first engine")
BF16 = ["--auto-cast", "all", "--auto-cast-type", "bf16"]
INT8 = ["--auto-cast", "all", "--auto-cast-type", "int8"]


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A scikit-learn pipeline as skl2onnx writes it: OpenVINO has no kernel for Scaler."""
    model = parse("""scaled (float[N,64] x) => (float[N,64] y) {
      [scaler] s = ai.onnx.ml.Scaler<offset=[0.5],scale=[2.0]>(x)
      [product] p = MatMul(s, w)
      [last] y = Relu(p)
    }""")
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model.graph.initializer.append(tensor("w", w))
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    onnx.save(model, tmp_path / "scaled.onnx")
    return tmp_path / "scaled.onnx"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Data for it."""
    x = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x)
    return tmp_path / "rows.npz"


def test_convert_plans_for_the_engine_that_runs_the_model(
    finecast: Finecast, scaled: Path, tmp_path: Path
) -> None:
    """It planned for OpenVINO's kernels, and no engine ran the result."""
    answer = finecast("convert", scaled, "-o", tmp_path / "low.onnx", *BF16)
    assert answer.code == ExitCode.DONE, answer.err
    told = "1 product by the rule 'kernel': ONNX Runtime has no working bf16 kernel"
    assert told in answer.err


def test_what_is_measured_is_measured_in_that_engine(
    finecast: Finecast, scaled: Path, rows: Path, tmp_path: Path
) -> None:
    skip_without_int8("onnxruntime")
    plan, out = tmp_path / "plan.json", tmp_path / "low.onnx"
    written = ["-o", out, "--plan-out", plan]
    answer = finecast("convert", scaled, *written, "--data", rows, *INT8)
    assert answer.code == ExitCode.DONE, answer.err
    assert Plan.load(plan).engine == "onnxruntime"
    assert Plan.load(plan).decision("product").format.label == "int8"  # pyright: ignore
    told = finecast("explain", scaled, "product", "--plan", plan)
    assert told.code == ExitCode.DONE
    assert not told.err  # kernels were compared in OpenVINO, whatever the plan says


def test_explain_asks_that_engine_for_its_kernels(finecast: Finecast, scaled: Path) -> None:
    report = finecast("explain", scaled, "product", *BF16, "--json").json
    verdicts = {v["rule"]: v["text"] for v in report["verdicts"]}
    assert verdicts["kernel"].startswith("ONNX Runtime has no working bf16 kernel")


def test_profile_times_all_models_in_an_engine_that_loads_them(
    finecast: Finecast, scaled: Path, net: Path
) -> None:
    fast = ["--runs", 2, "--seconds", 0, "--no-memory"]
    answer = finecast("profile", net, scaled, *fast, "--json")
    assert answer.code == ExitCode.DONE, answer.err
    assert answer.json["engine"] == "onnxruntime:CPU"
    asked = finecast("profile", scaled, *fast, "--engine", "openvino")
    assert asked.code == ExitCode.FAILED
    assert asked.err.endswith("an ONNX model: try --engine onnxruntime\n")


def test_what_no_engine_loads_is_told_without_engines_that_were_tried(
    finecast: Finecast, tmp_path: Path
) -> None:
    """The advice was to try ONNX Runtime, which had just failed."""
    model = parse("strange (float[4] x) => (float[4] y) { y = no.such.Op(x) }")
    model.opset_import.append(onnx.helper.make_opsetid("no.such", 1))
    onnx.save(model, tmp_path / "strange.onnx")
    for command in (["convert", "-o", tmp_path / "low.onnx", *BF16], ["profile"]):
        answer = finecast(*command, tmp_path / "strange.onnx")
        assert answer.code == ExitCode.FAILED
        assert "export it with ops that one of them has" in answer.err
        assert "try --engine" not in answer.err


def test_a_model_older_than_onnx_runtime_s_ops_is_taken_at_an_opset_that_it_has(
    finecast: Finecast, tmp_path: Path
) -> None:
    model = parse("old (float[4] x) => (float[4] y) { y = Add(x, x) }", opset=6)
    model.graph.node[0].name = ""
    onnx.save(model, tmp_path / "old.onnx")
    fp16 = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    answer = finecast("convert", tmp_path / "old.onnx", "-o", tmp_path / "o.onnx", *fp16)
    assert answer.code == ExitCode.DONE
    assert "ONNX Runtime reads no opset before 7: the model is taken at opset 7" in answer.err
