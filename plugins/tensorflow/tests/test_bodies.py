"""Bodies of While, If and Case, and calls: opened, planned, rounded, written, read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.cli import main
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.engines import get_engine
from finecast.engines.base import Session
from finecast.engines.emulator.session import plan_session
from finecast.errors import ExitCode
from finecast.frontends.native_model import runs_of, with_roundings, with_runs, with_switches
from finecast.graph import Graph
from finecast.native.observing import unseen
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH, Switch
from finecast.rules.policy import Policy, Scope
from finecast_tensorflow import frontend
from finecast_tensorflow.engine import TensorFlowEngine
from finecast_tensorflow.frontend import FrozenModel, TensorFlowFile
from finecast_tensorflow.frontend.canonical import canonical
from finecast_tensorflow.frontend.functions import bodies, every_node, opened
from finecast_tensorflow.frontend.loading import load, save
from plugins.tensorflow.tests.control_flow import MODELS, ROWS, WIDTH, feeds_of, weights
from plugins.tensorflow.tests.models import of_function, served, tf

ALL = pytest.mark.parametrize("name", MODELS)
WITH_BODIES = pytest.mark.parametrize("name", [n for n in MODELS if n != "unrolled"])


@dataclass(frozen=True, kw_only=True)
class Saved:
    path: Path
    file: TensorFlowFile
    session: Session

    def feeds(self, seed: int = 0) -> dict[str, Any]:
        return feeds_of(self.session.inputs, seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    folder, known = tmp_path_factory.mktemp("bodies"), dict[str, Saved]()

    def of(name: str) -> Saved:
        if name not in known:
            path = folder / name
            MODELS[name](path)
            model = load(path)
            known[name] = Saved(
                path=path,
                file=frontend.capture(model, name),
                session=TensorFlowEngine().load(model),
            )
        return known[name]

    return of


def run(model: FrozenModel, feeds: dict[str, Any]) -> dict[str, Any]:
    return TensorFlowEngine().load(model).run(feeds)


def difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    pairs = ((np.float32(got[n]), exact) for n, exact in wanted.items())
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def drawn(file: TensorFlowFile, seed: int, share: float = 0.6) -> Plan:
    """A plan of random ops in bf16, as many as the rules permit."""
    rng = np.random.default_rng(seed)
    policy = Policy.parse("all:bf16")
    planner = make_planner(frontend.prepare(file, policy), policy, get_engine("tensorflow"))
    formats = {
        number: Format.BF16
        if Format.BF16 in permission.formats and rng.random() < share
        else Format.FP32
        for number, permission in planner.permissions.items()
    }
    return planner.plan(formats, "drawn")


@ALL
def test_the_form_that_is_planned_gives_the_same_numbers(
    name: str, saved: Callable[[str], Saved]
) -> None:
    one = saved(name)
    for seed in range(3):
        feeds = one.feeds(seed)
        wanted = served(one.path, feeds)
        # XLA sums in another order.
        assert difference(one.session.run(feeds), wanted) < 1e-6


@ALL
def test_the_form_of_a_form_is_itself(name: str, saved: Callable[[str], Saved]) -> None:
    model = saved(name).file.model
    again = canonical(model)

    def kinds(m: FrozenModel) -> list[tuple[str, int]]:
        return sorted((n.op, len(n.input)) for n in every_node(m.graph))

    assert kinds(again) == kinds(model)
    assert not any("PartitionedCall" in n.op for n in every_node(model.graph))


@WITH_BODIES
def test_bodies_are_regions_of_the_graph(name: str, saved: Callable[[str], Saved]) -> None:
    file = saved(name).file
    graph, binding = file.graph, file.binding
    names = [n.name for n in graph.nodes]
    assert len(set(names)) == len(names)
    assert {n.op for n in graph.nodes if n.region} & {"matmul"}
    for node in graph.nodes:  # what is read was made before, or enters by a phi
        for index in node.inputs:
            maker = None if index is None else graph.values[index].producer
            assert maker is None or maker < node.id or graph.nodes[maker].op == "phi"
    assert len(binding.regions) == max(n.region for n in graph.nodes) + 1
    native = {f"{prefix}{n.name}" for prefix, m in opened(file.model) for n in m.graph.node}
    assert {n.name for n in graph.nodes if n.op != "phi"} <= native


@WITH_BODIES
def test_weights_are_constants_of_the_body_that_reads_them(
    name: str, saved: Callable[[str], Saved]
) -> None:
    graph = saved(name).file.graph
    products = [n for n in graph.nodes if n.region and n.op == "matmul"]
    for node in products:
        read = [graph.values[i] for i in node.inputs if i is not None]
        assert any(v.constant is not None for v in read), node.name


def test_what_a_loop_carries_is_of_one_type(saved: Callable[[str], Saved]) -> None:
    phis = [n for n in saved("while_loop").file.graph.nodes if n.op == "phi" and n.format]
    # x, which the loop never changes, comes in; the state comes in, is and goes out.
    ports = sorted((len(n.inputs), len(n.outputs)) for n in phis)
    assert ports == [(1, 3), (2, 3)]


def test_elements_of_a_list_are_of_one_type(saved: Callable[[str], Saved]) -> None:
    graph = saved("lstm").file.graph
    lists = [n for n in graph.nodes if n.op == "phi" and "TensorList" in str(n.attributes)]
    ends = [
        (
            [graph.nodes[graph.values[i].producer or 0].native for i in n.inputs if i],
            [graph.nodes[u].native for i in n.outputs if i for u in graph.values[i].uses],
        )
        for n in lists
    ]
    # What is put into it is read in the body; the states are put in by the body.
    assert (["tf::Transpose"], ["tf::MatMul"]) in ends
    assert (["tf::Mul"], ["tf::Transpose"]) in ends
    assert not any(v.dtype == "variant" for v in graph.values)


@ALL
@pytest.mark.parametrize("policy", ["all:bf16", "matmult:bf16"])
def test_a_whole_plan(
    name: str, policy: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    one = saved(name)
    done = finecast.convert(one.path, tmp_path / "low", policy)
    lows = {d.node for d in done.plan.decisions if d.format is Format.BF16}
    kinds = {d.op for d in done.plan.decisions if d.node in lows}
    assert "matmul" in kinds
    assert policy != "matmult:bf16" or kinds == {"matmul"}
    assert not [line for line in done.warnings if "keep" in line]
    again = {
        n.name: n.format for n in frontend.capture(load(tmp_path / "low"), "").graph.nodes
    }
    assert {n: again[n] for n in lows} == dict.fromkeys(lows, Format.BF16)
    applied = frontend.apply(finecast.load(one.path).file, done.plan)  # type: ignore[attr-defined]
    rounded = with_roundings(frontend.roundable(one.file), applied.edits)
    for seed in range(3):
        feeds = one.feeds(seed)
        exact = served(one.path, feeds)
        emulated = difference(run(rounded, feeds), exact)
        error = difference(served(tmp_path / "low", feeds), exact)
        assert 0 < error <= 2 * emulated + 2 * Format.BF16.epsilon


def test_nothing_is_cast_within_a_loop_that_is_all_low(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    finecast.convert(saved("lstm").path, tmp_path / "low", "all:bf16")
    model = load(tmp_path / "low")
    assert [n.op for n in every_node(model.graph)].count("Cast") == 2  # x, and the result
    lists = {n.attr["element_dtype"].type for n in every_node(model.graph)} - {0}
    assert lists == {tf.bfloat16.as_datatype_enum}


@pytest.mark.parametrize("seed", range(4))
@ALL
def test_any_plan(name: str, seed: int, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """What is written is served, keeps its ports, and has the numbers of its roundings."""
    one = saved(name)
    applied = frontend.apply(one.file, drawn(one.file, seed))
    save(applied.model, tmp_path / "low")
    again = load(tmp_path / "low")
    for before, after in ((one.file.model.inputs, again.inputs), (one.file.model.outputs,
                                                                  again.outputs)):  # fmt: skip
        assert {(p.name, p.dtype) for p in before} == {(p.name, p.dtype) for p in after}
    feeds = one.feeds(seed)
    exact = one.session.run(feeds)
    emulated = run(with_roundings(frontend.roundable(one.file), applied.edits), feeds)
    limit = 2 * difference(emulated, exact) + 2 * Format.BF16.epsilon
    assert difference(served(tmp_path / "low", feeds), exact) <= limit


@WITH_BODIES
def test_switches_reach_into_bodies(name: str, saved: Callable[[str], Saved]) -> None:
    one = saved(name)
    graph = one.file.graph
    products = [n for n in graph.nodes if n.op == "matmul" and n.region]
    ports = [{(n.id, 0): Format.BF16} for n in products]
    weights_of = [{(n.id, 1): Format.BF16} for n in products]
    phis = {(n.id, 0): Format.BF16 for n in graph.nodes if n.op == "phi" and n.format}
    groups = [*ports, *weights_of, phis]
    prepared = frontend.prepare(one.file, Policy.parse("all:bf16"))
    model = with_switches(prepared.roundable(), [Switch(ports=p) for p in groups])
    session, feeds = TensorFlowEngine().load(model), one.feeds()
    exact = one.session.run(feeds)

    def with_bits(*on: int) -> float:
        bits = np.array([k in on for k in range(len(groups))])
        return difference(session.run({**feeds, SWITCH: bits}), exact)

    assert with_bits() < 1e-6
    reached = [with_bits(k) for k in range(len(ports))]
    assert max(reached) > 1e-5  # of several branches one alone is taken
    assert max(with_bits(len(ports) + k) for k in range(len(weights_of))) > 1e-5
    assert with_bits(len(groups) - 1) > 1e-5


@WITH_BODIES
def test_a_device_computes_low_in_bodies_too(name: str, saved: Callable[[str], Saved]) -> None:
    one = saved(name)
    feeds = one.feeds()
    exact = one.session.run(feeds)
    plan = drawn(one.file, 0, share=1.0)
    emulation = Emulation(target=load_target("trn1"), scope=Scope.NONE)
    session = plan_session(lambda: frontend.roundable(one.file), plan, emulation)
    edits = frontend.apply(one.file, plan).edits
    wanted = run(with_roundings(frontend.roundable(one.file), edits), feeds)
    got = session.run(feeds)
    assert 1e-5 < difference(got, exact) < 0.05
    assert difference(got, wanted) < 2 * difference(wanted, exact)


def test_tune_plans_what_is_in_a_body(
    saved: Callable[[str], Saved], tmp_path: Path, bf16_pays: None
) -> None:
    del bf16_pays
    data = {"x": np.random.default_rng(0).normal(size=(16, 4, WIDTH)).astype(np.float32)}
    outcome = finecast.tune(
        saved("lstm").path, tmp_path / "tuned", data=data, metric="cosine", tolerance=0.01,
        policy="auto:bf16",
    )  # fmt: skip
    inside = {n for n in outcome.plan.formats if "/while/body/" in n}
    assert {"MatMul", "MatMul_1"} <= {n.rpartition("/")[2] for n in inside}
    low = {n for n, f in outcome.plan.formats.items() if f is Format.BF16}
    assert outcome.improved
    assert low & inside


def test_inspect_shows_what_is_in_bodies(
    saved: Callable[[str], Saved],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(saved("lstm").path)]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "matmul:3" in said  # two in the body
    assert "sigmoid:3, tanh:2" in said


def test_a_profile_counts_all_steps_of_a_loop(saved: Callable[[str], Saved]) -> None:
    one = saved("lstm")
    session = TensorFlowEngine().load(one.file.model, profiling=True)
    times = session.profile(one.feeds(), repeats=1)
    named = {op for kernel in times for op in kernel.ops}
    inside = {n.name for n in one.file.graph.float_nodes if n.region and n.op != "phi"}
    assert inside <= named


def test_a_large_weight_of_several_places_stays_one(tmp_path: Path) -> None:
    w = tf.Variable(np.eye(256, dtype=np.float32))

    def call(x: Any) -> dict[str, Any]:
        def step(i: Any, y: Any) -> tuple[Any, Any]:
            return i + 1, tf.matmul(y, w)

        y = tf.while_loop(lambda i, _: i < 2, step, (0, tf.matmul(x, w)))[1]
        return {"y": tf.cond(tf.reduce_sum(y) > 0, lambda: tf.matmul(y, w), lambda: y)}

    spec = tf.TensorSpec([None, 256], tf.float32, name="x")
    of_function(tmp_path / "m", call, [spec], [w])
    assert load(tmp_path / "m").size_bytes < 2 * 256 * 256 * 4
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    low = load(tmp_path / "low")
    assert low.size_bytes < 1.2 * 256 * 256 * 2  # in bf16, and no copy in fp32
    x = {"x": np.full((2, 256), 0.5, np.float32)}
    np.testing.assert_array_equal(served(tmp_path / "low", x)["y"], x["x"])


def test_an_assertion_in_a_body_is_still_made(tmp_path: Path) -> None:
    (w,) = kept = weights(1)

    def call(x: Any) -> dict[str, Any]:
        def step(i: Any, y: Any) -> tuple[Any, Any]:
            with tf.control_dependencies([tf.debugging.assert_less(y, 100.0)]):
                return i + 1, tf.matmul(y, w)

        return {"y": tf.while_loop(lambda i, _: i < 2, step, (0, x))[1]}

    of_function(tmp_path / "m", call, [ROWS], kept)
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    kinds = {n.op for n in every_node(load(tmp_path / "low").graph)}
    assert {"While", "Assert"} <= kinds
    fine = np.ones((1, WIDTH), np.float32)
    np.testing.assert_allclose(
        served(tmp_path / "low", {"x": fine})["y"],
        served(tmp_path / "m", {"x": fine})["y"],
        rtol=0.05,
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        served(tmp_path / "low", {"x": 1000 * fine})


def test_signatures_that_differ_in_a_body_are_two(tmp_path: Path) -> None:
    one, other = weights(2)
    module = tf.Module()
    module.kept = [one, other]

    def branch(w: Any) -> Any:
        def call(x: Any) -> dict[str, Any]:
            return {"y": tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, w), lambda: x)}

        return tf.function(call, input_signature=[ROWS])

    module.one, module.other = branch(one), branch(other)
    signatures = {"one": module.one, "other": module.other}
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=signatures)
    with pytest.raises(finecast.FinecastError, match="several signatures that differ"):
        load(tmp_path / "m")


def test_bodies_run_as_the_graph_around_them_does(saved: Callable[[str], Saved]) -> None:
    """A function is called for each step otherwise, which takes longer."""
    for name in MODELS:
        for node in every_node(saved(name).file.model.graph):
            assert not bodies(node) or node.attr["_lower_using_switch_merge"].b


def test_names_of_the_graph_are_its_own(saved: Callable[[str], Saved]) -> None:
    """A node outside may be called as one of a body is."""
    graph: Graph = saved("while_loop").file.graph
    inside = next(n for n in graph.nodes if n.region and n.op == "matmul")
    model = load(saved("while_loop").path)
    node = next(n for n in model.graph.node if n.op == "MatMul")
    before, node.name = node.name, inside.name
    for other in model.graph.node:
        other.input[:] = [inside.name if i == before else i for i in other.input]
    names = [n.name for n in frontend.capture(model, "").graph.nodes]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "sign", "dead"),
    [("cond", 1, "else"), ("cond", -1, "then"), ("while_loop", 1, "")],
)
def test_a_branch_that_no_sample_takes_is_unseen(
    name: str, sign: int, dead: str, saved: Callable[[str], Saved]
) -> None:
    file = saved(name).file
    prepared = frontend.prepare(file, Policy.parse("none"))
    feeds = {"x": np.full((2, WIDTH), sign, np.float32)}
    facts = unseen(prepared, lambda: [feeds])
    makers = {file.graph.nodes[file.graph.values[i].producer or 0].name for i in facts}
    assert {maker.split("/")[1] for maker in makers} == ({dead} if dead else set())


def test_runs_of_loops_within_one_another_are_counted(saved: Callable[[str], Saved]) -> None:
    """A loop of three steps; a branch in a loop's body; bodies of every kind of op."""
    for name in MODELS:
        one = saved(name)
        prepared = frontend.prepare(one.file, Policy.parse("none"))
        regions = sorted({n.region for n in prepared.graph.float_nodes if n.region})
        if not regions:
            continue
        counts = run(with_runs(prepared.roundable(), regions), one.feeds())
        roles = {r: one.file.binding.regions[r].role for r in regions}
        assert all(counts[runs_of(r)] >= 1 for r, role in roles.items() if role == "body")
        chosen = [counts[runs_of(r)] for r, role in roles.items() if role != "body"]
        assert not chosen or max(chosen) >= 1
