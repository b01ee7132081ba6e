"""Models that keep a state: each call alone, or sequences of calls as the evaluation asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import finecast
from finecast import api, cli
from finecast.data.function_workload import FunctionWorkload, Run
from finecast.engines.base import Array, Feeds, Steps, outputs_of_calls
from finecast.engines.exact import CachedSession
from finecast.errors import EngineError, ExitCode
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino.changes import kv_cache_of
from finecast.native.observing import observe
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.engines.stateful import WIDTH, accumulator, decoder, steps
from tests.kernels import skip_without_bf16, skip_without_int8

openvino = pytest.importorskip("openvino")

from finecast.engines.openvino import OpenVinoEngine, OpenVinoSession  # noqa: E402

EPSILON = float(np.finfo(np.float32).eps)
Numbers: TypeAlias = NDArray[np.float32]
SEQUENCES = [steps(4, seed=seed) for seed in range(3)]


def rows(count: int = 6, seed: int = 0) -> list[dict[str, Array]]:
    """Inputs of as many steps of ``accumulator``."""
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((2, WIDTH)).astype(np.float32)} for _ in range(count)]


@pytest.fixture(scope="module")
def session() -> OpenVinoSession:
    return OpenVinoEngine().load(accumulator())


def test_runs_start_anew_and_steps_go_on(session: OpenVinoSession) -> None:
    calls = rows(3)
    assert session.keeps_state
    alone = [session.run(one)["y"] for one in calls]
    np.testing.assert_array_equal(session.run(calls[0])["y"], alone[0])
    session.reset()
    carried = [session.step(one)["y"] for one in calls]
    np.testing.assert_array_equal(carried[0], alone[0])
    assert not np.allclose(carried[1], alone[1], atol=0.01)
    whole = session.run(Steps(calls))
    np.testing.assert_array_equal(whole["y"], np.concatenate(carried))
    assert [*Steps(calls)] == ["x"]


def test_outputs_whose_sizes_differ_are_joined_along_that_axis() -> None:
    session = OpenVinoEngine().load(decoder())
    two = np.zeros((1, 2, WIDTH), np.float32)
    first, second = steps(2)
    joined = session.run(Steps([first, {**second, "x": two}]))["y"]
    assert joined.shape == (1, 3, WIDTH)


def test_a_profile_of_a_sequence_has_the_time_of_a_call(session: OpenVinoSession) -> None:
    del session
    profiling = OpenVinoEngine().load(accumulator(), profiling=True)
    found = profiling.profile(Steps(rows(3)), repeats=2)
    assert {"first", "again", "last"} <= {op for kernel in found for op in kernel.ops}
    assert all(kernel.time_s > 0 for kernel in found)


def test_what_a_state_holds_is_observed_where_it_is_carried() -> None:
    file = frontend.from_model(accumulator())
    prepared = frontend.prepare(file, Policy.parse("none"))
    read = {n.name: n for n in prepared.graph.nodes}["again"].inputs[0]
    assert read is not None
    alone = observe(prepared, lambda: rows())
    carried = observe(prepared, lambda: [Steps(rows())])
    assert alone[read].largest == 0
    assert carried[read].largest > 0.1


def mean(outputs: list[Array]) -> float:
    return float(np.mean(np.concatenate(outputs).astype(np.float64)))


@pytest.mark.parametrize("carry", [False, True])
def test_what_an_evaluation_runs_is_remembered_as_it_ran(
    session: OpenVinoSession, carry: bool
) -> None:
    def evaluate(run: Run) -> float:
        found: list[Array] = []
        for seed in range(2):
            if carry:
                run.reset()
            found += [run(one)["y"] for one in rows(3, seed)]
        return mean(found)

    workload = FunctionWorkload(function=evaluate, name="evaluate")
    metric = workload.evaluate(session, None)
    cached = CachedSession(session)
    assert workload.evaluate(cached, None) == metric
    calls = [rows(3, seed) for seed in range(2)]
    wanted = (
        [one for seed in calls for one in outputs_of_calls(session, Steps(seed))]
        if carry
        else [session.run(one) for seed in calls for one in seed]
    )
    assert metric == mean([one["y"] for one in wanted])
    assert len(workload.remembered) == (2 if carry else 6)
    assert all(isinstance(one, Steps) is carry for one in workload.remembered)


def test_a_model_without_a_state_may_be_reset() -> None:
    x = openvino.opset13.parameter([2, 4], np.float32, name="x")
    x.output(0).set_names({"x"})
    model = openvino.Model([openvino.opset13.relu(x)], [x])
    run = Run(OpenVinoEngine().load(model), remember=True)
    feeds = {"x": np.ones((2, 4), np.float32)}
    run.reset()
    for _ in range(2):
        run(feeds)
    assert [type(one) for one in run.seen()] == [dict, dict]


def snr_db(sequences: list[list[dict[str, Array]]]) -> Callable[[Run], float]:
    """An evaluation over sequences, against the outputs of its first call."""
    first: list[Numbers] = []

    def evaluate(run: Run) -> float:
        found: list[Array] = []
        for calls in sequences:
            run.reset()
            found += [run(one)["y"].reshape(-1) for one in calls]
        outputs = np.concatenate(found).astype(np.float32)
        if not first:
            first.append(outputs)
        power = float(np.sum(first[0] ** 2))
        return 10 * np.log10(power / max(float(np.sum((outputs - first[0]) ** 2)), 1e-12))

    return evaluate


@pytest.mark.parametrize(
    ("make", "sequences"),
    [(accumulator, [rows(4, seed) for seed in range(3)]), (decoder, SEQUENCES)],
)
def test_tune_carries_a_state_as_the_evaluation_asks(
    make: Callable[[], Any], sequences: list[list[dict[str, Array]]], tmp_path: Path
) -> None:
    out = tmp_path / "low.xml"
    outcome = finecast.tune(
        make(),
        out,
        evaluate=snr_db(sequences),
        criterion="absolute",
        tolerance=130.0,
        policy="all:int8_weights",
        objective="size",
    )
    assert outcome.improved, outcome.why
    assert Format.INT8_WEIGHTS.label in outcome.counts
    # What is written is what was evaluated, step by step.
    found = snr_db(sequences)
    found(Run(OpenVinoEngine().load(make())))
    written = found(Run(OpenVinoEngine().load(out)))
    assert written == pytest.approx(outcome.tuned.metric, abs=0.1)
    # Errors are measured on sequences, too.
    assert outcome.measured_error == pytest.approx(10 ** (-written / 20), rel=0.5)


@pytest.mark.parametrize("policy", ["all:bf16", "all:int8,bf16"])
@pytest.mark.parametrize("make", [accumulator, decoder])
def test_convert_verifies_steps_that_read_a_state(
    make: Callable[[], Any], policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "int8" in policy:
        skip_without_int8()
    ran: list[Feeds] = []
    run = OpenVinoSession.run

    def seen(self: OpenVinoSession, feeds: Feeds) -> dict[str, Array]:
        ran.append(feeds)
        return run(self, feeds)

    monkeypatch.setattr(OpenVinoSession, "run", seen)
    feeds = rows(1)[0] if make is accumulator else steps(1)[0]
    done = api.convert(make(), tmp_path / "low.xml", policy, data=feeds)
    assert done.verified.relative_error is not None
    assert 0 < done.verified.relative_error < 0.1
    assert any(isinstance(one, Steps) and len(one.calls) == 3 for one in ran)


def test_a_list_of_a_calibration_function_is_a_sequence() -> None:
    skip_without_int8()

    def calib() -> Iterator[Any]:
        yield from [rows(4, seed) for seed in range(2)]

    done = api.convert(
        accumulator(), policy="all:int8", data=finecast.DataOptions(calib=calib)
    )
    coded = {d.node for d in done.plan.decisions if d.format is Format.INT8}
    assert "again" in coded  # of calls alone the state is 0, which shows no range


@pytest.fixture
def ir(tmp_path: Path) -> Path:
    """A stateful model as OpenVINO's pass makes it of inputs and outputs."""
    from openvino._offline_transformations import apply_make_stateful_transformation

    ops, rng = openvino.opset13, np.random.default_rng(0)
    x, past = (ops.parameter([1, WIDTH], np.float32, name=n) for n in ("x", "past"))
    for port in (x, past):
        port.output(0).set_names({port.get_friendly_name()})
    weights = [
        ops.constant((rng.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float32))
        for _ in range(2)
    ]
    both = [
        ops.matmul(value, w, False, False, name=name)
        for value, w, name in zip((x, past), weights, ("first", "again"), strict=True)
    ]
    step = ops.tanh(ops.add(*both))
    y, now = ops.result(ops.relu(step)), ops.result(step)
    y.input_value(0).set_names({"y"})
    now.input_value(0).set_names({"now"})
    model = openvino.Model([y, now], [x, past], "made_stateful")
    apply_make_stateful_transformation(model, {"past": "now"})
    path = tmp_path / "net.xml"
    openvino.save_model(model, path, compress_to_fp16=False)
    np.savez(tmp_path / "net.npz", x=np.concatenate([one["x"] for one in rows(4)]))
    return path


BF16 = ["--auto-cast", "all", "--auto-cast-type", "bf16"]
METRIC = ["--data", "net.npz", "--metric", "snr_db"]


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "net.xml", "-o", "low.xml", *BF16],
        ["tune", "net.xml", "-o", "low.xml", *METRIC, "--tolerance", "20"],
        ["explain", "net.xml", "again", *BF16],
        ["inspect", "net.xml"],
        ["emulate", "net.xml", "--target", "trn1", "--auto-cast", "all", *METRIC],
        ["ladder", "net.xml", "--target", "trn1", *METRIC, "--tolerance", "20"],
        ["profile", "net.xml"],
    ],
    ids=lambda words: words[0],
)
def test_every_verb_takes_a_stateful_model(
    words: list[str], ir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] not in cli.VERBS:
        pytest.skip("it is a plugin's")
    monkeypatch.chdir(ir.parent)
    allowed = {ExitCode.DONE} | ({ExitCode.NOT_IMPROVED} if words[0] == "tune" else set())
    assert cli.main(words) in allowed


def test_what_openvino_alone_reads_is_sent_to_no_other_engine(tmp_path: Path) -> None:
    """Results of the op that stores a state: OpenVINO does not compile them."""
    model = accumulator()
    (stored,) = model.get_sinks()
    model.add_results([openvino.opset13.result(stored.output(0))])
    with pytest.raises(EngineError, match="cannot load the model") as error:
        OpenVinoEngine().load(model)
    assert "onnxruntime" not in error.value.fix


@pytest.mark.parametrize("low", [Format.BF16, Format.FP16], ids=lambda f: f.label)
def test_a_state_is_empty_at_the_start_of_each_sequence_whatever_ops_are_low(
    low: Format,
) -> None:
    """The caches' numbers of the sequence before were read: answers were off by 30%."""
    model = decoder()
    made = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
    starts = [name for name, op in made.items() if op.get_type_name() == "Broadcast"]
    policy = Policy(f"all:{low.label}", include=[f"^{starts[0]}$", "^attention$"])
    done = finecast.convert(model, policy=policy, verify=False)
    assert [d.node for d in done.plan.decisions if d.format is low] == ["attention"]
    session = OpenVinoEngine().load(done.model)
    first, again = (session.run(Steps(SEQUENCES[0]))["y"] for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_model_by_hint_states_its_cache() -> None:
    """A program that loads it without settings had a cache of 8 bits."""
    skip_without_bf16()
    policy = replace(Policy.parse("all:bf16"), by_hint=True)
    done = finecast.convert(decoder(), policy=policy, verify=False)
    assert done.plan.by_hint
    assert done.plan.declared == ("KV cache kept in bf16",)
    compiled = openvino.Core().compile_model(done.model, "CPU")
    assert str(compiled.get_property("KV_CACHE_PRECISION").to_string()) == "bf16"
    assert kv_cache_of(done.model) is Format.BF16


def test_calls_of_different_lengths_show_whether_kernels_round(tmp_path: Path) -> None:
    """Outputs of such calls are joined without rows, which was an error of NumPy."""
    skip_without_int8()
    first = {"x": np.concatenate([one["x"] for one in steps(3)], axis=1)}
    calls = [{**steps(1)[0], **first}, *steps(2, seed=2)]
    outcome = finecast.tune(
        decoder(),
        tmp_path / "low.xml",
        evaluate=snr_db([calls]),
        criterion="absolute",
        tolerance=130.0,
        policy="all:int8_dynamic",
        objective="size",
    )
    assert outcome.improved, outcome.why
    assert Format.INT8_DYNAMIC.label in outcome.counts
