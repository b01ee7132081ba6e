"""convert, tune and explain with the compilers' options, as a user calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from finecast.cli import VERBS
from finecast.engines import get_engine
from finecast.errors import ExitCode
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.planning.plan import Plan
from finecast_neuron.compilers import NEURON_TARGETS
from tests.cli.conftest import Answer
from tests.engines.emulator import models

Finecast = Callable[..., Answer]


def element_types(path: Path) -> set[int]:
    """Of what the model stores."""
    return {t.data_type for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize(
    ("options", "device", "scope", "fmt"),
    [
        (["--target", "trn1", "--auto-cast", "all"], "trn1", "all", "bf16"),
        (["--fast-math", "fp32-cast-all-fp16"], "inf1", "all", "fp16"),
        (["--fast-math", "none"], "inf1", "matmult", "bf16"),
        (["--fast-math", "none", "fp32-cast-all"], "inf1", "all", "bf16"),
        (["--fast-math=none", "fp32-cast-all"], "inf1", "all", "bf16"),
        (["--fast-math", "all", "--fast-math", "none"], "inf1", "matmult", "bf16"),
        (["--fp32-cast", "matmult-fp16"], "inf1", "matmult", "fp16"),
        (["--sdk", "2.26"], "trn1", "matmult", "bf16"),
        (
            ["--target", "sm80", "--auto-cast", "matmul", "--auto-cast-type", "fp16"],
            "sm80", "matmult", "fp16",
        ),
    ],
)  # fmt: skip
def test_convert_states_the_casts(
    finecast: Finecast,
    mlp: Path,
    tmp_path: Path,
    options: list[str],
    device: str,
    scope: str,
    fmt: str,
) -> None:
    out, plan = tmp_path / "low.onnx", tmp_path / "low.json"
    answer = finecast("convert", mlp, "-o", out, *options, "--plan-out", plan, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["verified"]["engine"] == f"emulator:{device}"
    assert 0 < answer.json["verified"]["relative_error"] < 0.02
    found = Plan.load(plan)
    assert found.policy == f"{scope}:{fmt}"
    low = {d.op for d in found.decisions if d.format.label == fmt}
    assert "matmul" in low
    assert (low == {"matmul"}) == (scope == "matmult")
    onnx.checker.check_model(str(out), full_check=True)


def test_fp8_is_stated_around_the_operands(
    finecast: Finecast, mlp: Path, tmp_path: Path
) -> None:
    out, plan, again = tmp_path / "low.onnx", tmp_path / "p.json", tmp_path / "again.onnx"
    options = ["--target", "sm89", "--auto-cast", "matmult", "--auto-cast-type", "fp8_e4m3"]
    answer = finecast("convert", mlp, "-o", out, *options, "--plan-out", plan, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["ops"]["fp8_e4m3"] == 2
    assert answer.json["casts"] == 2  # into the second product; the first reads the input
    assert onnx.TensorProto.FLOAT8E4M3FN in element_types(out)
    onnx.checker.check_model(str(out), full_check=True)
    # ONNX Runtime's casts run it anywhere, and give what rounding the operands gives.
    weights = {t.name: t for t in onnx.load(mlp).graph.initializer}
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    first = onnx.load(out).graph.node
    product = next(n for n in first if n.op_type == "MatMul")
    shown = onnx.load(out)
    shown.graph.output.append(onnx.helper.make_empty_tensor_value_info(product.output[0]))
    session = onnxruntime.InferenceSession(
        shown.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    got = np.asarray(session.run([product.output[0]], {"x": x})[0])
    original = next(n for n in onnx.load(mlp).graph.node if n.op_type == "MatMul")
    w = onnx.numpy_helper.to_array(weights[original.input[1]])
    expected = round_to(x, Format.FP8_E4M3) @ round_to(w, Format.FP8_E4M3)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    replayed = finecast("apply", plan, mlp, "-o", again, "--engine", "onnxruntime")
    assert replayed.code == 0, replayed.err
    assert again.read_bytes() == out.read_bytes()


def test_the_environment_is_read_when_asked(
    finecast: Finecast, mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--auto-cast=all --auto-cast-type fp16 --target trn2 -O1 --model-type=transformer"
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    out = tmp_path / "low.onnx"
    answer = finecast("convert", mlp, "-o", out, "--from-env", "--json")
    assert answer.json["verified"]["engine"] == "emulator:trn2"
    assert element_types(out) == {onnx.TensorProto.FLOAT16}
    more = ["--from-env", "--auto-cast-type", "bf16", "--target", "trn1", "--force", "--json"]
    answer = finecast("convert", mlp, "-o", out, *more)
    assert answer.json["verified"]["engine"] == "emulator:trn1"  # the right-most wins
    assert element_types(out) == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--auto-casts=all", "did you mean --auto-cast?"),
        ("--auto-cast 'all", "NEURON_CC_FLAGS"),
        ("--auto-cast", "needs a value"),
        ("--auto-cast some", "some"),
        ("--fast-math all none", "all with none"),
    ],
)
def test_bad_flags_in_the_environment(
    finecast: Finecast,
    mlp: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    words: str,
) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    answer = finecast("convert", mlp, "-o", tmp_path / "low.onnx", "--from-env")
    assert answer.code == ExitCode.USAGE
    assert words in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["convert", "tune", "explain"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fast-math", "all", "none"], "all with none"),
        (["--fast-math", "fp32-cast-all", "fp32-cast-matmult"], "fp32-cast-matmult"),
        (["--fast-math", "quick"], "quick"),
        (["--fast-math", "all", "--auto-cast", "all"], "--auto-cast with --fast-math"),
        (["--auto-cast", "auto", "--fp32-cast", "all"], "--auto-cast auto with --fp32-cast"),
        (["--target", "trn1", "--fp32-cast", "all"], "--fp32-cast with --target trn1"),
        (["--target", "trn9"], "trn9"),
        (["--target", "sm75", "--auto-cast-type", "bf16"], "bf16 with --target sm75"),
        (["--auto-cast-type", "tf32"], "name the device with --target"),
        (["--target", "sm75", "--auto-cast-type", "tf32"], "tf32 with --target sm75"),
        (["--auto-cast-type", "fp8_e4m3"], "name the device with --target"),
        (["--stochastic-rounding", "--target", "inf1"], "stochastic rounding"),
        (["--sdk", "new"], "--sdk"),
    ],
)
def test_conflicts_are_one_line(
    finecast: Finecast,
    mlp: Path,
    mlp_data: Path,
    tmp_path: Path,
    verb: str,
    options: list[str],
    words: str,
) -> None:
    out = tmp_path / "low.onnx"
    more = {
        "convert": ["-o", out],
        "tune": ["-o", out, "--data", mlp_data],
        "explain": ["first"],
    }[verb]
    answer = finecast(verb, mlp, *more, *options)
    assert answer.code == ExitCode.USAGE
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("option", ["--auto-cast", "--fast-math", "--fp32-cast"])
def test_a_ladder_takes_no_options_that_its_rungs_state(
    finecast: Finecast, mlp: Path, mlp_data: Path, option: str
) -> None:
    answer = finecast("ladder", mlp, "--data", mlp_data, "--target", "inf1", option, "none")
    assert answer.code == ExitCode.USAGE
    assert f"No such option: {option}" in answer.err


def test_explain_judges_for_the_device(finecast: Finecast, mlp: Path) -> None:
    name = next(n.name for n in onnx.load(mlp).graph.node if n.op_type == "MatMul")
    options = ["--target", "trn1", "--auto-cast", "matmult", "--auto-cast-type", "fp8_e4m3"]
    answer = finecast("explain", mlp, name, *options, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["format"] == "fp8_e4m3"


def wide(path: Path) -> Path:
    """Products large enough that a device's rates tell formats apart."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((1024, 1024)) / 32).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["m"], name="first"),
            onnx.helper.make_node("Relu", ["m"], ["r"], name="act"),
            onnx.helper.make_node("MatMul", ["r", "w"], ["y"], name="second"),
        ],
        "wide",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", "m", 1024])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", "m", 1024])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


@pytest.fixture
def wide_case(tmp_path: Path) -> tuple[Path, Path]:
    x = np.random.default_rng(2).standard_normal((16, 4, 1024)).astype(np.float32)
    np.savez(tmp_path / "wide.npz", x=x)
    return wide(tmp_path / "wide.onnx"), tmp_path / "wide.npz"


@pytest.mark.parametrize(
    ("options", "fmt"),
    [
        (["--target", "trn1"], "fp16"),  # as fast as bf16, with more digits
        (["--target", "trn2", "--auto-cast-type", "fp8_e4m3"], "fp8_e4m3"),
        (["--target", "trn1", "--auto-cast", "matmult"], "bf16"),
        pytest.param(
            ["--target", "trn1", "--auto-cast-type", "bf16"], "bf16", marks=pytest.mark.long
        ),
        pytest.param(
            ["--target", "inf1", "--auto-cast-type", "fp16"], "fp16", marks=pytest.mark.long
        ),
        pytest.param(
            ["--target", "trn1", "--auto-cast-type", "tf32"], "tf32", marks=pytest.mark.long
        ),
        (["--target", "sm80", "--auto-cast", "matmult", "--auto-cast-type", "tf32"], "tf32"),
    ],
)
def test_tune_for_a_device_that_is_not_here(
    finecast: Finecast,
    wide_case: tuple[Path, Path],
    tmp_path: Path,
    options: list[str],
    fmt: str,
) -> None:
    model, data = wide_case
    out = tmp_path / "low.onnx"
    more = ["--data", data, "--metric", "cosine", "--tolerance", "0.01", "--json"]
    if fmt == "tf32":  # it moves as much as fp32: products gain where they wait for no memory
        x = np.random.default_rng(2).standard_normal((16, 64, 1024)).astype(np.float32)
        np.savez(data, x=x)
    answer = finecast("tune", model, "-o", out, *options, *more)
    assert answer.code == ExitCode.DONE, answer.err
    report = answer.json
    assert report["target"] == options[1]
    assert "not measured" in report["times"]
    assert report["speedup"] > 1
    assert report["tuned"]["metric"] >= 0.99 * report["baseline"]["metric"]
    assert 0 < report["relative_error"]["measured"] < 0.1
    plan = Plan.load(tmp_path / "low.plan.json")
    assert fmt in plan.counts
    onnx.checker.check_model(str(out), full_check=True)
    # What is said of it holds for the written model, run by the emulator.
    x = np.load(data)["x"]
    exact = get_engine("onnxruntime").load(model).run({"x": x})["y"].astype(np.float64)
    low = get_engine(f"emulator:{options[1]}").load(out).run({"x": x})["y"].astype(np.float64)
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert error == pytest.approx(report["relative_error"]["measured"], rel=0.05)
    replayed = tmp_path / "replayed.onnx"
    done = finecast("apply", tmp_path / "low.plan.json", model, "-o", replayed, "--no-verify")
    assert done.code == ExitCode.DONE, done.err
    assert replayed.read_bytes() == out.read_bytes()
    again = finecast("tune", model, "-o", out, *options, *more, "--resume", "--force")
    assert again.json["reused_trials"] >= 1
    # The baseline, and the winner, which is never taken from memory.
    assert again.json["evaluations"] == 2
    assert again.json["tuned"] == report["tuned"]
    text = finecast("tune", model, "-o", out, *options, *more[:-1], "--force").out
    assert "modelled, not measured" in text
    for said in (text, report["times"]):
        assert ("times are those of tf32 products" in said) == (fmt == "tf32")


def test_tune_keeps_the_criterion_in_emulation(
    finecast: Finecast, wide_case: tuple[Path, Path], tmp_path: Path
) -> None:
    model, data = wide_case
    out = tmp_path / "low.onnx"
    options = ["--metric", "snr_db", "--max-drop", "90", "--json"]
    answer = finecast("tune", model, "-o", out, "--target", "trn1", "--data", data, *options)
    assert answer.code == ExitCode.NOT_IMPROVED, answer.err
    assert "is within your limit (90)" in answer.json["why"]
    assert not out.exists()


@pytest.mark.parametrize(("target", "fmt"), [("trn1", "fp16"), ("sm80", "tf32")])
def test_tune_tries_formats_of_more_digits_than_bf16(
    finecast: Finecast,
    wide_case: tuple[Path, Path],
    tmp_path: Path,
    target: str,
    fmt: str,
) -> None:
    model, data = wide_case
    kept = ("--metric", "snr_db", "--tolerance", "60", "--json")  # bf16 has 50, fp16 68
    out = tmp_path / "low.onnx"
    answer = finecast("tune", model, "-o", out, "--target", target, "--data", data, *kept)
    assert answer.code == ExitCode.DONE, answer.json["why"]
    assert fmt in answer.json["ops"]


@pytest.fixture
def uneven(tmp_path: Path) -> tuple[Path, Path]:
    """Two products of one cost: one carries the output, one a thousandth of it.

    Numbers are beyond fp16's range.
    """
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((1024, 1024)) / 32).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["a"], name="main"),
            onnx.helper.make_node("MatMul", ["x", "v"], ["b"], name="aside"),
            onnx.helper.make_node("Add", ["a", "b"], ["y"], name="sum"),
        ],
        "uneven",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 1024])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 1024])],
        [
            onnx.numpy_helper.from_array(w, "w"),
            onnx.numpy_helper.from_array((w.T / 1000).copy(), "v"),
        ],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    path = tmp_path / "uneven.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    x = 2.0**20 * np.random.default_rng(2).standard_normal((64, 1024))
    np.savez(tmp_path / "uneven.npz", x=x.astype(np.float32))
    return path, tmp_path / "uneven.npz"


@pytest.mark.parametrize("verb", ["ladder", "tune"])
def test_a_plan_by_op_goes_beyond_the_ladder(
    finecast: Finecast, uneven: tuple[Path, Path], tmp_path: Path, verb: str
) -> None:
    model, data = uneven
    out = tmp_path / "low.onnx"
    options = ["--metric", "snr_db", "--max-drop", "80", "--json"]
    answer = finecast(verb, model, "--target", "trn1", "-o", out, "--data", data, *options)
    assert answer.code == ExitCode.DONE, answer.err
    report = answer.json
    if verb == "ladder":
        assert [r["options"] for r in report["rungs"] if r["passed"]] == ["--auto-cast none"]
        assert min(r["speed"] for r in report["rungs"]) == 1
        assert report["per_op"]["speed"] > 1
        assert report["per_op"]["metric"] >= 80
    else:
        assert report["tuned"]["metric"] >= 80
        assert report["speedup"] > 1.1
    stored = {t.name: t.data_type for t in onnx.load(out).graph.initializer}
    assert onnx.TensorProto.FLOAT in stored.values()
    assert {*stored.values()} & {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16}
    assert stored["w"] == onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "trn1", "--engine", "openvino"], "--engine openvino with --target trn1"),
        (["--engine", "emulator:trn1"], "--target"),
        (["--target", "trn1"], "no data"),
    ],
)
def test_tune_refuses(
    finecast: Finecast, mlp: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    answer = finecast("tune", mlp, "-o", tmp_path / "low.onnx", *options)
    assert answer.code == ExitCode.USAGE
    assert words in answer.err


def test_the_emulator_verifies_where_an_engine_can(
    finecast: Finecast, mlp: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    options = ["--auto-cast", "all", "--engine", "emulator:trn1", "--json"]
    answer = finecast("convert", mlp, "-o", out, *options)
    assert answer.code == 0, answer.err
    assert answer.json["verified"]["engine"] == "emulator:trn1"
    assert 0 < answer.json["verified"]["relative_error"] < 0.02


@pytest.mark.parametrize(
    "line",
    [
        ["inspect", "none.onnx"],
        ["convert", "none.onnx", "-o", "x.onnx"],
        ["tune", "none.onnx", "-o", "x.onnx", "--data", "d.npz"],
        ["explain", "none.onnx", "node"],
        ["emulate", "none.onnx", "--target", "trn1", "--data", "d.npz"],
        ["ladder", "none.onnx", "--target", "trn1", "--data", "d.npz"],
        ["profile", "none.onnx"],
    ],
)
def test_a_model_that_is_missing_is_the_users_slip(
    finecast: Finecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = finecast(*line)
    assert answer.code == ExitCode.USAGE
    assert "none.onnx" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(finecast: Finecast, verb: str) -> None:
    answer = finecast(verb, "--help")
    assert answer.code == 0
    assert "--json" in answer.out
    assert "Traceback" not in answer.out + answer.err


@pytest.mark.parametrize(
    "options",
    [
        ["--fast-math", "none"],
        ["--fast-math", "fp32-cast-matmult", "no-fast-relayout"],
        ["--fast-math=fp32-cast-all-fp16", "fast-relayout"],
        ["--fp32-cast", "matmult"],
        ["--fp32-cast", "all-fp16", "--target", "inf1"],
        ["--auto-cast", "none"],
        ["--auto-cast", "matmul", "--auto-cast-type", "bf16", "--target", "trn1n"],
        ["--auto-cast", "all", "--auto-cast-type", "fp16,bf16", "--io", "low"],
        ["--auto-cast", "all", "--op", "Softmax=fp32", "--engine", "emulator:trn1"],
        ["--sdk", "v2.26"],
    ],
)
def test_words_mean_the_same_in_any_case_and_with_blanks(
    finecast: Finecast, mlp: Path, tmp_path: Path, options: list[str]
) -> None:
    plans: list[Plan] = []
    for change in (str.lower, str.upper, lambda word: f" {word.title()} "):
        changed = [o if o.startswith("-") else change(o) for o in options]
        for at, word in enumerate(options):
            of_op = options[at - 1] == "--op"  # its name is the model's own
            if of_op or (word.startswith("--") and "=" in word):
                name, _, value = word.partition("=")
                changed[at] = f"{name}={change(value)}"
        plan = tmp_path / "p.json"
        more = ["-o", tmp_path / "low.onnx", "--plan-out", plan, "--force", "--json"]
        answer = finecast("convert", mlp, *changed, *more)
        assert answer.code == 0, answer.err
        plans.append(Plan.load(plan))
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(("word", "same"), [("False", "0"), (" FALSE ", "0"), ("TRUE", "1")])
def test_the_runtimes_switch_is_read_in_any_case(
    finecast: Finecast, mlp: Path, mlp_data: Path, monkeypatch: pytest.MonkeyPatch,
    word: str, same: str,
) -> None:  # fmt: skip
    options = ["--target", "trn1", "--auto-cast", "all", "--data", mlp_data, "--from-env"]
    found: list[float] = []
    for value in (word, same, "1" if same == "0" else "0"):
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", value)
        answer = finecast("emulate", mlp, *options, "--json")
        assert answer.code == 0, answer.err
        found.append(answer.json["output_error"])
    assert found[0] == found[1] != found[2]
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "maybe")
    answer = finecast("emulate", mlp, *options)
    assert answer.code == ExitCode.USAGE
    assert "'maybe' is neither on nor off (NEURON_RT_STOCHASTIC_ROUNDING_EN)" in answer.err


def test_a_later_none_takes_back_the_environments_cast(
    finecast: Finecast, mlp: Path, mlp_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = "--auto-cast all --auto-cast-type bf16 --model-type transformer -O1"
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    more = ["--from-env", "--auto-cast", "none", "--target", "trn1"]
    answer = finecast("convert", mlp, "-o", tmp_path / "low.onnx", *more, "--json")
    assert answer.code == 0, answer.err
    assert set(answer.json["ops"]) == {"fp32"}
    assert answer.err.count("--model-type, -O: for the compiler, no effect on numbers") == 1
    report = finecast("emulate", mlp, *more, "--data", mlp_data, "--json").json
    assert report["cast_ops"] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--model-type", "transformer", "-O1"],
        ["--model-type=unet-inference", "--optlevel", "2"],
        ["--optlevel=3", "--model-type", "transformer"],
        ["-O", "1", "--model-type", "generic"],
    ],
)
@pytest.mark.parametrize("verb", ["convert", "emulate"])
def test_the_compilers_other_options_are_accepted_and_told_once(
    finecast: Finecast, mlp: Path, mlp_data: Path, tmp_path: Path, verb: str, words: list[str]
) -> None:
    more = {"convert": ["-o", tmp_path / "low.onnx"], "emulate": ["--data", mlp_data]}[verb]
    cast = ["--auto-cast", "matmult", "--auto-cast-type", "bf16", "--target", "trn1"]
    answer = finecast(verb, mlp, *more, *words, *cast, "--json")
    assert answer.code == 0, answer.err
    assert answer.err.count("--model-type, --optlevel: for the compiler, no effect") == 1


def test_the_type_alone_is_read_as_the_compiler_reads_it(
    finecast: Finecast, mlp: Path, mlp_data: Path
) -> None:
    options = ["--target", "trn1", "--auto-cast-type", "fp16", "--data", mlp_data]
    answer = finecast("emulate", mlp, *options, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["cast_ops"] == 0
    assert "--auto-cast-type fp16 alone casts nothing" in answer.err


def test_a_release_of_neuron_is_of_no_other_device(
    finecast: Callable[..., Answer], net: Path
) -> None:
    answer = finecast("emulate", net, "--target", "avx2", "--sdk", "2.26")
    assert answer.code == ExitCode.USAGE
    assert "--sdk is a release of the Neuron compilers" in answer.err


def old_net(path: Path) -> Path:
    """A product and a Relu in an opset that has no low types for them."""
    nodes = [models.node("MatMul", "x w", "h"), models.node("Relu", "h", "y")]
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    return models.save(path, nodes, {"x": [4, 16]}, {"y": [4, 16]}, {"w": weight}, opset=9)


def test_explain_says_what_convert_says_where_the_compiler_casts_nothing(
    finecast: Finecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type alone casts nothing, so that the opset is not raised, and is no reason."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target trn2 --auto-cast-type fp8_e4m3")
    net = old_net(tmp_path / "old.onnx")
    found = finecast("explain", net, "--from-env", "--json")
    assert [group["decided_by"] for group in found.json["groups"]] == ["rule scope"]
    converted = finecast("convert", net, "-o", tmp_path / "low.onnx", "--from-env")
    assert "the compiler casts nothing with --auto-cast none" in converted.err
    assert found.err == converted.err


def test_an_op_s_own_format_raises_the_opset_without_a_scope(
    finecast: Finecast, tmp_path: Path
) -> None:
    net = old_net(tmp_path / "old.onnx")
    out, asked = tmp_path / "low.onnx", ("--auto-cast", "none", "--op", "MatMul=bf16")
    answer = finecast("convert", net, "-o", out, *asked, "--no-verify", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["ops"]["bf16"]
    assert onnx.load(out).opset_import[0].version == 13


def test_every_target_of_the_ladder_is_in_its_help(finecast: Finecast) -> None:
    shown = finecast("ladder", "--help").out
    assert all(name in shown for name in NEURON_TARGETS)
