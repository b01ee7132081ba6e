"""One model per thread of "Invalid graphs": each converts, checks, computes right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from finecast.errors import ModelError
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from tests.frontends.tools import (
    agree,
    convert,
    convert_file,
    formats,
    model,
    ops,
    parse,
    run,
    tensor,
)

POLICIES = ("all:fp16", "matmult:fp16")
BOTH = ("all:fp16", "all:bf16")


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        op, [i.strip("_") for i in inputs.split()], outputs.split(), **attributes
    )


def resize(opset: int = 17) -> onnx.ModelProto:
    return model(
        [
            node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
            node("Resize", "c roi scales", "r", mode="linear"),
            node("Relu", "r", "y"),
        ],
        {"x": [1, 2, 4, 4]},
        {"y": [1, 3, 8, 8]},
        [
            tensor("w", np.linspace(-1, 1, 54).reshape(3, 2, 3, 3)),
            tensor("roi", []),
            tensor("scales", [1, 1, 2, 2]),
        ],
        opset=opset,
    )


@pytest.mark.parametrize("opset", [11, 13, 17, 19])
@pytest.mark.parametrize("policy", BOTH)
def test_oc_306_and_272_resize_keeps_roi_and_scales_in_fp32(
    tmp_path: Path, opset: int, policy: str
) -> None:
    before = resize(opset)
    after, _, _ = convert(before, tmp_path, policy)
    scales = next(t for t in after.graph.initializer if t.name == "scales")
    assert scales.data_type == TensorProto.FLOAT
    if policy == "all:fp16":
        agree(before, after, Format.FP16)


def test_ort_17447_resize_in_a_loop(tmp_path: Path) -> None:
    before = parse(
        """
        g (float[1,1,4,4] x) => (float[1,1,n,m] y)
        <int64 trips = {2}, bool go = {1}, float[4] scales = {1, 1, 2, 2}>
        {
          y = Loop (trips, go, x) <body = b (int64 i, bool c, float[1,1,p,q] s)
            => (bool d, float[1,1,u,v] t) {
              d = Identity (c)
              e = Resize <mode = "nearest"> (s, , scales)
              t = Relu (e)
            }>
        }
        """
    )
    after, plan, _ = convert(before, tmp_path)
    assert "fp16" in formats(plan).values()
    agree(before, after, Format.FP16)


def test_oc_261_and_240_nodes_out_of_order(tmp_path: Path) -> None:
    before = model(
        [node("Relu", "m", "y"), node("MatMul", "x w", "m")],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", np.eye(4))],
    )
    after, _, _ = convert(before, tmp_path)
    made: set[str] = {"x"} | {t.name for t in after.graph.initializer}
    for step in after.graph.node:
        assert set(step.input) <= made
        made |= set(step.output)
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_allclose(run(after, x=x)[0], np.maximum(x, 0), atol=2e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_oc_320_and_ort_25522_casts_beside_low_and_high_ops(
    tmp_path: Path, policy: str
) -> None:
    before = model(
        [
            node("MatMul", "x w", "a"),
            node("Cast", "a", "b", to=TensorProto.FLOAT16),
            node("Cast", "b", "c", to=TensorProto.FLOAT),
            node("Cast", "x", "i", to=TensorProto.INT64),
            node("Cast", "i", "f", to=TensorProto.FLOAT),
            node("Softmax", "c", "d"),
            node("Add", "d f", "y"),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", np.eye(4))],
    )
    after, _, _ = convert(before, tmp_path, policy)
    agree(before, after, Format.FP16)


def test_casts_of_the_model_that_do_nothing_any_more_go(tmp_path: Path) -> None:
    before = model(
        [
            node("Relu", "x", "a"),
            node("Cast", "a", "b", to=TensorProto.FLOAT16),
            node("Cast", "b", "c", to=TensorProto.FLOAT),
            node("Relu", "c", "y"),
        ],
        {"x": [4]},
        {"y": [4]},
    )
    after, _, _ = convert(before, tmp_path)
    assert ops(after) == ["Cast", "Relu", "Relu", "Cast"]
    agree(before, after, Format.FP16)


def network() -> onnx.ModelProto:
    return model(
        [
            node("Conv", "x w", "c", pads=[1, 1, 1, 1], name="conv"),
            node("Relu", "c", "r", name="relu"),
            node("Add", "r r", "s", name="add"),
            node("Softmax", "s", "y", axis=1, name="softmax"),
        ],
        {"x": [1, 2, 4, 4]},
        {"y": [1, 3, 4, 4]},
        [tensor("w", np.linspace(-1, 1, 54).reshape(3, 2, 3, 3))],
    )


def test_oc_307_one_cast_for_several_consumers(tmp_path: Path) -> None:
    before = model(
        [
            node("Relu", "x", "h", name="keep"),
            *(node("MatMul", f"h w{i}", f"m{i}") for i in range(3)),
            node("Sum", "m0 m1 m2 h", "y", name="sum"),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor(f"w{i}", np.eye(4)) for i in range(3)],
    )
    after, _, _ = convert(before, tmp_path, "matmult:fp16")
    sources = [n.input[0] for n in after.graph.node if n.op_type == "Cast"]
    assert sources.count("h") == 1
    agree(before, after, Format.FP16)


IF = """
g (bool c, float[2,4] x) => (float[2,4] y)
<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
  h = Relu (x)
  y = If (c) <
    then_branch = t () => (float[2,4] a) { a = MatMul (h, w) },
    else_branch = e () => (float[2,4] b) { d = Exp (h)  b = Add (d, h) }
  >
}
"""


@pytest.mark.parametrize("policy", [*POLICIES, "all:bf16", "matmult:bf16"])
@pytest.mark.parametrize("taken", [True, False])
def test_mo_1628_if_branches_share_a_type_and_captures_are_cast_outside(
    tmp_path: Path, policy: str, taken: bool
) -> None:
    before = parse(IF)
    after, _, _ = convert(before, tmp_path, policy)
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16, c=np.array(taken))
    bodies = [a.g for n in after.graph.node for a in n.attribute if a.HasField("g")]
    casts = [n for b in bodies for n in b.node if n.op_type == "Cast"]
    assert not [n for n in casts if n.input[0] in ("h", "x")]


LOOP = """
g (float[2,4] x) => (float[2,4] y, float[n,2,4] all)
<int64 trips = {3}, bool go = {1}, float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
  y, all = Loop (trips, go, x) <body = b (int64 i, bool c, float[2,4] s)
    => (bool d, float[2,4] t, float[2,4] u) {
      k = Constant <value_floats = [0.5, 0.25, 0.125, 1.0]> ()
      d = Identity (c)
      m = MatMul (s, w)
      t = Add (m, k)
      u = Mul (x, t)
    }>
}
"""


@pytest.mark.parametrize("policy", [*POLICIES, "all:bf16", "matmult:bf16"])
def test_mo_717_loop_state_is_tied_and_constants_live_outside(
    tmp_path: Path, policy: str
) -> None:
    before = parse(LOOP)
    after, _, _ = convert(before, tmp_path, policy)
    loop = next(n for n in after.graph.node if n.op_type == "Loop")
    body = next(a.g for a in loop.attribute if a.name == "body")
    if policy.startswith("all"):
        assert "Cast" not in [n.op_type for n in body.node]
        assert not body.initializer
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16)


SCAN = """
g (float[3,4] x, float[4] z) => (float[4] y, float[3,4] all)
{
  y, all = Scan <num_scan_inputs = 1, body = b (float[4] s, float[4] v)
    => (float[4] t, float[4] u) { t = Add (s, v)  u = Exp (t) }> (z, x)
}
"""


@pytest.mark.parametrize("policy", BOTH)
def test_ort_7981_scan(tmp_path: Path, policy: str) -> None:
    before = parse(SCAN)
    after, plan, _ = convert(before, tmp_path, policy)
    assert set(formats(plan).values()) == {policy[4:]}
    if policy == "all:fp16":
        agree(before, after, Format.FP16)


def test_a_body_that_gives_back_a_captured_value_and_a_constant(tmp_path: Path) -> None:
    before = parse(
        """
        g (bool c, float[4] x) => (float[4] y, float[4] z)
        {
          h = Relu (x)
          y, z = If (c) <
            then_branch = t () => (float[4] a, float[4] f) { a = Exp (h)  f = Neg (h) },
            else_branch = e () => (float[4] b, float[4] k) {
              b = Identity (h)
              k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> () }
          >
        }
        """
    )
    after, _, _ = convert(before, tmp_path)
    for taken in (True, False):
        agree(before, after, Format.FP16, c=np.array(taken))


def test_mo_1943_and_302_outputs_used_inside_and_outputs_that_are_inputs(
    tmp_path: Path,
) -> None:
    before = model(
        [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("Add", "r h", "y")],
        {"x": [2, 4]},
        {"h": [2, 4], "y": [2, 4], "x": [2, 4], "w": [4, 4]},
        [tensor("w", np.eye(4))],
    )
    for policy in (*POLICIES, *BOTH):
        after, _, _ = convert(before, tmp_path, policy)
        if policy.endswith("fp16"):
            agree(before, after, Format.FP16)


def test_an_output_that_is_listed_twice(tmp_path: Path) -> None:
    before = model([node("Exp", "x", "y")], {"x": [4]}, {"y": [4]})
    before.graph.output.append(before.graph.output[0])
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(before, source)
    after, _, _ = convert_file(source, target, "all:fp16", check=False)
    assert [o.name for o in after.graph.output] == ["y", "y"]
    assert {o.type.tensor_type.elem_type for o in after.graph.output} == {TensorProto.FLOAT}


def test_mo_1946_fp16_model_to_bf16_stays_valid(tmp_path: Path) -> None:
    half = model(
        [node("MatMul", "x w", "m"), node("Exp", "m", "y")], {"x": [2, 4]}, {"y": [2, 4]}
    )
    for port in (*half.graph.input, *half.graph.output):
        port.type.tensor_type.elem_type = TensorProto.FLOAT16
    half.graph.initializer.append(tensor("w", np.eye(4), np.float16))
    after, plan, applied = convert(half, tmp_path, "all:bf16")
    assert applied.edits == ()
    assert not plan.decisions
    assert ops(after) == ["MatMul", "Exp"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("spelled", ["", "ai.onnx"])
def test_mo_767_the_opset_is_the_default_domains(
    tmp_path: Path, first: bool, spelled: str
) -> None:
    before = model(
        [node("Relu", "x", "h"), node("Exp", "h", "y")], {"x": [4]}, {"y": [4]}, opset=15
    )
    del before.opset_import[:]
    ids = [helper.make_opsetid("custom", 1), helper.make_opsetid(spelled, 15)]
    before.opset_import.extend(ids if first else ids[::-1])
    onnx.save(before, tmp_path / "m.onnx")
    assert frontend.opset_of(frontend.load(tmp_path / "m.onnx").model) == 15
    for policy in BOTH:
        _, plan, _ = convert(before, tmp_path, policy)
        assert set(formats(plan).values()) == {policy[4:]}


def test_nodes_that_spell_out_the_default_domain(tmp_path: Path) -> None:
    before = model([node("Relu", "x", "h"), node("Exp", "h", "y")], {"x": [4]}, {"y": [4]})
    for step in before.graph.node:
        step.domain = "ai.onnx"
    for policy in BOTH:
        _, plan, _ = convert(before, tmp_path, policy)
        assert set(formats(plan).values()) == {policy[4:]}


@pytest.mark.parametrize("shape", [["N", 4], [None, 4], [3, 4]])
def test_mo_652_and_1743_batch_size_and_unknown_dimensions(
    tmp_path: Path, shape: list[int | str | None]
) -> None:
    before = model(
        [node("MatMul", "x w", "h"), node("Softmax", "h", "y")],
        {"x": shape},
        {"y": shape},
        [tensor("w", np.eye(4))],
    )
    after, _, _ = convert(before, tmp_path)
    for port, twin in zip(before.graph.input, after.graph.input, strict=True):
        assert port.type.tensor_type.shape == twin.type.tensor_type.shape
    agree(before, after, Format.FP16)


FUNCTIONS = """
g (float[2,4] x) => (float[2,4] y)
<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
  a = local.block <alpha = 0.5> (x, w)
  b = local.block <alpha = 2.0> (a, w)
  y = Softmax (b)
}
<domain: "local", opset_import: ["" : 17, "local" : 1]>
block <alpha> (s, m) => (r) {
  p = MatMul (s, m)
  q = local.act <alpha: float = @alpha> (p)
  r = Add (q, s)
}
<domain: "local", opset_import: ["" : 17]>
act <alpha> (v) => (u) { u = Elu <alpha: float = @alpha> (v) }
"""


@pytest.mark.parametrize("policy", [*POLICIES, *BOTH, "matmult:bf16"])
def test_local_functions_are_specialised(tmp_path: Path, policy: str) -> None:
    before = parse(FUNCTIONS, imports='"local" : 1')
    after, plan, _ = convert(before, tmp_path, policy)
    assert sum(d.op == "matmul" and d.format.label == policy[-4:] for d in plan.decisions) == 2
    if policy.endswith("fp16"):
        agree(before, after, Format.FP16)


def test_a_function_of_an_older_opset_than_the_models(tmp_path: Path) -> None:
    before = parse(
        FUNCTIONS.replace('opset_import: ["" : 17]', 'opset_import: ["" : 14]'),
        imports='"local" : 1',
    )
    after, _, _ = convert(before, tmp_path)
    agree(parse(FUNCTIONS, imports='"local" : 1'), after, Format.FP16)


def test_policy_none_leaves_functions_as_they_are(tmp_path: Path) -> None:
    before = parse(FUNCTIONS, imports='"local" : 1')
    after, _, applied = convert(before, tmp_path, "none:fp16")
    assert len(after.functions) == 2
    assert applied.edits == ()


@pytest.mark.parametrize("policy", BOTH)
def test_ops_of_a_custom_domain_keep_their_type(tmp_path: Path, policy: str) -> None:
    before = model(
        [
            node("MatMul", "x w", "h"),
            helper.make_node("Odd", ["h"], ["o"], domain="my.own"),
            node("Add", "o h", "s"),
            node("Relu", "s", "y"),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [tensor("w", np.eye(4))],
        imports={"my.own": 3},
    )
    after, plan, _ = convert(before, tmp_path, policy)
    assert next(d for d in plan.decisions if d.op == "matmul").format.label == policy[4:]
    odd = next(n for n in after.graph.node if n.op_type == "Odd")
    made = {o: n for n in after.graph.node for o in n.output}
    source = made[odd.input[0]]
    assert source.op_type == "Cast"
    assert source.attribute[0].i == TensorProto.FLOAT
    assert {i.domain: i.version for i in after.opset_import}["my.own"] == 3


@pytest.mark.parametrize("name", ["up", ""])
def test_what_is_wrong_is_told_with_its_node(name: str, tmp_path: Path) -> None:
    given = resize(11)
    (up,) = (n for n in given.graph.node if n.op_type == "Resize")
    up.name = name
    del up.input[2:]  # neither scales nor sizes
    onnx.save(given, tmp_path / "m.onnx")
    with pytest.raises(ModelError) as caught:
        frontend.check(tmp_path / "m.onnx")
    told = "node 'up' (Resize)" if name else "a node Resize without a name"
    assert caught.value.what.startswith(f"{told} is not valid ONNX: ")
    assert "ShapeInference" not in caught.value.what
