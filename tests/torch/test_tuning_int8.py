"""Tuning modules over int8 beside bf16 and fp32: as stated times and real errors have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import finecast.torch as ft
from finecast.data.criterion import Criterion, CriterionKind
from finecast.engines.exact import Exact
from finecast.engines.torch import TorchEngine, rates
from finecast.engines.torch.costs import CompiledCost, KernelTimes
from finecast.engines.torch.integers import Prepare
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch.codes import scales_of_products
from finecast.native.observing import observe
from finecast.native.planning import Judging, make_planner
from finecast.native.roundings import Times
from finecast.native.torch import planning, subject
from finecast.native.torch.model import of_module
from finecast.native.torch.planning import measured_errors
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.torch.planned import plan_of
from tests.torch.test_tuning import Branches, Clock, Device, X

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

ROW = Format.INT8_DYNAMIC_ROW
# What a product in each format takes off the 8 ms of a call.
SAVED_MS = {Format.FP32: 0.0, Format.BF16: 1.0, Format.INT8: 3.0, ROW: 3.0}


class Stated(Device):
    """Times modules by the formats of their products."""

    def prepare(self, module: torch.nn.Module) -> Callable[..., Any]:
        saved = 0.0
        if isinstance(module, torch.fx.GraphModule):
            plan = plan_of(module)
            saved = sum(SAVED_MS[d.format] for d in plan.decisions if d.op == "linear")
        times: Iterator[float] = cycle((8.0 - saved,))
        return self.runner(module, times)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Stated:
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    speeds = {Format.BF16: 2.0, Format.INT8: 4.0, ROW: 4.0}

    def rate(device: str, fmt: Format, threads: int) -> rates.Rate:
        del device, threads
        speed = speeds.get(fmt, 1.0)
        tflops = 1e-5 * speed
        return rates.Rate(
            product_tflops=tflops, speed=speed, bandwidth_gb_s=50.0, overhead_s=0.0
        )

    monkeypatch.setattr(rates, "rate", rate)
    monkeypatch.setattr(KernelTimes, "time_s", lambda *_: None)
    ran_on(monkeypatch)
    return Stated(clock)


def ran_on(
    monkeypatch: pytest.MonkeyPatch, *, floats: Callable[[frozenset[str]], bool] | None = None
) -> None:
    """Compiled modules run products on integers; where ``floats`` says so, none of them."""

    def compiled(
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        prepare: Prepare = torch.compile,
    ) -> tuple[Callable[..., Any], frozenset[str]]:
        del args, kwargs
        coded: frozenset[str] = frozenset()
        if isinstance(module, torch.fx.GraphModule):
            coded = frozenset(scales_of_products(module))
        on_floats = coded if floats is not None and floats(coded) else frozenset[str]()
        run = module if prepare is torch.compile else prepare(module)
        return run, on_floats

    monkeypatch.setattr(subject, "compiled_frozen", compiled)
    monkeypatch.setattr(planning, "compiled_frozen", compiled)


def tuned(device: Stated, tolerance: float, policy: str) -> Any:
    net = Branches().eval()
    want = net(X).detach()

    def error(module: torch.nn.Module) -> float:
        return float((module(X) - want).norm() / want.norm())

    return ft.tune(
        net,
        (X,),
        evaluate=error,
        policy=policy,
        criterion=Criterion(
            kind=CriterionKind.ABSOLUTE, tolerance=tolerance, higher_is_better=False
        ),
        options=ft.TuneOptions(prepare=device.prepare),
    )


def formats_of(found: Any) -> dict[str, Format]:
    """Those of the products, by the layer."""
    decisions = found.plan.decisions
    return {d.node.partition("/")[0]: d.format for d in decisions if d.op == "linear"}


@pytest.mark.parametrize("fmt", [Format.INT8, ROW])
def test_int8_is_tuned_and_its_error_is_as_predicted(device: Stated, fmt: Format) -> None:
    found = tuned(device, 1.0, f"auto:{fmt.label}")
    assert found.improved
    assert formats_of(found) == {"large": fmt, "small": fmt}
    assert found.speedup == pytest.approx(8 / 2)
    assert found.measured_error / 1.25 < found.predicted_error < 1.25 * found.measured_error
    assert found.probes >= 4  # both values, and the weights of both products
    assert len(scales_of_products(found.model)) == 2
    assert subject.FROZEN_TIMES in found.warnings


def test_a_product_that_int8_harms_keeps_fp32(device: Stated) -> None:
    (fastest,) = tuned(device, 1.0, "auto:int8").trials
    found = tuned(device, fastest.metric / 2, "auto:int8")
    assert formats_of(found) == {"large": Format.FP32, "small": Format.INT8}
    assert found.tuned.metric <= fastest.metric / 2


def test_one_plan_mixes_int8_bf16_and_fp32(device: Stated) -> None:
    low = tuned(device, 1.0, "auto:bf16")
    found = tuned(device, 1.5 * low.tuned.metric, "auto:int8,bf16")
    assert found.improved
    assert formats_of(found) == {"large": Format.BF16, "small": Format.INT8}
    assert found.speedup == pytest.approx(8 / 4)
    assert found.tuned.metric <= 1.5 * low.tuned.metric


def test_a_plan_that_does_not_run_on_integers_is_dropped_and_said(
    device: Stated, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fastest,) = tuned(device, 1.0, "auto:int8").trials
    # Alone, not beside the other: what is compiled first of all runs as planned.
    ran_on(monkeypatch, floats=lambda coded: len(coded) == 1)
    found = tuned(device, fastest.metric / 2, "auto:int8")
    assert not [f for f in formats_of(found).values() if f is Format.INT8]
    assert any("a plan was dropped" in note for note in found.warnings)


def test_nothing_is_planned_that_runs_on_floats(
    device: Stated, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_on(monkeypatch, floats=bool)
    found = tuned(device, 1.0, "auto:int8")
    assert not found.improved
    floats = "planned in int8, PyTorch (compiled) runs it in floats all the same"
    assert any("'large/linear'" in note and floats in note for note in found.warnings)


def test_wrong_integers_are_not_planned_and_bf16_is(
    device: Stated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(module: Any, *_: object) -> tuple[Callable[..., Any], frozenset[str]]:
        return lambda x: 1.3 * module(x), frozenset()

    monkeypatch.setattr(planning, "compiled_frozen", wrong)
    found = tuned(device, 1.0, "auto:int8,bf16")
    assert formats_of(found) == {"large": Format.BF16, "small": Format.BF16}
    assert any("nothing is planned in int8" in note for note in found.warnings)


def test_what_is_no_format_of_compiled_modules_is_refused(device: Stated) -> None:
    with pytest.raises(UsageError, match="int8_weights is planned for models of") as e:
        tuned(device, 1.0, "auto:int8_weights")
    assert e.value.fix.startswith("make it ONNX for OpenVINO,")
    with pytest.raises(UsageError, match="in models of ONNX and OpenVINO alone"):
        tuned(device, 1.0, "auto:int8+bias")


def test_single_errors_are_those_of_the_codes_that_a_plan_states() -> None:
    net = Branches().eval()
    policy = Policy.parse("auto:int8")
    model = of_module(net, ((X,), {}))
    prepared, captured = model.prepare(policy), model.file.captured(policy.label)
    facts = observe(prepared, lambda: [model.examples])
    how = Judging(facts=facts, measured=True)
    planner = make_planner(prepared, policy, TorchEngine(), how)
    times = Times.modelled(planner, CompiledCost(graph=planner.graph, rates={}), ())
    exact = Exact.of(model.reference(), [model.examples])
    found = measured_errors(prepared, planner, times, exact)
    where, sensitivity = times.points[Format.INT8], found[Format.INT8]
    assert len(where.points) == len(where.weights) == 2
    with torch.no_grad():
        got = frontend.apply(captured, frontend.planned_edits(captured, planner.lowest()))(X)
        want = net(X)
    error = float(((got - want).norm() / want.norm()) ** 2)
    assert sensitivity.total == pytest.approx(error, rel=1e-3)
    assert np.all(sensitivity.weights > 0)
