"""Models as they are found: quantised, half converted, old, oddly named, with fused ops."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from finecast import api
from finecast.errors import ModelError
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.frontends.tools import (
    agree,
    convert,
    convert_file,
    formats,
    model,
    ops,
    parse,
    tensor,
)

BOTH = ("all:fp16", "all:bf16")
ALL = (*BOTH, "matmult:fp16", "matmult:bf16")


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    names = ["" if i == "_" else i for i in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=outputs.split()[0], **attributes)


def seeded(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 4


@pytest.mark.parametrize("policy", ALL)
def test_qdq(tmp_path: Path, policy: str) -> None:
    before = model(
        [
            node("QuantizeLinear", "x s z", "q"),
            node("DequantizeLinear", "q s z", "d"),
            node("DequantizeLinear", "w s z", "wd"),
            node("MatMul", "d wd", "m"),
            node("Relu", "m", "r"),
            node("QuantizeLinear", "r s z", "rq"),
            node("DequantizeLinear", "rq s z", "y"),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [
            tensor("s", 0.05),
            tensor("z", 0, np.int8),
            tensor("w", np.arange(16).reshape(4, 4) - 8, np.int8),
        ],
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert {formats(plan).get(n, "fp32") for n in ("q", "d", "wd", "rq", "y")} == {"fp32"}
    assert {formats(plan).get(n, "fp32") for n in ("m", "r")} == {"fp32"}
    assert ops(after) == ops(before)  # engines still find the pattern


@pytest.mark.parametrize("policy", ALL)
def test_partly_fp16(tmp_path: Path, policy: str) -> None:
    before = model(
        [
            node("Cast", "x", "h", to=TensorProto.FLOAT16),
            node("MatMul", "h w", "m"),
            node("Cast", "m", "f", to=TensorProto.FLOAT),
            node("MatMul", "f v", "y"),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4), np.float16), tensor("v", seeded(4, 4))],
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert "m" not in formats(plan)
    assert formats(plan)["y"] == policy[-4:]
    if policy == "all:fp16":
        assert ops(after) == ["Cast", "MatMul", "MatMul", "Cast"]
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16)


@pytest.mark.parametrize("policy", ALL)
def test_names_that_collide_or_are_digits(tmp_path: Path, policy: str) -> None:
    before = model(
        [
            helper.make_node("MatMul", ["0", "1"], ["2"], name="0"),
            helper.make_node("Relu", ["2"], ["2_fp16"], name="0"),
            helper.make_node("Exp", ["2_fp16"], ["cast_2_fp32"], name=""),
            helper.make_node("Add", ["cast_2_fp32", "1_bf16"], ["y"], name="Exp_2"),
        ],
        {"0": [2, 4]},
        {"y": [2, 4]},
        [tensor("1", seeded(4, 4)), tensor("1_bf16", seeded(4))],
    )
    after, plan, _ = convert(before, tmp_path, policy)
    names = [n.name for n in after.graph.node]
    assert len(set(names)) == len(names)
    assert len(plan.decisions) == 4
    if policy.endswith("fp16"):
        for number, step in enumerate(before.graph.node):  # ONNX Runtime wants unique names
            step.name = f"n{number}"
        agree(before, after, Format.FP16)


@pytest.mark.parametrize("policy", ALL)
def test_ir_3_initializers_that_are_inputs(tmp_path: Path, policy: str) -> None:
    before = model(
        [node("MatMul", "x w", "m"), node("Add", "m b", "y")],
        {"x": [2, 4], "w": [4, 4], "b": [4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4)), tensor("b", seeded(4))],
        opset=8,
        ir_version=3,
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert formats(plan)["m"] == policy[-4:]
    if policy.endswith("fp16"):
        listed = {v.name for v in after.graph.input}
        assert {t.name for t in after.graph.initializer} <= listed
        agree(before, after, Format.FP16, x=seeded(2, 4, seed=3))


@pytest.mark.parametrize("policy", ALL)
def test_ir_3_initializers_that_are_no_inputs(tmp_path: Path, policy: str) -> None:
    """Engines take such files; for bf16, whose opset is newer, it was advised to use fp16."""
    before = model(
        [node("MatMul", "x w", "y")],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4))],
        opset=8,
        ir_version=3,
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert formats(plan)["y"] == policy[-4:]
    asked = {v.name for v in after.graph.input} - {t.name for t in after.graph.initializer}
    assert asked == {"x"}


def test_defaults_of_inputs_can_still_be_overridden(tmp_path: Path) -> None:
    before = model(
        [node("MatMul", "x w", "y")],
        {"x": [2, 4], "w": [4, 4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4))],
    )
    after, _, _ = convert(before, tmp_path)
    other = seeded(4, 4, seed=9)
    agree(before, after, Format.FP16, x=seeded(2, 4))
    agree(before, after, Format.FP16, x=seeded(2, 4), w=other)


RECURRENT = {"RNN": 1, "GRU": 3, "LSTM": 4}


@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("opset", [7, 14, 22])
@pytest.mark.parametrize("policy", ALL)
def test_recurrent(tmp_path: Path, op: str, opset: int, policy: str) -> None:
    gates = RECURRENT[op]
    states = "y h c" if op == "LSTM" else "y h"
    before = model(
        [node(op, "x w r b lengths start", states, hidden_size=5)],
        {"x": [3, 2, 4], "start": [1, 2, 5]},
        {"y": [3, 1, 2, 5], "h": [1, 2, 5]},
        [
            tensor("w", seeded(1, gates * 5, 4)),
            tensor("r", seeded(1, gates * 5, 5)),
            tensor("b", seeded(1, gates * 10)),
            tensor("lengths", [3, 2], np.int32),
        ],
        opset=opset,
    )
    _, plan, _ = convert(before, tmp_path, policy)
    assert formats(plan)["y"] == policy[-4:]


CONTRIB = [
    (node("FusedMatMul", "x w", "h", domain="com.microsoft", alpha=0.5), "fp16"),
    (node("Gelu", "x", "h", domain="com.microsoft"), "fp16"),
    (node("FastGelu", "x b", "h", domain="com.microsoft"), "fp16"),
    (node("BiasGelu", "x b", "h", domain="com.microsoft"), "fp16"),
    (node("SkipLayerNormalization", "x x g b", "h", domain="com.microsoft"), "fp16"),
    (node("QuickGelu", "x", "h", domain="com.microsoft"), "fp16"),
    (node("SimplifiedLayerNormalization", "x g", "h", axis=-1), "fp16"),
    (node("NotAnOpYet", "x", "h", domain="com.microsoft"), None),
]


@pytest.mark.parametrize(("fused", "low"), CONTRIB, ids=[n.op_type for n, _ in CONTRIB])
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16"])
def test_ops_of_onnx_runtime(
    tmp_path: Path, fused: onnx.NodeProto, low: str | None, policy: str
) -> None:
    """onnx infers nothing after them; their definitions say what their outputs are."""
    before = model(
        [fused, node("MatMul", "h w", "m"), node("Relu", "m", "y")],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4)), tensor("g", np.ones(4)), tensor("b", seeded(4))],
        imports={"com.microsoft": 1},
    )
    onnx.save(before, tmp_path / "m.onnx")
    # onnx's checker does not know the op that ONNX Runtime puts into ONNX's own domain.
    check = fused.domain != ""
    after, plan, _ = convert_file(
        tmp_path / "m.onnx", tmp_path / "o.onnx", policy, check=check
    )
    assert formats(plan)["m"] == policy[4:]
    assert formats(plan).get("h") == (policy[4:] if low else None)
    if policy == "all:fp16" and low:
        agree(before, after, Format.FP16)


def test_ports_of_fused_ops_that_are_always_fp32_stay(tmp_path: Path) -> None:
    before = model(
        [
            node("SkipLayerNormalization", "x x g b", "h mean scale", domain="com.microsoft"),
            node("Add", "h mean", "y"),
        ],
        {"x": [2, 1, 4]},
        {"y": [2, 1, 4]},
        [tensor("g", np.ones(4)), tensor("b", seeded(4))],
        imports={"com.microsoft": 1},
    )
    after, plan, _ = convert(before, tmp_path)
    assert formats(plan) == {"h": "fp16", "y": "fp16"}
    assert "mean" in {n.input[0] for n in after.graph.node if n.op_type == "Cast"}


SEQUENCES = """
g (float[2,4] x, float[4,4] w) => (float[n,4] y, int64 count)
{
  a = MatMul (x, w)
  b = Relu (a)
  s = SequenceConstruct (a, b, x)
  one = Constant <value_int = 1> ()
  c = SequenceAt (s, one)
  d = Exp (c)
  t = SequenceInsert (s, d)
  y = ConcatFromSequence <axis = 0> (t)
  count = SequenceLength (t)
}
"""


def test_an_optional_output_without_a_value(tmp_path: Path) -> None:
    """ONNX Runtime gives None for it, and it counts as empty: what has values is compared."""
    path = tmp_path / "optional.onnx"
    held = helper.make_tensor_type_proto(TensorProto.FLOAT, [4])
    graph = helper.make_graph(
        [node("Sin", "x", "y"), node("Optional", "", "none", type=held)],
        "net",
        [helper.make_value_info("x", held)],
        [
            helper.make_value_info("y", held),
            helper.make_value_info("none", helper.make_optional_type_proto(held)),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    onnx.save(made, path)
    result = api.convert(path, policy="all:bf16", engine="onnxruntime", progress=False)
    assert result.verified is not None
    assert "y" in result.verified.outputs
    assert not result.verified.note


@pytest.mark.parametrize("policy", ALL)
def test_sequences(tmp_path: Path, policy: str) -> None:
    before = parse(SEQUENCES)
    after, plan, _ = convert(before, tmp_path, policy)
    assert policy[-4:] in formats(plan).values()
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16)


OPTIONALS = """
g (bool c, float[4] x) => (float[4] y)
{
  h = Exp (x)
  o = Optional (h)
  e = OptionalGetElement (o)
  y = Mul (e, x)
}
"""


@pytest.mark.parametrize("policy", ALL)
def test_optionals(tmp_path: Path, policy: str) -> None:
    before = parse(OPTIONALS, opset=18)
    after, _, _ = convert(before, tmp_path, policy)
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16, c=np.array(True))


@pytest.mark.parametrize("opset", range(7, 25))
@pytest.mark.parametrize("policy", ALL)
def test_every_opset(tmp_path: Path, opset: int, policy: str) -> None:
    """Ops whose definitions changed: attributes to inputs, inference forms, axes."""
    squeeze = (
        node("Squeeze", "p", "v", axes=[2]) if opset < 13 else node("Squeeze", "p ax", "v")
    )
    clip = (
        node("Clip", "n", "k", min=0.0, max=6.0)
        if opset < 11
        else node("Clip", "n lo hi", "k")
    )
    reduce = (
        node("ReduceMean", "k", "p", axes=[3], keepdims=0)
        if opset < 18
        else node("ReduceMean", "k ax3", "p", keepdims=0)
    )
    before = model(
        [
            node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
            node("BatchNormalization", "c g b m s", "n"),
            clip,
            reduce,
            squeeze,
            node("Softmax", "v", "y", axis=1),
        ],
        {"x": [1, 2, 1, 4]},
        {"y": [1, 3]},
        [
            tensor("w", seeded(3, 2, 3, 3)),
            *(tensor(n, np.abs(seeded(3, seed=i)) + 1) for i, n in enumerate("gbms")),
            *((tensor("ax", [2], np.int64),) if opset >= 13 else ()),
            *((tensor("lo", 0.0), tensor("hi", 6.0)) if opset >= 11 else ()),
            *((tensor("ax3", [3], np.int64),) if opset >= 18 else ()),
        ],
        opset=opset,
        ir_version=10 if opset > 20 else 8,
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert formats(plan)["c"] == policy[-4:]
    version = next(i.version for i in after.opset_import if i.domain == "")
    assert version == opset or policy.endswith("bf16")
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16)


def test_shape_inference_that_fails_leaves_types_known(tmp_path: Path) -> None:
    """ort#20189: a declared shape that contradicts what is computed."""
    before = model(
        [node("MatMul", "x w", "m"), node("Relu", "m", "r"), node("Exp", "r", "y")],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", seeded(4, 4))],
    )
    before.graph.value_info.append(
        helper.make_tensor_value_info("m", TensorProto.FLOAT, [7, 7])
    )
    onnx.save(before, tmp_path / "m.onnx")
    after, plan, _ = convert_file(
        tmp_path / "m.onnx", tmp_path / "o.onnx", "all:fp16", check=False
    )
    assert set(formats(plan).values()) == {"fp16"}
    agree(before, after, Format.FP16)


def test_unlike_type_parameters(tmp_path: Path) -> None:
    """T, T1 and U: scale and statistics of a normalisation, the exponent of a power."""
    before = model(
        [
            node("BatchNormalization", "x g b m s", "n"),
            node("Pow", "n two", "p"),
            node("LayerNormalization", "p lg", "l mean inv"),
            node("Mul", "l inv", "y"),
        ],
        {"x": [2, 3]},
        {"y": [2, 3]},
        [
            *(tensor(n, np.abs(seeded(3, seed=i)) + 1) for i, n in enumerate("gbms")),
            tensor("two", 2, np.int64),
            tensor("lg", np.ones(3)),
        ],
    )
    after, plan, _ = convert(before, tmp_path)
    assert set(formats(plan).values()) == {"fp16"}
    agree(before, after, Format.FP16)


def test_unused_outputs_and_dead_ends(tmp_path: Path) -> None:
    before = model(
        [
            node("Split", "x", "a b", axis=1),
            node("Exp", "b", "dead"),
            node("MaxPool", "x4", "y idx", kernel_shape=[2, 2]),
            node("Relu", "a", "z"),
        ],
        {"x": [2, 4], "x4": [1, 1, 4, 4]},
        {"y": [1, 1, 3, 3], "z": [2, 2]},
        opset=17,
    )
    after, _, _ = convert(before, tmp_path)
    agree(before, after, Format.FP16)


@pytest.mark.parametrize("policy", BOTH)
def test_einsum_group_norm_deform_conv_attention(tmp_path: Path, policy: str) -> None:
    before = model(
        [
            node("GroupNormalization", "x g b", "n", num_groups=2),
            node("DeformConv", "n w offset", "d", pads=[1, 1, 1, 1]),
            node("Reshape", "d shape", "r"),
            node("Einsum", "r r", "e", equation="bij,bkj->bik"),
            node("Attention", "e e e", "y", q_num_heads=1, kv_num_heads=1),
        ],
        {"x": [1, 4, 4, 4], "offset": [1, 18, 4, 4]},
        {"y": [1, 4, 4]},
        [
            tensor("g", np.ones(4)),
            tensor("b", seeded(4)),
            tensor("w", seeded(4, 4, 3, 3)),
            tensor("shape", [1, 4, 16], np.int64),
        ],
        opset=23,
        ir_version=10,
    )
    _, plan, _ = convert(before, tmp_path, policy)
    chosen = {d.op: d.format.label for d in plan.decisions}
    assert set(chosen.values()) == {policy[4:]}


@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16", "none"])
def test_an_output_without_a_shape(policy: str, tmp_path: Path) -> None:
    """ONNX asks for one and no engine needs it: exporters leave it out."""
    nodes = [node("MatMul", "x w", "m"), node("Relu", "m", "y")]
    proto = model(nodes, {"x": ["N", 4]}, {"y": None}, [tensor("w", np.eye(4))])
    after, plan, _ = convert(proto, tmp_path, policy)
    assert [d.dim_param or d.dim_value for d in _dims(after)] == ["N", 4]
    onnx.save(proto, tmp_path / "m.onnx")
    file = frontend.load(tmp_path / "m.onnx")
    prepared = frontend.prepare(file, Policy.parse(policy))
    once = frontend.to_bytes(frontend.apply(file, plan, prepared).model)
    assert once == frontend.to_bytes(frontend.apply(file, plan).model)


def _dims(proto: onnx.ModelProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(proto.graph.output[0].type.tensor_type.shape.dim)


def test_errors_name_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(model([node("Relu", "x", "y")], {"x": [4]}, {"y": [4]}), tmp_path / "m.onnx")

    def refuse(path: Path, **_: object) -> None:
        raise ModelError("the model is not valid ONNX", where=str(path))

    monkeypatch.setattr(frontend, "check", refuse)
    with pytest.raises(ModelError) as caught:
        api.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", "all:fp16")
    assert caught.value.where == f"{tmp_path / 'm.onnx'}, converted"
    assert ".finecast-" not in str(caught.value)


def test_a_value_named_by_its_type_has_it(tmp_path: Path) -> None:
    """The low value behind an output was called ``y_fp32``."""
    nodes = [node("MatMul", "x w", "m"), node("Relu", "m", "y")]
    proto = model(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, [tensor("w", np.eye(4))])
    after, _, _ = convert(proto, tmp_path, "all:bf16")
    kinds: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.BFLOAT16: "bf16"}
    typed = onnx.shape_inference.infer_shapes(after).graph
    named = {v.name: kinds[v.type.tensor_type.elem_type] for v in typed.value_info}
    made = {n: k for n, k in named.items() if "_" in n}
    assert made == dict.fromkeys(("w_bf16", "x_bf16", "y_bf16"), "bf16")


def test_dictionaries_are_refused_by_name(tmp_path: Path) -> None:
    """As classifiers of scikit-learn give them, converted by default."""
    maps = node("ZipMap", "x", "y", classlabels_int64s=[0, 1, 2])
    maps.domain = "ai.onnx.ml"
    of_floats = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    kind = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, of_floats)
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])
    graph = helper.make_graph([maps], "g", [x], [helper.make_value_info("y", kind)])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"output 'y' is a dictionary.*'zipmap': False"):
        frontend.load(tmp_path / "m.onnx")


def test_sparse_initializers_are_refused_by_name(tmp_path: Path) -> None:
    """They were left out, and what read one was told to be made by no node."""
    model = parse("net (float[N,4] x) => (float[N,2] y) { y = MatMul(x, w) }")
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    places = helper.make_tensor("places", TensorProto.INT64, [2], [1, 6])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 2]))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"initializer 'w' is sparse.*from_array"):
        frontend.load(tmp_path / "m.onnx")


def test_a_table_that_was_cut_after_its_shape_was_stated(tmp_path: Path) -> None:
    """What a ``value_info`` says of a constant does not count: its tensor has a shape."""
    before = model(
        [node("MatMul", "x w", "e"), node("MatMul", "e v", "y")],
        {"x": [2, 6]},
        {"y": [2, 4]},
        [tensor("w", seeded(6, 8)), tensor("v", seeded(8, 4))],
    )
    before.graph.value_info.append(
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [30522, 8])
    )
    onnx.save(before, tmp_path / "cut.onnx")
    kept = replace(Policy.parse("matmult:bf16"), exclude=(re.compile("^e$"),))
    low, _, _ = convert_file(tmp_path / "cut.onnx", tmp_path / "low.onnx", kept)
    onnx.checker.check_model(low, full_check=True)
