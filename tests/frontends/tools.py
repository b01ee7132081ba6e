"""Small models, written as text, and one call that converts and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, Prepared
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules import Context, Permission, permit
from finecast.rules.policy import Policy

Array = NDArray[Any]
CASTS_BACK = {TensorProto.FLOAT: "fp32"}


def parse(
    text: str, *, opset: int = 17, ir_version: int = 8, imports: str = ""
) -> onnx.ModelProto:
    """A model from ONNX's text form of its graph (and functions)."""
    more = f", {imports}" if imports else ""
    return onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["" : {opset}{more}]>\n{text}'
    )


def tensor(name: str, array: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    """An initializer."""
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str | None]],
    outputs: Mapping[str, Sequence[int | str | None] | None],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    ir_version: int = 8,
    imports: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model with fp32 ports."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        list(weights),
    )
    ids = [helper.make_opsetid("", opset)]
    ids += [helper.make_opsetid(d, v) for d, v in (imports or {}).items()]
    return helper.make_model(graph, opset_imports=ids, ir_version=ir_version)


def convert(
    proto: onnx.ModelProto, folder: Path, policy: str | Policy = "all:fp16", name: str = "out"
) -> tuple[onnx.ModelProto, Plan, Applied]:
    """Converted, saved, checked strictly and read back."""
    source, target = folder / f"{name}_source.onnx", folder / f"{name}.onnx"
    onnx.save(proto, source)
    return convert_file(source, target, policy)


def convert_file(
    source: Path, target: Path, policy: str | Policy, *, check: bool = True
) -> tuple[onnx.ModelProto, Plan, Applied]:
    """As ``convert``, of a file."""
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    file = frontend.load(source)
    prepared = frontend.prepare(file, policy)
    plan = planner_of(prepared, policy).lowest()
    applied = frontend.apply(file, plan)
    frontend.save(applied.model, target, force=True)
    if check:
        frontend.check(target)
    return onnx.load(target, load_external_data=False), plan, applied


def planner_of(
    prepared: Prepared, policy: Policy, permissions: Mapping[int, Permission] | None = None
) -> Planner:
    """Makes plans for no engine; by default the rules judge without data."""
    judged = permit(Context(graph=prepared.graph, policy=policy))
    return Planner(
        graph=prepared.graph,
        policy=policy,
        permissions=judged if permissions is None else permissions,
        opset=prepared.minimal_opset,
    )


def graph_of(proto: onnx.ModelProto, folder: Path, policy: str = "all:bf16") -> Graph:
    """The neutral graph of a model, as it is planned under ``policy``."""
    onnx.save(proto, folder / "read.onnx")
    file = frontend.load(folder / "read.onnx")
    return frontend.prepare(file, Policy.parse(policy)).graph


def run(proto: onnx.ModelProto | Path, **feeds: Array) -> list[Array]:
    """In ONNX Runtime, without its own optimisations; missing inputs are drawn at random."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = str(proto) if isinstance(proto, Path) else proto.SerializeToString()
    session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    for port in session.get_inputs():
        if port.name not in feeds:
            shape = [d if isinstance(d, int) else 3 for d in port.shape]
            feeds[port.name] = rng.standard_normal(shape).astype(np.float32)
    results: list[Any] = list(session.run(None, feeds))
    return results


def agree(
    before: onnx.ModelProto, after: onnx.ModelProto, fmt: Format, **feeds: Array
) -> None:
    """Outputs have their names, types, shapes; values within 16 roundings of the largest.

    Eight ops in a row, each rounding its operand and its result, is what these models have.
    """
    assert [(o.name, o.type.tensor_type.elem_type) for o in before.graph.output] == [
        (o.name, o.type.tensor_type.elem_type) for o in after.graph.output
    ]
    for want, got in zip(run(before, **feeds), run(after, **feeds), strict=True):
        assert want.shape == got.shape
        assert want.dtype == got.dtype
        if want.dtype.kind != "f":
            assert np.array_equal(want, got)
            continue
        wide = want.astype(np.float64)
        scale = np.max(np.abs(wide[np.isfinite(wide)]), initial=0.0)
        np.testing.assert_allclose(
            got.astype(np.float64), wide, atol=16 * fmt.unit_roundoff * scale + 1e-7, rtol=0
        )


def ops(proto: onnx.ModelProto) -> list[str]:
    """Op types in order, bodies included."""
    found: list[str] = []

    def walk(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            found.append(node.op_type)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g)

    walk(proto.graph)
    return found


def formats(plan: Plan) -> dict[str, str]:
    """Format labels by node name."""
    return {d.node: d.format.label for d in plan.decisions}


def bf16_convolution() -> onnx.ModelProto:
    """A model that computes in bf16, called ``product`` there: ONNX Runtime cannot run it."""
    return onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 22]>
        low (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <bfloat16[1,1,1,1] w = {1}> {
          c = Cast<to = 16>(x)
          [product] d = Conv(c, w)
          y = Cast<to = 1>(d)
        }"""
    )
