"""convert and explain with tf32, which ONNX has no type for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast.engines import get_engine
from finecast.engines.emulator import EmulatorEngine
from finecast.errors import ExitCode
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast_neuron.compilers import resolve
from finecast_neuron.flags import Given
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]


def element_types(path: Path) -> set[int]:
    """Of what the model stores."""
    return {t.data_type for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("target", ["trn1", "sm80"])
@pytest.mark.parametrize("scope", ["matmult", "all"])
def test_tf32_is_stated_by_arithmetic_on_the_operands(
    finecast: Finecast, mlp: Path, tmp_path: Path, scope: str, target: str
) -> None:
    out, plan, again = tmp_path / "low.onnx", tmp_path / "p.json", tmp_path / "again.onnx"
    options = ["--target", target, "--auto-cast", scope, "--auto-cast-type", "tf32"]
    answer = finecast("convert", mlp, "-o", out, *options, "--plan-out", plan, "--json")
    assert answer.code == 0, answer.err
    assert "ONNX has no tf32" in answer.err + answer.out
    assert answer.json["verified"]["engine"] == f"emulator:{target}"
    assert 0 < answer.json["verified"]["relative_error"] < 1e-3
    assert answer.json["ops"]["tf32"] == 2
    assert answer.json["casts"] == 0
    assert element_types(out) == {onnx.TensorProto.FLOAT}
    assert {d.op for d in Plan.load(plan).decisions if d.format is Format.TF32} == {"matmul"}
    # The numbers are those of the plan's emulation, bit for bit: both round the same operands.
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    written = get_engine(f"emulator:{target}").load(out).run({"x": x})
    given = Given(target=target, auto_cast="matmult", auto_cast_type="tf32")
    planned = EmulatorEngine(emulation=resolve(given).emulation).load(mlp).run({"x": x})
    exact = get_engine("onnxruntime").load(mlp).run({"x": x})
    for name, array in planned.items():
        assert np.array_equal(written[name], array)
        assert not np.array_equal(exact[name], array)
    replayed = finecast("apply", plan, mlp, "-o", again, "--engine", "onnxruntime")
    assert replayed.code == 0, replayed.err
    assert again.read_bytes() == out.read_bytes()


def test_explain_says_what_takes_no_tf32(finecast: Finecast, mlp: Path) -> None:
    nodes = {n.op_type: n.name for n in onnx.load(mlp).graph.node}
    other = next(name for kind, name in nodes.items() if kind != "MatMul")
    options = ["--target", "trn1", "--auto-cast", "all", "--auto-cast-type", "tf32", "--json"]
    answer = finecast("explain", mlp, nodes["MatMul"], *options)
    assert answer.json["format"] == "tf32"
    answer = finecast("explain", mlp, other, *options)
    assert answer.json["format"] == "fp32"
    assert "emulator:trn1 has no working tf32 kernel for onnx::" in answer.out


def test_inputs_cannot_be_what_onnx_has_no_type_for(
    finecast: Finecast, mlp: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    options = ["--target", "trn1", "--auto-cast-type", "tf32", "--auto-cast", "matmult"]
    answer = finecast("convert", mlp, "-o", out, *options, "--io", "x=tf32")
    assert answer.code == ExitCode.USAGE
    assert "ONNX has no type tf32" in answer.err
    answer = finecast("convert", mlp, "-o", out, *options, "--io", "low", "--json")
    assert answer.code == 0, answer.err
    assert element_types(out) == {onnx.TensorProto.FLOAT}
    assert {p.type.tensor_type.elem_type for p in onnx.load(out).graph.input} == {1}
