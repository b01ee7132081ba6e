"""What every frontend must do. A new one is listed in ``networks``; nothing changes here."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

import finecast
from finecast import Policy
from finecast.data.feeds import synthetic_feeds
from finecast.data.function_workload import Run
from finecast.diagnosis.difference import Side, difference
from finecast.engines.base import Array
from finecast.errors import FinecastError, ModelError, UsageError
from finecast.native.model import ReadOptions
from finecast.native.opening import opened, study_beside
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.sensitivity import squared_error
from finecast.reports.plan_report import check_content
from finecast.tuning.result import Result
from tests.native import toy, toy_chain, toy_subject
from tests.native.networks import FRONTENDS, Frontend

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

RNG = np.random.default_rng(0)
WEIGHTS = [(RNG.normal(size=(8, 8)) / 4).astype(np.float32) for _ in range(3)]
X = RNG.normal(size=(64, 8)).astype(np.float32)
CHANGES: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "negated": lambda w: -w,
    "reversed": lambda w: w[::-1, ::-1].copy(),
    "transposed": lambda w: w.T.copy(),
}
UNKNOWN = (
    replace(Policy.parse("all:bf16"), op_formats={"NoSuchOp": Format.FP32}),
    replace(Policy.parse("all:bf16"), exclude=(re.compile("no_such_node"),)),
)


@pytest.fixture(params=FRONTENDS, ids=lambda f: f.suffix or f.needs)
def frontend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    found: Frontend = request.param
    pytest.importorskip(found.needs)
    if found.needs == "torch":
        request.getfixturevalue("fast_bf16")
    toy.install(monkeypatch)
    return found


@pytest.fixture
def net(frontend: Frontend, tmp_path: Path) -> Path:
    path = tmp_path / f"net{frontend.suffix}"
    frontend.write(path, WEIGHTS)
    return path


@pytest.fixture
def low(net: Path) -> Path:
    """Where a result goes."""
    return net.with_stem("low")


def files_of(*paths: Path) -> list[Path]:
    """All files of models: in a folder, or beside the model's own file."""
    found: list[Path] = []
    for path in paths:
        beside = path.parent.glob(f"{path.stem}.*")
        found += path.rglob("*") if path.is_dir() else beside
    return sorted(part for part in found if part.is_file())


def content(path: Path) -> dict[str, bytes]:
    """What is in a model's files."""
    return {str(p.relative_to(path.parent)): p.read_bytes() for p in files_of(path)}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def copied(path: Path, copy: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, copy)
        return
    for part in files_of(path):
        part.with_stem(copy.stem).write_bytes(part.read_bytes())


def numbers(path: Path) -> list[Array]:
    """What a file's model gives on the same feeds each time."""
    session = finecast.load(path).reference()
    return [*session.run(synthetic_feeds(session.inputs, batch=4)).values()]


def test_a_converted_model_opens_and_keeps_its_ports(
    frontend: Frontend, net: Path, low: Path
) -> None:
    done = finecast.convert(net, low, "all:bf16")
    assert set(done.plan.formats.values()) == {Format.BF16}
    before, after = (finecast.load(path).reference() for path in (net, low))
    for one, other in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
        assert [s.dtype for s in one] == [s.dtype for s in other]
        assert [len(s.shape or ()) for s in one] == [len(s.shape or ()) for s in other]
    assert [s.name for s in before.inputs] == [s.name for s in after.inputs] == ["x"]
    if frontend.output:
        assert [s.name for s in after.outputs] == [frontend.output]
    (wanted,), (got,) = numbers(net), numbers(low)
    error = math.sqrt(squared_error([got], [wanted]))
    assert 0 < error < 8 * Format.BF16.unit_roundoff


def test_a_converted_model_is_not_converted_again(net: Path, low: Path) -> None:
    """By any verb that plans; what looks at it as it is works."""
    plan = finecast.convert(net, low, "matmult:bf16").plan
    again = low.with_stem("again")
    advice = f"give the original: {re.escape(net.name)}, digest {plan.model}$"
    for verb in (
        lambda: finecast.convert(low, again, "matmult:bf16"),
        lambda: finecast.convert(low, again, "all:fp16"),
        lambda: finecast.convert(low, again, "none"),
        lambda: finecast.apply(plan, low, again),
        lambda: finecast.tune(low, again, data={"x": X}),
    ):
        with pytest.raises(
            ModelError, match="converted by finecast before, to matmult"
        ) as one:
            verb()
        assert re.search(advice, one.value.fix)
    assert not files_of(again)
    assert finecast.inspect(low).classes
    assert finecast.diff(finecast.load(net), finecast.load(low)).summary
    numbers(low)


def test_the_policy_that_changes_nothing_changes_no_number(net: Path, low: Path) -> None:
    finecast.convert(net, low, "none:bf16")
    np.testing.assert_array_equal(numbers(net), numbers(low))


def test_a_saved_plan_gives_what_convert_gave(net: Path, low: Path, tmp_path: Path) -> None:
    done = finecast.convert(net, low, "matmult:bf16")
    assert len(set(done.plan.formats.values())) == 2
    saved = tmp_path / "saved.plan.json"
    saved.write_text(done.plan.to_json(), encoding="utf-8")
    again = net.with_stem("again")
    replayed = finecast.apply(saved, net, again)
    assert replayed.plan.digest == done.plan.digest
    assert (replayed.casts, replayed.size_bytes[0]) == (done.casts, done.size_bytes[0])
    np.testing.assert_array_equal(numbers(low), numbers(again))


def test_every_float_op_is_judged_with_a_reason(net: Path) -> None:
    explained = finecast.explain(net, policy="all:bf16")
    graph, plan = explained.graph, explained.plan
    assert graph.float_nodes
    assert set(plan.formats) == {n.name for n in graph.float_nodes}
    assert all(d.reasons and all(r.text for r in d.reasons) for d in plan.decisions)
    named = finecast.load(net).graph_for(plan)
    assert [n.name for n in named.float_nodes] == [n.name for n in graph.float_nodes]


def test_inspect_counts_all_of_it(net: Path) -> None:
    census = finecast.inspect(net)
    assert census.parameters == sum(w.size for w in WEIGHTS)
    files = sum(f.stat().st_size for f in files_of(net))
    assert sum(w.nbytes for w in WEIGHTS) <= census.size_bytes <= files
    assert {"matmul", "relu"} & {op for c in census.classes for op in c.ops}


def test_a_plan_of_another_model_is_refused(
    frontend: Frontend, net: Path, low: Path, tmp_path: Path
) -> None:
    other = tmp_path / f"other{frontend.suffix}"
    for weights in ([*WEIGHTS, *WEIGHTS], WEIGHTS[:1]):  # it names too many ops, or too few
        frontend.write(other, weights)
        plan = finecast.explain(other, policy="all:bf16").plan
        for call in (
            lambda p: finecast.apply(p, net, low),
            lambda p: finecast.load(net).graph_for(p),
        ):
            with pytest.raises(ModelError):
                call(plan)
    assert files_of(tmp_path) == files_of(net, other)


@pytest.mark.parametrize("policy", UNKNOWN, ids=["op", "node"])
def test_unknown_names_are_refused_before_any_work(
    frontend: Frontend, net: Path, low: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Run] = []

    def evaluate(run: Run) -> float:
        calls.append(run)
        return 1.0

    engine = frontend.state_times(monkeypatch)
    verbs: tuple[Callable[[], object], ...] = (
        lambda: finecast.convert(net, low, policy),
        lambda: finecast.explain(net, policy=policy),
        lambda: finecast.tune(
            net, low, policy=policy, evaluate=evaluate, calib=[{"x": X}], engine=engine
        ),
    )
    for verb in verbs:
        with pytest.raises(UsageError, match=r"(?i)no_?such"):
            verb()
    assert not calls
    assert not low.exists()


def test_the_digest_is_of_the_content(frontend: Frontend, net: Path, tmp_path: Path) -> None:
    copy, other = (tmp_path / f"{name}{frontend.suffix}" for name in ("copy", "other"))
    copied(net, copy)
    frontend.write(other, [WEIGHTS[0] + np.float32(1), *WEIGHTS[1:]])
    digests = [finecast.load(path).digest for path in (net, copy, other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_of_the_same_sizes_and_range_are_seen(
    frontend: Frontend, net: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "changed").mkdir()
    changed = tmp_path / "changed" / net.name
    weight = CHANGES[change](WEIGHTS[1])
    frontend.write(changed, [WEIGHTS[0], weight, WEIGHTS[2]])
    before, after = (
        Side.of_graph(opened(path, ReadOptions()).read_graph(), path.name)
        for path in (net, changed)
    )
    (op,) = difference(before, after).changed
    assert [one.value for one in op.changes] == ["weights"]
    distance = np.linalg.norm(weight - WEIGHTS[1]) / np.linalg.norm(WEIGHTS[1])
    assert op.weights == pytest.approx(distance, rel=1e-5)
    assert not difference(before, before).changed


def test_outputs_that_collide_are_refused(net: Path, low: Path) -> None:
    before = content(net)
    low.write_text("mine", encoding="utf-8")
    for output, force in ((net, True), (net, False), (low, False), (net.parent, True)):
        with pytest.raises(UsageError):
            finecast.convert(net, output, "all:bf16", force=force)
        with pytest.raises(UsageError):
            finecast.tune(net, output, data={"x": X}, force=force)
    assert content(net) == before
    assert low.read_text(encoding="utf-8") == "mine"
    if net.is_dir():
        low.unlink()  # force replaces a folder by a folder
    finecast.convert(net, low, "all:bf16", force=True)
    assert numbers(low)


@pytest.mark.parametrize("metric", ["top1", "agreement"])  # with labels; beside fp32
def test_tune_keeps_the_criterion_or_changes_nothing(
    frontend: Frontend, net: Path, low: Path, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = frontend.state_times(monkeypatch)
    (scores,) = finecast.load(net).reference().run({"x": X}).values()
    data = {"x": X} | ({"label": scores.argmax(axis=1)} if metric == "top1" else {})
    outcome = finecast.tune(
        net, low, data=data, metric=metric, criterion="absolute", tolerance=0.1, engine=engine
    )
    assert outcome.baseline.metric == 1.0
    assert outcome.improved == frontend.gains
    assert outcome.improved == low.exists() == outcome.plan.lowers
    assert outcome.tuned.metric >= 0.9
    assert outcome.tuned.latency_s <= outcome.baseline.latency_s
    if outcome.improved:
        again = finecast.apply(outcome.plan, net, net.with_stem("again"))
        assert again.plan.digest == outcome.plan.digest
        np.testing.assert_array_equal(numbers(low), numbers(net.with_stem("again")))
    check_report(outcome)


def check_report(outcome: Result) -> None:
    """Its data has the schema, and says of each op in the plan what is around it."""
    content = outcome.report().to_dict()
    check_content(content, where="report")
    ops = {op["name"]: op for op in content["ops"]}
    assert {name: ops[name]["type"] for name in outcome.plan.formats} == {
        name: fmt.label for name, fmt in outcome.plan.formats.items()
    }
    assert all(ops[one.node]["outputs"] for one in outcome.plan.counted)
    assert content["result"]["tuned"]["metric"] == pytest.approx(outcome.tuned.metric)
    assert outcome.report().lines[0] == content["summary"]["answers"][0]


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_tune_for_bytes_gives_a_smaller_model(
    frontend: Frontend, tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low weights are half of fp32's, whether or not the machine computes in them faster."""
    engine = frontend.state_times(monkeypatch)
    rng, sizes = np.random.default_rng(5), (X.shape[1], 256, 256, 4)
    weights = [(rng.standard_normal(s) / 16).astype(np.float32) for s in pairwise(sizes)]
    net, low = tmp_path / f"wide{frontend.suffix}", tmp_path / f"low{frontend.suffix}"
    frontend.write(net, weights)
    outcome = finecast.tune(
        net,
        low,
        data={"x": X},
        metric="cosine",
        objective=objective,
        tolerance=0.1,
        engine=engine,
    )
    assert outcome.improved
    assert outcome.tuned.cost < 0.8 * outcome.baseline.cost  # the toy writes weights as text
    assert outcome.gain == pytest.approx(outcome.baseline.cost / outcome.tuned.cost)
    check_report(outcome)
    before, after = (sum(f.stat().st_size for f in files_of(p)) for p in (net, low))
    assert after < 0.8 * before  # OpenVINO's .xml has a line a node


def test_tune_writes_nothing_where_no_plan_keeps_the_criterion(
    frontend: Frontend, net: Path, low: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, before = frontend.state_times(monkeypatch), files_of(net)
    scores, first = iter([1.0, 1.0]), list[Array]()  # fp32's outputs are judged twice

    def evaluate(run: Run) -> float:
        (y,) = run({"x": X}).values()
        first.append(y)
        # Other outputs than the model's are not judged.
        assert not np.array_equal(y, np.negative(first[0]))
        return next(scores, 0.0)

    outcome = finecast.tune(net, low, evaluate=evaluate, calib=[{"x": X}], engine=engine)
    assert not outcome.improved
    assert not outcome.plan.lowers
    assert outcome.tuned == outcome.baseline
    study_beside(low).unlink(missing_ok=True)  # what was tried stays, for another run
    assert files_of(net.parent) == before


def test_what_tune_tells_of_its_work_stays_within_it(
    frontend: Frontend, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    finecast.tune(
        net,
        data={"x": X},
        metric="agreement",
        engine=frontend.state_times(monkeypatch),
        progress=tell,
    )
    assert told
    assert all(stage and 0 <= done <= total >= 1 for stage, done, total in told)


def test_a_failure_leaves_nothing_behind(
    net: Path, low: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(net)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        finecast.convert(net, low, "all:bf16")
    assert files_of(net.parent) == before


@pytest.mark.parametrize("found", [None, b"", b"garbage", b"{}"])
def test_what_is_no_model_is_one_error(net: Path, found: bytes | None) -> None:
    file = net / "saved_model.pb" if net.is_dir() else net
    remove(net)
    if found is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(found)
    with pytest.raises(FinecastError) as caught:
        finecast.convert(net, net.with_stem("low"))
    assert str(net) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plans_come_back_from_their_files(net: Path) -> None:
    plans = [finecast.explain(net, policy="all:bf16").plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert Plan.from_json(plans[0].to_json()) == plans[0]


@pytest.mark.parametrize("part", [toy, toy_chain, toy_subject], ids=lambda p: p.__name__)
def test_a_frontend_s_parts_are_short(part: ModuleType) -> None:
    assert len(Path(part.__file__ or "").read_text(encoding="utf-8").splitlines()) < 150
