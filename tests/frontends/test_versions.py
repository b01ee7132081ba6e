"""Models stated by versions of ONNX that are newer than what they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import finecast
from finecast.data.options import DataOptions
from finecast.engines import get_engine, installed
from finecast.errors import EngineError, ModelError
from finecast.files import digest
from finecast.frontends.onnx import load
from finecast.frontends.onnx.opset import (
    NEWEST_IR,
    NEWEST_OPSET,
    raise_opset,
    stated_for_engines,
)
from finecast.frontends.onnx.types import infer
from tests.frontends.tools import parse, tensor

RNG = np.random.default_rng(0)
NEWEST = [helper.make_opsetid("", 28)]
TOLD = "it has IR version 14 and opset 28"


def written(path: Path, *ops: str, opsets: list[onnx.OperatorSetIdProto] = NEWEST) -> Path:
    """x @ w, and then ``ops``, each on the result of the one before; as textbooks make it."""
    names = ["m", *(f"v{i}" for i in range(len(ops) - 1)), "y"]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"])]
    nodes += [
        helper.make_node(op, [a], [b]) for op, a, b in zip(ops, names, names[1:], strict=False)
    ]
    ends = [helper.make_tensor_value_info(n, 1, ["N", 64]) for n in "xy"]
    w = tensor("w", RNG.normal(size=(64, 64)) / 8)
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [w])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=14), path)
    return path


def test_what_make_model_writes_is_taken_by_versions_that_engines_read(
    tmp_path: Path,
) -> None:
    """Its ranges could not be observed, for ONNX Runtime does not read IR version 14."""
    net = written(tmp_path / "net.onnx", "Relu", "Celu", "Softmax")
    x = RNG.normal(size=(8, 64)).astype(np.float32)
    done = finecast.convert(
        net, tmp_path / "low.onnx", policy="all:fp16", engine="onnxruntime", data={"x": x}
    )
    assert done.counts == {"fp16": 3, "fp32": 1}  # opset 26 has Celu in fp32 alone
    assert any(TOLD in text for text in done.warnings)
    low = onnx.load(tmp_path / "low.onnx")
    assert (low.ir_version, low.opset_import[0].version) == (NEWEST_IR, NEWEST_OPSET)
    in_memory = finecast.convert(
        onnx.load(net), policy="all:fp16", engine="onnxruntime", data={"x": x}
    )
    assert in_memory.plan.digest == done.plan.digest


def test_it_keeps_its_digest_and_external_data(tmp_path: Path) -> None:
    net = written(tmp_path / "net.onnx", "Relu")
    onnx.save(onnx.load(net), net, save_as_external_data=True, location="w.bin")
    file = load(net)
    stated = stated_for_engines(file)
    assert stated.path != file.path
    assert (stated.digest, stated.external) == (file.digest, file.external)
    assert stated.digest == digest(net, tmp_path / "w.bin")
    get_engine("onnxruntime").load(stated.path)


def test_what_needs_the_newer_opset_keeps_it(tmp_path: Path) -> None:
    net = written(tmp_path / "net.onnx", "SwiGLU")
    model = onnx.load(net)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 32
    onnx.save(model, net)
    file = load(net)
    assert stated_for_engines(file) is file


def test_older_models_are_left_as_they_are(tmp_path: Path) -> None:
    file = load(written(tmp_path / "net.onnx", "Relu"))
    again = stated_for_engines(file)
    assert stated_for_engines(again) is again


def test_the_engine_says_which_versions_to_state(tmp_path: Path) -> None:
    net = written(tmp_path / "net.onnx", "Relu")
    with pytest.raises(EngineError, match=r"IR version: 14.*ir_version of onnx\.helper"):
        get_engine("onnxruntime").load(net)


@pytest.mark.parametrize("slopes", ["stored", "computed"])
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_slopes_by_channel_of_an_old_prelu_are_read_along_axis_1(
    slopes: str, engine: str, tmp_path: Path
) -> None:
    """Opset 7 broadcasts them from the last axis, which is of the same size here."""
    if not installed(engine):
        pytest.skip(f"{engine} is not installed")
    given = "" if slopes == "computed" else "<float[3] s = {0.5, 1, 2}>"
    ports = "float[2,3,3] x, float[3] s" if slopes == "computed" else "float[2,3,3] x"
    op = "t = Neg(s)\n u = Neg(t)\n y = PRelu(x, u)"
    if slopes == "stored":
        op = "y = PRelu(x, s)"
    text = f"net ({ports}) => (float[2,3,3] y) {given} {{ {op} }}"
    net = tmp_path / "net.onnx"
    onnx.save(parse(text, opset=6), net)
    x = RNG.normal(size=(2, 3, 3)).astype(np.float32)
    by_channel = np.array([0.5, 1, 2], np.float32)
    data = {"x": x} if slopes == "stored" else {"x": x, "s": by_channel}
    done = finecast.convert(
        net,
        tmp_path / "low.onnx",
        "all:fp16",
        engine=engine,
        data=DataOptions(calib=lambda: [data]),
    )
    said = "ONNX Runtime reads no opset before 7: the model is taken at opset 7"
    assert said in done.warnings
    wanted = np.where(x < 0, x * by_channel[:, None], x)
    got: Any
    (got,) = get_engine(engine).load(tmp_path / "low.onnx").run(data).values()
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("domain", "version"), [("", 1 << 62), ("", 1 << 31), ("ai.onnx", 1001), ("own", 1 << 62)]
)
def test_opsets_that_no_onnx_has_are_refused(
    tmp_path: Path, domain: str, version: int
) -> None:
    """Conversions looked at each version up to it, without an end."""
    opsets = [helper.make_opsetid(domain, version)]
    path = written(tmp_path / "m.onnx", opsets=opsets)
    with pytest.raises(ModelError, match=f"there is no opset {version} of"):
        load(path)


OLD_BROADCASTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "an axis": (
        """a = Relu(x)
           b = Add<broadcast = 1, axis = 1>(a, v)
           c = MaxPool<kernel_shape = [1, 1]>(b)
           d = Mul<broadcast = 1, axis = 1>(c, m)
           y = Sub(d, a)""",
        lambda x, v, m: (
            (np.maximum(x, 0) + v[:, None, None]) * m[..., None] - np.maximum(x, 0)
        ),
    ),
    "the last axes": (
        "b = Add<broadcast = 1>(x, last)\n y = Div(b, b)",
        lambda x, v, m: np.ones_like(x),
    ),
    "an operand that is computed": (
        "t = Neg(v)\n y = Add<broadcast = 1, axis = 1>(x, t)",
        lambda x, v, m: x - v[:, None, None],
    ),
    "a bias": (
        "f = Flatten(x)\n y = Gemm<broadcast = 1>(f, w, last)",
        lambda x, v, m: x.reshape(len(x), -1) @ np.full((18, 3), 0.5) + [2, 3, 4],
    ),
}


@pytest.mark.parametrize("kind", OLD_BROADCASTS)
@pytest.mark.parametrize("opset", [7, 13, 22])
def test_operands_of_old_opsets_broadcast_as_they_did(kind: str, opset: int) -> None:
    """Also where the batch is a free size, which onnx's converter refuses."""
    body, wanted = OLD_BROADCASTS[kind]
    halves = ", ".join(["0.5"] * 54)
    text = (
        "net (float[N,2,3,3] x) => (float[a,b] y)"
        f" <float[2] v = {{1, 5}}, float[2,3] m = {{1, 2, 3, 4, 5, 6}}, float[3] last ="
        f" {{2, 3, 4}}, float[18,3] w = {{{halves}}}> {{ {body} }}"
    )
    model = parse(text, opset=6)
    if kind != "a bias":
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, None))
    x = RNG.normal(size=(5, 2, 3, 3)).astype(np.float32)
    raised = ir.to_proto(raise_opset(ir.from_proto(model), opset))
    outputs: Any = ReferenceEvaluator(raised).run(None, {"x": x})
    v, m = np.array([1, 5], np.float32), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(outputs[0], wanted(x, v, m), rtol=1e-5, atol=1e-5)


def test_a_model_of_an_old_opset_and_a_free_batch_is_converted(tmp_path: Path) -> None:
    text = (
        "net (float[N,2,3,3] x) => (float[N,2,3,3] y) <float[2] v = {1, 5}>"
        " { y = Add<broadcast = 1, axis = 1>(x, v) }"
    )
    onnx.save(parse(text, opset=6), tmp_path / "net.onnx")
    done = finecast.convert(tmp_path / "net.onnx", tmp_path / "low.onnx", "all:bf16")
    assert [d.format.label for d in done.plan.decisions] == ["bf16"]


@pytest.mark.parametrize("split", ["one", ""], ids=["with sizes", "without"])
@pytest.mark.parametrize("raised", [False, True])
def test_parts_that_lose_an_axis_are_stated_with_no_wrong_shape(
    split: str, raised: bool
) -> None:
    """PyTorch's older exporter writes ``unbind`` so; ONNX Runtime fails by a wrong shape."""
    text = (
        "net (float[4,8] x) => (float[n] y) <int64 one = {1}, int64 i = {2}> {"
        f" s = SplitToSequence<axis = 1, keepdims = 0>(x, {split})\n p = SequenceAt(s, i)"
        "\n y = Relu(p) }"
    )
    model = ir.from_proto(parse(text.replace("(x, )", "(x)"), opset=17))
    if raised:
        model = raise_opset(model, 20)
    infer(model, shapes=True)
    ranks = {v.name: len(v.shape) for n in model.graph for v in n.outputs if v.shape}
    assert ranks.get("p", 1) == 1
    assert ranks["y"] == 1
