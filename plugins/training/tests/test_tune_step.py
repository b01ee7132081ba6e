"""A training step as a tuning target: what is chosen, by what, and what is refused."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed, nn
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from finecast import Format, Plan, Policy
from finecast.errors import UsageError
from finecast.planning import predicted_error
from finecast.progress import silent
from finecast_training import replay
from finecast_training.backend import Backend, JointGraph, compiled
from finecast_training.measures import Exactness, GradientDeviation, StepFigures, deviations
from finecast_training.replay import Replay
from finecast_training.sensitivities import analysed
from finecast_training.step import LossOf
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_search import StepCandidate, StepSearch
from finecast_training.step_tuning import StepResult, _same_everywhere, _told_once
from finecast_training.target import Sampling, StepCost, StepTarget
from finecast_training.tuned_step import TunedStep
from plugins.training.tests.stated_steps import stated

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Net(nn.Module):
    """Two layers, a norm between them, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


def batches() -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(24, 16), torch.randint(0, 4, (24,))) for _ in range(3)]


def seconds(plan: StepPlan) -> float:
    """Stated times: a plan with less memory takes a little longer than one without."""
    of_way = {Way.FP32: 2.0, Way.AUTOCAST: 1.0, Way.PLANNED: 0.8}[plan.way]
    return of_way * (1.1 if plan.memory.value == "least" else 1.0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    stated(monkeypatch, seconds)


@pytest.fixture(scope="module")
def tuned() -> tuple[nn.Module, StepResult, dict[str, torch.Tensor]]:
    """One search, its module, and the module's state before."""
    with pytest.MonkeyPatch.context() as patched:
        from finecast.engines.torch import rates
        from finecast.engines.torch.costs import KernelTimes

        def rate(*_: object) -> rates.Rate:
            return rates.Rate(
                product_tflops=0.001, speed=4.0, bandwidth_gb_s=50.0, overhead_s=1e-7
            )

        patched.setattr(rates, "rate", rate)
        patched.setattr(KernelTimes, "time_s", lambda *_: None)  # by the rates
        stated(patched, seconds)
        torch.manual_seed(0)
        net = Net()
        before = copy.deepcopy(net.state_dict())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        result = ft.tune_step(
            net, loss, batches(), optimizer=optimizer, max_memory=10**9, moments=2,
            trial_steps=4, seeds=2,
        )  # fmt: skip
    return net, result, before


def test_random_numbers_go_on_as_before() -> None:
    net, some = Net(), batches()
    before = torch.get_rng_state()
    with StepTarget.of(net, loss, some, [], Sampling(moments=2, between=1)).compared():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


Tuned = tuple[nn.Module, StepResult, dict[str, torch.Tensor]]


def test_the_fastest_plan_no_worse_than_autocast_is_taken(tuned: Tuned) -> None:
    _, result, _ = tuned
    assert result.plan.way is Way.PLANNED
    assert result.plan.counts["bf16"] > 0
    autocast = next(c for c in result.candidates if c.plan.way is Way.AUTOCAST)
    best = result.best
    assert best.compiled is not None
    assert autocast.compiled is not None
    assert best.compiled.beyond(autocast.compiled) == []
    assert best.speed[1] == pytest.approx(1.25)
    names = [c.plan.name for c in result.candidates]
    assert any("solver" in n for n in names)
    assert "RAF's rules" in names
    assert all(c.why for c in result.candidates if c is not best and c.plan != best.plan)


def test_slow_steps_and_little_memory_take_fewer_samples() -> None:
    cost = StepCost(seconds=0.01, state_bytes=3, sample_bytes=2, free_bytes=1000)
    full = cost.sampling(96.0)
    assert full == Sampling(moments=3, between=4, batches=2)
    slow = replace(cost, seconds=2.0).sampling(96.0)
    assert slow == Sampling(moments=3, between=2, batches=1)
    assert replace(cost, seconds=50.0).sampling(96.0).samples == 1
    small = replace(cost, free_bytes=60).sampling(96.0)  # of which a quarter may be taken
    assert small == Sampling(moments=3, between=2, batches=1)
    assert replace(cost, free_bytes=0).sampling(96.0).samples == 1
    stated = replace(cost, seconds=50.0).sampling(96.0, moments=4, between=0)
    assert (stated.moments, stated.between) == (4, 0)


def test_what_a_short_time_allows_is_compared_and_said(tuned: Tuned) -> None:
    """One plan is compiled in any case, beside fp32 and autocast."""
    net = Net()
    result = ft.tune_step(net, loss, batches(), max_memory="1GB", timeout_s=1e-3)
    assert result.sampling == Sampling(moments=1, between=2, batches=1)
    assert "compared on 1 batch at 1 moment of training, after each 2 steps" in str(result)
    assert "some plans were not compared: timeout_s is 0.001" in result.warnings
    assert len(result.candidates) < len(tuned[1].candidates)
    timed = [c for c in result.candidates if c.compiled is not None]
    assert len(timed) <= 3
    assert {Way.FP32, Way.AUTOCAST} <= {c.plan.way for c in timed}


def test_figures_of_some_samples_are_held_against_those_of_the_same() -> None:
    def figures(*errors: float) -> StepFigures:
        return StepFigures.of(
            [
                {"w": GradientDeviation(error=e, angle=0.0, vanished=0.0, nonfinite=0.0)}
                for e in errors
            ]
        )

    most = figures(0.1, 0.2, 0.3)
    assert figures(0.1).beyond(most) == []
    assert figures(0.11).beyond(most) == ["error", "worst_error"]
    assert figures(0.1, 0.2).beyond(most) == []


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    ("lost", "autocasts", "worse"),
    [
        ({"embedding": 1}, {}, False),  # of 65,552 elements
        ({"embedding": 33}, {"embedding": 30}, False),
        ({"embedding": 5}, {}, True),
        ({"embedding": 2000}, {"embedding": 1000}, True),
        ({"embedding": 1000, "bias": 16}, {"embedding": 1000}, True),
    ],
)
def test_single_elements_that_became_zero_are_chance(
    lost: dict[str, int], autocasts: dict[str, int], worse: bool, samples: int
) -> None:
    """One element of 263,808 that cancelled in bf16 had a good plan left for fp32."""
    torch.manual_seed(0)
    wanted = {"embedding": torch.randn(512, 128) + 9, "bias": torch.ones(16)}

    def exactness(zeros: dict[str, int]) -> Exactness:
        got = {name: tensor.clone() for name, tensor in wanted.items()}
        for name, count in zeros.items():
            got[name].flatten()[:count] = 0
        figures = StepFigures.of([deviations(got, wanted, wanted)] * samples)
        fine = StepFigures.of([deviations(wanted, wanted, wanted)] * samples)
        return Exactness(gradients=replace(fine, vanished=figures.vanished,
                                           chance=figures.chance), updates=fine)  # fmt: skip

    beyond = exactness(lost).beyond(exactness(autocasts))
    assert [text.partition(" (")[0] for text in beyond] == worse * ["gradients: vanished"]


def test_what_is_worse_is_told_with_its_figures() -> None:
    def exactness(error: float, angle: float, vanished: float) -> Exactness:
        lost = GradientDeviation(
            error=error, angle=angle, vanished=vanished, nonfinite=0.0, elements=10**4
        )
        return Exactness(gradients=StepFigures.of([{"w": lost}]), updates=StepFigures.of([]))

    assert exactness(0.02, 0.5, 0.002).beyond(exactness(0.01, 1e-4, 0.0)) == [
        "gradients: error (2%, autocast 1%)",
        "gradients: worst error (2%, autocast 1%)",
        "gradients: angle (60 degrees, autocast 0.81)",
        "gradients: vanished (0.2%, autocast 0%)",
    ]


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_deviations_are_those_of_fp64(scale: float) -> None:
    """Blocks of fp32 are summed, and numbers that fp32 cannot square are taken as fp64."""
    torch.manual_seed(0)
    wanted = torch.randn(700, 600) * scale
    got = wanted + 1e-3 * scale * torch.randn(700, 600)
    got[0] = 0
    right, off = wanted.double(), (got.double() - wanted.double())
    own = GradientDeviation.of(got, wanted)
    assert own.error == pytest.approx(float(off.norm() / right.norm()), rel=1e-4)
    cosine = (got.double() * right).sum() / got.double().norm() / right.norm()
    assert own.angle == pytest.approx(float(1 - cosine), rel=1e-4)
    assert own.vanished == pytest.approx(1 / 700, rel=1e-2)
    got[3, 5] = float("nan")
    assert GradientDeviation.of(got, wanted).nonfinite == pytest.approx(1 / wanted.numel())


@pytest.mark.parametrize("stalls", [False, True])
def test_for_the_least_memory_states_of_the_optimizer_are_held_low(
    stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objection(self: Replay, own: object, most: object) -> str:
        del own, most
        return "it would stall" if stalls or "exp_avg_sq" in self.lost else ""

    monkeypatch.setattr(Replay, "objection", objection)
    monkeypatch.setattr(replay, "_STEPS", 2)
    monkeypatch.setattr(StepSearch, "held_gradients", lambda *_: 0 if stalls else 100)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    result = ft.tune_step(
        net, loss, batches(), optimizer=optimizer, objective="memory", max_memory=10**9,
        micro_batches=2, moments=1, between=1, trial_steps=2, seeds=1, timeout_s=1e-3,
    )  # fmt: skip
    assert result.plan.states == (() if stalls else ("exp_avg", "gradients"))
    assert "exp_avg_sq of the optimizer stays in fp32: it would stall" in result.warnings
    elements = sum(p.numel() for p in net.parameters())
    assert result.held_bytes == (0 if stalls else 2 * elements + 100)
    held = "exp_avg, gradients of the optimizer in bf16 between its steps"
    assert (held in str(result)) is not stalls
    result.step(*batches()[0]).backward()
    optimizer.step()
    low = torch.float32 if stalls else torch.bfloat16
    assert optimizer.state[net.first.weight]["exp_avg"].dtype is low
    assert net.first.weight.grad is not None
    assert net.first.weight.grad.dtype is low


class Attention(nn.Module):
    """Fused attention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x).view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rows[0], rows[1], rows[2])
        return self.last(mixed.transpose(1, 2).reshape(24, 16))


def test_attention_stays_in_fp32_where_its_kernel_is_slower_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finecast.engines.torch.costs import KernelTimes

    def time_s(_: KernelTimes, node: Any, fmt: Format, __: float) -> float:
        slower = "attention" in node.op
        return 1e-3 if (fmt is Format.FP32) is not slower else 1e-4

    monkeypatch.setattr(KernelTimes, "time_s", time_s)
    net = Attention()
    result = ft.tune_step(net, loss, batches(), moments=1, max_memory=10**9)
    (named,) = (c for c in result.candidates if "fp32 where faster" in c.plan.name)
    formats = {d.op: d.format for plan in named.plan.plans for d in plan.decisions}
    attention = {op: fmt for op, fmt in formats.items() if "attention" in op}
    assert len(attention) == 2  # forwards and backwards
    assert set(attention.values()) == {Format.FP32}
    assert formats["addmm"] is Format.BF16
    autocast = next(c for c in result.candidates if c.plan.way is Way.AUTOCAST)
    assert named.exactness.error < 1.1 * autocast.exactness.error


def test_roundings_in_front_of_a_saved_result_have_errors() -> None:
    """The backward pass reads the result of the softmax: errors go on through that."""
    last: list[float] = []

    def chosen(joint: JointGraph) -> Plan:
        analysis, why = analysed(joint, joint.planner)
        assert not why
        formats = dict.fromkeys(joint.planner.permissions, Format.FP32)
        (node,) = (n for n in joint.graph.float_nodes if n.name.endswith("last/addmm_1"))
        last.append(predicted_error(analysis, formats | {node.id: Format.BF16}))
        return joint.planner.highest()

    net, (x, y) = Net().eval(), batches()[0]
    compiled(LossOf(net, loss).forward, Backend("auto:bf16", chooser=chosen, kernels=False))(
        x, y
    )
    assert [1e-4 < math.sqrt(error) < 1e-2 for error in last] == [True]


def test_the_module_of_the_user_stays_as_it_is(tuned: Tuned) -> None:
    net, _, before = tuned
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.get_submodule("drop").p == 0.5


def test_the_result_says_what_it_is(tuned: Tuned) -> None:
    _, result, _ = tuned
    text = str(result)
    assert "x2.5 as fast as compiled fp32, x1.25 as compiled autocast" in text
    assert "MB at the peak, autocast" in text
    assert "beside fp32" in text
    assert "over 2 seeds" in text
    compiled, _, ops = result.tables
    assert {"torch.autocast", "fp32"} <= {row[0] for row in compiled.rows}
    assert {row[2] for row in ops.rows} == set(result.plan.counts)
    assert all(row[3] for row in ops.rows)
    assert any("backward" in row[1] for row in ops.rows)
    content = result.to_dict()
    assert content["trial"]["steps"] == 4
    assert content["best"]["gradients"]["nonfinite"] == 0


def test_the_step_trains_and_a_saved_plan_gives_the_same_step(
    tuned: Tuned, tmp_path: Path
) -> None:
    net, result, _ = tuned
    path = tmp_path / "step.json"
    result.save(path)
    with pytest.raises(UsageError, match="output exists"):
        result.save(path)
    again = ft.load_step(path, copy.deepcopy(net), loss)
    assert again.plan == result.plan
    x, y = batches()[0]
    grads: list[torch.Tensor] = []
    for step in (result.step, again):
        step.module.zero_grad()
        step.module.eval()  # no dropout
        step(x, y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in step.module.parameters()
                                if p.grad is not None]))  # fmt: skip
        assert step.plans[0].counts["bf16"] > 0
        step.module.zero_grad()
    assert torch.equal(*grads)
    plain = copy.deepcopy(net).eval()
    loss(plain, x, y).backward()
    want = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert 0 < float((grads[0] - want).norm() / want.norm()) < 0.05


def test_a_plan_holds_for_a_graph_of_another_size(tuned: Tuned) -> None:
    _, result, _ = tuned
    step = result.step
    x, y = batches()[0]
    step(x[:7], y[:7])
    formats = {(d.node, d.op): d.format for d in result.plan.plans[0].decisions}
    other = step.plans[-1]
    known = [d for d in other.decisions if (d.node, d.op) in formats]
    assert len(known) > 0.8 * len(other.decisions)
    assert all(d.format is formats[d.node, d.op] for d in known)


def test_a_step_without_plans_says_who_chooses() -> None:
    for way, told in ((Way.AUTOCAST, "torch.autocast chooses"), (Way.FP32, "all are in fp32")):
        plan = StepPlan(name="without", policy="auto:bf16", way=way)
        best = StepCandidate(plan=plan, exactness=cast("Any", None))
        table = StepResult(
            step=cast("Any", None), candidates=(), best=best,
            sampling=Sampling(moments=1, between=0),
        ).explain()  # fmt: skip
        assert not table.rows
        assert told in " ".join(table.notes)


def searched(result: StepResult, objective: str, most: int | None) -> StepSearch:
    """The search of a result, asked for something else."""
    candidates = [replace(c, why="") for c in result.candidates]
    search = StepSearch(
        target=cast("Any", None), policy=Policy.parse("auto:bf16"), objective=objective,
        max_memory=most, progress=silent, candidates=candidates,
    )  # fmt: skip
    search.fp32, search.autocast = (
        next(c for c in candidates if c.plan.way is way) for way in (Way.FP32, Way.AUTOCAST)
    )
    return search


def test_the_least_memory_is_an_objective_and_a_bound(tuned: Tuned) -> None:
    order = searched(tuned[1], "memory", 10**9).allowed()
    taken = [c.memory_bytes for c in order]
    assert taken == sorted(taken)
    assert len(set(taken)) > 1
    within = searched(tuned[1], "time", taken[0])
    assert {c.memory_bytes for c in within.allowed()} == {taken[0]}
    assert any(" allowed" in c.why for c in within.candidates)
    none = searched(tuned[1], "time", 1)
    assert none.best().plan.way is Way.FP32
    assert none.notes == ["no plan takes at most 1e-06 MB"]


def test_a_compiled_plan_that_is_worse_than_autocast_is_not_taken(tuned: Tuned) -> None:
    search = searched(tuned[1], "time", 10**9)
    before = search.best()
    assert before.compiled is not None
    same = [c for c in search.candidates if c.plan.plans == before.plan.plans]
    lost = GradientDeviation(error=1.0, angle=0.5, vanished=0.0, nonfinite=0.2)
    samples = [{"first.weight": lost}] * len(before.compiled.gradients.error)
    for one in same:
        one.compiled = replace(before.compiled, gradients=StepFigures.of(samples))
    after = search.best()
    assert after.plan.plans != before.plan.plans
    (why,) = {c.why for c in same}
    assert why.startswith("worse than torch.autocast: overflow: Inf or NaN first in the")
    assert why.endswith("gradient of first.weight (20% of its elements)")


def test_an_autocast_that_is_compiled_wrongly_is_no_measure(tuned: Tuned) -> None:
    """Compiled autocast gave gradients of a U-Net that were off by two thirds, and won."""
    search = searched(tuned[1], "time", 10**9)
    autocast = search.autocast
    assert autocast.compiled is not None
    lost = GradientDeviation(error=0.7, angle=0.2, vanished=0.3, nonfinite=0.0)
    samples = [{"first.weight": lost}] * len(autocast.compiled.gradients.error)
    autocast.compiled = replace(autocast.compiled, gradients=StepFigures.of(samples))
    autocast.seconds = 1e-9
    best = search.best()
    assert best is not autocast
    assert autocast.why.startswith("worse than torch.autocast: gradients: error")
    assert best.exactness.error < 1.1 * autocast.exactness.error


def test_where_low_formats_gain_nothing_the_step_stays_in_fp32(tuned: Tuned) -> None:
    search = searched(tuned[1], "time", None)
    search.fp32.seconds, search.fp32.memory_bytes = 0.1, search.autocast.memory_bytes
    assert search.best() is search.fp32
    assert all(c.why for c in search.allowed()[1:])


def test_a_faster_fp32_may_take_the_memory_that_it_takes(tuned: Tuned) -> None:
    """Autocast that took four times as long was chosen for its memory."""
    search = searched(tuned[1], "time", None)
    most = max(c.memory_bytes for c in search.candidates) + 1
    search.fp32.seconds, search.fp32.memory_bytes = 0.1, most
    assert search.best() is search.fp32
    search.fp32.seconds = 10.0
    assert search.best().memory_bytes <= search.autocast.memory_bytes
    assert search.fp32.why.endswith(" allowed")


def raising(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"labels of {len(y)} rows\nand {net(x).shape}")


def without_autocast(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("no bf16 for me")
    return loss(net, x, y)


def scheduler() -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Net().parameters()), 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": lambda net, x, _: net(x)}, r"the loss is a tensor of shape \(24, 4\)"),
        ({"loss": lambda _, x, __: x.sum()}, "does not depend on parameters"),
        ({"loss": lambda *_: 1.0}, "the loss is a float"),
        ({"loss": 5}, "an int is no loss"),
        ({"batches": [torch.ones(3)]}, "batch 0 is a Tensor, and no tuple"),
        ({"batches": []}, "there is no batch"),
        ({"batches": 5}, "a list is expected for batches"),
        ({"batches": [(torch.ones(2, 16),), (torch.ones(3, 16),)]}, r"batch 1 has the form"),
        ({"model": Net().requires_grad_(False)}, "no parameter of the module requires"),
        ({"model": nn.ReLU()}, "no parameter of the module requires"),
        ({"model": nn.LazyLinear(4)}, "'weight' has no size yet: the module is lazy"),
        ({"loss": lambda net, x, _: net(x).sum() * 1j}, "the loss is a complex tensor"),
        ({"loss": lambda net, _: net.first.bias.sum()}, "takes .net, _., and is called with"),
        ({"loss": raising}, "the loss raised ValueError: labels of 24 rows"),
        ({"loss": without_autocast}, "under torch.autocast, .* fails: no bf16 for me"),
        ({"optimizer": torch.optim.LBFGS(Net().parameters())}, "a LBFGS needs a closure"),
        ({"optimizer": scheduler()}, "a StepLR is no optimizer"),
        ({"model": Net().to("meta")}, "the module is on meta, and tensor 0"),
        ({"optimizer": torch.optim.SGD(Net().parameters())}, "has none of the module's"),
        ({"optimizer": [3]}, "an int is no optimizer"),
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"policy": "all:int8"}, "training steps have no plans in int8 .policy.: use one of"),
        ({"max_memory": 0}, "0 is no size .max_memory."),
        ({"max_memory": "lots"}, "'lots' is no size .max_memory.: give a number of B, KB, MB"),
        ({"moments": 0}, "moments is 0"),
        ({"timeout_s": 0.0}, "0 seconds are no time"),
        ({"max_memry": 1}, "did you mean max_memory"),
        ({"seeds": 3}, "seeds changes nothing without a trial .*: give trial_steps"),
        ({"trial_steps": 5}, "trial_steps changes nothing without an optimizer .*: give opt"),
        ({"micro_batches": 4}, "micro_batches changes nothing without an optimizer"),
    ],
)
def test_what_cannot_be_tuned_is_refused(change: dict[str, Any], said: str) -> None:
    call: dict[str, Any] = {"model": Net(), "loss": loss, "batches": batches(), **change}
    with pytest.raises(UsageError, match=said):
        ft.tune_step(call.pop("model"), call.pop("loss"), call.pop("batches"), **call)


def test_micro_batches_that_nothing_adds_up_are_refused() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(UsageError, match=r'micro_batches .*: give objective="memory"'):
        ft.tune_step(net, loss, batches(), optimizer=optimizer, micro_batches=2)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (partial(torch.autocast, "cpu", torch.bfloat16), r"torch.autocast\('cpu'\) is on"),
        (torch.no_grad, r"torch.no_grad\(\) is on"),
        (torch.inference_mode, r"torch.inference_mode\(\) is on"),
    ],
)
def test_modes_in_which_fp32_has_no_gradients_are_named(
    mode: Callable[[], Any], said: str
) -> None:
    """Under autocast the reference itself would be in bf16."""
    with mode(), pytest.raises(UsageError, match=said):
        ft.tune_step(Net(), loss, batches())
    with mode(), pytest.raises(UsageError, match=said):
        ft.TrainingStep(Net(), loss, batches()[0])


def test_what_is_compiled_is_not_called_under_autocast() -> None:
    x, y = batches()[0]
    plan = StepPlan(name="fp32", policy="auto:bf16", way=Way.FP32)
    calls: list[Callable[[], object]] = [
        lambda: ft.compile(Net())(x),
        lambda: torch.compile(torch.nn.Linear(16, 4), backend="finecast")(x),
        lambda: TunedStep(plan, Net(), loss)(x, y),
    ]
    for call in calls:
        with torch.autocast("cpu"), pytest.raises(Exception, match="is on: it casts ops by"):
            call()


def test_a_call_without_gradients_is_no_step_of_training() -> None:
    step = TunedStep(StepPlan(name="fp32", policy="auto:bf16", way=Way.FP32), Net(), loss)
    step.schedule({1: StepPlan(name="autocast", policy="auto:bf16", way=Way.AUTOCAST)})
    with torch.no_grad():
        step(*batches()[0])
    step(*batches()[0])
    assert step.plan.way is Way.FP32
    step(*batches()[0])
    assert step.plan.way is Way.AUTOCAST


class Spectrum(nn.Module):
    """Its transform has no kernel in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.first(x)).abs()


@contextmanager
def begun(net: nn.Module) -> Generator[StepSearch]:
    """A search that has compared fp32 and autocast."""
    target = StepTarget.of(net, loss, batches()[:1], [], Sampling(moments=1, between=0))
    search = StepSearch(
        target=target, policy=Policy.parse("auto:bf16"), objective="time", max_memory=None,
        progress=silent,
    )  # fmt: skip
    with target.compared():
        search.autocast, search.fp32 = (
            search._compare(StepPlan(name=way.value, policy="auto:bf16", way=way))
            for way in (Way.AUTOCAST, Way.FP32)
        )
        yield search


def test_a_plan_whose_kernels_fail_is_left_out_and_named() -> None:
    with begun(Spectrum()) as search:
        lowest = Policy.parse("all:bf16")
        assert search._by_rules("products", Policy.parse("matmult:bf16"), "finecast")
        assert search._by_rules("all ops", lowest, "finecast") is None
        assert "all ops do not apply: MKL FFT doesn't support" in search.notes[-1]
        other = StepPlan(name="another process's", policy="all:bf16")
        assert "another process's: left out, MKL FFT" in search.objection(other)


def test_a_plan_whose_compiled_kernels_fail_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiles = StepPlan.compile

    def failing(self: StepPlan, module: Any, *, kernels: bool = True) -> Any:
        def call(*_: object) -> None:
            raise RuntimeError("no kernel\nat all")

        planned = self.way is Way.PLANNED and kernels
        return call if planned else compiles(self, module, kernels=kernels)

    with begun(nn.Sequential(nn.Linear(16, 4))) as search:
        products = search._by_rules("products", Policy.parse("matmult:bf16"), "finecast")
        assert products is not None
        monkeypatch.setattr(StepPlan, "compile", failing)
        search._measure([products])
        assert products.why == "its kernels fail: no kernel"
        assert search.best().plan.way in {Way.AUTOCAST, Way.FP32}


def test_processes_take_the_first_plan_that_holds_on_all_their_batches(
    monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    search = searched(tuned[1], "time", 10**9)
    search.graphs = ["graph"]
    best = search.best()

    def gather(everywhere: list[Any], own: Any) -> None:
        """Another process, on whose batches planned formats are worse."""
        planned = isinstance(own, str) and asked[-1].way is Way.PLANNED
        everywhere[:] = [own, "gradients: error" if planned else own]

    def objection(_: StepSearch, plan: StepPlan) -> str:
        asked.append(plan)
        return ""

    asked: list[StepPlan] = []
    monkeypatch.setattr(StepSearch, "objection", objection)
    for name, stub in (("is_initialized", lambda: True), ("get_world_size", lambda: 2)):
        monkeypatch.setattr(distributed, name, stub)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    assert best.plan.way is Way.PLANNED
    assert _same_everywhere(search, best).way is Way.AUTOCAST
    assert f"{best.plan.name} was not taken: in process 1 it is worse" in search.notes[0]


def test_what_is_zero_but_for_roundings_does_not_vanish() -> None:
    wanted = torch.tensor([1.0, -2.0, 1e-9, 1e-3])
    got = torch.tensor([1.0, -2.0, 0.0, 0.0])
    assert GradientDeviation.of(got, wanted).vanished == 0.25
    tiny = torch.full((4,), 1e-30)
    assert GradientDeviation.of(torch.zeros(4), tiny).vanished == 1.0


def test_an_error_of_three_percent_more_than_autocast_s_is_worse() -> None:
    def figures(error: float) -> StepFigures:
        deviation = GradientDeviation(error=error, angle=0.0, vanished=0.0, nonfinite=0.0)
        return StepFigures.of([{"weight": deviation}] * 4)

    assert figures(0.0103).beyond(figures(0.01)) == ["error", "worst_error"]
    assert figures(0.01005).beyond(figures(0.01)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "not the plan of a training step"),
        ("{}", "not the plan of a training step"),
        ('{"kind": "finecast.step", "version": 9}', "a plan of version 9"),
        ('{"kind": "finecast.step", "version": 1}', "not the plan of a training step"),
    ],
)
def test_a_file_that_is_no_plan_of_a_step(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        ft.load_step(path, Net(), loss)


def test_a_plan_of_a_step_reads_back_equal(tuned: Tuned) -> None:
    plan = replace(tuned[1].plan, scale=2.0)
    assert StepPlan.from_json(plan.to_json()) == plan


@pytest.mark.long
def test_raf_s_example_with_loss_and_optimizer_in_the_step(
    monkeypatch: pytest.MonkeyPatch, fast_bf16: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer of BERT; its two figures are the time of a step and its memory."""
    from examples import bert_layer_training as example

    sizes = {"BATCH": 2, "TOKENS": 16, "VOCABULARY": 64, "WIDTH": 32, "HEADS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(example, name, size)
    model = example.Model()
    some = torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))
    call = example.tuned(model, some, "bf16")
    said = capsys.readouterr().out
    assert "as compiled autocast" in said
    assert "MB at the peak" in said
    step = example.training_step(model, call, scale=False)
    before = model.head.weight.detach().clone()
    example.show("AMP, finecast, tuned", step, model, some, repeats=1)
    milliseconds, megabytes = capsys.readouterr().out.splitlines()
    assert float(milliseconds.split()[-1]) > 0
    assert float(megabytes.split()[-1]) > 0
    assert not torch.equal(before, model.head.weight)


class Overflowing(nn.Module):
    """Overflows in fp16 before its last layer, which is innocent."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(1e-6 * self.wide(1e6 * x)))


def test_an_overflow_is_told_with_the_verb_that_finds_its_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of the last layer was named, whose input was NaN already."""
    monkeypatch.setattr(StepSearch, "_planned", lambda _: ())
    monkeypatch.setattr(StepSearch, "_measure", lambda *_: None)
    monkeypatch.setattr(StepSearch, "best", lambda self: self.fp32)
    sampling = Sampling(moments=1, between=0, batches=1)
    search = StepSearch(
        target=StepTarget.of(Overflowing(), loss, batches(), [], sampling),
        policy=Policy.parse("auto:fp16"), objective="time", max_memory=None, progress=silent,
    )  # fmt: skip
    search.run()
    (note,) = search.notes
    assert note.startswith(
        "torch.autocast: overflow: Inf or NaN first in the gradient of last"
    )
    assert note.endswith("finecast.blame of a finecast.torch.TrainingStep names the op")


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_warning_of_each_compilation_is_shown_once() -> None:
    def tune() -> None:
        with _told_once():
            for text in ("tf32 is skipped", "fp8 is skipped", "tf32 is skipped"):
                with warnings.catch_warnings():  # as around each compilation
                    warnings.warn(text, stacklevel=1)

    with pytest.warns(UserWarning, match="skipped") as shown:
        tune()
    assert [str(w.message) for w in shown] == ["tf32 is skipped", "fp8 is skipped"]
    with pytest.warns(UserWarning, match="skipped") as shown:
        tune()
    assert len(shown) == 2


def test_fp16_has_a_scale_of_the_loss_that_keeps_gradients_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finecast.engines.torch import rates

    def rate(*_: object) -> rates.Rate:
        return rates.Rate(product_tflops=1.0, speed=4.0, bandwidth_gb_s=50.0, overhead_s=1e-7)

    monkeypatch.setattr(rates, "rate", rate)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))

    def steep(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 64.0 * loss(net, x, y)

    result = ft.tune_step(
        net, steep, batches(), policy="auto:fp16", max_memory=10**9, moments=1, between=0,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
    )  # fmt: skip
    assert 1.0 < result.plan.scale < 2.0**16
    assert f"the loss is multiplied by {result.plan.scale:g}" in str(result)
    scaler, before = result.step.scaler(), net[0].get_parameter("weight").detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler.scale(result.step(*batches()[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, net[0].get_parameter("weight"))
    assert scaler.is_enabled()
