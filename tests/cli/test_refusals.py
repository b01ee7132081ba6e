"""Conversions whose numbers nothing explains are refused, and the op at fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from finecast.engines import installed
from finecast.errors import ExitCode
from finecast.frontends.dry_run import DryRun
from tests.cli.conftest import Answer
from tests.frontends.tools import parse, tensor

Finecast = Callable[..., Answer]
needs_openvino = pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")

OVERFLOW = """net (float[4,16] x) => (float[4,16] y)
  <float wide = {60}, float narrow = {0.001}> {
  [scale] big = Mul(x, wide)
  [square] sq = Mul(big, big)
  [fourth] q = Mul(sq, sq)
  [back] y = Mul(q, narrow)
}"""
CANCELS = """net (float[4,16] x) => (float[4,16] y) <float shift = {30000}> {
  [soft] s = Sigmoid(x)
  [up] u = Add(s, shift)
  [shape] r = Identity(u)
  [down] d = Sub(r, shift)
  [after] y = Mul(d, d)
}"""


def saved(text: str, folder: Path, **weights: np.ndarray) -> Path:
    model = parse(text)
    model.graph.initializer.extend(tensor(n, a) for n, a in weights.items())
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def convert(
    finecast: Finecast,
    net: Path,
    out: Path,
    fmt: str,
    *more: object,
    engine: str = "onnxruntime",
) -> Answer:
    cast = ["--auto-cast", "all", "--auto-cast-type", fmt, "--engine", engine, "--json"]
    return finecast("convert", net, "-o", out, *cast, *more)


@pytest.mark.parametrize(
    ("text", "says", "first"),
    [(OVERFLOW, "NaN or Inf", "fourth"), (CANCELS, "no digit of it is right", "down")],
)
def test_refused_with_the_first_op_that_goes_wrong(
    finecast: Finecast, tmp_path: Path, text: str, says: str, first: str
) -> None:
    net, out = saved(text, tmp_path), tmp_path / "low.onnx"
    device = "emulator:sm80"  # CPUs compute fp16 in fp32, unrounded
    answer = convert(finecast, net, out, "fp16", engine=device)
    assert answer.code == ExitCode.NOT_IMPROVED
    assert says in answer.err
    assert f"first at '{first}'" in answer.err
    assert "--no-verify" in answer.err
    assert "the inputs were random numbers or examples: --data FILE.npz" in answer.err
    assert not out.exists()
    assert convert(finecast, net, out, "fp16", "--no-verify", engine=device).code == 0
    assert out.exists()


# OpenVINO leaves out the first bias where two of several elements follow an fp16 product.
BIASES = {
    "Add": "[product] m = MatMul(x, w)\n [first] s = Add(m, b)\n",
    "Sub": "[product] m = MatMul(x, w)\n [first] s = Sub(m, b)\n",
    "Gemm": "[product] s = Gemm(x, w, b)\n",
    "reshaped": "[product] m = MatMul(x, w)\n [first] t = Add(b, m)\n s = Reshape(t, shape)\n",
}
SECOND = {"one": "[last] y = Add(s, c)", "two": "i = Add(s, scalar)\n [last] y = Sub(i, c)"}


def biased(first: str, second: str, folder: Path) -> Path:
    ports = "net (float[2,4] x) => (float[2,3] y) <float scalar = {1}, int64[2] shape = {2,3}>"
    text = f"{ports} {{ {BIASES[first]} {SECOND[second]} }}"
    weights = {"w": np.ones((4, 3)), "b": np.full(3, 100.0), "c": np.arange(1, 4) * 100.0}
    return saved(text, folder, **weights)


@needs_openvino
@pytest.mark.parametrize("first", BIASES)
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("more", [["--exclude", "^last$"], []], ids=["part", "all"])
def test_what_openvino_computes_wrongly_is_never_written(
    finecast: Finecast, tmp_path: Path, first: str, second: str, more: list[str]
) -> None:
    net, out = biased(first, second, tmp_path), tmp_path / "low.onnx"
    answer = convert(finecast, net, out, "fp16", *more, engine="openvino")
    assert answer.code == 0, answer.err
    assert answer.json["verified"]["relative_error"] < 1e-3
    assert ("fp16" in answer.json["ops"]) == (first != "Gemm")  # no more than that is kept


@needs_openvino
def test_an_op_that_the_engine_computes_wrongly_is_seen(
    finecast: Finecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finecast.engines.faults.FAULTS", ())
    net, out = biased("Add", "one", tmp_path), tmp_path / "low.onnx"
    answer = convert(finecast, net, out, "fp16", "--exclude", "^last$", engine="openvino")
    assert answer.code == ExitCode.NOT_IMPROVED
    assert "computed wrongly" in answer.err
    assert "first at 'last'" in answer.err
    assert not out.exists()


TANHS = """net (float[8,16] x) => (float[8,16] y) <float[16,16] w> {
  [in] m = MatMul(x, w)
  [wrong] t = Tanh(m)
  [last] y = Mul(t, m)
}"""


@needs_openvino
@pytest.mark.parametrize("more", [[], ["--op", "Tanh=fp16"]], ids=["free", "forced"])
def test_the_one_op_that_the_engine_computes_wrongly_keeps_fp32(
    finecast: Finecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    import openvino
    from openvino import opset13

    compiled = openvino.Core.compile_model

    def compile_wrongly(core: Any, model: Any, *rest: Any) -> Any:
        """Compile ``model`` with twice the result of its Tanh, if that is fp16."""
        for op in model.get_ordered_ops():
            if op.get_type_name() == "Tanh" and op.get_element_type() == openvino.Type.f16:
                readers = list(op.output(0).get_target_inputs())
                twice = opset13.add(op, op)
                for reader in readers:
                    reader.replace_source_output(twice.output(0))
        return compiled(core, model, *rest)

    monkeypatch.setattr(openvino.Core, "compile_model", compile_wrongly)
    monkeypatch.setattr(DryRun, "keep", lambda _: None)  # models are verified here
    net = saved(TANHS.replace("<float[16,16] w> ", ""), tmp_path, w=np.eye(16))
    answer = convert(finecast, net, tmp_path / "low.onnx", "fp16", *more, engine="openvino")
    if more:
        assert answer.code == ExitCode.NOT_IMPROVED
        assert "first at 'wrong'" in answer.err
        return
    assert answer.code == 0, answer.err
    assert answer.json["ops"] == {"fp16": 2, "fp32": 1}
    assert answer.json["verified"]["relative_error"] < 1e-3
    assert "'wrong' keeps fp32: planned in fp16, OpenVINO computes it wrongly" in answer.err


BOTH = ("onnxruntime", "openvino")


@needs_openvino
@pytest.mark.parametrize("engine", BOTH)
def test_fp16_that_onnxruntime_does_not_run_is_said(
    finecast: Finecast, tmp_path: Path, engine: str
) -> None:
    text = """net (float[16,16] x) => (float[16,16] y) {
      [in] m = MatMul(x, w)
      [eye] e = EyeLike(m)
      [sum] y = Add(m, e)
    }"""
    net, low = saved(text, tmp_path, w=np.eye(16)), tmp_path / "low.onnx"
    answer = convert(finecast, net, low, "fp16", engine=engine)
    assert answer.code == 0, answer.err
    said = "ONNX Runtime does not run the result on a CPU: it has no fp16 kernel for EyeLike"
    assert (said in answer.err) == (engine == "openvino")
    again = convert(finecast, net, low, "fp16", "--op", "EyeLike=fp32", "--force")
    assert said not in again.err
    assert ort.InferenceSession(low, providers=["CPUExecutionProvider"]).get_inputs()


# Each is a model in which a large relative error says nothing, or an output is decided.
LEGITIMATE: Mapping[str, str] = {
    "a mean that fp32 rounds to noise": """net (float[4,64] x) => (float[4,1] y)
      <float[64] one = {ONES}> {
      n = LayerNormalization(x, one)
      y = ReduceMean<axes=[1]>(n)
    }""",
    "ranks as floats": """net (float[4,64] x) => (float[4] y) <float[64,64] w> {
      m = MatMul(x, w)
      i = ArgMax<axis=1, keepdims=0>(m)
      y = Cast<to=1>(i)
    }""",
    "signs": "net (float[64,64] x) => (float[64,64] y) <float[64,64] w> "
    "{ m = MatMul(x, w)\n y = Sign(m) }",
    "as many rows as are positive": """net (float[64,64] x) => (float[m,n] y)
      <float[64,64] w, float zero = {0}> {
      m = MatMul(x, w)
      p = Greater(m, zero)
      i = NonZero(p)
      y = Cast<to=1>(i)
    }""",
    "zeros": "net (float[4,64] x) => (float[4,64] y) { y = Sub(x, x) }",
    "no digits at all": "net (float[4,64] x) => (float[4,64] y) <float[64,64] w> "
    "{ m = MatMul(x, w)\n y = Softmax(m) }",
}


@pytest.mark.parametrize("kind", LEGITIMATE)
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_what_is_not_wrong_is_written(
    finecast: Finecast, tmp_path: Path, kind: str, engine: str
) -> None:
    if not installed(engine):
        pytest.skip(f"needs {engine}")
    text = LEGITIMATE[kind].replace("ONES", ",".join(["1"] * 64))
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = {"w": weights} if "> w" in text or " w" in text else {}
    net = saved(
        text.replace(", float[64,64] w", "")
        .replace("<float[64,64] w>", "")
        .replace("float[64,64] w, ", ""),
        tmp_path,
        **model,
    )
    fmt = "fp16" if engine == "onnxruntime" else "bf16"
    answer = convert(finecast, net, tmp_path / "low.onnx", fmt, engine=engine)
    assert answer.code == 0, answer.err


def test_what_is_fp64_is_said(finecast: Finecast, tmp_path: Path) -> None:
    net = saved("net (double[4] x) => (double[4] y) { h = Exp(x)\n y = Tanh(h) }", tmp_path)
    answer = convert(finecast, net, tmp_path / "low.onnx", "fp16")
    assert answer.code == 0, answer.err
    assert "2 ops compute in fp64" in answer.err


@pytest.mark.parametrize(("kind", "label"), [("double", "fp64"), ("float16", "fp16")])
def test_what_keeps_its_type_can_be_taken_to_fp32(
    finecast: Finecast, tmp_path: Path, kind: str, label: str
) -> None:
    """The warning names the option; the option makes it go."""
    net = saved(
        f"net ({kind}[4] x) => ({kind}[4] y) {{ h = Tanh(x)\n y = Tanh(h) }}", tmp_path
    )
    low, plan = tmp_path / "low.onnx", tmp_path / "low.plan.json"
    answer = convert(finecast, net, low, "bf16")
    assert f"2 ops compute in {label} and keep it: --from-type {label}" in answer.err
    asked = ("--from-type", label, "--plan-out", plan)
    answer = finecast(
        "convert",
        net,
        "-o",
        low,
        "--auto-cast",
        "all",
        "--auto-cast-type",
        "bf16",
        "--force",
        *asked,
    )
    assert answer.code == 0, answer.err
    assert "keep it" not in answer.err
    assert finecast("apply", plan, net, "-o", tmp_path / "again.onnx").code == 0
    assert (tmp_path / "again.onnx").read_bytes() == low.read_bytes()
    node = json.loads(plan.read_text())["decisions"][-1]["node"]
    explained = finecast("explain", net, node, "--plan", plan, "--json")
    assert explained.json["format"] in ("bf16", "fp32")
    inspected = finecast("inspect", net, "--from-type", label, "--json").json
    types = [c["types"] for c in inspected["classes"] if c["class"] != "cast"]
    assert all(set(t) <= {"fp32"} for t in types), types


def test_a_type_that_no_op_has_is_refused(finecast: Finecast, tmp_path: Path) -> None:
    net = saved("net (float[4] x) => (float[4] y) { y = Tanh(x) }", tmp_path)
    for verb in ("convert", "tune"):
        answer = finecast(
            verb,
            net,
            "-o",
            tmp_path / "low.onnx",
            "--from-type",
            "fp64",
            "--auto-cast-type",
            "bf16",
        )
        assert answer.code == ExitCode.USAGE
        assert "no op of the model computes in fp64" in answer.err
        assert "fp32" in answer.err


@pytest.mark.parametrize(
    ("fmt", "how", "says"),
    [
        ("bf16", "mse", "mse changes nothing in bf16"),
        ("int8", "gptq", "it is for int4_weights, int4_dynamic"),
        ("int8_weights", "percentile", "percentile changes nothing in int8_weights"),
        ("int4_weights", "gpt", "minmax, percentile, mse, gptq"),
        ("int8", "entropy", "minmax, percentile"),
        ("bf16", "minmax", "--auto-cast-type int8"),
    ],
)
def test_a_calibration_that_does_nothing_is_refused(
    fmt: str, how: str, says: str, tmp_path: Path, finecast: Finecast
) -> None:
    net = saved(OVERFLOW, tmp_path)
    answer = convert(finecast, net, tmp_path / "o.onnx", fmt, "--calibration", how)
    assert answer.code == ExitCode.USAGE
    assert "--calibration" in answer.err
    assert says in answer.err


def test_an_op_in_a_format_that_was_not_asked_for_is_a_slip(
    tmp_path: Path, finecast: Finecast
) -> None:
    net = saved(OVERFLOW, tmp_path)
    answer = convert(finecast, net, tmp_path / "o.onnx", "bf16", "--op", "Mul=int8")
    assert answer.code == ExitCode.USAGE
    assert "--auto-cast-type bf16,int8" in answer.err


def test_errors_on_random_inputs_are_said_to_be_so(finecast: Finecast, tmp_path: Path) -> None:
    net = saved("net (float[4,16] x) => (float[4,16] y) { y = Tanh(x) }", tmp_path)
    np.savez(tmp_path / "data.npz", x=np.ones((8, 16), np.float32))
    out, fp16 = tmp_path / "low.onnx", ["--auto-cast", "all", "--auto-cast-type", "fp16"]
    text = finecast("convert", net, "-o", out, *fp16).out
    assert ", on random inputs" in text
    data = ["--data", tmp_path / "data.npz", "--batch", 4, "--force"]
    assert "on random inputs" not in finecast("convert", net, "-o", out, *fp16, *data).out
    given = convert(finecast, net, out, "fp16", *data).json["verified"]
    assert given["random_inputs"] is False
