"""Tuning modules: with stated times it improves, keeps a mix, or refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.data.criterion import Criterion, CriterionKind
from finecast.data.metrics import Score
from finecast.errors import UsageError
from finecast.measure.racing import Effort
from finecast.native.torch.model import of_module
from finecast.native.torch.subject import TorchSubject, waiting_notes
from finecast.native.torch.workload import ModuleWorkload
from finecast.numbers.formats import Format
from finecast.planning.contributions import Contributions
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@dataclass
class Clock:
    """Time that only the timed modules move; stands for the module ``time``."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = staticmethod(time.process_time)


class Branches(nn.Module):
    """The first product's error is ten times the other's at the output."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.large, self.small = nn.Linear(16, 16), nn.Linear(16, 16)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * self.large(x) + self.small(torch.sin(x))


@dataclass
class Device:
    """Times modules as stated: in ms, fp32 and by the number of products in bf16."""

    clock: Clock
    fp32_ms: Sequence[float] = (4.0,)
    low_ms: Callable[[int], Sequence[float]] = lambda low: (4.0 - low,)
    timed: list[nn.Module] = field(default_factory=list)

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        self.timed.append(module)
        of = cycle(self.fp32_ms)
        if isinstance(module, torch.fx.GraphModule):
            of = cycle(self.low_ms(products(module)))
        return self.runner(module, of)

    def runner(self, module: nn.Module, times: Iterator[float]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert not module.training
            self.clock.now_s += 1e-3 * next(times)
            return module(*args, **kwargs)

        return run


def products(module: Any) -> int:
    """Products that a planned module computes in bf16."""
    return sum(
        d.op in ("linear", "matmul", "addmm") and d.format is Format.BF16
        for d in plan_of(module).decisions
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    return Device(clock)


def tuned(
    device: Device,
    tolerance: float,
    net: nn.Module | None = None,
    objective: str = "latency",
    **more: Any,
) -> Any:
    """``net`` with its relative error as the metric."""
    net = net or Branches().eval()
    want = net(X).detach()

    def error(module: nn.Module) -> float:
        return float((module(X) - want).norm() / want.norm())

    return ft.tune(
        net,
        (X,),
        evaluate=error,
        criterion=Criterion(
            kind=CriterionKind.ABSOLUTE, tolerance=tolerance, higher_is_better=False
        ),
        objective=objective,
        options=ft.TuneOptions(prepare=device.prepare),
        **more,
    )


def test_it_improves(device: Device) -> None:
    net = Branches().train()
    found = tuned(device, 1.0, net)
    assert found.improved
    assert found.conditions["threads"] == torch.get_num_threads()
    # Each op that is named as costly was put back into fp32 and run.
    costly = Contributions.of(found.plan).low
    assert costly
    assert all(one.measured is not None for one in costly)
    assert products(found.model) == 2
    assert found.speedup == pytest.approx(4 / 2)
    assert (found.baseline.latency_s, found.tuned.latency_s) == pytest.approx((4e-3, 2e-3))
    assert found.tuned.metric > 0.0 == found.baseline.metric
    assert [t.passed for t in found.trials] == [True]
    assert found.model(X).dtype is torch.float32
    assert net.training


def test_a_study_tells_weights_and_engines_apart(device: Device, tmp_path: Path) -> None:
    """Modules of one structure shared their trials, and all engines those of a module."""
    how: dict[str, Any] = {"study": tmp_path / "study.db", "resume": True, "engine": "torch"}
    first, again = tuned(device, 1.0, **how), tuned(device, 1.0, **how)
    assert (first.reused, again.reused) == (0, 1)
    assert again.reused_sensitivities == ("bf16",)
    how["engine"] = "torch-eager"
    eager = tuned(device, 1.0, **how)
    assert (eager.reused, eager.reused_sensitivities) == (0, ("bf16",))
    how["engine"] = "torch"
    trained = Branches().eval()
    with torch.no_grad():
        trained.small.weight[3, 5] += 1e-3
    other = tuned(device, 1.0, trained, **how)
    assert (other.reused, other.reused_sensitivities) == (0, ())
    assert other.plan.model != first.plan.model


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_it_counts_bytes_where_they_are_asked_for(device: Device, objective: str) -> None:
    device.low_ms = lambda low: (4.0 + low,)  # slower, and smaller all the same
    assert not tuned(device, 1.0).improved
    found = tuned(device, 1.0, objective=objective)
    assert found.improved
    assert products(found.model) == 2
    assert found.speedup < 1
    assert found.tuned.size_bytes < found.baseline.size_bytes
    assert found.gain == pytest.approx(found.baseline.cost / found.tuned.cost)
    assert found.gain > 1.5


def test_a_module_is_run_one_call_at_a_time(device: Device) -> None:
    with pytest.raises(UsageError, match="one request at a time"):
        tuned(device, 1.0, objective="throughput")


def test_it_keeps_a_mix_where_the_fastest_misses(device: Device) -> None:
    (fastest,) = tuned(device, 1.0).trials
    found = tuned(device, fastest.metric / 2)
    assert found.improved
    assert found.tuned.metric <= fastest.metric / 2
    assert products(found.model) == 1
    assert {d.format for d in found.plan.decisions} == {Format.FP32, Format.BF16}
    assert not found.trials[0].passed
    assert found.speedup == pytest.approx(4 / 3)


def test_it_refuses_what_misses(device: Device) -> None:
    net = Branches().train()
    found = tuned(device, 0.0, net)
    assert not found.improved
    assert found.model is net
    assert net.training
    assert found.trials
    assert not any(t.passed for t in found.trials)
    assert found.speedup == 1.0
    assert {d.format for d in found.plan.decisions} == {Format.FP32}


@pytest.mark.parametrize(("ms", "improved"), [(3.93, False), (3.90, True), (4.5, False)])
def test_gains_under_two_percent_leave_the_module(
    device: Device, ms: float, improved: bool
) -> None:
    device.low_ms = lambda _low: (ms,)
    found = tuned(device, 1.0)
    assert found.improved == improved
    assert bool(found.trials) == improved  # what is not faster is not evaluated


def test_the_gain_is_that_of_the_rounds_not_of_the_medians(device: Device) -> None:
    """After three calls to warm up a disturbance takes four of fp32's rounds."""
    calm = (8.0,) * 200
    device.fp32_ms = (1.0, 1.0, 1.0, 10.0, 10.0, 10.0, 10.0, *calm)
    device.low_ms = lambda _low: (1.0, 1.0, 1.0, 9.9, 9.9, 9.9, 8.0, *calm)
    net = Branches().eval()
    found = tuned(device, 1.0, net)
    assert not found.improved
    assert found.model is net
    assert "no plan is faster" in found.why


def test_a_slower_format_is_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from finecast.engines.torch import rates

    slow = rates.Rate(product_tflops=0.1, speed=0.5, bandwidth_gb_s=50.0, overhead_s=1e-7)
    monkeypatch.setattr(rates, "rate", lambda *_args: slow)
    device.low_ms = lambda low: (4.0 + low,)
    net = Branches().eval()
    found = tuned(device, 1.0, net)
    assert (found.improved, found.trials, found.model) == (False, (), net)
    assert "no plan" in found.why
    with pytest.warns(UserWarning, match=r"bf16 runs at x0\.5.*no speed is gained here"):
        low = ft.convert(net, (X,), "auto:bf16")
    assert {d.format for d in plan_of(low).decisions} == {Format.FP32}
    assert torch.equal(low(X), net(X))


def test_compiled_modules_are_timed_again_and_again() -> None:
    """What torch.compile gives must not be asked whether it is true: it refuses."""
    net = Branches().eval()
    options = ft.TuneOptions(prepare=lambda m: torch.compile(m, backend="eager"))
    model = of_module(net, ((X,), {}))
    model.tuning = options
    subject = model.subject(None, None)
    assert isinstance(subject, TorchSubject)
    built = subject.model.build(plan_of(ft.convert(net, (X,), "all:bf16")))
    workload = ModuleWorkload(
        function=lambda _: 1.0,
        name="constant",
        known=None,
        examples=subject.model.examples,
        signature=subject.model.signature,
    )
    for _ in range(2):
        assert subject.times({"low": built}, workload, Effort(min_time_s=0.0)).names == {"low"}


def test_an_evaluation_of_a_module_has_margins() -> None:
    """Its share of right decisions tells which ones are right, of any module."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    data = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    labels = net(data).argmax(-1)
    labels[::8] = net(data).topk(2).indices[::8, 1]

    def right(module: nn.Module) -> float:
        return float((module(data).argmax(-1) == labels).float().mean())

    low = ft.convert(net, (data,), "all:bf16")
    subject = of_module(net, ((data,), {})).subject(None, None)
    assert isinstance(subject, TorchSubject)
    workload = ModuleWorkload(
        function=right,
        name="right",
        known=None,
        examples=subject.model.examples,
        signature=subject.model.signature,
    )
    exact = workload.evaluate(subject.reference, None)
    session = subject.session(subject.model.build(plan_of(low)))
    value = workload.evaluate(session, subject.reference)
    for score, module in ((exact, net), (value, low)):
        assert isinstance(score, Score)
        scores = module(data).detach()
        own = scores.gather(1, labels[:, None])[:, 0]
        other = scores.scatter(1, labels[:, None], -torch.inf).max(-1).values
        assert score.margins["0"] == pytest.approx((own - other).numpy(), abs=1e-6)


def mean(module: nn.Module) -> float:
    return float(module(X).detach().mean())


def test_a_program_brings_its_own_inputs() -> None:
    program = torch.export.export(Branches().eval(), (X,))
    options = ft.TuneOptions(prepare=lambda module: module)
    for given in ((), None):
        outcome = ft.tune(program, given, evaluate=mean, options=options)
        assert outcome.baseline.metric == pytest.approx(mean(program.module()))


@pytest.mark.parametrize("verb", [ft.convert, partial(ft.tune, evaluate=lambda _: 1.0)])
@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        ("m.pt2", (X,), "a str is no module"),
        (Branches(), X, "expected for example_inputs, not .* Tensor"),
        (Branches(), None, "needs example inputs"),
    ],
)
def test_what_is_no_module_or_no_inputs_is_said(
    verb: Callable[..., object], model: object, inputs: object, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        verb(model, inputs)


def test_compile_takes_no_path() -> None:
    pytest.importorskip("finecast_training")
    with pytest.raises(UsageError, match="a str cannot be compiled"):
        ft.compile(cast("Any", "m.pt2"))


@pytest.mark.parametrize("steps", [1, 0, -3])
def test_too_few_steps_are_told(steps: int) -> None:
    with pytest.raises(UsageError, match="give at least 2"):
        ft.tune(
            nn.Linear(4, 4),
            (torch.ones(2, 4),),
            evaluate=lambda _: 1.0,
            options=ft.TuneOptions(steps=steps),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": 0.01}, "a Criterion is expected for criterion"),
        ({"options": {"steps": 3}}, "a TuneOptions is expected for options"),
    ],
)
def test_options_of_another_kind_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ft.tune(nn.Linear(4, 4), (torch.ones(2, 4),), evaluate=lambda _: 1.0, **options)


def test_threads_that_spin_are_named_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert waiting_notes(0.0) == ()
    (note,) = waiting_notes(0.5)
    assert "2 threads" in note
    assert "OMP_NUM_THREADS=1" in note
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert waiting_notes(0.5) == ()
