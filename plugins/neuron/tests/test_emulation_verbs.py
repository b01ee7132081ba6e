"""formats, targets, emulate and ladder as a user calls them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast.api import explain
from finecast.errors import ExitCode, ModelError
from finecast.numbers.formats import Format
from finecast_neuron.ladder import LadderWalk, PlanResult
from tests.cli.conftest import Answer
from tests.engines.emulator import models
from tests.frontends.tools import parse

Finecast = Callable[..., Answer]


def test_formats(finecast: Finecast) -> None:
    rows = {r["format"]: r for r in finecast("formats", "--json").json}
    assert rows["fp16"]["maximum"] == 65504
    assert rows["bf16"]["epsilon"] == 2.0**-7
    assert rows["tf32"]["smallest_normal"] == rows["fp32"]["smallest_normal"]
    assert "dynamic range" in rows["bf16"]["strengths"]
    text = finecast("formats").out
    assert "Floating-point formats" in text
    assert "65504" in text


def test_formats_of_values(finecast: Finecast) -> None:
    rows = finecast("formats", "--values", "1e-8,0.1,70000", "--json").json
    found = {r["format"]: [v["becomes"] for v in r["values"]] for r in rows}
    assert found["fp16"] == ["0.0", "0.0999755859375", "inf"]
    assert found["bf16"][2] == "70144.0"
    assert "underflow" in finecast("formats", "--values", "1e-8").out
    answer = finecast("formats", "--values", "1e-8,many")
    assert answer.code == ExitCode.USAGE
    assert "many" in answer.err


def test_targets(finecast: Finecast) -> None:
    names = [t["name"] for t in finecast("targets", "--json").json]
    assert {"inf1", "trn1", "inf2", "trn2", "trn3", "sm80", "amx"} <= set(names)
    one = finecast("targets", "trn1", "--json").json
    assert one["engines"]["matmul"]["tflops"]["bf16"] == 92
    assert "matmul" in finecast("targets", "trn1").out
    assert finecast("targets", "trn9").code == ExitCode.USAGE


def test_a_device_is_called_by_its_own_name(
    finecast: Finecast, mlp: Path, mlp_data: Path
) -> None:
    options = ["--auto-cast-type", "bf16", "--auto-cast", "all", "--data", mlp_data]
    answer = finecast("emulate", mlp, "--target", "TRN1", *options)
    assert answer.out.startswith("trn1 ")
    kept = ["--data", mlp_data, "--no-per-op"]
    assert finecast("ladder", mlp, "--target", " TRN1", *kept).out.startswith("trn1: ")


def test_emulate(finecast: Finecast, mlp: Path, mlp_data: Path) -> None:
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--data", mlp_data]
    start = time.perf_counter()
    report = finecast("emulate", mlp, "--target", "trn1", *options, "--json").json
    assert 0 < report["seconds"] < time.perf_counter() - start
    assert report["options"] == "--auto-cast all --auto-cast-type fp16"
    assert 0 < report["output_error"] < 0.01
    assert report["ops"]
    assert all(o["reasons"] for o in report["ops"])
    shares = [o["share"] for o in report["ops"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)


def test_options_that_lower_nothing_cost_nothing(
    finecast: Finecast, mlp: Path, mlp_data: Path
) -> None:
    options = ["--target", "trn1", "--auto-cast", "none", "--data", mlp_data]
    report = finecast("emulate", mlp, *options, "--metric", "cosine", "--json").json
    assert set(report["output_errors"].values()) == {0.0}
    assert report["emulated"] == report["fp32"]
    text = finecast("emulate", mlp, *options).out
    assert "nothing is cast down: the numbers are those of fp32" in " ".join(text.split())
    # inf1 has no fp32 products: the same options cost something there.
    there = finecast("emulate", mlp, "--target", "inf1", "--fast-math", "none", *options[4:])
    assert "relative output error" in there.out


def test_infinities_that_no_transpose_reads_cost_nothing(
    finecast: Finecast, tmp_path: Path
) -> None:
    text = """net (float[4, 4] x, float[4, 4] mask) => (float[4, 4] y) {
        t = Transpose(x)
        s = MatMul(x, t)
        m = Add(s, mask)
        y = Softmax(m)
    }"""
    onnx.save(parse(text, opset=17), tmp_path / "m.onnx")
    mask = np.where(np.tri(4) > 0, 0, -np.inf).astype(np.float32)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, mask=mask)
    options = ["--target", "inf2", "--auto-cast", "none", "--data", tmp_path / "d.npz"]
    options += ["--metric", "cosine", "--batch", "4", "--json"]
    assert finecast("emulate", tmp_path / "m.onnx", *options).json["output_error"] == 0


def test_emulate_says_what_overflows(finecast: Finecast, tmp_path: Path) -> None:
    model = models.scaled_product(tmp_path / "m.onnx", 2.0**20)
    np.savez(tmp_path / "d.npz", x=np.ones((8, 4), np.float32))
    options = [
        "--auto-cast",
        "matmult",
        "--auto-cast-type",
        "fp16",
        "--data",
        tmp_path / "d.npz",
    ]
    report = finecast("emulate", model, "--target", "trn1", *options, "--json").json
    assert "overflow" in report["ops"][0]["reasons"][0]
    assert report["output_error"] is None  # infinite: JSON has no such number


def test_keywords_after_fast_math(finecast: Finecast, mlp: Path, mlp_data: Path) -> None:
    words = ["--fast-math", "fp32-cast-matmult", "no-fast-relayout"]
    report = finecast(
        "emulate", mlp, "--target", "inf1", *words, "--data", mlp_data, "--json"
    ).json
    assert report["options"] == " ".join(words)
    before = finecast(
        "emulate", "--target", "inf1", *words, mlp, "--data", mlp_data, "--json"
    ).json
    assert before["output_error"] == report["output_error"]


def test_a_misspelt_keyword_after_others_is_answered_with_the_keywords(
    finecast: Finecast, mlp: Path, mlp_data: Path
) -> None:
    words = ["--fast-math", "all", "bogus", "--data", mlp_data]
    answer = finecast("emulate", mlp, "--target", "inf1", *words)
    assert answer.code == ExitCode.USAGE
    assert "'bogus'" in answer.err
    assert "fp32-cast-matmult-fp16, fast-relayout" in answer.err


def test_conflicts_are_named(finecast: Finecast, mlp: Path, mlp_data: Path) -> None:
    words = ["--fast-math", "all", "none", "--data", mlp_data]
    answer = finecast("emulate", mlp, "--target", "inf1", *words)
    assert answer.code == ExitCode.USAGE
    assert "all with none" in answer.err


def test_the_environment_counts_when_asked(
    finecast: Finecast, mlp: Path, mlp_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast all --model-type transformer")
    options = ["--target", "trn1", "--data", mlp_data, "--json"]
    assert finecast("emulate", mlp, *options).json["cast_ops"] == 0
    assert finecast("emulate", mlp, *options, "--from-env").json["cast_ops"] > 5


@pytest.mark.parametrize("verb", ["emulate", "ladder"])
def test_the_environment_may_name_the_device(
    finecast: Finecast,
    mlp: Path,
    mlp_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    options = [mlp, "--data", mlp_data, "--metric", "cosine", "--json"]
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast all --target inf2")
    assert finecast(verb, *options, "--from-env").code == ExitCode.DONE
    answer = finecast(verb, *options)
    assert answer.code == ExitCode.USAGE
    assert "no device is named" in answer.err
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast all")
    assert "NEURON_CC_FLAGS has no --target" in finecast(verb, *options, "--from-env").err


def test_an_option_with_a_typeset_dash(finecast: Finecast, mlp: Path, mlp_data: Path) -> None:
    options = ["--target", "trn1", "--auto-cast", "all", "\N{EM DASH}-auto-cast-type", "fp16"]
    report = finecast("emulate", mlp, *options, "--data", mlp_data, "--json").json
    assert report["options"] == "--auto-cast all --auto-cast-type fp16"


@pytest.mark.parametrize("option", ["--fast-math", "--auto-cast-type", "--target"])
def test_an_empty_value_is_refused(
    finecast: Finecast, mlp: Path, mlp_data: Path, option: str
) -> None:
    answer = finecast("emulate", mlp, "--data", mlp_data, option, "")
    assert answer.code == ExitCode.USAGE
    assert f"the value is empty ({option})" in answer.err


def test_emulate_offers_what_it_takes(finecast: Finecast) -> None:
    text = " ".join(finecast("emulate", "--help").out.split())
    assert "--auto-cast SCOPE Which ops are cast: none, matmult (or matmul), all. " in text
    assert "FORMAT[,FORMAT]" not in text
    assert "FORMAT[,FORMAT]" in finecast("convert", "--help").out


def test_a_seed_is_for_stochastic_rounding(
    finecast: Finecast, mlp: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    answer = finecast("convert", mlp, "-o", out, "--seed", "3")
    assert answer.code == ExitCode.USAGE
    assert "--seed 3 without --stochastic-rounding" in answer.err
    assert not out.exists()


@pytest.mark.parametrize(("target", "rungs"), [("trn1", 7), ("inf1", 4)])
def test_ladder(
    finecast: Finecast, mlp: Path, mlp_data: Path, tmp_path: Path, target: str, rungs: int
) -> None:
    out = tmp_path / "low.onnx"
    options = ["--metric", "cosine", "--tolerance", "1e-3", "-o", out, "--json"]
    answer = finecast("ladder", mlp, "--target", target, "--data", mlp_data, *options)
    assert answer.code == ExitCode.DONE, answer.err
    report = answer.json
    assert len(report["rungs"]) == rungs
    for rung in (report["rungs"][0], report["rungs"][-1]):
        how = ["--target", target, *rung["options"].split(), "--data", mlp_data, "--json"]
        alone = finecast("emulate", mlp, *how).json["output_error"]
        assert rung["output_error"] == pytest.approx(alone, abs=8 * Format.FP32.epsilon)
        assert (rung["output_error"] == 0) == (rung["options"] == "--auto-cast none")
    assert min(r["speed"] for r in report["rungs"]) == 1
    best = report["recommended"]
    chosen = next(r for r in report["rungs"] if r["options"] == best["options"])
    assert chosen["passed"]
    assert best["options"] in best["command"]
    assert out.exists() == (report["per_op"]["written"] is not None)
    if out.exists():
        onnx.checker.check_model(str(out), full_check=True)


def test_a_negative_tolerance_is_refused(finecast: Finecast, tmp_path: Path) -> None:
    model = models.lossless_transpose(tmp_path / "m.onnx")
    x, labels = models.labelled_ties()
    np.savez(tmp_path / "d.npz", x=x[..., None], label=np.zeros_like(labels))
    options = ["--metric", "top1", "--tolerance", "-1"]
    answer = finecast(
        "ladder", model, "--target", "inf1", "--data", tmp_path / "d.npz", *options
    )
    assert answer.code == ExitCode.USAGE


def test_ladder_says_that_the_compiler_is_absent(
    finecast: Finecast, mlp: Path, mlp_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    options = ["--metric", "cosine", "--compile", "model.hlo", "--no-per-op"]
    answer = finecast("ladder", mlp, "--target", "inf1", "--data", mlp_data, *options)
    assert "neuron-cc is not on PATH" in answer.out
    assert answer.code == ExitCode.FAILED


def test_ladder_needs_a_neuron_target(finecast: Finecast, mlp: Path, mlp_data: Path) -> None:
    answer = finecast("ladder", mlp, "--target", "sm80", "--data", mlp_data)
    assert answer.code == ExitCode.USAGE
    assert "finecast emulate" in answer.err


@pytest.mark.parametrize("spec", ["emulator", "emulator:", "emulator:trn9"])
def test_the_emulator_needs_a_device(
    finecast: Finecast, mlp: Path, tmp_path: Path, spec: str
) -> None:
    answer = finecast("convert", mlp, "-o", tmp_path / "low.onnx", "--engine", spec)
    assert answer.code == ExitCode.USAGE
    assert answer.err.count("\n") == 1


def test_the_emulators_time_is_not_profiled(finecast: Finecast, mlp: Path) -> None:
    answer = finecast("profile", mlp, "--engine", "emulator:trn1")
    assert answer.code == ExitCode.USAGE
    assert "says nothing of the device" in answer.err


def test_ladder_passes_paths_with_spaces_to_the_compiler(
    finecast: Finecast,
    mlp: Path,
    mlp_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "neuron-cc"
    compiler.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$(dirname "$0")/got"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program = tmp_path / "my 'own' model.hlo"
    program.write_text("")
    options = ["--metric", "cosine", "--compile", program, "--no-per-op"]
    answer = finecast("ladder", mlp, "--target", "inf1", "--data", mlp_data, *options)
    assert f"compiled to {program.with_suffix('.neff')}" in answer.out
    assert answer.code == ExitCode.DONE
    words = (tmp_path / "got").read_text().splitlines()
    assert words[:2] == ["compile", str(program)]
    assert words[-2:] == ["--output", str(program.with_suffix(".neff"))]


def test_ladder_keeps_no_model_that_fails_its_check(
    finecast: Finecast,
    mlp: Path,
    mlp_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise ModelError("the model is not valid ONNX", where=str(path))

    def found(walk: LadderWalk, outcome: object, named: object) -> tuple[PlanResult, str]:
        plan = explain(walk.model.path, policy="all:bf16").plan
        return PlanResult(plan=plan, metric=1.0, errors={}, time_s=1e-6), ""

    monkeypatch.setattr("finecast.frontends.onnx.check", refuse)
    monkeypatch.setattr("finecast_neuron.api.search_per_op", found)
    out = tmp_path / "low.onnx"
    out.write_text("of before")
    options = ["--metric", "cosine", "-o", out, "--force"]
    answer = finecast("ladder", mlp, "--target", "trn1", "--data", mlp_data, *options)
    assert answer.code == ExitCode.FAILED, answer.out
    assert out.read_text() == "of before"


def test_ladder_calls_an_older_output_stale(
    finecast: Finecast, mlp: Path, mlp_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    out.write_text("of before")
    options = ["--metric", "cosine", "-o", out, "--force", "--no-per-op", "--json"]
    answer = finecast("ladder", mlp, "--target", "inf1", "--data", mlp_data, *options)
    assert answer.code == ExitCode.NOT_IMPROVED
    assert answer.json["stale"] == [str(out)]
    assert f"STALE: {out}" in answer.err
