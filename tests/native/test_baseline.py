"""The fp32 model in a second engine: what is compared with is not taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines import get_engine, installed
from finecast.engines.base import Array
from finecast.native.baseline import SecondOpinion, differing
from finecast.native.onnx import OnnxModel, take
from finecast.native.source import AS_IT_IS
from tests.frontends.tools import parse

SIDE = 16
RNG = np.random.default_rng(5)


def squared(text: str) -> onnx.ModelProto:
    """A model of ``x`` and a square constant ``w``."""
    model = parse(f"net (float[4,{SIDE}] x) => (float[4,{SIDE}] y) {{ {text} }}", opset=17)
    w = RNG.normal(size=(SIDE, SIDE)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


def told(model: OnnxModel, outputs: Mapping[str, Array], feeds: Mapping[str, Array]) -> str:
    graph = model.prepare(AS_IT_IS).graph
    second = SecondOpinion(source=model, engine=get_engine("openvino"))
    return differing(second, graph, dict(feeds), outputs)


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
def test_engines_that_disagree_about_fp32_are_named_with_the_op(tmp_path: Path) -> None:
    """Weights that are computed from constants, and then read in both ways, are confused."""
    net = squared("r = Mul(w, w)\n h = MatMul(x, r)\n t = Transpose(r)\n y = MatMul(h, t)")
    onnx.save(net, tmp_path / "net.onnx")
    done = finecast.convert(
        tmp_path / "net.onnx", tmp_path / "o.onnx", "none", engine="openvino"
    )
    (text,) = (w for w in done.warnings if "disagree" in w)
    assert text.startswith(
        "OpenVINO and ONNX Runtime disagree about the fp32 model: output 'y'"
    )
    assert "(onnx::MatMul)" in text
    alone = finecast.convert(
        tmp_path / "net.onnx", tmp_path / "p.onnx", "none", engine="onnxruntime"
    )
    assert not any("disagree" in w for w in alone.warnings)


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize(
    ("text", "change", "expected"),
    [
        ("y = MatMul(x, w)", lambda y: y, ""),
        ("y = MatMul(x, w)", lambda y: y * 1.0001, ""),
        ("y = MatMul(x, w)", lambda y: y * 1.1, "by a relative 0.1"),
        ("y = MatMul(x, w)", lambda y: y[:2], "in its shape"),
        ("y = MatMul(x, w)", lambda y: y * np.nan, "by NaN or Inf"),
        # Digits that fp32 does not determine say nothing, and a step may go either way.
        ("h = Mul(x, w0)\n y = Sin(h)", lambda y: y * 1.1, ""),
        ("h = MatMul(x, w)\n y = Floor(h)", lambda y: y + 1, ""),
    ],
    ids=["same", "rounded", "wrong", "shape", "nan", "undetermined", "decided"],
)
def test_what_counts_as_a_difference(text: str, change: Any, expected: str) -> None:
    net = squared(text)
    net.graph.initializer.append(numpy_helper.from_array(np.full((1, 1), 3e7, "f4"), "w0"))
    x = RNG.normal(size=(4, SIDE)).astype(np.float32)
    model = take(net)
    (y,) = get_engine("onnxruntime").load(net.SerializeToString()).run({"x": x}).values()
    found = told(model, {"y": np.asarray(change(y), np.float32)}, {"x": x})
    assert bool(found) is bool(expected)
    assert expected in found


CAST = "h = MatMul(x, w) t = Mul(h, four) q = Cast<to=7>(t)"
DIVIDES = "OpenVINO is wrong there, by a known fault (openvino-integer-division)"
INTEGERS = {
    "Mod": (
        """(int64[n, 8] ids) => (float[n, 8, 16] y) {
        [bucket] h = Mod(ids, m) [look] e = Gather(t, h) y = MatMul(e, w) }""",
        f"'bucket' (onnx::Mod): {DIVIDES}",
    ),
    "Div": (
        """(int64[n, 8] ids) => (float[n, 8, 16] y, int64[n, 8] h) {
        [part] q = Div(ids, m) h = Mod(q, m) e = Gather(t, h) y = MatMul(e, w) }""",
        f"'part' (onnx::Div): {DIVIDES}",
    ),
    "Mul": (
        """(int64[n, 8] ids, float[4, 16] x) => (float[4, 16] y, int64[n, 8] h) {
        y = MatMul(x, w) [times] z = Mul(ids, k) h = Mod(z, m) }""",
        "'times' (onnx::Mul): OpenVINO is wrong there, by a known fault (openvino-int64)",
    ),
    "behind a decision": (
        """(int64[n, 8] ids) => (float[n, 8, 16] y) {
        [bucket] h = Mod(ids, m) [look] e = Gather(t, h) a = MatMul(e, w)
        g = Greater(a, k0) y = Where(g, a, e) }""",
        f"'bucket' (onnx::Mod): {DIVIDES}",
    ),
    "two of them": (
        """(int64[n, 8] ids) => (int64[n, 8] h, int64[n, 8] q) {
        [bucket] h = Mod(ids, m) [part] q = Div(ids, m) }""",
        (
            f"'bucket' (onnx::Mod): {DIVIDES}; output 'q' differs in 100% of its"
            f" elements, first at 'part' (onnx::Div): {DIVIDES}"
        ),
    ),
    "Cast of some large numbers": (
        """(float[4, 16] x) => (int64[4, 16] q) {
        y = MatMul(x, w) z = Mul(y, edge) [tick] q = Cast<to=7>(z) }""",
        "'tick' (onnx::Cast): OpenVINO is wrong there, by a known fault (openvino-cast-int64)",
    ),
    "Cast": (
        """(float[4, 16] x) => (float[4, 16] y, int64[4, 16] q) {
        y = MatMul(x, w) z = Mul(y, large) [tick] q = Cast<to=7>(z) }""",
        "'tick' (onnx::Cast): OpenVINO is wrong there, by a known fault (openvino-cast-int64)",
    ),
}


def write_integers(name: str, folder: Path) -> Path:
    """The model of ``INTEGERS``, in a file."""
    text, _ = INTEGERS[name]
    model = parse(f"net {text}", opset=17)
    arrays = {
        "w": RNG.normal(size=(SIDE, SIDE)).astype(np.float32),
        "t": RNG.normal(size=(1000, SIDE)).astype(np.float32),
        "m": np.array(1000),
        "k": np.array(7777),
        "k0": np.array(0, np.float32),
        "large": np.array(1e12, np.float32),
        "edge": np.array(2.5e8, np.float32),  # the largest numbers alone are beyond 2^31
    }
    read = {i for node in model.graph.node for i in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(a, n) for n, a in arrays.items() if n in read
    )
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize("name", INTEGERS)
def test_wrong_integers_are_named_with_the_op_and_the_engine(
    name: str, tmp_path: Path
) -> None:
    """Random inputs show it, too: of ids that a remainder reduces large ones are drawn."""
    net = write_integers(name, tmp_path)
    done = finecast.convert(net, tmp_path / "o.onnx", "none", engine="openvino")
    (text,) = (w for w in done.warnings if "disagree" in w)
    assert INTEGERS[name][1] in text
    assert text.endswith("engine onnxruntime takes the other")
    alone = finecast.convert(net, tmp_path / "p.onnx", "none", engine="onnxruntime")
    assert not any("disagree" in w for w in alone.warnings)


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
def test_another_fault_is_not_called_one_of_integers() -> None:
    """OpenVINO leaves a part of it unwritten; the integers that it reads are small."""
    ports = "(float[2,3,4,5] x, int64[4] r) => (float[a,b,c,d] y)"
    net = parse(f"net {ports} {{ [copies] y = Tile(x, r) }}")
    feeds = {"x": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32), "r": np.full(4, 2)}
    outputs = get_engine("openvino").load(net.SerializeToString()).run(feeds)
    text = told(take(net), outputs, feeds)
    assert "first at 'copies' (onnx::Tile)" in text
    assert "known fault" not in text


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
def test_an_onnx_file_that_becomes_ir_has_a_second_engine_too(tmp_path: Path) -> None:
    """Only OpenVINO runs IR, but ONNX Runtime runs the file that it is made of."""
    net = write_integers("Cast", tmp_path)
    (text,) = (
        w
        for w in finecast.convert(net, tmp_path / "o.xml", "none").warnings
        if "disagree" in w
    )
    assert INTEGERS["Cast"][1] in text
    assert text.endswith("engine onnxruntime takes the other, if the output is ONNX")


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize(
    ("op", "change", "expected"),
    [
        ("q = Mod(k, seven)", lambda q: q + (q == q.max()), "of its elements"),
        ("h = MatMul(x, w) q = ArgMax(h)", lambda q: q + (q == q.max()), ""),
        ("h = MatMul(x, w) q = ArgMax(h)", lambda q: q + 16, "of its elements"),
        (CAST, lambda q: q + 1, ""),
        (CAST, lambda q: q + 2 * (q == q.max()), "of its elements"),
    ],
    ids=["exact", "a rank that may be another one", "no rank", "a step", "no step"],
)
def test_integers_are_exact_unless_rounded_numbers_decide_them(
    op: str, change: Any, expected: str
) -> None:
    net = parse(
        f"net (float[4, {SIDE}] x, int64[4, 1] k) => (int64[n, m] q) {{ {op} }}", opset=17
    )
    w = RNG.normal(size=(SIDE, SIDE)).astype(np.float32)
    four = np.array(4, np.float32)
    for name, array in {"w": w, "seven": np.array(7), "four": four}.items():
        net.graph.initializer.append(numpy_helper.from_array(array, name))
    feeds = {"x": RNG.normal(size=(4, SIDE)).astype(np.float32), "k": np.arange(4)[:, None]}
    (q,) = get_engine("onnxruntime").load(net.SerializeToString()).run(feeds).values()
    found = told(take(net), {"q": np.asarray(change(q))}, feeds)
    assert expected in found
    assert bool(found) is bool(expected)
