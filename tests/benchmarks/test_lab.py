"""The laws of the laboratory: what is true of its nets, and that nothing real gets into it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from benchmarks.lab import __main__ as lab
from benchmarks.lab import assumptions as assumed
from benchmarks.lab import drawn, figures, kept, optimum, recording
from benchmarks.lab.architectures import FAMILIES
from benchmarks.lab.drawn import DrawnNet, Samples
from benchmarks.lab.figures import net_of, run_of, runs_of
from benchmarks.lab.nets import ENUMERATED, Key, Net
from benchmarks.lab.recording import Recording
from benchmarks.lab.searches import SEARCHES, Chosen
from benchmarks.lab.simulation import Simulation
from finecast.data.criterion import Criterion
from finecast.measure import timing
from finecast.measure.racing import ANCHOR, Effort
from finecast.numbers.formats import Format
from finecast.solver.labelling import evaluate

# The lab has a clock of its own in place of the one that is stated in tests.
pytestmark = pytest.mark.real_clock

SAMPLE = Path(__file__).parents[1] / "samples" / "lab-recording-1.jsonl"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing that an earlier run kept is read."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plan is searched for briefly, where it decides nothing."""
    for name in ("_FEWEST_KICKS", "_MOST_KICKS"):
        monkeypatch.setattr(optimum, name, 0)


def key(family: str, seed: int, *, held_out: bool = False) -> Key:
    return Key(family=family, held_out=held_out, seed=seed)


def drawn_net(family: str, seed: int) -> DrawnNet:
    return drawn.draw(key(family, seed))


# ------------------------------------------------------------------------------ the best plan


@pytest.mark.parametrize(("family", "seed"), [("cnn", 10), ("mobile", 53)])
def test_the_long_search_finds_the_best_of_all_plans(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As it searches where there are too many to try them all."""
    monkeypatch.setattr(optimum, "_FEW_PLANS", 0)
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    net = drawn_net(family, seed)
    units = len(net.units.members)
    labels = np.arange(1 << units)[:, None] >> np.arange(units) & 1
    labels = labels[np.isfinite(net.by_casts.time[np.arange(units), labels]).all(axis=1)]
    lost = np.concatenate([net.losses(part) for part in np.array_split(labels, 16)])
    best_s = min(evaluate(net.by_casts, label).time_s for label in labels[lost <= 1])
    assert net.best.time_s == pytest.approx(best_s)
    assert not net.best.by_hint


def test_of_few_plans_all_are_tried() -> None:
    """The best one lowers four units whose errors cancel, and no search finds that."""
    net = drawn_net("mlp", 14)
    assert np.count_nonzero(net.best.label) == 4
    assert net.losses(net.best.label[None])[0] <= 1


@pytest.mark.parametrize(("family", "seed"), [("mlp", 14), ("mobile", 41), (ENUMERATED, 11)])
def test_no_valid_plan_of_a_search_is_faster_than_the_best(family: str, seed: int) -> None:
    net = net_of(key(family, seed))
    assert net.losses(net.best.label[None], by_hint=net.best.by_hint)[0] <= 1
    assert net.best.time_s <= net.fp32_s
    for noise in range(2):
        simulation = Simulation(net=net, seed=noise)
        with simulation.clock.in_place():
            SEARCHES["tune"](simulation)
        tried = [plan for plan in simulation.plans.values() if net.loss(plan) <= 1]
        assert all(net.best.time_s <= net.true_s(plan) for plan in tried)


@pytest.mark.usefixtures("short")
def test_the_best_of_a_table_is_at_most_what_any_search_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lucky(simulation: Simulation) -> Chosen:
        plan = simulation.net.planner.lowest()
        simulation.evaluate(simulation.load(plan), plan)
        return Chosen(plan=None, evaluations=1)

    def kept_in_fp32(simulation: Simulation) -> Chosen:
        del simulation
        return Chosen(plan=None, evaluations=1)

    where = key("mlp", 15)  # everything may be low
    net = net_of(where)
    worse = replace(net.best, time_s=net.fp32_s)
    monkeypatch.setattr(figures, "net_of", lambda _: net)
    monkeypatch.setitem(net.__dict__, "best", worse)
    monkeypatch.setattr(figures, "SEARCHES", {"a": lucky, "b": kept_in_fp32})
    runs = runs_of(where, ["a", "b"], 1)
    assert all(run.beaten for run in runs)
    assert {run.best_s for run in runs} == {net.true_s(net.planner.lowest())}


# ------------------------------------------------------------------------------- determinism


@pytest.mark.usefixtures("short")
def test_the_same_seed_gives_the_same_figures_and_another_one_does_not() -> None:
    one, again, other = (
        run_of(net_of(key("mobile", 41)), "tune", noise)[0] for noise in (0, 0, 1)
    )
    assert one == again
    assert one.seconds != other.seconds


def test_another_net_of_a_family_is_another_one() -> None:
    one, other = (net_of(key("mlp", seed)) for seed in (14, 20))
    assert one.fp32_s != other.fp32_s
    assert one.graph != other.graph


@pytest.mark.usefixtures("short")
def test_no_clock_of_this_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_of(net_of(key("mobile", 41)), "tune", 0)

    def read() -> NoReturn:
        raise AssertionError("a real clock was read")

    net = net_of(key("mobile", 41))
    assert net.best.time_s > 0
    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(timing, "process_time", read)
    monkeypatch.setattr(timing, "_waits_s", read)
    assert run_of(net, "tune", 0) == expected


def test_the_clock_is_given_back() -> None:
    before = time.perf_counter, timing.used_s, timing.Demand.__dict__["now"]
    simulation = Simulation(net=net_of(key("mlp", 14)), seed=0)
    with simulation.clock.in_place():
        simulation.clock.spend(5.0)
        assert time.perf_counter() == timing.used_s() == timing.Demand.now().used_s == 5.0
    assert before == (time.perf_counter, timing.used_s, timing.Demand.__dict__["now"])


# ------------------------------------------------------------------------------ what is drawn


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
@pytest.mark.parametrize("held_out", [False, True])
def test_nets_are_of_20_to_some_hundred_ops(family: str, held_out: bool) -> None:
    for seed in range(4):
        net = drawn.draw(key(family, seed, held_out=held_out))
        assert 20 <= len(net.graph.nodes) <= 900
        assert net.fp32_s > 0
        lowest = net.lowest[None]
        assert net.losses(np.zeros_like(lowest))[0] == 0
        assert net.planner.is_free


def test_held_out_nets_have_architectures_of_their_own() -> None:
    seen = {family.seen for family in FAMILIES}
    held_out = {family.held_out for family in FAMILIES}
    assert len(seen) == len(held_out) == len(FAMILIES)
    assert seen.isdisjoint(held_out)


def test_errors_of_plans_are_two_decibels_from_their_sums() -> None:
    off: list[float] = []
    for family in FAMILIES:
        for seed in range(6):
            net = drawn_net(family.name, seed)
            rows, single = np.arange(assumed.CALIBRATION), 0.0
            for number, (fmt, where) in enumerate(net.points.items(), start=1):
                of = len(where.points) + len(where.weights)
                low = np.pad(net.lowest == number, (0, 1))
                done = np.flatnonzero(low[net.vectors[fmt].causes].any(axis=1))
                switches = np.eye(of, dtype=bool)[done]
                single += sum(np.mean(net.rounded(fmt, on, rows) ** 2) for on in switches)
            together = float(np.mean(net.deviations(net.lowest, rows) ** 2))
            off.append(10 * math.log10(together / single))
    assert 1.0 < np.abs(off).mean() < 3.0
    assert np.abs(off).max() < 9.0


def test_margins_tell_as_many_changed_decisions_as_there_are() -> None:
    net = next(
        found
        for seed in range(60)
        if (found := drawn_net("mlp", seed)).metric == "agreement"
        and 0.01 < float(found.losses(found.lowest[None])[0]) * found.allowed < 0.1
    )
    everyone = np.arange(assumed.POPULATION)
    outcomes = net.outcomes(net.lowest, everyone)
    assert outcomes.margins is not None
    assert outcomes.shifts is not None
    shifts = math.sqrt(np.mean(outcomes.shifts**2))
    chance = [0.5 * math.erfc(m / shifts / math.sqrt(2)) for m in outcomes.margins]
    assert np.mean(chance) == pytest.approx(outcomes.changed.mean(), rel=0.25)
    lost = float(net.losses(net.lowest[None])[0]) * net.allowed
    assert outcomes.changed.mean() == pytest.approx(lost, abs=2 / assumed.POPULATION)


@pytest.mark.parametrize("accuracy", [0.6, 0.8, 0.98])
def test_samples_have_the_accuracy_that_was_drawn(accuracy: float) -> None:
    samples = Samples.draw(np.random.default_rng(0), 50_000, accuracy)
    assert samples.right.mean() == pytest.approx(accuracy, abs=0.01)
    assert not (samples.right & samples.second).any()
    near = samples.margins < np.quantile(samples.margins, 0.2)
    assert samples.right[near].mean() < samples.right[~near].mean()


def test_all_low_loses_what_was_drawn() -> None:
    drawn_losses = [
        float((net := drawn_net(family.name, seed)).losses(net.lowest[None])[0])
        for family in FAMILIES
        for seed in range(10)
    ]
    least, most = assumed.DIFFICULTY
    inside = [0.5 * least <= lost <= 1.2 * most for lost in drawn_losses]
    assert np.mean(inside) > 0.95
    assert 0.15 < np.mean(np.array(drawn_losses) <= 1) < 0.55


def test_an_enumerated_net_rounds_all_that_a_plan_rounds() -> None:
    net = net_of(key(ENUMERATED, 11))
    where = net.points[Format.FP16]
    everything = np.ones(len(where.points) + len(where.weights), dtype=bool)
    rows = np.arange(assumed.JUDGE_ROWS)
    probed = float(np.mean(net.rounded(Format.FP16, everything, rows) ** 2))
    low = np.ones(len(net.units.members), dtype=np.int64)
    assert isinstance(net.criterion, Criterion)
    true = float(net.losses(low[None])[0]) * 10 ** (-net.criterion.tolerance / 10)
    # Intermediate sums are rounded again where values are, so that the two nearly agree.
    assert probed == pytest.approx(true, rel=0.05)
    assert not net.rounded(Format.FP16, np.zeros_like(everything), rows).any()


# ------------------------------------------------------------------- what a search may ask


@pytest.fixture
def started() -> Simulation:
    simulation = Simulation(net=net_of(key("mlp", 14)), seed=0)
    simulation.start()
    return simulation


Question = Callable[[Simulation, Net], object]

QUESTIONS: dict[str, Question] = {
    "observe": lambda s, _: s.observe(),
    "predicted": lambda s, _: s.predicted(),
    "switch": lambda s, _: s.switch(Format.BF16, 4),
    "probe": lambda s, n: s.probe(
        Format.BF16,
        np.ones(len(n.points[Format.BF16].points) + len(n.points[Format.BF16].weights), bool),
    ),
    "emulated_error": lambda s, n: s.emulated_error(n.planner.lowest()),
    "build": lambda s, n: s.build(n.planner.lowest()),
    "load": lambda s, n: s.load(n.planner.lowest()),
    "race": lambda s, _: s.race({"a": s.fp32()}, Effort(min_time_s=0.0)),
    "evaluate": lambda s, _: s.evaluate(s.fp32(), None),
    "some samples": lambda s, _: s.evaluate(s.fp32(), None, np.arange(3)),
    "unlabelled": lambda s, _: s.unlabelled(s.fp32(), np.arange(3)),
    "deviations": lambda s, _: s.deviations(s.fp32(), np.arange(3)),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_takes_simulated_time(started: Simulation, name: str) -> None:
    before = started.clock.now_s
    with started.clock.in_place():
        QUESTIONS[name](started, started.net)
    assert started.clock.now_s > before


def test_a_model_that_is_loaded_again_has_another_speed(started: Simulation) -> None:
    plan = started.net.planner.lowest()
    one, other = (started.load(plan).call_s for _ in range(2))
    assert one != other
    most = (1 + assumed.PROCESS_LIMIT) * 1.0001
    true_s = started.net.true_s(plan)
    assert all(1 / most < call_s / true_s < most for call_s in (one, other))


def test_a_race_tells_true_speeds_up_to_noise(started: Simulation) -> None:
    plan = started.net.planner.lowest()
    with started.clock.in_place():
        loaded = started.load(plan)
        race = started.race({"low": loaded}, Effort(min_time_s=0.0, rounds=200))
    speed = started.fp32().call_s / loaded.call_s
    assert race.speed("low").median == pytest.approx(speed, rel=0.02)
    assert race.names == {"low"}
    assert race.latency(ANCHOR).runs >= 200


def test_samples_of_the_population_are_not_shown(started: Simulation) -> None:
    with pytest.raises(AssertionError):
        started.evaluate(started.fp32(), None, np.array([started.net.samples]))


def test_calibration_rows_have_no_labels(started: Simulation) -> None:
    found = started.unlabelled(started.load(started.net.planner.lowest()), np.arange(9))
    assert found.right is None
    assert found.second is None
    assert found.margins is not None


# --------------------------------------------------------------------------------- the command


@pytest.mark.usefixtures("short")
def test_lab_prints_a_row_for_each_family(capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["--families", "mlp", "mobile", "--nets", "1", "--first", "53", "--seeds", "1",
              "--jobs", "1"])  # fmt: skip
    output = capsys.readouterr()
    rows = [line.split(" | ")[0] for line in output.out.splitlines()]
    assert rows == ["| tune", "|---" * 13 + "|", "| mlp", "| mobile", "| all"]
    assert "held-out" not in output.err


@pytest.mark.usefixtures("short")
def test_held_out_nets_come_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["--families", "mlp", "--nets", "1", "--seeds", "1", "--jobs", "1", "--json",
              "--held-out"])  # fmt: skip
    output = capsys.readouterr()
    assert "this is for the last run" in output.err
    printed = [json.loads(line) for line in output.out.splitlines()]
    run, *summed = [line for line in printed if "environment" not in line]
    assert run["net"] == "mlp*/0"
    assert run["architecture"] == "mixer"
    assert [one["family"] for one in summed] == ["mlp", "all"]


# ---------------------------------------------------------------------------------- recordings


def test_a_recording_of_an_older_release_is_read_and_written_again(tmp_path: Path) -> None:
    found = Recording.read(SAMPLE)
    found.write(tmp_path / "again.jsonl")
    assert Recording.read(tmp_path / "again.jsonl") == found
    assert (tmp_path / "again.jsonl").read_text() == SAMPLE.read_text()
    kinds = {type(line) for line in found.lines}
    assert kinds == {
        recording.KernelLine,
        recording.PlanLine,
        recording.RaceLine,
        recording.LoadLine,
        recording.SamplesLine,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no recording"),
        ("{}", "no recording"),
        ('{"line": "load", "version": 1, "seconds": 1}', "no recording"),
        ('{"line": "header", "version": 99}', "version 99 is newer"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        Recording.read(path)


def test_fit_tells_spreads_beside_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_bytes(SAMPLE.read_bytes())
    lab.main(["fit", str(tmp_path)])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["recordings"] for line in printed if "recordings" in line] == [1]
    lines = [line for line in printed if "what" in line]
    found = {line["what"]: line for line in lines}
    assert found["calls within a race"]["assumed"] == assumed.ROUND_NOISE
    assert all(line["count"] and line["deviation"] is not None for line in lines)


def test_fit_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no recordings"):
        lab.main(["fit", str(tmp_path)])


def test_record_keeps_what_a_search_saw(tmp_path: Path) -> None:
    lab.main(["record", "digits", "--busy", "--kind", "cnn", "--write", str(tmp_path)])
    found = Recording.read(tmp_path / "digits.openvino.jsonl")
    assert found.header.busy
    assert found.header.kind == "cnn"
    assert found.header.evaluations > 1
    plans = {line.digest for line in found.of(recording.PlanLine)}
    evaluated = {line.digest for line in found.of(recording.SamplesLine)}
    assert ANCHOR in evaluated
    assert evaluated & plans
    assert all(ANCHOR in line.rounds for line in found.of(recording.RaceLine))
    assert found.of(recording.LoadLine)
