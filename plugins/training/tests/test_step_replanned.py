"""Tuned steps while they train: plans chosen anew, schedules, faults, and what is around."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import finecast.torch as ft
from finecast import Format, Policy
from finecast.errors import UsageError
from finecast.progress import silent
from finecast_training.backend import Backend, compiled
from finecast_training.faults import overflow, stalled
from finecast_training.measures import (
    FEWEST,
    Exactness,
    GradientDeviation,
    StepFigures,
    deviations,
)
from finecast_training.optimizer_states import GRADIENTS
from finecast_training.paired_trial import PairedTrial, paired_trial
from finecast_training.replay import Replay, Replayed
from finecast_training.step import LossOf
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_search import StepCandidate, StepSearch
from finecast_training.target import Sampling, StepTarget
from finecast_training.tuned_step import TunedStep

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
POLICY = "auto:bf16"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is built."""
    compiles = StepPlan.compile

    def op_by_op(self: StepPlan, module: Any, *, kernels: bool = True) -> Any:
        del kernels
        return compiles(self, module, kernels=False)

    monkeypatch.setattr(StepPlan, "compile", op_by_op)
    torch.manual_seed(0)
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.again = again

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(torch.tanh(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return self.last(y)


def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 8), torch.randint(0, 4, (12,))


def planned(policy: str, net: nn.Module, of: Callable[..., Any] = loss) -> StepPlan:
    """The plan by a policy."""
    backend = Backend(policy, kernels=False)
    torch.compile(LossOf(net, of), backend=backend)(*batch()).backward()
    net.zero_grad()
    return StepPlan(name=policy, policy=policy, plans=tuple(backend.plans))


def target(net: nn.Module, *optimizers: optim.Optimizer, **more: int) -> StepTarget:
    how = {"moments": 1, "between": 1, **more}
    return StepTarget.of(net, loss, [batch(), batch()], list(optimizers), Sampling(**how))


# ------------------------------------------------------------------------- chosen anew


def test_a_plan_that_became_worse_than_autocast_is_left(fast_bf16: None) -> None:
    net = Net()
    step = TunedStep(planned("matmult:bf16", net), net, loss)
    with pytest.raises(UsageError, match="the step was not called"):
        step.replan()
    bad = step.plan
    exact = StepPlan(name="all in fp32", policy=POLICY, way=Way.FP32)
    worst = StepFigures.of(
        [{"first.weight": GradientDeviation(error=9, angle=1, vanished=0, nonfinite=0)}]
    )
    step.known = (bad, exact)
    step(*batch()).backward()
    compares = StepTarget.exactness

    def now(self: StepTarget, call: Any, scale: float = 1.0, samples: Any = None) -> Exactness:
        planned = getattr(call, "finecast_plans", None) is not None
        own = compares(self, call, scale, samples)
        return Exactness(gradients=worst, updates=worst) if planned else own

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepTarget, "exactness", now)
        done = step.replan()
    assert done.changed
    assert done.before is bad
    assert step.plan is exact
    assert "matmult:bf16 is now worse than torch.autocast: gradients: error" in done.why
    back = step.replan()  # what was in the way is gone: the fastest is taken again
    assert back.after is bad
    assert "faster" in back.why
    assert step.replan().why == "it is no worse than torch.autocast, as before"
    assert [d.changed for d in step.history] == [True, True, False]
    shown = [str(done) for done in step.history]
    assert shown[0].startswith("<Replanned before call 1: all in fp32, as matmult:bf16 is now")
    assert shown[2] == (
        "<Replanned before call 1: matmult:bf16 is kept, as it is no worse than"
        " torch.autocast, as before>"
    )
    assert str(step).startswith("<TunedStep by matmult:bf16: ")
    assert " bf16" in str(step)


def test_plans_are_compared_on_as_many_batches_as_tell_chance(fast_bf16: None) -> None:
    net = Net()
    step = TunedStep(planned("matmult:bf16", net), net, loss)
    for _ in range(5):
        step(*batch()).backward()
    counts: list[int] = []
    compares = StepTarget.exactness

    def counted(self: StepTarget, *arguments: Any) -> Exactness:
        counts.append(len(self.samples))
        return compares(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepTarget, "exactness", counted)
        step.replan()
    assert set(counts) == {FEWEST}


def test_plans_are_chosen_anew_every_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    step = TunedStep(StepPlan(name="fp32", policy=POLICY, way=Way.FP32), net, loss)
    calls: list[int] = []
    monkeypatch.setattr(TunedStep, "replan", lambda self: calls.append(self._calls))
    step.replan_every(2)
    for _ in range(5):
        step(*batch())
    assert calls == [2, 4]
    with pytest.raises(UsageError, match="calls is -1"):
        step.replan_every(-1)


def test_a_schedule_changes_plans_at_its_calls() -> None:
    net = Net()
    fp32, low = StepPlan(name="fp32", policy=POLICY, way=Way.FP32), planned("all:bf16", net)
    step = TunedStep(low, net, loss)
    step.schedule({2: fp32})
    followed = []
    for _ in range(4):
        step(*batch())
        followed.append(step.plan)
    assert followed == [low, low, fp32, fp32]
    assert step.history[0].calls == 2
    with pytest.raises(UsageError, match="is no call and plan"):
        step.schedule({1: 5})


def test_what_is_scheduled_holds_although_plans_are_chosen_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, calls = Net(), list[int]()
    low, fp32 = planned("all:bf16", net), StepPlan(name="fp32", policy=POLICY, way=Way.FP32)
    step = TunedStep(low, net, loss)
    monkeypatch.setattr(TunedStep, "replan", lambda self: calls.append(self._calls))
    step.replan_every(2)
    step.schedule({3: fp32})
    for _ in range(7):
        step(*batch())
    assert calls == [2]
    assert step.plan is fp32
    step.schedule({})
    step.replan_every(1)
    step(*batch())
    assert calls == [2, 7]


def test_a_schedule_for_calls_that_are_over_holds_from_the_next_one() -> None:
    net = Net()
    fp32, low = StepPlan(name="fp32", policy=POLICY, way=Way.FP32), planned("all:bf16", net)
    step = TunedStep(fp32, net, loss)
    for _ in range(3):
        step(*batch())
    step.schedule({1: fp32, 2: low})
    step(*batch())
    assert step.plan is low
    assert [done.calls for done in step.history] == [3]


def test_a_plan_that_is_followed_again_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, compiles = list[str](), StepPlan.compile

    def counted(self: StepPlan, module: Any, *, kernels: bool = True) -> Any:
        compiled.append(self.name)
        return compiles(self, module, kernels=kernels)

    net = Net()
    fp32, low = StepPlan(name="fp32", policy=POLICY, way=Way.FP32), planned("all:bf16", net)
    monkeypatch.setattr(StepPlan, "compile", counted)
    step = TunedStep(low, net, loss)
    for plan in (fp32, low, fp32):
        step.follow(plan)
    assert compiled == ["all:bf16", "fp32"]


def test_the_smaller_last_batch_of_an_epoch_ends_no_training() -> None:
    net = Net()
    step = TunedStep(StepPlan(name="fp32", policy=POLICY, way=Way.FP32), net, loss)
    step.replan_every(2)
    x, y = batch()
    for rows in (12, 5, 12):
        step(x[:rows], y[:rows]).backward()
    assert [done.calls for done in step.history] == [2]


# ------------------------------------------------------------------------------- faults


def test_an_overflow_is_named_by_the_layer_in_which_it_begins() -> None:
    fine = GradientDeviation(error=0.1, angle=0, vanished=0, nonfinite=0)
    lost = GradientDeviation(error=float("inf"), angle=1, vanished=0, nonfinite=0.5)
    figures = StepFigures.of([{"first": lost, "middle": lost, "last": fine}])
    said = overflow(figures)
    assert said == (
        "overflow: Inf or NaN first in the gradient of middle (50% of its elements),"
        " then in 1 before it"
    )
    assert overflow(StepFigures.of([{"last": fine}])) == ""


def test_fp16_overflows_in_one_layer_and_a_smaller_scale_mends_it() -> None:
    def steep(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2.0**12 * loss(net, x, y)

    net = Net()
    own = StepTarget.of(net, steep, [batch()], [], Sampling(moments=1, between=0))
    low = StepPlan(name="", policy="auto:fp16", way=Way.AUTOCAST)
    call = low.compile(own.module)
    large, small = (own.exactness(call, scale).gradients for scale in (2.0**12, 1.0))
    assert "first in the gradient of last" in overflow(large)
    assert not small.broken


class LowMomentum(optim.Optimizer):
    """Momentum that is kept in bf16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.ones_like(p, dtype=torch.bfloat16)
                kept = state["momentum"]
                state["momentum"] = (kept + 1e-4 * p.grad).to(kept.dtype)
                with torch.no_grad():
                    p -= group["lr"] * state["momentum"].float()


def test_an_optimizer_s_state_in_bf16_that_stalls_is_named() -> None:
    net = Net()
    (said,) = stalled(target(net, LowMomentum(net.parameters())))
    assert "in bfloat16" in said
    assert "momentum of first.weight (100%)" in said
    assert stalled(target(net, optim.AdamW(net.parameters()))) == []


def search_of(own: StepTarget, low: StepPlan) -> StepSearch:
    """A search that compared autocast and a plan."""
    search = StepSearch(
        target=own, policy=Policy.parse(POLICY), objective="memory", max_memory=None,
        progress=silent,
    )  # fmt: skip
    search.autocast = search._compare(StepPlan(name="", policy=POLICY, way=Way.AUTOCAST))
    search._compare(low)
    return search


def test_a_state_is_held_in_bf16_unless_it_would_stall(fast_bf16: None) -> None:
    """A mean of squares stands still in bf16, but not in the first steps of training."""
    net = Net()
    own = target(net, optim.AdamW(net.parameters(), lr=1e-3))
    exact = StepPlan(name="fp32", policy=POLICY, way=Way.FP32)
    search = search_of(own, exact)
    saved = search.held_states(exact)
    assert saved == {"exp_avg": 2 * sum(p.numel() for p in net.parameters())}
    (said,) = search.notes
    assert said.startswith("exp_avg_sq of the optimizer stays in fp32: it would stall, as")


def test_a_state_in_bf16_that_costs_updates_their_digits_stays_in_fp32() -> None:
    net = Net()
    own = target(net, optim.SGD(net.parameters(), lr=1e-3, momentum=0.9))
    replay = Replay.of(Replayed(own), ["momentum_buffer"], torch.bfloat16)
    assert 2**-10 < replay.error < 2**-6

    def off_by(error: float) -> StepFigures:
        deviation = GradientDeviation(error=error, angle=0, vanished=0, nonfinite=0)
        return StepFigures.of([{"first.weight": deviation}])

    assert replay.objection(off_by(0.0), off_by(0.1)) == ""
    said = replay.objection(off_by(0.0), off_by(2**-12))
    assert said.startswith("in bfloat16 updates would be off by")


def test_states_are_held_low_between_steps_of_the_optimizer() -> None:
    net = Net()
    other = copy.deepcopy(net)
    first, second = (optim.AdamW(n.parameters(), lr=1e-2) for n in (net, other))
    plan = StepPlan(name="", policy=POLICY, way=Way.FP32, states=("exp_avg",))
    assert StepPlan.from_json(plan.to_json()) == plan
    step = TunedStep(plan, net, loss)
    step.optimizers = [first]
    for _ in range(5):
        some = batch()
        for call, optimizer in ((step, first), (lambda *b: loss(other, *b), second)):
            optimizer.zero_grad()
            call(*some).backward()
            optimizer.step()
    weight, wanted = net.first.weight, other.first.weight
    assert first.state[weight]["exp_avg"].dtype is torch.bfloat16
    assert first.state[weight]["exp_avg_sq"].dtype is torch.float32
    assert 0 < float((weight - wanted).norm() / wanted.norm()) < 2**-8
    kept = first.state[weight]["exp_avg"].float()
    step.replan()  # on a copy
    assert first.state[weight]["exp_avg"].dtype is torch.bfloat16
    step.follow(replace(plan, states=()))
    assert torch.equal(first.state[weight]["exp_avg"], kept)
    assert not first._optimizer_step_pre_hooks


def test_gradients_of_micro_batches_are_added_up_low(fast_bf16: None) -> None:
    net = Net()
    other = copy.deepcopy(net)
    first, second = (optim.AdamW(n.parameters(), lr=1e-2) for n in (net, other))
    plan = replace(planned("matmult:bf16", net), states=(GRADIENTS,))
    step, wide = TunedStep(plan, net, loss), TunedStep(replace(plan, states=()), other, loss)
    step.optimizers = [first]
    for _ in range(3):
        for _ in range(4):
            some = batch()
            step(*some).backward()
            wide(*some).backward()
        assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {
            torch.bfloat16
        }
        for optimizer, own in ((first, net), (second, other)):
            nn.utils.clip_grad_norm_(own.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    weight, wanted = net.first.weight, other.first.weight
    assert 0 < float((weight - wanted).norm() / wanted.norm()) < 2**-8
    step(*batch()).backward()
    step.replan()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    step.follow(replace(plan, states=()))
    kept: Any = weight.grad
    assert kept.dtype is torch.float32
    step(*batch()).backward()
    first.step()


def test_gradients_are_added_up_low_unless_updates_become_worse_than_autocast_s() -> None:
    """The 64th of equal gradients is a quarter of a unit in the last place of the sum's."""
    net = Net()
    own = target(net, optim.SGD(net.parameters(), lr=1e-3))
    own.batches = own.batches[:1]
    exact = StepPlan(name="fp32", policy=POLICY, way=Way.FP32)
    search = search_of(own, exact)
    search.fp32 = StepCandidate(plan=exact, exactness=own.exact())
    saved = search.held_gradients(exact, (), 2)
    assert saved == 2 * sum(p.numel() for p in net.parameters())
    assert not search.notes
    assert search.held_gradients(exact, (), 64) == 0
    (said,) = search.notes
    assert said.startswith("gradients are added up in fp32: in bf16 updates of 64 micro-")
    assert all(p.grad_dtype is torch.float32 for p in own.parameters.values())


def test_a_trial_updates_once_for_so_many_batches() -> None:
    net = Net()
    own = target(net, optim.SGD(net.parameters(), lr=1e-3))
    steps: list[int] = []
    own.optimizers[0].register_step_post_hook(lambda *_: steps.append(1))
    way = own.module, StepPlan(name="", policy=POLICY, way=Way.FP32)
    trial = paired_trial(own, {"fp32": way}, steps=3, seeds=1, micro_batches=4)
    assert len(steps) == 3
    assert trial.steps == 3


def test_parameters_in_bf16_whose_updates_are_lost_are_named() -> None:
    net = Net().bfloat16()
    optimizer = optim.SGD(net.parameters(), lr=1e-5)

    def low(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x.bfloat16()).float(), y)

    own = StepTarget.of(net, low, [batch()], [optimizer], Sampling(moments=1, between=1))
    (said,) = stalled(own)
    assert said.startswith("updates stall: in bfloat16")
    assert "first.weight" in said


def test_updates_that_bf16_would_lose_are_kept_by_a_plan(fast_bf16: None) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=1e-5)
    own = target(net, optimizer)
    low = planned("all:bf16", net)
    updates = own.exactness(low.compile(own.module)).updates
    assert max(updates.vanished) < 0.01
    assert max(updates.error) < 0.1


def test_a_stale_cast_is_found() -> None:
    net = Net()
    call = compiled(net, Backend("all:bf16", accumulation=True, kernels=False))
    x, _ = batch()
    call(x).sum().backward()
    assert call.finecast_backend.stale() == ()
    net.middle.weight.data.mul_(2.0)
    assert call.finecast_backend.stale() == ("middle.weight",)
    with torch.no_grad():
        net.middle.weight.mul_(2.0)  # which the next call notices
    assert call.finecast_backend.stale() == ()


def test_planted_faults_are_named_in_the_result_with_their_layers() -> None:
    """A gradient of one layer that fp16 cannot hold, and states that stand still in bf16."""

    def steep(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(net, x, y) + 2.0**14 * net.middle(torch.ones(12, 16)).float().sum()

    net = Net()
    result = ft.tune_step(
        net, steep, [batch()], optimizer=LowMomentum(net.parameters()), policy="auto:fp16",
        moments=1, between=1, timeout_s=1e-3,
    )  # fmt: skip
    said = "\n".join(result.warnings)
    assert "torch.autocast: overflow: Inf or NaN first in the gradient of middle." in said
    assert "updates stall: in bfloat16" in said
    assert "momentum of first.weight (" in said
    assert result.plan.way is Way.FP32


def test_a_trial_that_loses_by_more_than_seeds_is_told_from_one_that_does_not() -> None:
    losses = {"fp32": (1.0, 1.1, 0.9), "near": (1.01, 1.12, 0.9), "far": (1.5, 1.6, 1.42)}
    trial = PairedTrial(steps=9, losses=losses)
    assert trial.is_worse("far")
    assert not trial.is_worse("near")
    mean, low, high = trial.difference("near")
    assert low < 0 < mean < high
    nan = PairedTrial(steps=9, losses={"fp32": (1.0, 1.0), "x": (float("nan"), 1.0)})
    assert nan.is_worse("x")


# ------------------------------------------------------- what is around a step in training


def test_measured_on_a_copy_optimizers_keep_the_types_of_their_states() -> None:
    net = Net()
    optimizer = LowMomentum(net.parameters())
    own = target(net, optimizer)
    own.train(own.module, [batch()])
    own.restore(own.samples[0].checkpoint)
    kept = own.optimizers[0].state.values()
    assert {s["momentum"].dtype for s in kept} == {torch.bfloat16}
    assert not optimizer.state


def test_updates_are_compared_where_gradients_have_digits(fast_bf16: None) -> None:
    """Adam makes an update of the usual size of a gradient that is zero but for roundings."""

    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.norm(self.first(x))))

    net = Normal()
    net.middle.requires_grad_(False)
    own = target(net, optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    low = planned("matmult:bf16", net).compile(own.module)
    assert own.exactness(low).updates.worst != "first.bias"
    everywhere = deviations(
        own.updates(own.gradients(low, own.samples[0].batch)),
        own.samples[0].updates,
        own.parameters,
    )
    assert max(everywhere, key=lambda n: everywhere[n].error) == "first.bias"


def trained(kind: str, net: Net, call: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Parameters after two steps, each of two micro-batches, with clipping."""
    torch.manual_seed(3)
    groups = [net.first, net.middle, net.last] if kind == "optimizers" else [net]
    optimizers = [
        optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in groups
        if any(p.requires_grad for p in m.parameters())
    ]
    for _ in range(2):
        for _ in range(2 if kind == "accumulated" else 1):
            call(*batch()).backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            call(*batch())  # before the next gradients
        if kind == "data":
            net.middle.weight.data.mul_(1.5)
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    "kind",
    ["plain", "checkpoint", "frozen", "tied", "clipped", "accumulated", "optimizers", "data"],
)
def test_a_step_trains_as_fp32_does(kind: str, fast_bf16: None) -> None:
    net = Net(again=kind == "checkpoint")
    if kind == "frozen":
        net.first.requires_grad_(False)
    if kind == "tied":
        net.first = nn.Linear(8, 16)
        net.middle.bias = net.first.bias
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    other = copy.deepcopy(net)
    step = TunedStep(planned("matmult:bf16", net), net, loss)
    got = trained(kind, net, step)
    want = trained(kind, other, lambda *b: loss(other, *b))
    assert step.plans[0].counts["bf16"] > 0
    moved = float((want - start).norm())
    assert 0 < float((got - want).norm()) < 0.1 * moved
    if kind == "frozen":
        assert all(p.grad is None for p in net.first.parameters())


def test_a_plan_has_the_policy_that_it_was_made_under() -> None:
    assert Policy.parse(planned("all:bf16", Net()).policy).label == "all:bf16"


def formats_of(step: TunedStep) -> dict[str, str]:
    """Formats by the ops' own names, without the modules that they are in."""
    return {d.node.rpartition("/")[2]: d.format.label for d in step.plans[-1].decisions}


class Wrapped(nn.Module):
    """As DDP has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.filterwarnings("error:the plan of the training step")
def test_a_plan_holds_for_a_module_that_is_wrapped(fast_bf16: None) -> None:
    net = Net()
    (by_policy,) = planned("matmult:bf16", net).plans
    assert by_policy.decision("module.middle/addmm_1") is not None
    changed = tuple(
        replace(d, format=Format.FP32) if d.node == "module.middle/addmm_1" else d
        for d in by_policy.decisions
    )
    own = replace(by_policy, decisions=changed)
    plan = StepPlan(name="", policy="matmult:bf16", plans=(own,))
    step, other = TunedStep(plan, net, loss), TunedStep(plan, Wrapped(net), loss)
    for one in (step, other):
        one(*batch()).backward()
    assert step.plans[0].digest == plan.plans[0].digest
    assert formats_of(other) == formats_of(step)
    assert formats_of(other)["addmm_1"] == "fp32"
    assert formats_of(other)["addmm"] == "bf16"


def test_a_plan_of_another_module_is_told_of(fast_bf16: None) -> None:
    plan = planned("matmult:bf16", Net())
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    step = TunedStep(plan, other, loss)
    with pytest.warns(UserWarning, match="names .* ops of a graph: the others follow"):
        step(*batch()).backward()
