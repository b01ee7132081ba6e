"""Probes of what a device can do: small kernels run in each format and timed against fp32.

A format "runs" if the engine loads and runs a matrix product and a convolution, each followed
by an elementwise op, on values stored in that format, and the results are right. For a format
of constants alone a product is run whose time is that of reading its weights. The speed of a
format is the time in fp32 over the time in the format, of the probe that gains more, measured
in turns: CPU flags do not tell how fast a format is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from finecast.devices.targets import Target
from finecast.engines.base import Array, Capability, Engine
from finecast.engines.integers import FUSIONS, engines_for, fuses
from finecast.engines.probe_models import (
    Probe,
    admitted,
    of_weights,
    probes_of,
)
from finecast.errors import EngineError
from finecast.numbers.encodings import Dynamic
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import PROBED_GAIN
from finecast.processes.memory import memory_error
from finecast.rules.policy import Policy, Scope

PROBED = (
    Format.FP32,
    Format.TF32,
    Format.BF16,
    Format.FP16,
    Format.FP8_E4M3,
    Format.FP8_E5M2,
    *FUSIONS,
)
_TF32_ENGINES = frozenset({("onnxruntime", "CUDA"), ("onnxruntime", "Tensorrt")})
"""Where fp32 ops may compute in tf32 (ONNX has no such type of its own)."""

_BUDGET_S = 0.05  # per format and kernel, so that an engine takes about half a second
_LONGEST_S = 1.5  # on a machine where other processes disturb almost every call
_FEWEST_TURNS = 10
# How many of the fastest times have to be alike, and their largest ratio for that.
_ALIKE = 4
_ALIKE_RATIO = 1.05
# By how much a speed has to be above or below the least gain, if not known better.
_CLEAR = 1.2
_NO_KERNEL = "no kernel for"
_SLACK = 8.0
"""Allowed error in unit roundoffs of the result's magnitude: inputs, weights, product, sum
and activation round once each, and a margin of 1.6 for unlucky cancellation."""

# By engine and device: measured again, a speed would be slightly different.
_cache: dict[tuple[str, str], dict[Format, Capability]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    run: Callable[[], object] | None
    reason: str = ""
    exact: bool = False


def probe(engine: Engine) -> Mapping[Format, Capability]:
    """The capabilities of an engine's device; measured once per process."""
    return _known(engine, PROBED)


def probe_one(engine: Engine, fmt: Format) -> Capability:
    """The capability in one format: a fraction of ``probe``'s time."""
    return _known(engine, (fmt,))[fmt]


def recall(engine: Engine, fmt: Format, speed: float) -> None:
    """Take ``speed`` for that of a format, unless it was probed in this process."""
    known = _cache.setdefault((engine.name, engine.device), {})
    known.setdefault(fmt, Capability(runs=True, speed=speed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Whether a format is faster than fp32 in an engine or on a device, and a text.

    ``slow`` says what it gives where it is taken although it is not faster.
    """

    gains: bool
    text: str
    slow: str = "no speed is gained here"

    @property
    def note(self) -> str:
        """What to say of a format that is taken and not faster."""
        return f"{self.text}: {self.slow}"


def speed_of(engine: Engine, fmt: Format) -> Speed:
    """The speed of one format, by short probes; of an emulated device by its data sheet."""
    if engine.emulates is not None:
        return _documented(engine.emulates.target, fmt)
    capability = engine.capability(fmt)
    why = f" ({capability.reason})" if capability.reason else ""
    if not capability.runs or capability.speed is None:
        name, missing = engine.title, _NO_KERNEL in capability.reason
        text = f"{name} has no {fmt.label} {'kernels' if missing else 'arithmetic'} here"
        return Speed(gains=False, text=text if missing else f"{text}{why}")
    relative = f"x{capability.speed:.2g} of fp32's speed in {engine.title}"
    text = f"{fmt.label} runs at {relative} here{why}"
    return Speed(gains=capability.worthwhile, text=text)


def _documented(target: Target, fmt: Format) -> Speed:
    """Whether a device computes in a format, and what it gains by one that it widens."""
    if target.computes_in(fmt):
        return Speed(gains=True, text=f"{target.name} computes in {fmt.label}")
    stays = target.stored(fmt) is fmt is not Format.TF32
    return Speed(
        gains=False,
        text=f"{fmt.label}, which {target.name} computes in a wider format",
        slow="only less memory is moved" if stays else "no speed is gained",
    )


def drop_slow_formats(
    policy: Policy, speed: Callable[[Format], Speed], user_rules: Sequence[object] = ()
) -> tuple[Policy, tuple[str, ...]]:
    """The policy without formats that are not faster than fp32 here, and notes on these.

    Law: at least one format stays, as single ops may gain by it: a note says that it is no
    faster. Only scope ``auto`` is narrowed, and without user rules; formats that the user
    gives to an op stay.
    """
    if policy.scope is not Scope.AUTO or user_rules:
        return policy, ()
    speeds = {fmt: speed(fmt) for fmt in policy.formats}
    named = set(policy.op_formats.values())
    kept = tuple(f for f, s in speeds.items() if s.gains or f in named) or policy.formats[:1]
    notes = tuple(
        s.note if f in kept else f"skipped: {s.text}"
        for f, s in speeds.items()
        if not s.gains and f not in named
    )
    return replace(policy, formats=kept), notes


def _known(engine: Engine, formats: Sequence[Format]) -> dict[Format, Capability]:
    known = _cache.setdefault((engine.name, engine.device), {})
    missing = [fmt for fmt in formats if fmt not in known]
    if missing:
        needed = dict.fromkeys(p for fmt in missing for p in probes_of(fmt))
        baseline = {p: _attempt(engine, p, Format.FP32) for p in needed}
        for fmt in missing:  # one after the other: some are judged by another one
            known[fmt] = _judge(engine, fmt, {p: baseline[p] for p in probes_of(fmt)})
    return {fmt: known[fmt] for fmt in formats}


def _judge(engine: Engine, fmt: Format, baseline: Mapping[Probe, _Attempt]) -> Capability:
    if fmt is Format.TF32:
        named = (engine.name, engine.device) in _TF32_ENGINES
        return Capability(
            runs=named, reason="" if named else "this device has no tf32 arithmetic"
        )
    if fmt is Format.FP32:
        failed = [a.reason for a in baseline.values() if a.run is None]
        return Capability(
            runs=not failed, speed=None if failed else 1.0, reason="; ".join(failed)
        )
    if fmt.has_scales and (reason := _unfit(engine, fmt)):
        return Capability(runs=False, reason=reason)
    speeds: list[float] = []
    reasons: list[str] = []
    emulated = True
    for model, reference in baseline.items():
        attempt = _attempt(engine, model, fmt)
        emulated = emulated and attempt.exact
        if attempt.run is None:
            reasons.append(attempt.reason)
        elif reference.run is not None:
            speeds.append(_speed(reference.run, attempt.run))
    if reasons or not speeds:
        return Capability(runs=False, reason="; ".join(dict.fromkeys(reasons)))
    if fmt.dynamic_group is not None and (why := _rounding_fault(engine, fmt)):
        return Capability(runs=False, reason=why)
    if emulated:
        speed = min(1.0, *speeds)
        return Capability(runs=True, speed=speed, reason="computed in fp32", in_fp32=True)
    return Capability(runs=True, speed=max(speeds))


def _unfit(engine: Engine, fmt: Format) -> str:
    """Why no plans in a format of codes are made for the engine here; empty if some are."""
    if not fuses(engine.name, fmt):
        return f"plans in {fmt.label} are made for {engines_for(fmt)} alone"
    if not fmt.encodes_results:
        return ""
    products = _known(engine, (fmt.result,))[fmt.result]
    if products.runs and not products.in_fp32:
        return ""
    return f"its products are those of {fmt.result.label}: {products.reason}"


def _rounding_fault(engine: Engine, fmt: Format) -> str:
    """Why kernels do not round values as the format says; empty if they do.

    In one model they have to round the values that meet some constants, and to read those
    exactly that meet others.
    """
    (model,) = probes_of(fmt)
    how = Dynamic(format=fmt, group=fmt.dynamic_group or 0)
    x = np.random.default_rng(2).standard_normal(model.x_shape).astype(np.float32)
    w = of_weights(model, fmt).round(model.w.astype(np.float32))
    exact, rounded = (np.maximum(v @ w, 0) for v in (x, how.round(x)))
    for apart, wanted, other in ((False, rounded, exact), (True, exact, rounded)):
        try:
            loaded = engine.load_probe(replace(model, apart=apart), fmt)
            got = loaded.run({"x": x})["y"].astype(np.float64)
        except EngineError as error:
            _check_memory(error)
            return _cause(error)
        if np.linalg.norm(got - wanted) > np.linalg.norm(got - other):
            kind = "rounds values that must stay exact" if apart else "does not round values"
            return f"{engine.title} {kind} here"
    return ""


def _check_memory(error: EngineError) -> None:
    """Raise an error of memory where that was lacking: it says nothing of what engines can."""
    if (lacking := memory_error(error)) is not None:
        raise lacking from error


def _attempt(engine: Engine, model: Probe, fmt: Format) -> _Attempt:
    if engine.reads_onnx and not fmt.has_scales and not admitted(model.op, fmt):
        return _Attempt(run=None, reason=f"ONNX has no {model.op} in {fmt.label}")
    try:
        session = engine.load_probe(model, fmt)
        feeds = {"x": model.x.astype(np.float32)}
        got = session.run(feeds)["y"]
    except EngineError as error:
        _check_memory(error)
        return _Attempt(run=None, reason=f"{model.name}: {_cause(error)}")
    error = _error_in_roundoffs(got, model.expected, fmt)
    if not error <= _SLACK:
        step = fmt.unit_roundoff
        return _Attempt(
            run=None,
            reason=f"{model.name}: computed wrongly here, with a relative error of"
            f" {error * step:.2g} where {fmt.label} explains {_SLACK * step:.2g}: not used",
        )
    # The data take more bits than 16-bit formats have: without error it ran in fp32.
    return _Attempt(
        run=lambda: session.run(feeds), exact=error == 0 and fmt is not Format.FP32
    )


def _cause(error: EngineError) -> str:
    return error.what.partition(" the model: ")[2] or error.what


def _error_in_roundoffs(got: Array, expected: NDArray[np.float64], fmt: Format) -> float:
    scale = float(np.abs(expected).max())
    error = float(np.abs(got.astype(np.float64) - expected).max())
    return error / scale / fmt.unit_roundoff


def _speed(reference: Callable[[], object], candidate: Callable[[], object]) -> float:
    """The reference's fastest time over the candidate's, both run in turns.

    Other processes only make a time longer. Turns go on until both seem to have run
    undisturbed, on a busy machine for up to ``_LONGEST_S``; but no longer than it takes to
    tell clearly whether the candidate gains. The ratio is taken of the even and of the odd
    turns, and the one nearer to 1 is given: a disturbance rarely hits both.
    """
    for run in (reference, candidate):
        run()
    before: list[float] = []
    after: list[float] = []
    start = time.perf_counter()
    while (
        len(after) < _FEWEST_TURNS
        or time.perf_counter() < start + _BUDGET_S
        or (
            not (_ran_alone(before) and _ran_alone(after))
            and not _is_clear(before, after)
            and time.perf_counter() < start + _LONGEST_S
        )
    ):
        before.append(_time(reference))
        after.append(_time(candidate))
    return min(_halves(before, after), key=lambda ratio: abs(math.log(ratio)))


def _halves(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The ratio of the fastest times, by the even and by the odd turns."""
    even, odd = (min(before[half::2]) / min(after[half::2]) for half in (0, 1))
    return even, odd


def _is_clear(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether both halves tell, by far more than they differ, that it gains; or not."""
    low, high = sorted(ratio / PROBED_GAIN for ratio in _halves(before, after))
    return low > _CLEAR * high / low or high * _CLEAR * high / low < 1


def _ran_alone(times: Sequence[float]) -> bool:
    """Whether the fastest times are alike, which disturbed ones would not be."""
    fastest = sorted(times)[:_ALIKE]
    return len(fastest) == _ALIKE and fastest[-1] <= _ALIKE_RATIO * fastest[0]


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
