"""emulate and ladder on programs that ``torch.export.save`` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from finecast.engines.emulator import exact_session  # noqa: E402
from finecast.errors import ExitCode  # noqa: E402
from tests.cli.conftest import Answer  # noqa: E402
from tests.engines.emulator import exported_pairs as pairs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Finecast = Callable[..., Answer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nets as programs, each with data and the labels of fp32."""
    made = tmp_path_factory.mktemp("programs")
    for name in pairs.NETS:
        torch.export.save(pairs.program(name), made / f"{name}.pt2")
        np.savez(made / f"{name}.npz", x=pairs.inputs(name, 24))
    return made


@pytest.mark.parametrize("name", list(pairs.NETS))
@pytest.mark.parametrize("scope", ["matmult", "all"])
def test_emulate_gives_what_it_gives_for_the_onnx_export(
    finecast: Finecast, folder: Path, name: str, scope: str
) -> None:
    options = ["--target", "trn1", "--auto-cast", scope, "--auto-cast-type", "bf16"]
    options += ["--data", folder / f"{name}.npz", "--metric", "snr_db", "--json"]
    program = finecast("emulate", folder / f"{name}.pt2", *options)
    assert program.code == ExitCode.DONE, program.err
    found, onnx = program.json, finecast("emulate", pairs.onnx_file(name), *options).json
    # Values near a middle may round to either side (see test_torch_programs.tolerance).
    assert found["output_error"] == pytest.approx(onnx["output_error"], rel=0.1)
    assert found["emulated"] == pytest.approx(onnx["emulated"], abs=1)
    assert found["output_error"] > 1e-4
    assert found["ops"]
    assert all(o["reasons"] for o in found["ops"])
    assert sum(o["share"] for o in found["ops"]) == pytest.approx(1)


@pytest.mark.parametrize("target", ["trn1", "inf1"])
def test_ladder_gives_what_it_gives_for_the_onnx_export(
    finecast: Finecast, folder: Path, target: str
) -> None:
    options = ["--target", target, "--data", folder / "mlp.npz", "--no-per-op"]
    options += ["--metric", "snr_db", "--max-drop", "30", "--json"]
    answer = finecast("ladder", folder / "mlp.pt2", *options)
    assert answer.code == ExitCode.DONE, answer.err
    onnx = finecast("ladder", pairs.onnx_file("mlp"), *options).json
    for ours, theirs in zip(answer.json["rungs"], onnx["rungs"], strict=True):
        assert ours["options"] == theirs["options"]
        assert ours["output_error"] == pytest.approx(theirs["output_error"], rel=0.1, abs=1e-6)
        assert ours["passed"] == theirs["passed"]
    assert answer.json["recommended"]["options"] == onnx["recommended"]["options"]


def test_ladder_writes_the_program_of_a_plan_by_op(finecast: Finecast, tmp_path: Path) -> None:
    """Of two products one needs digits that bf16 and fp16 lack, the other none: no rung that
    casts passes."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = torch.nn.Parameter(torch.eye(512))
            self.coarse = torch.nn.Parameter(torch.eye(512))

        def forward(self, x: Any, z: Any) -> Any:
            return x @ self.fine, z @ self.coarse

    rng = np.random.default_rng(0)
    lead = rng.integers(0, 512, 32)
    x = np.ones((32, 512), np.float32)
    x[np.arange(32), lead] += np.float32(2.0**-13)  # below half a step of fp16
    z = rng.integers(-8, 9, (32, 512)).astype(np.float32)
    example = (torch.from_numpy(x), torch.from_numpy(z))
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(Two().eval(), example, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    np.savez(tmp_path / "m.npz", x=x, z=z, label=lead)
    out = tmp_path / "low.pt2"
    options = ["--target", "trn1", "--data", tmp_path / "m.npz", "--metric", "top1"]
    answer = finecast("ladder", tmp_path / "m.pt2", *options, "-o", out, "--json")
    assert answer.code == ExitCode.DONE, answer.err
    report = answer.json
    assert [r["options"] for r in report["rungs"] if r["passed"]] == ["--auto-cast none"]
    assert report["per_op"]["written"] == str(out), report["per_op"]
    assert report["per_op"]["metric"] == 1.0
    assert report["per_op"]["ops"] == {"fp16": 1, "fp32": 1}, "the first of two as fast"
    low = torch.export.load(out)
    fine, coarse = low.module()(*example)
    assert np.array_equal(fine.detach().numpy(), x)
    assert np.array_equal(coarse.detach().numpy(), z)
    assert torch.float16 in {t.dtype for t in low.state_dict.values()}
    assert finecast("ladder", tmp_path / "m.pt2", *options, "-o", out).code == ExitCode.USAGE


def test_the_model_is_loaded_once(
    finecast: Finecast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    module = sys.modules["finecast.engines.emulator"]

    def counted(path: Path) -> Any:
        loads.append(path)
        return exact_session(path)

    monkeypatch.setattr(module, "exact_session", counted)
    monkeypatch.setattr("finecast.native.onnx.exact_session", counted)
    options = ["--target", "trn1", "--data", folder / "mlp.npz", "--json"]
    assert finecast("emulate", pairs.onnx_file("mlp"), *options).code == ExitCode.DONE
    assert len(loads) == 1
    finecast("ladder", pairs.onnx_file("mlp"), *options, "--no-per-op")
    assert len(loads) == 2


def test_what_would_run_code_needs_the_users_word(finecast: Finecast, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"no program")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 2), np.float32))
    for verb in ("emulate", "ladder"):
        data = ["--target", "trn1", "--data", tmp_path / "d.npz"]
        answer = finecast(verb, tmp_path / "m.pt2", *data)
        assert answer.code == ExitCode.FAILED
        assert answer.err.count("\n") == 1
        assert "m.pt2" in answer.err


def test_what_was_not_measured_is_judged_by_reputation(
    finecast: Finecast, tmp_path: Path
) -> None:
    """As for ONNX: without data a softmax keeps fp32 under auto, converted or explained."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softmax(dim=-1)).eval()
    torch.export.save(torch.export.export(net, (torch.randn(4, 16),)), tmp_path / "m.pt2")
    options = ["--target", "trn1", "--auto-cast-type", "bf16", "--json"]
    plan = tmp_path / "p.json"
    given = ["-o", tmp_path / "low.pt2", "--plan-out", plan]
    assert finecast("convert", tmp_path / "m.pt2", *options, *given).code == ExitCode.DONE
    decisions = {d["op"]: d for d in json.loads(plan.read_text())["decisions"]}
    assert decisions["softmax"]["format"] == "fp32"
    assert "nothing was measured" in json.dumps(decisions["softmax"]["reasons"])
    told = finecast("explain", tmp_path / "m.pt2", decisions["softmax"]["node"], *options)
    assert told.json["format"] == "fp32"
