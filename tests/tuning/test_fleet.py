"""Plans of a fleet: the choice by toy judges, and a small net for two kinds of machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.cli import main
from finecast.data.criterion import Criterion
from finecast.data.workload import Workload
from finecast.errors import EngineError, UsageError
from finecast.measure.environment import environment, instruction_sets, limit_to
from finecast.native.lock import Lock, Machine, Runner
from finecast.native.machine_kind import MachineKind
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.fleet import Fleet, PricedKind
from finecast.progress import silent
from finecast.tuning.executor import Evaluated, Executor
from finecast.tuning.fleet import Choosing, KindJudge, groupings
from finecast.tuning.fleet_plans import KindOutcome
from finecast.tuning.fleet_tuning import outputs_of, proven
from finecast.tuning.goal import Budget, Goal, TuneRequest
from tests.native.networks import FRONTENDS, Weights
from tests.planning.test_fleet import analysis, own_best, planner, prices

SAMPLE = Path(__file__).parent.parent / "samples" / "fleet" / "vnni.prices.json"
FP32, BF16, FP16 = Format.FP32, Format.BF16, Format.FP16


@dataclass
class Tables(Executor):
    """The accuracy of a plan: what each format loses there."""

    loses: Mapping[Format, float]
    calls: int = 0

    def baseline(self, workload: Workload) -> float:
        del workload
        return 1.0

    def evaluate(self, built: Built) -> Evaluated:
        self.calls += 1
        lost = [self.loses.get(fmt, 0.0) for fmt in {*built.plan.formats.values()}]
        if math.inf in lost:
            raise EngineError("no kernel")
        return Evaluated(metric=1.0 - sum(lost), error=0.0)


def judge(**loses: float) -> KindJudge:
    given = {Format.parse(label): lost for label, lost in loses.items()}
    return KindJudge(executor=Tables(given), criterion=Criterion(tolerance=0.01), baseline=1.0)


def choosing(judges: Mapping[str, KindJudge], trials: int | None = None) -> Choosing:
    """A gains most by fp16, b by bf16, c by neither of both but nothing is lost by them."""
    lists = {
        "a": prices([(4.0, 2.0, 1.0)] * 3),
        "b": prices([(4.0, 1.0, 2.0)] * 3),
        "c": prices([(4.0, 3.9, 3.9)] * 3),
    }
    kinds = {name: own_best(lists[name]) for name in judges if name in lists}
    fleet = Fleet(planner=planner(), analysis=analysis([1e-6] * 3), kinds=kinds)
    budget = Budget(goal=Goal(max_trials=trials))
    return Choosing(fleet=fleet, judges=judges, budget=budget, progress=silent)


def replace_kinds(given: Choosing, kinds: Mapping[str, PricedKind]) -> Choosing:
    fleet = replace(given.fleet, kinds=kinds)
    return Choosing(fleet=fleet, judges=given.judges, budget=given.budget, progress=silent)


def test_the_least_worst_of_those_that_keep_the_criterion_everywhere_is_chosen() -> None:
    free = choosing({"a": judge(), "b": judge()}).serving(frozenset("ab"))
    assert free.worst == pytest.approx(2 / 3)  # one op in the other's format
    judges = {"a": judge(), "b": judge(fp16=0.02)}
    kept = choosing(judges).serving(frozenset("ab"))
    assert set(kept.proposal.plan.formats.values()) == {BF16}
    assert kept.losses == pytest.approx({"a": 1.0, "b": 0.0})
    nothing = choosing({"a": judge(bf16=1.0), "b": judge(fp16=math.inf)})
    assert not nothing.serving(frozenset("ab")).proposal.plan.lowers
    assert nothing.judges["b"].failed == ["no kernel"]
    assert nothing.why_fp32(frozenset("ab")).startswith("no lower plan that was tried keeps")


def test_it_is_said_why_no_op_is_lower() -> None:
    slow = {"a": prices([(4.0, 2.0, 40.0)] * 3), "b": prices([(4.0, 40.0, 2.0)] * 3)}
    judges = {"a": judge(), "b": judge()}
    found = replace_kinds(choosing(judges), {n: own_best(p) for n, p in slow.items()})
    both = frozenset("ab")
    assert not found.serving(both).proposal.plan.lowers
    assert found.why_fp32(both).startswith("any lower plan known loses at least as much")
    flat = {n: own_best(prices([(4.0, 8.0, 8.0)] * 3)) for n in "ab"}
    found = replace_kinds(choosing(judges), flat)
    found.serving(both)
    assert found.why_fp32(both) == "fp32 is the own best plan of each kind"


def test_a_budget_ends_the_search_with_fp32() -> None:
    judges = {"a": judge(bf16=1.0), "b": judge()}
    found = choosing(judges, trials=1)
    assert not found.serving(frozenset("ab")).proposal.plan.lowers
    assert len(judges["a"].metrics) == 1
    assert found.why_fp32(frozenset("ab")).endswith("and the limit of one trial is reached")


def test_plans_are_as_few_as_the_allowed_loss_lets_them_be() -> None:
    kinds = {"a": judge(), "b": judge(), "c": judge()}
    groups = {
        within: [sorted(one.losses) for one in choosing(kinds).chosen(within)]
        for within in (0.01, 0.7)
    }
    assert groups[0.7] == [["a", "b", "c"]]
    assert len(groups[0.01]) == 2
    assert sum("c" in group for group in groups[0.01]) == 1
    missing = choosing({**kinds, "c": judge(bf16=1.0, fp16=1.0)}).chosen(0.05)
    assert sorted(sorted(one.losses) for one in missing) == [["a"], ["b"], ["c"]]
    assert len(list(groupings("abcd", lambda group: True))) == 15


X = np.random.default_rng(1).normal(size=(48, 16)).astype(np.float32)


def net(folder: Path) -> tuple[Path, Path]:
    """A net whose own classes are the labels, and its data."""
    path, data = folder / "net.onnx", folder / "data.npz"
    rng = np.random.default_rng(0)
    weights: Weights = [rng.normal(size=s).astype(np.float32) for s in pairwise((16, 32, 8))]
    FRONTENDS[0].write(path, weights)
    import onnxruntime

    (scores,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    np.savez(data, x=X, label=np.asarray(scores).argmax(axis=1))
    return path, data


def left(folder: Path, path: Path, options: Mapping[str, Any]) -> MachineKind:
    """What a machine leaves, with given prices: no timing decides."""
    own = folder / "own.prices.json"
    assert finecast.tune(path, prices=own, max_trials=1, **options).files == (own,)
    found = MachineKind.load(own)
    assert found.machine == Machine.here()
    assert found.prices.formats[0] is FP32
    times = {FP32: 4e-3, BF16: 1e-3}
    fixed = replace(
        found.prices,
        times_s=tuple(
            tuple(times.get(fmt, 5e-3) for fmt in found.prices.formats)
            for _ in found.prices.units
        ),
        casts_s={},
    )
    low = {op: BF16 for op, formats in fixed.permitted.items() if BF16 in formats}
    return replace(found, prices=fixed, best=low)


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, finecast.Result]:
    """Prices of this machine and of one that has AVX2 alone, and the plan for both."""
    folder = tmp_path_factory.mktemp("fleet")
    path, data = net(folder)
    options: dict[str, Any] = {
        "data": data,
        "metric": "top1",
        "tolerance": 0.1,
        "policy": "auto:bf16",
        "batch": 16,
        "progress": False,
        "engine": "openvino",
    }
    here = left(folder, path, options)
    sets = tuple(s for s in ("avx2",) if s in here.machine.instruction_sets)
    slow = replace(here.machine, instruction_sets=sets)
    away = replace(here.machine, instruction_sets=("sve",))
    for name, machine in (("here", here.machine), ("avx2", slow), ("arm", away)):
        replace(here, machine=machine).write(folder / f"{name}.prices.json")
    fleet = [folder / f"{name}.prices.json" for name in ("here", "avx2", "arm")]
    found = finecast.tune(path, folder / "low.onnx", fleet=fleet, **options)
    return folder, found


def test_what_no_plan_of_this_run_has_is_said(flow: tuple[Path, finecast.Result]) -> None:
    folder, _ = flow
    found = finecast.tune(
        folder / "net.onnx",
        data=folder / "data.npz",
        metric="top1",
        tolerance=0.1,
        policy="auto:int8",
        batch=16,
        progress=False,
        engine="openvino",
        fleet=[folder / "here.prices.json"],
    )
    assert not found.improved
    assert found.why.endswith(
        "a call takes 4.00 times as long on here as by its own best plan"
    )
    assert "3 fp32: any lower plan known loses at least as much on some kind" in str(found)
    assert "the own best plan of here has bf16, which no plan here has" in str(found)


def test_a_bound_is_told_where_it_says_something() -> None:
    kind = KindOutcome(name="k", plan=0, fp32_s=3.0, best_s=1.0, time_s=1.5)
    assert proven(0.0001, [kind]) == proven(-math.inf, [kind]) == ""
    assert "loses 20.0% or more" in proven(0.2, [kind])
    assert "loses 50.0% or more" in proven(0.7, [kind])


def test_one_plan_serves_kinds_that_are_simulated_here(
    flow: tuple[Path, finecast.Result],
) -> None:
    folder, found = flow
    assert found.improved
    assert found.fleet is not None
    assert [kind.name for kind in found.fleet.kinds] == ["here", "avx2", "arm"]
    assert [kind.judged for kind in found.fleet.kinds] == [True, True, False]
    assert all(kind.loss == pytest.approx(0) for kind in found.fleet.kinds)
    assert all(kind.metric >= 0.9 for kind in found.fleet.kinds if kind.judged)
    assert BF16 in found.plan.formats.values()
    content = found.to_dict()["fleet"]
    assert content["kinds"][1]["fleet_ms"] == pytest.approx(content["kinds"][1]["own_best_ms"])
    assert content["plans"][0]["output"] == str(folder / "low.onnx")
    assert "no process here runs as arm" in str(found)
    lock = folder / "low.here.lock.json"
    assert found.lock == lock
    samples = [str(folder / f"low.{name}.lock.npz") for name in ("here", "avx2")]
    told = f"{samples[0]} and {samples[1]} have samples of your data: --no-lock"
    assert told in str(found)
    assert f"wrote {folder / 'low.onnx'}, {folder / 'low.plan.json'}, {lock}" in str(found)


def test_each_kind_has_its_lock_and_verify_takes_the_one_of_this_machine(
    flow: tuple[Path, finecast.Result],
) -> None:
    folder, found = flow
    assert found.output is not None
    machines = {
        name: Lock.load(folder / f"low.{name}.lock.json").observed.machine.instruction_sets
        for name in ("here", "avx2")
    }
    assert machines == {"here": instruction_sets(environment()), "avx2": ("avx2",)}
    assert not (folder / "low.arm.lock.json").exists()
    verified = finecast.verify(found.output)
    assert Path(verified.lock).name == "low.here.lock.json"
    assert set(verified.drifted) <= {"speed"}
    other = finecast.verify(found.output, lock=folder / "low.avx2.lock.json")
    if machines["here"] != machines["avx2"]:
        assert "instruction sets" in other.drifted


def test_prices_of_something_else_are_refused(
    flow: tuple[Path, finecast.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = flow
    kind = folder / "here.prices.json"
    command = ["tune", str(folder / "net.onnx"), "-o", str(tmp_path / "out.onnx")]
    command += ["--data", str(folder / "data.npz"), "--metric", "top1", "--tolerance", "0.1"]

    def refused(*options: str) -> str:
        assert main([*command, *options]) == 2
        return capsys.readouterr().err

    assert "two kinds of machines" in refused("--fleet", str(kind), "--fleet", str(kind))
    for option in (["--target", "trn1"], ["--prices", "p.json"], ["--resume"]):
        found = refused("--fleet", str(kind), *option)
        assert f"--fleet and {option[0]} do not go together: leave one out" in found
        assert "starting anew" not in found
    assert "--within" in refused("--within", "5%")
    assert "no share" in refused("--within", "some", "--fleet", str(kind))
    lock = folder / "low.here.lock.json"
    assert "a file of the kind finecast.lock" in refused("--fleet", str(lock))
    text = json.loads(kind.read_text())
    found = refused("--fleet", str(kind), "--engine", "onnxruntime")
    assert "of openvino:CPU, and the model runs in onnxruntime:CPU here" in found
    other = tmp_path / "other.prices.json"
    other.write_text(json.dumps(text | {"engine": {"name": "onnxruntime:CPU", "version": ""}}))
    found = refused("--fleet", str(kind), "--fleet", str(other))
    assert "here with openvino:CPU, other with onnxruntime:CPU" in found
    for change, words in (
        ({"formats": ["bf16"]}, "not a file of prices"),
        ({"rest_us": -1}, "is no time"),
        ({"version": 9}, "version 9"),
        ({"engine": None}, "'engine' has another form than tune --prices writes"),
        ({"units": [{"ops": ["a"]}]}, "'units' has another form"),
        ({"best": {"a": "int99"}}, "in 'best', "),
    ):
        changed = tmp_path / "changed.prices.json"
        changed.write_text(json.dumps(text | change))
        found = refused("--fleet", str(changed), "--batch", "16")
        assert words in found
        assert "Error" not in found
    changed.write_text(json.dumps({k: v for k, v in text.items() if k != "casts"}))
    assert "it has no 'casts'" in refused("--fleet", str(changed))
    own = MachineKind.load(kind)
    ops = [op for unit in own.prices.units for op in unit]
    own.check(own.prices.graph, ops, own.inputs)
    with pytest.raises(
        UsageError, match=r"the prices in .*here.prices.json are of another model"
    ):
        own.check("0123", ops, own.inputs)
    with pytest.raises(UsageError, match=r"was 16x16 .* 2x16 here"):
        own.check(own.prices.graph, ops, {"x": (2, 16)})


def test_models_of_an_earlier_run_are_outputs_too(tmp_path: Path) -> None:
    """So that they are replaced by --force alone, and told of where they stay."""
    for number in (1, 2, 3, 5):
        (tmp_path / f"w.{number}.onnx").touch()
    request = TuneRequest(fleet=(Path("a"), Path("b")), within=0.05)
    found = [path.name for path in outputs_of(request, tmp_path / "w.onnx")]
    assert found == ["w.1.onnx", "w.2.onnx", "w.3.onnx"]


def test_prices_are_read_as_they_were_written(
    flow: tuple[Path, finecast.Result], tmp_path: Path
) -> None:
    folder, _ = flow
    kind = MachineKind.load(folder / "own.prices.json")
    kind.write(tmp_path / "own.prices.json")
    again = MachineKind.load(tmp_path / "own.prices.json")
    assert again.prices.permitted == kind.prices.permitted
    np.testing.assert_allclose(again.prices.times_s, kind.prices.times_s, rtol=1e-5)
    assert again.best == kind.best


def test_prices_of_this_version_are_read() -> None:
    """Those that a machine left for the net of the guide's page, which also uses them."""
    kind = MachineKind.load(SAMPLE)
    assert kind.name == "vnni"
    assert kind.machine.instruction_sets == ("avx2", "avx512f", "avx512_vnni")
    assert set(kind.best.values()) == {Format.INT8}
    assert all(len(one) == len(kind.prices.formats) == 4 for one in kind.prices.times_s)


def test_a_kind_whose_engine_reads_no_limit_is_not_simulated() -> None:
    assert limit_to(instruction_sets(environment())) == {}
    assert limit_to(("sve",)) is None
    kind = MachineKind(
        name="k",
        runner=Runner(name="onnxruntime:CPU", version=""),
        machine=Machine(cpu="", cores=1, instruction_sets=("avx2",)),
        inputs={},
        prices=prices([(1.0, 1.0, 1.0)] * 3),
        best={},
    )
    if instruction_sets(environment()) != ("avx2",):
        assert kind.environment is None
        by_openvino = replace(kind, runner=Runner(name="openvino:CPU", version=""))
        assert by_openvino.environment is not None
