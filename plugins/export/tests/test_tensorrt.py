"""Strongly typed models for TensorRT, held to the rules that it documents."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper, parser

from finecast import Format, Plan, api
from finecast.errors import UsageError
from finecast.rules.base import Reason
from finecast_export.exporting import export
from finecast_export.strong_types import RULES, violations

Array = NDArray[np.float32]
NET: Final = """<ir_version: 8, opset_import: ["" : 17]>
net (float[4, 64] x) => (float[4, 32] y) {
  [first] a = Gemm <transB = 1> (x, w0, b0)
  [act] r = Relu (a)
  [second] c = MatMul (r, w1)
  [end] y = Softmax (c)
}"""
SHAPES: Final = {"w0": (48, 64), "b0": (48,), "w1": (48, 32)}


def feeds() -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal((4, 64), np.float32)}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    draw, made = np.random.default_rng(0), parser.parse_model(NET)
    for name, shape in SHAPES.items():
        array = (draw.standard_normal(shape) / 8).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=feeds()["x"])
    return tmp_path / "net.onnx"


def planned(net: Path, policy: str) -> Plan:
    data = net.with_name("data.npz") if "int8" in policy else None
    return api.convert(net, None, policy, target="sm90", data=data, verify=False).plan


def rounded(x: Array) -> Array:
    """To e4m3 as TensorRT's QuantizeLinear with the scale 1 does, without finecast's code."""
    import ml_dtypes

    clipped = np.clip(x, -448, 448)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def expected_fp8(net: Path) -> Array:
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(net).graph.initializer}
    w0, b0, w1 = (rounded(held[name]) for name in SHAPES)
    hidden = np.maximum(rounded(feeds()["x"]) @ w0.T + b0, 0)
    scores = rounded(hidden) @ w1
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def run(model: onnx.ModelProto) -> Array:
    """By ONNX Runtime, node by node: what it fuses has other roundings."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, feeds())[0])


@pytest.mark.parametrize(
    ("policy", "stated"),
    [
        ("all:fp16", {"fp16": 4}),
        ("all:bf16", {"bf16": 4}),
        ("matmult:fp8_e4m3", {"fp8_e4m3": 2}),
        ("matmult:int8", {"int8": 2}),
        ("matmult:tf32", {"tf32": 2}),
    ],
)
def test_a_plan_s_formats_are_types_of_the_model(
    policy: str, stated: dict[str, int], net: Path, tmp_path: Path
) -> None:
    plan, script = planned(net, policy), tmp_path / "engine.py"
    exported = export(plan, "tensorrt", script, model=net)
    assert exported.stated == stated
    assert exported.left_out == ()
    compile(script.read_text(), str(script), "exec")
    assert f"TF32 = {'tf32' in stated}\n" in exported.text
    made = onnx.load(script.with_suffix(".onnx"))
    onnx.checker.check_model(made, full_check=True)
    assert violations(made) == []
    if policy == "matmult:fp8_e4m3":
        assert not any(n.op_type == "Cast" for n in made.graph.node)
        np.testing.assert_allclose(run(made), expected_fp8(net), rtol=1e-5)
    if policy == "matmult:int8":
        applied = api.apply(plan, net, verify=False).model
        np.testing.assert_array_equal(run(made), run(applied))


def test_what_it_cannot_have_is_listed_with_its_figures(net: Path, tmp_path: Path) -> None:
    reason = Reason(
        rule="decision",
        text="",
        permits=("fp8_e5m2",),
        evidence={"fp32 us": 9.0, "fp8_e5m2 us": 4.0, "error if fp8_e5m2": 0.25},
    )
    plan = planned(net, "matmult:fp8_e4m3")
    e5m2 = tuple(
        replace(d, format=Format.FP8_E5M2, reasons=(reason,)) if d.node == "second" else d
        for d in plan.decisions
    )
    exported = export(replace(plan, decisions=e5m2), "tensorrt", tmp_path / "e.py", model=net)
    (left,) = exported.left_out
    assert (left.node, left.saved_us, left.error) == ("second", 5.0, 0.25)
    assert exported.stated == {"fp8_e4m3": 1}
    assert violations(onnx.load(tmp_path / "e.onnx")) == []


def test_codes_with_a_zero_point_stay_in_fp32(net: Path) -> None:
    data = net.with_name("data.npz")
    plan = api.convert(
        net, None, "matmult:int8", engine="onnxruntime", data=data, verify=False
    ).plan
    assert plan.counts["int8"]
    with pytest.raises(UsageError, match="symmetric around 0"):
        export(plan, "tensorrt", model=net)


def test_tf32_is_one_switch(net: Path) -> None:
    plan = planned(net, "matmult:tf32")
    low = {"first": Format.FP32, "act": Format.FP16}
    decisions = (replace(d, format=low.get(d.node, d.format)) for d in plan.decisions)
    exported = export(replace(plan, decisions=tuple(decisions)), "tensorrt", model=net)
    assert "TF32 = False\n" in exported.text
    assert [one.node for one in exported.left_out] == ["second"]


def test_a_model_that_it_has_no_op_for_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[4, 4] x) => (float[4, 4] y, float y_det) {
      [one] y = MatMul (x, x)
      [two] y_det = Det (x)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "net.onnx")
    plan = planned(tmp_path / "net.onnx", "matmult:fp16")
    with pytest.raises(UsageError, match=r"TensorRT does not take.*has no Det.*two"):
        export(plan, "tensorrt", model=tmp_path / "net.onnx")


def test_the_model_is_asked_for(net: Path, finecast: Any, tmp_path: Path) -> None:
    plan, out = tmp_path / "low.plan.json", tmp_path / "engine.py"
    plan.write_text(planned(net, "all:fp16").to_json())
    words = ["export", plan, "--to", "tensorrt", "-o", out]
    assert "name the model that the plan is for" in finecast(*words).err
    done = finecast(*words, "--model", net)
    assert done.code == 0, done.err
    assert "not verified here" in done.err
    assert out.with_suffix(".onnx").exists()
    assert finecast(*words, "--model", net).code != 0
    with pytest.raises(UsageError, match="takes the plan alone"):
        export(Plan.load(plan), "neuron", model=net)
    with pytest.raises(UsageError, match=r"end it in \.py"):
        export(Plan.load(plan), "tensorrt", tmp_path / "e.onnx", model=net)


def test_what_is_read_is_not_overwritten(net: Path, finecast: Any, tmp_path: Path) -> None:
    outside = tmp_path / "net.bin"
    onnx.save(
        onnx.load(net),
        net,
        save_as_external_data=True,
        location=outside.name,
        size_threshold=0,
    )
    plan = tmp_path / "low.plan.json"
    plan.write_text(planned(net, "all:fp16").to_json())
    words = ["export", plan, "--to", "tensorrt", "--model", net, "--force", "-o"]
    before = {path: path.read_bytes() for path in (net, outside, plan)}
    for out in (net.with_suffix(".py"), outside, plan):
        done = finecast(*words, out)
        assert done.code == 2, out
        assert "are the same file" in done.err
    assert {path: path.read_bytes() for path in before} == before
    assert not net.with_suffix(".py").exists()


def test_a_script_is_not_printed_without_its_model(
    net: Path, finecast: Any, tmp_path: Path
) -> None:
    plan = tmp_path / "low.plan.json"
    plan.write_text(planned(net, "all:fp16").to_json())
    done = finecast("export", plan, "--to", "tensorrt", "--model", net)
    assert (done.code, done.out) == (2, "")
    assert "name the script that is written" in done.err


# One model for each rule that breaks it, and the node that does.
HEAD: Final = """<ir_version: 10, opset_import: ["" : 21, "other" : 1]>
net ({ports}) => ({result} y)
<{constants}> {{
{nodes}
}}"""
PAIR: Final = "[bad] u = QuantizeLinear (x, s, z) [bad] y = DequantizeLinear (u, s, z)"
ALONG: Final = PAIR.replace("Linear", "Linear <axis = 0>").replace("[bad] y", "[good] y")
PRODUCT: Final = PAIR.replace("bad", "good").replace("y =", "d =") + " [bad] y = MatMul (d, x)"
UINT8: Final = "[bad] u = Cast <to = 2> (x) [back] y = Cast <to = 1> (u)"
FP8: Final = "[bad] u = Cast <to = 17> (x) [bad] y = Cast <to = 1> (u)"
TWO: Final = "float[2] s = {1.0, 2.0}, int8[2] z = {0, 0}"
BROKEN: Final = [
    ("operator", "float[4] x", "float[4]", "", "[bad] y = other.Op (x)"),
    ("operator", "float[2,2] x", "float", "", "[bad] y = Det (x)"),
    ("types", "float[4] x", "float[4]", "", UINT8),
    ("types", "bfloat16[4] x", "bfloat16[4]", "", "[bad] y = Mish (x)"),
    ("equal types", "float16[4] x", "float16[4]", "float s = {2.0}", "[bad] y = Pow (x, s)"),
    ("quantized", "float[4] x", "float[4]", "", FP8),
    ("zero point", "float[4] x", "float[4]", "float s = {1.0}, int8 z = {3}", PAIR),
    ("zero point", "float[4] x", "float[4]", "float s = {1.0}, uint8 z = {0}", PAIR),
    ("scale", "float[4] x, float s", "float[4]", "int8 z = {0}", PAIR),
    ("scale", "float[4] x", "float[4]", "float s = {-1.0}, int8 z = {0}", PAIR),
    ("scale", "float[2] x", "float[2]", TWO, ALONG),
    ("operands", "float[2,2] x", "float[2,2]", "float s = {1.0}, int8 z = {0}", PRODUCT),
]


@pytest.mark.parametrize(("rule", "ports", "result", "constants", "nodes"), BROKEN)
def test_each_rule_finds_what_breaks_it(
    rule: str, ports: str, result: str, constants: str, nodes: str
) -> None:
    text = HEAD.format(ports=ports, result=result, constants=constants, nodes=nodes)
    found = violations(parser.parse_model(text.replace("] [", "]\n[")))
    assert found
    assert {one.node for one in found} == {"bad"}
    assert rule in {one.rule for one in found}


def test_each_rule_has_its_case_and_its_source() -> None:
    assert {rule.name for rule in RULES} == {case[0] for case in BROKEN}
    assert all("nvidia" in r.source or "onnx-tensorrt" in r.source or "NvInfer" in r.source
               for r in RULES)  # fmt: skip


def test_opsets_have_ends() -> None:
    model = parser.parse_model(NET.replace('"" : 17', '"" : 8'))
    assert next(one.rule for one in violations(model)) == "opset"


# ------------------------------------------------ what the script asks TensorRT's builder for


class Recorder(SimpleNamespace):
    """A stand-in for TensorRT that keeps what is asked of it; it builds nothing."""

    def __init__(self) -> None:
        super().__init__(flags=[], cleared=[], shapes={}, parsed=[], created=[])

    def module(self) -> ModuleType:
        config = SimpleNamespace(
            set_flag=self.flags.append,
            clear_flag=self.cleared.append,
            add_optimization_profile=lambda _: None,
        )
        profile = SimpleNamespace(
            set_shape=lambda name, *shapes: self.shapes.update({name: shapes})
        )
        builder = SimpleNamespace(
            create_network=lambda flags: self.created.append(flags),
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, config: b"plan",
        )

        def parse(path: str) -> bool:
            self.parsed.append(path)
            return True

        logger: Any = lambda level: None  # noqa: E731 - it has attributes
        logger.WARNING = logger.ERROR = 0
        trt: Any = ModuleType("tensorrt")
        trt.Logger = logger
        trt.Builder = lambda _: builder
        trt.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        trt.BuilderFlag = SimpleNamespace(TF32="tf32")
        trt.OnnxParser = lambda *_: SimpleNamespace(parse_from_file=parse)
        trt.Runtime = lambda _: SimpleNamespace(deserialize_cuda_engine=lambda plan: plan)
        return trt


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "tensorrt", made.module())
    return made


@pytest.mark.parametrize("policy", ["all:fp16", "matmult:tf32"])
def test_the_builder_gets_no_flag_of_a_precision(
    policy: str, recorder: Recorder, net: Path, tmp_path: Path
) -> None:
    script = tmp_path / "engine.py"
    export(planned(net, policy), "tensorrt", script, model=net)
    defined: Any = {"__name__": "engine", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), defined)
    shapes: Mapping[str, tuple[int, ...]] = {"x": (4, 64)}
    engine = defined["build"](defined["MODEL"], shapes, tf32=defined["TF32"])
    assert engine == b"plan"
    assert recorder.parsed == [str(script.with_suffix(".onnx"))]
    assert recorder.created == [2]
    assert recorder.flags == []
    assert recorder.cleared == ([] if "tf32" in policy else ["tf32"])
    assert recorder.shapes == {"x": ((4, 64),) * 3}


def test_fp8_tensors_are_of_the_type_that_tensorrt_has(net: Path, tmp_path: Path) -> None:
    export(planned(net, "matmult:fp8_e4m3"), "tensorrt", tmp_path / "e.py", model=net)
    graph = onnx.load(tmp_path / "e.onnx").graph
    types = {t.name: t.data_type for t in graph.initializer}
    weights = [types[n.input[0]] for n in graph.node if n.input[0] in types]
    assert weights == [TensorProto.FLOAT8E4M3FN] * 2
    assert all(types[n.input[2]] == TensorProto.FLOAT for n in graph.node if n.name == "first")
