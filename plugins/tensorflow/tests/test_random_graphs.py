"""Random graphs under random plans: valid, ports kept, and the numbers of the emulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.frontends.native_model import with_roundings, with_switches
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant, round_to
from finecast.planning.plan import Decision, Plan
from finecast.planning.points import SWITCH, Switch
from finecast_tensorflow import frontend
from finecast_tensorflow.engine import TensorFlowEngine
from finecast_tensorflow.frontend import FrozenModel
from finecast_tensorflow.frontend.canonical import folded
from finecast_tensorflow.frontend.loading import of_graph_def
from plugins.tensorflow.tests.models import tf

SIZE = 8
FLOAT = NDArray[np.float32]
_ONE = ("Relu", "Tanh", "Sigmoid", "Neg", "Softmax", "Transpose", "Reshape", "Identity")
_TWO = ("AddV2", "Sub", "Mul", "Maximum", "MatMul", "Select")


@dataclass
class Built:
    """A graph of ops on square matrices."""

    graph: Any = field(default_factory=tf.Graph)
    values: list[Any] = field(default_factory=list[Any])

    def add(self, op: str, a: Any, b: Any) -> Any:
        match op:
            case "Transpose":
                return tf.transpose(a)
            case "Reshape":
                return tf.reshape(tf.reshape(a, [SIZE * SIZE]), [SIZE, SIZE])
            case "Select":
                return tf.where(a > b, a, b * 0.5)
            case "MatMul":
                return tf.matmul(a, b) / SIZE
            case "Softmax":
                return tf.nn.softmax(a)
            case "Identity":
                return tf.identity(a)
            case _:
                raw = getattr(tf.raw_ops, op)
                return (
                    raw(features=a)
                    if op == "Relu"
                    else raw(x=a, y=b)
                    if op in _TWO
                    else raw(x=a)
                )


@st.composite
def models(draw: st.DrawFn) -> FrozenModel:
    built = Built()
    with built.graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [SIZE, SIZE], name="x")
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        constants = [
            tf.constant(rng.normal(size=(SIZE, SIZE)).astype(np.float32)) for _ in range(2)
        ]
        built.values = [x, *constants]
        for op in draw(st.lists(st.sampled_from((*_ONE, *_TWO)), min_size=1, max_size=12)):
            a, b = (draw(st.sampled_from(built.values)) for _ in range(2))
            built.values.append(built.add(op, a, b))
        ends = draw(st.lists(st.sampled_from(built.values[3:]), min_size=1, max_size=2))
        for number, end in enumerate(ends):
            tf.identity(end, name=f"end{number}")
        # Something that depends on the input, so that not all of it is folded.
        tf.add(built.values[-1], x, name="last")
        names = [*(f"end{i}" for i in range(len(ends))), "last"]
    return of_graph_def(built.graph.as_graph_def(), ["x"], names)


def emulated(model: FrozenModel, graph: Graph, low: set[int], x: FLOAT) -> dict[str, FLOAT]:
    """Each op alone in fp32, on numbers that were rounded where the plan rounds them."""
    known: dict[int, Any] = {}
    for value in graph.values:
        if value.is_input:
            known[value.id] = x
        elif value.constant is not None:
            known[value.id] = value.constant.read()
    nodes = {n.name: n for n in model.graph.node}
    for node in graph.nodes:
        inputs: list[Any] = []
        for index, follows in zip(node.inputs, node.follows_in, strict=True):
            assert index is not None
            array = known[index]
            if node.id in low and follows:
                constant = graph.values[index].constant is not None
                rounded = convert_constant(array, Format.BF16) if constant else array
                array = round_to(rounded.astype(np.float32), Format.BF16)
            inputs.append(array)
        for index, array, follows in zip(
            node.outputs, one(nodes[node.name], inputs), node.follows_out, strict=True
        ):
            assert index is not None
            known[index] = (
                round_to(array, Format.BF16) if node.id in low and follows else array
            )
    by_tensor = {t: i for i, t in enumerate(frontend.capture(model, "").binding.values)}
    return {p.name: known[by_tensor[p.tensor]] for p in model.outputs}


def one(node: Any, inputs: list[Any]) -> list[Any]:
    """One op on arrays, as the graph has it: in fp32."""
    graph = tf.Graph()
    with graph.as_default():
        given = [tf.constant(array) for array in inputs]
        copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(t.op.name for t in given)
        graph_def = graph.as_graph_def()
        graph_def.node.append(copy)
    run = tf.Graph()
    with run.as_default():
        tf.import_graph_def(graph_def, name="")
        tensors = run.get_operation_by_name(node.name).outputs
        with tf.compat.v1.Session(graph=run) as session:
            found: list[Any] = session.run(list(tensors))
    return found


@given(model=models(), choice=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_a_random_plan_gives_the_numbers_of_its_emulation(
    model: FrozenModel, choice: st.DataObject
) -> None:
    captured = frontend.capture(model, "digest")
    graph = captured.graph
    low = {n.id for n in graph.float_nodes if choice.draw(st.booleans(), label=n.name)}
    plan = Plan(
        model="digest",
        policy="",
        opset=0,
        decisions=tuple(
            Decision(node=n.name, op=n.op, format=Format.BF16 if n.id in low else Format.FP32)
            for n in graph.float_nodes
        ),
    )
    applied = frontend.apply(captured, plan)
    assert applied.model.inputs == model.inputs
    assert [(p.name, p.dtype, p.shape) for p in applied.model.outputs] == [
        (p.name, p.dtype, p.shape) for p in model.outputs
    ]
    x = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
    engine = TensorFlowEngine()
    got, wanted = engine.load(applied.model).run({"x": x}), emulated(model, graph, low, x)
    rounded = with_roundings(frontend.roundable(captured), applied.edits)
    in_fp32 = engine.load(rounded).run({"x": x})
    for name, array in wanted.items():
        assert got[name].dtype == np.float32
        # A sum in another order may round each op's result to the next number of bf16.
        bound = Format.BF16.unit_roundoff * 2 * len(low) * max(1.0, float(np.abs(array).max()))
        for found in (got, in_fp32):
            np.testing.assert_allclose(
                found[name].astype(np.float32), array, atol=bound + 1e-5
            )
    if not low:
        exact = engine.load(model).run({"x": x})
        assert all(np.array_equal(got[n], exact[n]) for n in exact)


@given(model=models())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_a_switch_that_is_off_changes_nothing(model: FrozenModel) -> None:
    captured = frontend.capture(model, "")
    graph = captured.graph
    read = [
        (node.id, index)
        for node in graph.float_nodes
        for index, value in enumerate(node.inputs)
        if value is not None and graph.values[value].format is Format.FP32
    ]
    shown = range(len(graph.outputs))
    switches = [
        *(Switch(ports={port: Format.BF16}) for port in read),
        *(Switch(outputs={i: Format.BF16}) for i in shown),
    ]
    engine, x = TensorFlowEngine(), np.ones((SIZE, SIZE), np.float32) / 3
    session = engine.load(with_switches(frontend.roundable(captured), switches))
    off = session.run({"x": x, SWITCH: np.zeros(len(switches), bool)})
    exact = engine.load(model).run({"x": x})
    for name, array in exact.items():
        found, wanted = off[name].astype(np.float32), array.astype(np.float32)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@given(model=models())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_folding_twice_is_folding_once(model: FrozenModel) -> None:
    again = folded(model)
    assert again.graph == model.graph
    assert again.outputs == model.outputs
