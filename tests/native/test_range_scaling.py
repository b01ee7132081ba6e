"""T5's and Gemma's overflows repaired: from a net in a library's form to its fp16 model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine
from finecast.engines.emulator import EmulatorEngine
from finecast.frontends import onnx as onnx_frontend
from finecast.frontends import openvino as openvino_frontend
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops.flops import flops
from finecast.planning.adjustments import WHOLE, Adjustment
from finecast.planning.plan import Plan
from finecast.planning.range_scaling import RULE
from finecast.rules.policy import Adjust, Policy
from finecast.tuning.result import Result
from tests.overflowing_nets import NETS, OverflowingNet

DEVICE = "sm70"  # has fp16, and no bf16


@pytest.fixture(scope="module", params=[*NETS])
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def net(named: str) -> OverflowingNet:
    return NETS[named]


@pytest.fixture(scope="module")
def exported(net: OverflowingNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return net.export(tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture(scope="module", params=["onnx", "xml"])
def path(request: pytest.FixtureRequest, exported: Path) -> Path:
    found = exported.with_suffix(f".{request.param}")
    if not found.exists():
        openvino.save_model(openvino.convert_model(exported), found, compress_to_fp16=False)
    return found


def run(path: Path, data: Mapping[str, Any], engine: str = "openvino") -> NDArray[np.float32]:
    (found,) = get_engine(engine).load(path).run(data).values()
    return found.astype(np.float32)


def off(got: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    if not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def share_in_fp16(path: Path, plan: Plan) -> float:
    """The share of the operations of matrix products that are in fp16."""
    graph = graph_of(path)
    shapes = {v.id: v.fixed_shape for v in graph.values if v.fixed_shape is not None}
    counts = {n.name: flops(graph, n, shapes) or 0 for n in graph.nodes if n.op == "matmul"}
    low = sum(c for n, c in counts.items() if plan.formats[n] is Format.FP16)
    return low / sum(counts.values())


def graph_of(path: Path) -> Graph:
    if path.suffix == ".onnx":
        return onnx_frontend.prepare(onnx_frontend.load(path), Policy("all:fp16")).graph
    return openvino_frontend.prepare(openvino_frontend.load(path), Policy("all:fp16")).graph


@pytest.fixture(scope="module")
def done(path: Path, net: OverflowingNet) -> Result:
    return api.convert(path, low_of(path), policy="all:fp16", data=net.data())


def low_of(path: Path) -> Path:
    return path.with_name(f"low{path.suffix}")


def test_it_computes_in_fp16_what_would_overflow(
    path: Path, net: OverflowingNet, done: Result
) -> None:
    """By arithmetic, and in the engines: without scaling there are Infs."""
    (gain,) = done.gains
    assert gain.kind is Adjust.RANGE
    assert gain.error_without == np.inf
    assert gain.error_with < 0.01
    assert done.plan is not None
    assert share_in_fp16(path, done.plan) > 0.99
    exact = run(path, net.data())
    assert off(run(low_of(path), net.data()), exact) < 0.01
    if path.suffix == ".onnx":
        assert off(run(low_of(path), net.data(), "onnxruntime"), exact) < 0.01


def test_a_device_computes_it(exported: Path, net: OverflowingNet) -> None:
    exact, device = run(exported, net.data()), EmulatorEngine(emulation=explicit_casts(DEVICE))
    found: list[float] = []
    for name, data in (("plain", None), ("scaled", net.data())):
        out = exported.with_name(f"{name}.onnx")
        api.convert(exported, out, policy="all:fp16", data=data, verify=False)
        found.append(off(device.load(out).run(net.data())["logits"].astype(np.float32), exact))
    assert found[0] > 0.9  # nothing is right
    assert found[1] < 0.01


def test_nothing_is_inserted(path: Path, done: Result) -> None:
    """Weights, and epsilons of norms, take up all factors."""
    plan, graph = done.plan, graph_of(path)
    assert plan is not None
    nodes = {n.name: n for n in graph.nodes}
    for one in plan.adjustments:
        value = graph.read(nodes[one.node], one.port)
        assert value is not None
        assert value.constant is not None
    assert RULE in {r.rule for r in plan.reasons}


def test_in_fp32_no_bit_changes(exported: Path, net: OverflowingNet) -> None:
    """All ops of the plan in fp32 again: its scaled operands alone are left."""
    plan = api.convert(exported, policy="all:fp16", data=net.data(), verify=False).plan
    assert plan is not None
    assert plan.adjustments
    bare = Plan(
        model=plan.model,
        policy=plan.policy,
        opset=plan.opset,
        decisions=(),
        adjustments=plan.adjustments,
    )
    applied = onnx_frontend.apply(onnx_frontend.load(exported), bare)
    out = exported.with_name("bare.onnx")
    onnx.save(onnx_frontend.to_proto(applied.model), out)
    for engine in ("openvino", "onnxruntime"):
        np.testing.assert_array_equal(
            run(out, net.data(), engine), run(exported, net.data(), engine)
        )


def test_a_plan_replays_to_the_same_model(
    path: Path, net: OverflowingNet, done: Result
) -> None:
    again = path.with_name(f"again{path.suffix}")
    assert done.plan is not None
    api.apply(Plan.from_json(done.plan.to_json()), path, again, data=net.data())
    np.testing.assert_array_equal(run(again, net.data()), run(low_of(path), net.data()))


def test_none_leaves_ops_in_fp32(exported: Path, net: OverflowingNet) -> None:
    plain = Policy("all:fp16", adjust="none")
    done = api.convert(exported, policy=plain, data=net.data(), verify=False)
    assert done.plan is not None
    assert not done.plan.adjustments
    assert not done.gains
    assert share_in_fp16(exported, done.plan) < 0.95


@pytest.mark.slow
def test_tune_makes_it_where_a_plan_needs_it(tmp_path: Path) -> None:
    net = NETS["gemma"]
    done = api.tune(
        net.export(tmp_path / "net.onnx"),
        tmp_path / "tuned.onnx",
        policy="auto:fp16",
        data=net.data(),
        target=DEVICE,
        objective="size",
        tolerance=0.05,
    )
    assert done.plan is not None
    assert done.plan.adjustments
    (gain,) = done.gains
    assert gain.error_without == np.inf
    assert gain.error_with < 0.01


NORM = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4, 8] x) => (float[n, 4, 8] y) {
  [big] a = MatMul (x, w)
  [norm] b = LayerNormalization <epsilon = 0.001> (a, g, o)
  [end] y = MatMul (b, w)
}"""
X = np.random.default_rng(2).standard_normal((6, 4, 8)).astype(np.float32)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_value_is_adjusted_along_two_axes(tmp_path: Path, suffix: str) -> None:
    """A plan may scale a value as a whole for its range, and its channels for codes, too."""
    text = NORM.partition("  [norm]")[0].replace("] a =", "] y =") + "}"
    made, path = parser.parse_model(text), tmp_path / f"net{suffix}"
    made.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype="f4"), "w"))
    onnx.save(made, tmp_path / "net.onnx")
    if suffix == ".xml":
        openvino.save_model(openvino.convert_model(tmp_path / "net.onnx"), path)
    plan = api.convert(path, policy=Policy("matmult:bf16", exclude=["."]), verify=False).plan
    assert plan is not None
    (op,) = (d.node for d in plan.decisions)
    whole = Adjustment(node=op, axis=WHOLE, exponents=(3,))
    channels = Adjustment(node=op, axis=-1, exponents=(*range(8),))
    api.apply(replace(plan, adjustments=(channels, whole)), path, tmp_path / f"low{suffix}")
    wanted = X * np.exp2(np.arange(8, dtype="f4")) * 8
    np.testing.assert_array_equal(run(tmp_path / f"low{suffix}", {"x": X}), wanted)


LOG_SUM_EXP = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4, 8] x) => (float[n, 4, 8] y) {
  [scores] a = MatMul (x, w)
  [power] b = Exp (a)
  [total] c = ReduceSum <keepdims = 1> (b, axes)
  [log] d = Log (c)
  [end] y = Add (x, d)
}"""


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_log_sum_exp_without_a_maximum_is_shifted(tmp_path: Path, suffix: str) -> None:
    made, path = parser.parse_model(LOG_SUM_EXP), tmp_path / "net.onnx"
    draw = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    axes = np.array([-1], np.int64)
    for name, array in (("w", draw * np.float32(1.5)), ("axes", axes)):
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, path)
    if suffix == ".xml":
        found = openvino.convert_model(path)
        path = path.with_suffix(suffix)
        openvino.save_model(found, path, compress_to_fp16=False)
    done = api.convert(path, tmp_path / f"low{suffix}", policy="all:fp16", data={"x": X})
    (gain,) = done.gains
    assert not gain.error_without < 1
    assert gain.error_with < 0.01
    assert done.plan is not None
    assert {a.node for a in done.plan.adjustments if a.add} == {"power"}
