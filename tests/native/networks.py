"""The frontends that the conformance suite holds to its laws: a new one is listed here.

Each writes the same network in its own form: products by ``weights``, a ReLU between two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from finecast.graph import Graph
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.cost import MeasuredCost
from tests.engines import toy as toy_engine

Weights = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """One row.

    Attributes:
        suffix: Of its files; empty where its models are folders.
        write: Writes the network of some weights.
        state_times: Makes times what the test says they are, whatever machine it runs on;
            returns the engine to tune in, None where the frontend names none.
        gains: Whether a low format is faster by these times.
        needs: What has to be installed.
        output: What the network's output is called; empty where torch.export names it anew.
    """

    suffix: str
    write: Callable[[Path, Weights], None]
    state_times: Callable[[pytest.MonkeyPatch], str | None]
    gains: bool
    needs: str
    output: str = "y"


def _write_onnx(path: Path, weights: Weights) -> None:
    nodes: list[onnx.NodeProto] = []
    before = "x"
    for i in range(len(weights)):
        after = "y" if i == len(weights) - 1 else f"a{i}"
        nodes.append(helper.make_node("MatMul", [before, f"w{i}"], [after], f"product{i}"))
        before = after
        if after != "y":
            before = f"b{i}"
            nodes.append(helper.make_node("Relu", [after], [before], f"relu{i}"))
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", weights[0].shape[0]), ("y", weights[-1].shape[1]))
    ]
    tensors = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], tensors)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def _write_ir(path: Path, weights: Weights) -> None:
    import openvino
    from openvino import opset13

    from tests.frontends.openvino_graphs import model_of

    given = opset13.parameter([-1, len(weights[0])], np.float32, name="x")
    last: openvino.Node = given
    for i, w in enumerate(weights):
        if i:
            last = opset13.relu(last, name=f"relu{i - 1}")
        last = opset13.matmul(last, opset13.constant(w), False, False, name=f"product{i}")
    last.output(0).set_names({"y"})
    openvino.save_model(model_of([last], [given]), path, compress_to_fp16=False)


def _write_pt2(path: Path, weights: Weights) -> None:
    import torch

    layers: list[torch.nn.Module] = []
    for w in weights:
        layer = torch.nn.Linear(*w.shape, bias=False)
        layer.weight.data = torch.from_numpy(w.T.copy())
        layers += [layer, torch.nn.ReLU()]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*layers[:-1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(x)
            return result

    x = torch.from_numpy(np.random.default_rng(5).normal(size=(4, len(weights[0]))))
    free = ({0: torch.export.Dim("n", min=2, max=64)},)
    torch.export.save(
        torch.export.export(Net().eval(), (x.float(),), dynamic_shapes=free), path
    )


def _write_toy(path: Path, weights: Weights) -> None:
    ops: list[dict[str, object]] = []
    for i, w in enumerate(weights):
        ops.append(
            {"name": f"product{i}", "op": "matmul", "format": "fp32", "weight": w.tolist()}
        )
        ops.append({"name": f"relu{i}", "op": "relu", "format": "fp32"})
    path.write_text(json.dumps({"ops": ops[:-1]}), encoding="utf-8")


def _write_saved_model(path: Path, weights: Weights) -> None:
    tf: Any = pytest.importorskip("tensorflow")
    variables = [tf.Variable(w) for w in weights]

    def call(x: Any) -> dict[str, Any]:
        for i, w in enumerate(variables):
            x = tf.matmul(x if i == 0 else tf.nn.relu(x), w)
        return {"y": x}

    module = tf.Module()
    module.kept = variables
    spec = tf.TensorSpec([None, len(weights[0])], tf.float32, name="x")
    module.call = tf.function(call, input_signature=[spec])
    tf.saved_model.save(module, str(path), signatures=module.call.get_concrete_function())


def _same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model takes the same time."""
    from finecast.measure import timing

    monkeypatch.setattr(timing, "time", toy_engine.Clock())


def _half_in_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO runs the models; each op takes half the time in bf16, casts hardly any."""
    from finecast.engines.probe import Speed
    from finecast.measure.racing import Race
    from finecast.native import engine_subject, roundings

    def cost(graph: Graph, *_: object) -> MeasuredCost:
        shares = {fmt: 1e-3 if fmt is Format.BF16 else 2e-3 for fmt in Format}
        times = {fmt: {n.name: s for n in graph.nodes} for fmt, s in shares.items()}
        return MeasuredCost(times_s=times, cast_overhead_s=1e-6, cast_bandwidth_gb_s=1e3)

    def times(_: object, built: Mapping[str, Built], *__: object) -> Race:
        low = {name: one.plan.counts.get("bf16", 0) for name, one in built.items()}
        return Race.stated(1.0, {name: 1.0 - 0.05 * count for name, count in low.items()})

    def speed(_: object, fmt: Format) -> Speed:
        return Speed(gains=fmt is Format.BF16, text=f"{fmt.label}, as stated")

    monkeypatch.setattr(roundings, "measured_cost", cost)
    monkeypatch.setattr(engine_subject.EngineSubject, "times", times)
    monkeypatch.setattr(engine_subject.EngineSubject, "speed", speed)


def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is not what is tested: modules run as they are, all in the same time."""
    from finecast.measure import timing
    from finecast.native.torch import subject

    monkeypatch.setattr(timing, "time", toy_engine.Clock())
    monkeypatch.setattr(subject, "deployed", lambda: lambda module: module)


FRONTENDS: Final = (
    Frontend(
        suffix=".onnx",
        write=_write_onnx,
        state_times=toy_engine.install,
        gains=True,
        needs="onnxruntime",
    ),
    Frontend(
        suffix=".xml",
        write=_write_ir,
        state_times=_half_in_low,
        gains=True,
        needs="openvino",
    ),
    Frontend(
        suffix=".pt2",
        write=_write_pt2,
        state_times=_op_by_op,
        gains=False,
        needs="torch",
        output="",
    ),
    Frontend(
        suffix="",
        write=_write_saved_model,
        state_times=_same_times,
        gains=False,
        needs="tensorflow",
    ),
    Frontend(
        suffix=".toy", write=_write_toy, state_times=lambda _: None, gains=True, needs="json"
    ),
)
