"""Bodies of OpenVINO's If, Loop and TensorIterator: opened, planned, rounded, written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.engines import get_engine
from finecast.engines.emulator.session import plan_session
from finecast.frontends import openvino as frontend
from finecast.frontends.native_model import with_roundings, with_switches
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.reader import read
from finecast.graph import Graph
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.planning.points import SWITCH, Switch
from finecast.rules.policy import Policy, Scope
from tests.frontends.openvino_graphs import WIDTH, model_of, run

STEPS: Final = 3


def weights(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return op.constant((rng.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32))


def recurrent() -> openvino.Model:
    """h = tanh(h @ w + x_t), over slices of x: its last h, and all of them."""
    x = op.parameter([2, STEPS, WIDTH], np.float32, name="x")
    start = op.parameter([2, WIDTH], np.float32, name="start")
    step, state, w = (
        op.parameter(shape, np.float32)
        for shape in ([2, 1, WIDTH], [2, WIDTH], [WIDTH, WIDTH])
    )
    product = op.matmul(state, w, False, False, name="product")
    total = op.add(product, op.squeeze(step, op.constant([1])), name="sum")
    after = op.tanh(total, name="tanh")
    row = op.unsqueeze(after, op.constant([1]), name="row")
    body = model_of([after, row], [step, state, w])
    loop = op.tensor_iterator()
    loop.set_friendly_name("loop")
    loop.set_body(body)
    loop.set_sliced_input(step, x.output(0), 0, 1, 1, -1, 1)
    loop.set_merged_input(state, start.output(0), after.output(0))
    loop.set_invariant_input(w, weights(0).output(0))
    last = loop.get_iter_value(after.output(0), -1)
    rows = loop.get_concatenated_slices(row.output(0), 0, 1, 1, -1, 1)
    return named([op.relu(last, name="end"), rows], [x, start])


def counted() -> openvino.Model:
    """y = (i + 1) * relu(y @ w), a number of times that is a constant."""
    x = op.parameter([2, WIDTH], np.float32, name="x")
    state, number = op.parameter([2, WIDTH], np.float32), op.parameter([], np.int64)
    product = op.matmul(state, weights(1), False, False, name="product")
    times = op.convert(op.add(number, op.constant(np.int64(1))), "f32", name="times")
    scaled = op.multiply(op.relu(product, name="relu"), times, name="scaled")
    going = op.constant(np.array(True))
    body = model_of([going, scaled], [number, state])
    loop = op.loop(op.constant(np.int64(STEPS)), op.constant(np.array(True)))
    loop.set_friendly_name("loop")
    loop.set_function(body)
    loop.set_special_body_ports([0, 0])
    loop.set_merged_input(state, x.output(0), scaled.output(0))
    return named([op.tanh(loop.get_iter_value(scaled.output(0), -1), name="end")], [x])


def branch(x: Any, sign: bool, seed: int) -> tuple[Any, Any]:
    """A parameter and what a branch makes of it."""
    given = op.parameter([2, WIDTH], np.float32)
    product = op.matmul(given, weights(seed), False, False, name=f"product{seed}")
    return given, (op.sigmoid if sign else op.tanh)(product, name=f"branch{seed}")


def chosen(x: Any, wanted: Any) -> Any:
    """One of two branches, which read the same value."""
    (one, first), (two, second) = branch(x, True, 2), branch(x, False, 3)
    then, other = model_of([first], [one]), model_of([second], [two])
    made = op.if_op(wanted)
    made.set_friendly_name("if")
    made.set_then_body(then)
    made.set_else_body(other)
    made.set_input(x, one, two)
    return made.set_output(then.get_results()[0], other.get_results()[0])


def conditional() -> openvino.Model:
    """relu(a branch of x), by the sign of the sum of x."""
    x = op.parameter([2, WIDTH], np.float32, name="x")
    total = op.reduce_sum(x, op.constant([0, 1]), False, name="total")
    found = chosen(x.output(0), op.greater(total, op.constant(np.float32(0))).output(0))
    return named([op.relu(found, name="end")], [x])


def nested() -> openvino.Model:
    """A branch is taken in each step of a loop, by the number of the step."""
    x = op.parameter([2, WIDTH], np.float32, name="x")
    state, number = op.parameter([2, WIDTH], np.float32), op.parameter([], np.int64)
    wanted = op.equal(number, op.constant(np.int64(1)))
    after = op.add(chosen(state.output(0), wanted.output(0)), state, name="sum")
    body = model_of([op.constant(np.array(True)), after], [number, state])
    loop = op.loop(op.constant(np.int64(STEPS)), op.constant(np.array(True)))
    loop.set_friendly_name("loop")
    loop.set_function(body)
    loop.set_special_body_ports([0, 0])
    loop.set_merged_input(state, x.output(0), after.output(0))
    return named([op.tanh(loop.get_iter_value(after.output(0), -1), name="end")], [x])


def named(ends: list[Any], inputs: list[Any]) -> openvino.Model:
    for given in inputs:
        given.output(0).set_names({given.get_friendly_name()})
    ends = [e.output(0) if isinstance(e, openvino.Node) else e for e in ends]
    results = [op.result(end) for end in ends]
    for number, end in enumerate(ends):
        end.set_names({f"out{number}"})
    return model_of(results, inputs)


MODELS: Final[dict[str, Callable[[], openvino.Model]]] = {
    f.__name__: f for f in (recurrent, counted, conditional, nested)
}


def feeds_of(model: openvino.Model, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        p.get_any_name(): rng.normal(size=list(p.shape)).astype(np.float32)
        for p in model.inputs
    }


def kinds(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


def difference(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", MODELS)
def test_bodies_are_regions_of_the_graph(name: str) -> None:
    file = frontend.from_model(MODELS[name]())
    graph, binding = read(file.model)
    assert {v.name for v in graph.outputs} == {n for p in file.model.outputs for n in p.names}
    ops = {o.get_friendly_name() for o in every_op(file.model)}
    assert {n.name for n in graph.nodes if n.op != "phi"} <= ops
    inside = [n for n in graph.nodes if n.region]
    assert {"matmul"} <= {n.op for n in inside}
    for node in graph.nodes:  # what is read was made before, or enters by a phi or a port
        for index in node.inputs:
            maker = None if index is None else graph.values[index].producer
            assert maker is None or maker < node.id or graph.nodes[maker].op == "phi"
    assert len(binding.regions) == max(n.region for n in graph.nodes) + 1


def test_what_a_loop_carries_is_of_one_type() -> None:
    graph, _ = read(frontend.from_model(recurrent()).model)
    phis = [n for n in graph.nodes if n.op == "phi"]
    ports = sorted((len(n.inputs), len(n.outputs)) for n in phis)
    # The slices and the weight come in; rows go out; the state comes in, is and goes out.
    assert ports == [(1, 1), (1, 1), (1, 1), (2, 2)]
    assert all(n.format is Format.FP32 for n in phis)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["all:bf16", "all:fp16", "matmult:bf16"])
def test_a_whole_plan(name: str, policy: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    openvino.save_model(model, tmp_path / "net.xml", compress_to_fp16=False)
    done = finecast.convert(tmp_path / "net.xml", tmp_path / "low.xml", policy)
    wanted = done.plan.formats
    assert {f for n, f in wanted.items() if "product" in n} == {
        Policy.parse(policy).formats[0]
    }
    assert not [line for line in done.warnings if "keep their types" in line]
    low = openvino.Core().read_model(tmp_path / "low.xml")
    again = {n.name: n.format for n in read(low)[0].nodes}
    for node, fmt in wanted.items():
        if node in again and not node.startswith("times"):
            assert again[node] is fmt, node
    feeds = feeds_of(model)
    for port, exact in run(model, feeds).items():
        assert 0 < difference(run(low, feeds)[port], exact) < 0.05


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_any_plan(name: str, seed: int, tmp_path: Path) -> None:
    """What is written loads, keeps its ports, and has the numbers of its roundings."""
    model = MODELS[name]()
    file = frontend.from_model(model)
    rng = np.random.default_rng(seed)
    policy = Policy.parse("all:bf16")
    prepared = frontend.prepare(file, policy)
    planner = make_planner(prepared, policy, get_engine("openvino"))
    formats = {
        number: Format.BF16
        if Format.BF16 in permission.formats and rng.random() < 0.6
        else Format.FP32
        for number, permission in planner.permissions.items()
    }
    plan = planner.plan(formats, "drawn")
    applied = frontend.apply(file, plan)
    frontend.save(applied.model, tmp_path / "low.xml")
    low = openvino.Core().read_model(tmp_path / "low.xml")
    for before, after in zip(
        [*model.inputs, *model.outputs], [*low.inputs, *low.outputs], strict=True
    ):
        assert before.get_names() == after.get_names()
        assert before.get_element_type() == after.get_element_type()
        assert before.get_partial_shape() == after.get_partial_shape()
    feeds = feeds_of(model, seed)
    wanted, got = run(model, feeds), run(low, feeds)
    emulated = run(with_roundings(frontend.roundable(file), applied.edits), feeds)
    for port, exact in wanted.items():
        limit = 2 * difference(emulated[port], exact) + 2 * Format.BF16.epsilon
        assert difference(got[port], exact) <= limit


@pytest.mark.parametrize("name", MODELS)
def test_switches_reach_into_bodies(name: str) -> None:
    model = MODELS[name]()
    file = frontend.from_model(model)
    prepared = frontend.prepare(file, Policy.parse("all:bf16"))
    graph = prepared.graph
    products = [n for n in graph.nodes if n.op == "matmul" and n.region]
    assert products
    ports = [{(n.id, 0): Format.BF16} for n in products]
    phis = {(n.id, 0): Format.BF16 for n in graph.nodes if n.op == "phi" and n.format}
    switched = with_switches(prepared.roundable(), [Switch(ports=p) for p in (*ports, phis)])
    feeds = feeds_of(model)
    exact = run(model, feeds)["out0"]

    def with_bits(*on: int) -> Any:
        bits = np.array([k in on for k in range(len(ports) + 1)])
        return run(switched, {**feeds, SWITCH: bits})["out0"]

    np.testing.assert_allclose(with_bits(), exact, rtol=1e-6, atol=1e-7)
    reached = [difference(with_bits(k), exact) for k in range(len(ports))]
    assert max(reached) > 1e-5  # of an If one branch alone is taken
    assert difference(with_bits(len(ports)), exact) > 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_device_computes_low_in_bodies_too(name: str) -> None:
    model = MODELS[name]()
    file = frontend.from_model(model)
    policy = Policy.parse("all:bf16")
    prepared = frontend.prepare(file, policy)
    planner = make_planner(prepared, policy, get_engine("openvino"))
    feeds = feeds_of(model)
    exact = run(model, feeds)["out0"]
    inside = {n.id for n in prepared.graph.nodes if n.region}
    errors = []
    for low in (inside, inside | set(planner.permissions)):
        formats = {
            i: Format.BF16 if i in low and Format.BF16 in p.formats else Format.FP32
            for i, p in planner.permissions.items()
        }
        plan = planner.plan(formats, "given")
        emulation = Emulation(target=load_target("trn1"), scope=Scope.NONE)
        session = plan_session(lambda: frontend.roundable(file), plan, emulation)
        edits = frontend.apply(file, plan).edits
        wanted = run(with_roundings(frontend.roundable(file), edits), feeds)["out0"]
        errors.append(difference(session.run(feeds)["out0"], exact))
        assert difference(session.run(feeds)["out0"], wanted) < 2 * difference(wanted, exact)
    assert 1e-5 < min(errors) <= max(errors) < 0.05


def test_tune_plans_what_is_in_a_body(tmp_path: Path) -> None:
    openvino.save_model(recurrent(), tmp_path / "net.xml", compress_to_fp16=False)
    rng = np.random.default_rng(0)
    shapes = {"x": (32, 2, STEPS, WIDTH), "start": (32, 2, WIDTH)}
    data = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    outcome = finecast.tune(
        tmp_path / "net.xml",
        tmp_path / "tuned.xml",
        data={n: a.reshape(-1, *a.shape[2:]) for n, a in data.items()},
        metric="cosine",
        tolerance=0.01,
        policy="auto:bf16",
    )
    assert {"product", "tanh"} <= outcome.plan.formats.keys()
