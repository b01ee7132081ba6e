"""Stated times: what tests take in place of the times of this machine.

A time that is measured decides which plans are made and which one wins. The machine that runs
the tests is busy with other tests, so that a measured time would now and then decide a test.
Here each format has a stated share of fp32's time, for kernels, for short probes and for whole
models, and a call of anything else takes a stated time. Tests of the measuring itself have the
mark ``real_clock``; they may assert nothing about the times that it gives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from finecast.engines import probe
from finecast.engines.base import Capability, KernelTime
from finecast.engines.onnxruntime import OnnxRuntimeSession
from finecast.engines.openvino import OpenVinoSession
from finecast.evaluation import workers
from finecast.evaluation.workers import WorkerExecutor
from finecast.measure import timing
from finecast.measure.racing import ANCHOR, Race
from finecast.native import roundings
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built, Origin
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.tuning.loop import Loop
from finecast.tuning.measuring import Racing

CALL_S: Final = 1e-3
"""What a call takes of which nothing else is stated."""

KERNEL_S: Final = 1e-5
"""What a kernel takes for each op of the model that runs in it, in fp32."""

MOVE_S: Final = 1e-6
"""What a kernel takes that the engine added: a reorder, a conversion."""

_BY_HINT: Final = 0.99
"""An engine's hint lowers ops without casts, which saves a little beside the same by casts."""


def _has_clock(module: Any) -> bool:
    """Whether the test states a clock of its own, for the calls that ``module`` times."""
    return module.time is not time


def share(fmt: Format) -> float:
    """The share of fp32's time that an op takes in ``fmt``."""
    if fmt is Format.FP32:
        return 1.0
    if fmt.has_scales:
        return 0.4 if fmt.encodes_values else 0.7
    return 0.6 if fmt is Format.BF16 else 0.65


def seconds_of(plan: Plan) -> float:
    """What a call of a plan's model takes: ``CALL_S`` in fp32, shared by the ops alike."""
    shares = [share(fmt) for fmt in plan.formats.values()] or [1.0]
    hinted = _BY_HINT if plan.by_hint else 1.0
    cached = 0.9 if plan.kv_cache is not Format.FP32 else 1.0
    return CALL_S * hinted * cached * sum(shares) / len(shares)


def _kernel_s(kernel: KernelTime) -> float:
    by_label = {fmt.label: fmt for fmt in Format}
    types = {kernel.format, *kernel.constants}
    integers = bool(types & {"int8", "uint8", "int4", "uint4"})
    fmt = by_label.get(kernel.format, Format.INT8 if integers else Format.FP32)
    factor = 0.7 if integers and not fmt.has_scales else share(fmt)
    return KERNEL_S * len(kernel.ops) * factor if kernel.ops else MOVE_S


def _by_plans(race: Race, models: Mapping[str, Built] | Mapping[str, Origin]) -> Race:
    """A race with the stated times of the plans that its models are made from."""
    if _has_clock(timing):
        return race
    seconds = {ANCHOR: CALL_S, **{n: seconds_of(one.plan) for n, one in models.items()}}
    took = {n: timing.Took(wall_s=s, used_s=s) for n, s in seconds.items()}
    race._samples = {
        name: dict.fromkeys(samples, took[name]) for name, samples in race._samples.items()
    }
    return race


def _stated_race(real: Callable[..., Race]) -> Callable[..., Race]:
    def times(self: Any, built: Mapping[str, Built], *rest: Any) -> Race:
        return _by_plans(real(self, built, *rest), built)

    return times


def _stated_race_of_workers(real: Callable[..., Any]) -> Callable[..., Any]:
    """A worker process measures its races by a clock of its own."""

    def race(self: WorkerExecutor, racing: Racing) -> tuple[Race | None, Sequence[str]]:
        measured, told = real(self, racing)
        return None if measured is None else _by_plans(measured, racing.models), told

    return race


def _stated_profile(real: Callable[..., list[KernelTime]]) -> Callable[..., list[KernelTime]]:
    def profile(self: Any, feeds: Any, *, repeats: int = 5) -> list[KernelTime]:
        del repeats  # the times of one run are those of many
        kernels = real(self, feeds, repeats=1)
        stated = (replace(kernel, time_s=_kernel_s(kernel)) for kernel in kernels)
        return sorted(stated, key=lambda kernel: -kernel.time_s)

    return profile


def _stated_judge(real: Callable[..., Capability]) -> Callable[..., Capability]:
    def judge(engine: Any, fmt: Format, baseline: Any) -> Capability:
        found = real(engine, fmt, baseline)
        if found.speed is None or _has_clock(probe):
            return found
        return replace(found, speed=1.0 if found.in_fp32 else 1 / share(fmt))

    return judge


def _stated_call(
    real: Callable[[timing.Turns, str], timing.Took],
) -> Callable[[timing.Turns, str], timing.Took]:
    def timed(turns: timing.Turns, name: str) -> timing.Took:
        if _has_clock(timing):
            return real(turns, name)
        turns.calls[name]()
        return timing.Took(wall_s=CALL_S, used_s=CALL_S)

    return timed


def state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing be decided by a measured time, of this process or of its workers."""
    monkeypatch.setattr(timing.Turns, "_timed", _stated_call(timing.Turns._timed))
    monkeypatch.setattr(probe, "_judge", _stated_judge(probe._judge))
    for name in ("times", "streamed"):
        monkeypatch.setattr(EngineSubject, name, _stated_race(getattr(EngineSubject, name)))
    # Stated times are the same in each process, and each start of one takes a second.
    monkeypatch.setattr(workers, "timing_afresh", lambda *_: None)
    monkeypatch.setattr(WorkerExecutor, "_race", _stated_race_of_workers(WorkerExecutor._race))
    for session in (OpenVinoSession, OnnxRuntimeSession):
        monkeypatch.setattr(session, "profile", _stated_profile(session.profile))
    # One session for all switches, as far as the engine loads it.
    monkeypatch.setattr(roundings, "part_size", lambda switches, load_s, run_s: switches)
    # Importing these takes seconds: tests that use them have done it.
    if "finecast.native.torch.subject" in sys.modules:
        _state_torch(monkeypatch)
    if tensorflow := sys.modules.get("finecast_tensorflow.engine"):
        session = tensorflow.TensorFlowSession
        monkeypatch.setattr(session, "profile", _stated_profile(session.profile))


def _state_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from finecast.engines.torch import costs, rates
    from finecast.native.torch.subject import TorchSubject

    def rate(device: str, fmt: Format, threads: int) -> rates.Rate:
        if _has_clock(rates):
            return real_rate(device, fmt, threads)
        speed = 1 / share(fmt)
        return rates.Rate(
            product_tflops=0.001 * speed, speed=speed, bandwidth_gb_s=50.0, overhead_s=1e-7
        )

    def measure(self: Any, node: Any, fx: Any, formats: Sequence[Format]) -> Any:
        found = real(self, node, fx, formats)
        if costs.least_times is not rates.least_times:  # the test states them
            return found
        return None if found is None else tuple(KERNEL_S * share(fmt) for fmt in formats)

    real_rate = rates.rate
    real = costs.KernelTimes._measure
    monkeypatch.setattr(rates, "rate", rate)
    monkeypatch.setattr(costs.KernelTimes, "_measure", measure)
    monkeypatch.setattr(costs, "_seen", {})
    monkeypatch.setattr(TorchSubject, "times", _stated_race(TorchSubject.times))


def race_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All plans that are known race in each race, whatever times are predicted of them."""
    race = Loop.race

    def together(self: Loop, plans: Sequence[Proposal]) -> str:
        return race(self, [*plans, *self.pool.values()])

    monkeypatch.setattr(Loop, "race", together)
