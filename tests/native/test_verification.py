"""What random inputs say of a conversion: errors that its formats explain, and others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

import finecast
from finecast.data.deviation import deviation
from finecast.data.options import DataOptions
from finecast.engines import get_engine, installed
from finecast.errors import EngineError, WrongNumbersError
from finecast.native.engine_model import EngineModel
from finecast.native.opening import opened
from finecast.numbers.thresholds import LIMIT
from finecast.tuning.result import Result
from tests.frontends.tools import parse, tensor
from tests.kernels import skip_without_bf16

ROWS, COLUMNS = 8, 64
RNG = np.random.default_rng(1)
SQUARE = (RNG.normal(size=(COLUMNS, COLUMNS)) / 8).astype(np.float32)
"""Products of standard normal numbers by it are standard normal again."""

X = RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32)
DATA = DataOptions(data={"x": X}, batch=ROWS)

HEAD = "net (float[8,64] x) => (float[8,m] y)"
STEPS = 12
CHAOS = "\n".join(
    f"[left{i}] a{i} = Sub(one, v{i})\n [grow{i}] b{i} = Mul(v{i}, a{i})\n"
    f" [scale{i}] v{i + 1} = Mul(b{i}, rate)"
    for i in range(STEPS)
)
# Errors grow with each step of a chaotic map; an offset takes the digits that it is larger by.
EXPLAINED: Mapping[str, str] = {
    "a chaotic map": f"""{HEAD} <float one = {{1}}, float rate = {{3.9}}> {{
      [in] z = MatMul(x, w)
      [squash] v0 = Sigmoid(z)
      {CHAOS}
      [out] y = Identity(v{STEPS})
    }}""",
    "an offset": f"""{HEAD} <float shift = {{300}}> {{
      [up] s = Add(x, shift)
      [in] z = MatMul(s, w)
      [down] y = Sub(z, back)
    }}""",
}
# The formats of all ops together lose digits that low products alone keep.
NOT_EXPLAINED: Mapping[str, str] = {
    "a variance": f"""{HEAD} <float shift = {{32}}> {{
      [in] z = MatMul(x, w)
      [up] s = Add(z, shift)
      [square] q = Mul(s, s)
      [mean_square] e = ReduceMean<axes = [1]>(q)
      [mean] m = ReduceMean<axes = [1]>(s)
      [square_mean] n = Mul(m, m)
      [down] y = Sub(e, n)
    }}""",
    "a logit": f"""{HEAD} <float one = {{1}}, float scale = {{8}}> {{
      [in] z = MatMul(x, w)
      [wide] u = Mul(z, scale)
      [squash] p = Sigmoid(u)
      [left] q = Sub(one, p)
      [odds] o = Div(p, q)
      [log] y = Log(o)
    }}""",
}
BLIND: Mapping[str, str] = {
    "saturated": f"{HEAD} <float wide = {{1000}}>"
    " { [in] z = MatMul(x, w)\n u = Mul(z, wide)\n y = Softmax(u) }",
    "constant": f"{HEAD} <float far = {{1000}}>"
    " { [in] z = MatMul(x, w)\n u = Sub(z, far)\n r = Relu(u)\n y = Sub(r, back) }",
    "masked": f"{HEAD} <float lowest = {{-1e30}}>"
    " { [in] z = MatMul(x, w)\n m = Min(z, lowest)\n"
    " y = Softmax(m) }",
}
SUFFIXES = ("onnx", "xml")


def saved(text: str, folder: Path, suffix: str) -> Path:
    """The model as a file of the suffix."""
    if not installed("openvino"):
        pytest.skip("needs OpenVINO")
    import openvino

    model = parse(text)
    weights = {"w": SQUARE, "back": 300 * SQUARE.sum(axis=0)}
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(tensor(n, a) for n, a in weights.items() if n in used)
    path = folder / f"net.{suffix}"
    onnx.save(model, folder / "net.onnx")
    if suffix == "xml":
        read = openvino.convert_model(folder / "net.onnx")
        openvino.save_model(read, path, compress_to_fp16=False)
    return path


def convert(net: Path, data: DataOptions | None = None) -> Result:
    low = net.with_stem("low")
    return finecast.convert(net, low, "all:bf16", engine="openvino", data=data, force=True)


def doubts(done: Result) -> list[str]:
    """The warnings on what the inputs show; another says where bf16 is no faster."""
    return [said for said in done.warnings if "no speed is gained here" not in said]


@pytest.mark.long
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", EXPLAINED)
def test_errors_that_low_products_explain_are_written_with_a_warning(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    done = convert(saved(EXPLAINED[kind], tmp_path, suffix))
    error = done.verified.relative_error or 0.0
    assert error > 0.5
    (said,) = doubts(done)
    assert f"{error:.3g} on random inputs" in said
    assert "The formats explain it" in said
    assert "own: data FILE.npz" in said
    assert (tmp_path / f"low.{suffix}").exists()


@pytest.mark.parametrize("kind", EXPLAINED)
def test_on_data_no_right_digit_is_refused_all_the_same(kind: str, tmp_path: Path) -> None:
    net = saved(EXPLAINED[kind], tmp_path, "onnx")
    with pytest.raises(WrongNumbersError, match="no digit of it is right"):
        convert(net, data=DATA)
    assert not (tmp_path / "low.onnx").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", NOT_EXPLAINED)
def test_what_low_products_do_not_explain_is_refused(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    skip_without_bf16()  # what is computed in fp32 is right
    with pytest.raises(WrongNumbersError, match=r"no digit of it is right|NaN or Inf"):
        convert(saved(NOT_EXPLAINED[kind], tmp_path, suffix))
    assert not (tmp_path / f"low.{suffix}").exists()


@pytest.mark.parametrize("kind", NOT_EXPLAINED)
def test_so_it_is_on_a_device_with_bf16(kind: str, tmp_path: Path) -> None:
    net = saved(NOT_EXPLAINED[kind], tmp_path, "onnx")
    with pytest.raises(WrongNumbersError, match=r"no digit of it is right|NaN or Inf"):
        finecast.convert(net, tmp_path / "low.onnx", "all:bf16", target="amx")
    assert not (tmp_path / "low.onnx").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", BLIND)
def test_inputs_that_show_no_error_are_said_to_be_so(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    net = saved(BLIND[kind], tmp_path, suffix)
    (said,) = doubts(convert(net))
    assert "cannot tell a right model from a wrong one: output 'y'" in said
    assert "data of its own" in said
    (said,) = doubts(convert(net, data=DATA))
    assert "cannot tell" in said
    assert "Verify the model on other data" in said


def test_inputs_that_show_errors_are_not_doubted(tmp_path: Path) -> None:
    text = f"{HEAD} {{ [in] z = MatMul(x, w)\n y = Softmax(z) }}"
    assert doubts(convert(saved(text, tmp_path, "onnx"))) == []


# All logits are equal but for the order of sums, and huge: softmax has no certain digit.
EQUAL = """net (float[4,16] x) => (float[4,8] y) <float huge = {1000000000.0}> {
  [logits] m = MatMul(x, w)
  [large] l = Mul(m, huge)
  [soft] y = Softmax(l)
}"""


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("huge", [True, False])
def test_noise_of_results_shows_what_fp32_does_not_determine(
    tmp_path: Path, suffix: str, huge: bool
) -> None:
    net = tmp_path / "net.onnx"
    model = parse(EQUAL if huge else EQUAL.replace("1000000000.0", "1"))
    model.graph.initializer.append(tensor("w", np.ones((16, 8))))
    onnx.save(model, net)
    if suffix == ".xml":
        openvino = pytest.importorskip("openvino")
        openvino.save_model(openvino.convert_model(net), net.with_suffix(suffix))
    source = opened(net.with_suffix(suffix))
    assert isinstance(source, EngineModel)
    x = {"x": np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)}
    (exact,) = source.reference().run(x).values()
    (moved,) = source.noisy_session().run(x).values()
    error = deviation(moved, exact).relative
    assert error >= LIMIT if huge else error < 1e-5


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
def test_a_model_that_does_not_run_on_the_user_s_data_is_refused(tmp_path: Path) -> None:
    """It was written, and called verified: "loaded, not run: give --data"."""
    model = parse(
        "net (float[n,8] x) => (float[4,m,16] y) <int64[1] zero = {0}>"
        " { u = Unsqueeze(x, zero) p = MatMul(u, w) y = Relu(p) }",
        opset=17,
    )
    model.graph.initializer.append(tensor("w", RNG.normal(size=(4, 8, 16)).astype(np.float32)))
    x = RNG.normal(size=(32, 8)).astype(np.float32)
    given, output = {"x": x}, tmp_path / "low.onnx"
    try:
        get_engine("openvino").load(model.SerializeToString()).run(given)
    except EngineError:  # as of 2026.4: it takes the product's batch for 1
        with pytest.raises(EngineError, match="as it was given"):
            finecast.convert(model, output, "all:fp16", data=given, engine="openvino")
        assert not output.exists()
    else:
        pytest.skip("this release of OpenVINO runs it")
