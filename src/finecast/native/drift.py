"""Whether a model does on this machine what it did where it was judged.

Law: what decides numbers has to be as it was locked, outputs have to be within the tolerances,
and a call must not take much longer. What only may change speed is told, and so is what cannot
be judged here; ``strict`` counts that, too. No data and no fp32 model are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

from finecast.data.workload import sample_count
from finecast.engines.base import feeds_for
from finecast.engines.numerics import DENORMALS, OF_SPEED, VARIABLES
from finecast.errors import UsageError
from finecast.naming import (
    Option,
    assignments,
    convert_options,
    left_out,
    listed,
    number_of,
    path_of,
)
from finecast.native.lock import (
    Lock,
    LockedKernel,
    Observed,
    Runner,
    load_to_verify,
    observed,
)
from finecast.native.opening import LOCK, lock_beside, opened
from finecast.numbers.thresholds import SLOWER
from finecast.plugin import title_of
from finecast.reports.base import Report, TextTable
from finecast.rules.draws import behind_draws

_TIMINGS: Final = 3
"""A call that is too slow is timed again, up to so many times in all; the fastest counts."""
_MOST_NODES: Final = 3
"""Nodes that are named for a change of kernels."""
_PROCESS: Final = frozenset({*VARIABLES, DENORMALS})
"""Settings of the process, which every session has."""
_MOST_CHANGES: Final = 8
"""Changes that are listed for one check."""


class State(Enum):
    """What a check found: all as before, a difference to know of, or one that counts."""

    HOLDS = "holds"
    TOLD = "notice"
    DRIFTED = "drifted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One of the things that are compared.

    Attributes:
        name: What is compared.
        state: What was found.
        texts: What differs, or what was found to be equal.
    """

    name: str
    state: State
    texts: tuple[str, ...]


_Outcome = tuple[State, Sequence[str]]
"""The state of a check, and its texts."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Report):
    """What became of a lock on this machine.

    Attributes:
        model: The model's file.
        lock: The lock's file.
        checks: What was compared.
        strict: Whether differences that are told count, too.
        deviations: By output how far the golden samples are off.
        call_s: Seconds of a call now, and when it was locked; None where it was not timed.
    """

    model: str
    lock: str
    checks: Sequence[Check]
    strict: bool = False
    deviations: Mapping[str, float] = field(default_factory=dict[str, float])
    call_s: tuple[float | None, float | None] = (None, None)

    @property
    def holds(self) -> bool:
        """Whether the model does what it did."""
        bad = {State.DRIFTED, State.TOLD} if self.strict else {State.DRIFTED}
        return not any(one.state in bad for one in self.checks)

    @property
    def drifted(self) -> tuple[str, ...]:
        """Names of the checks that do not hold or are told."""
        return tuple(one.name for one in self.checks if one.state is not State.HOLDS)

    @property
    def lines(self) -> Sequence[str]:
        """The verdict, and a line for each check."""
        does = "computes the same" if self.holds else "may not compute the same"
        head = f"{self.model} {does} here as where it was tuned"
        return [
            head,
            *(f"{c.name}: {c.state.value}: {text}" for c in self.checks for text in c.texts),
        ]

    @property
    def tables(self) -> Sequence[TextTable]:
        """A row for each check, and for each of its differences."""
        rows = [
            ("" if number else check.name, "" if number else check.state.value, text)
            for check in self.checks
            for number, text in enumerate(check.texts)
        ]
        left = ("check", "state", "found")
        return [TextTable(left=left, rows=rows, fold=("found",))]

    def _content(self) -> dict[str, Any]:
        now, then = (None if s is None else s * 1e3 for s in self.call_s)
        return {
            "model": self.model,
            "lock": self.lock,
            "holds": self.holds,
            "strict": self.strict,
            "checks": [
                {"name": c.name, "state": c.state.value, "found": list(c.texts)}
                for c in self.checks
            ],
            "deviations": dict(self.deviations),
            "call_ms": {"now": now, "locked": then},
        }


def _settings(given: Mapping[str, str] | Sequence[str] | None) -> Mapping[str, str]:
    """Settings by name, also of ``NAME=VALUE`` texts."""
    settings = assignments(
        given,
        str,
        where="--set",
        form="NAME=VALUE",
        fix="write INFERENCE_PRECISION_HINT=bf16",
        at_first=True,
    )
    return {name: str(value) for name, value in settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How a model is verified.

    Attributes:
        lock: The lock; None for the one beside the model.
        settings: Settings of the engine, by its own names, as the model is deployed.
        strict: Whether differences that are only told count, too.
    """

    lock: Path | None = Option(
        help="The deployment manifest; default MODEL with .lock.json: m.lock.json for m.onnx.",
        metavar="FILE.json",
        kind=Path,
        convert=path_of,
    ).field(None)
    settings: Mapping[str, str] = Option(
        help="A setting of the engine that the deployed model has, by the engine's name, as"
        " INFERENCE_PRECISION_HINT=bf16.",
        flags=("--set",),
        metavar="NAME=VALUE",
        many=True,
        python=(Mapping, "a dict of settings"),
        convert=_settings,
    ).field({})
    strict: bool = Option(
        help="Fail also where only the machine differs: threads, CPU, other work on it.",
        kind=bool,
    ).field(False)

    def __post_init__(self) -> None:
        """Read what was given as text."""
        convert_options(self)


def verify(
    model: Path, options: VerifyOptions, deployed: object | None = None
) -> Verification:
    """Compare what a model does here with its lock.

    Args:
        model: The model's path.
        options: Where the lock is, and how strict this is.
        deployed: What runs the model in production, to be verified in place of a session of
            finecast's, as ``Session.running`` takes it.

    Raises:
        UsageError: If there is no lock, or a setting is unknown.
        ModelError: If the model cannot be read.
        EngineError: If the engine is not installed, or cannot run the model.
    """
    if model.name.endswith(LOCK):
        raise UsageError(
            "this is the name of a deployment manifest, and not of a model",
            where=str(model),
            fix="name the model; --lock names a manifest that is not beside it",
        )
    opened_model = opened(model)
    path = options.lock or lock_beside(model)
    lock = Lock.load(path)
    locked = lock.observed.runner
    session = load_to_verify(locked.engine().configured(options.settings), model)
    if deployed is not None:
        session = session.running(deployed)
    runner = Runner.of(locked.name, throughput=locked.throughput)
    deviations = {} if lock.samples is None else lock.samples.deviations(session)
    if deployed is not None:  # it draws anew: what finecast loads draws the same each time
        drawn = behind_draws(opened_model.read_graph())
        deviations = {n: deviation for n, deviation in deviations.items() if n not in drawn}
    call = None if lock.samples is None else feeds_for(session, lock.samples.calls[0])
    look = partial(observed, opened_model.digest, runner, session, call)
    return compared(
        lock, look, deviations, strict=options.strict, names=(str(model), str(path))
    )


def compared(
    lock: Lock,
    look: Callable[[], Observed],
    deviations: Mapping[str, float],
    *,
    strict: bool = False,
    names: tuple[str, str] = ("model", "lock"),
) -> Verification:
    """What became of ``lock``.

    Args:
        lock: What was.
        look: Observes what is, and times a call; again where that was slow.
        deviations: By output how far the golden samples are off.
        strict: As in ``VerifyOptions``.
        names: Those of the model and the lock.
    """
    was, now = lock.observed, look()
    speed = _speed(lock, now)
    for _ in range(_TIMINGS - 1):
        if speed[0] is not State.DRIFTED:
            break
        again = look()
        if again.call_s is not None and now.call_s is not None and again.call_s < now.call_s:
            now = again
        speed = _speed(lock, now)
    model = State.HOLDS, ["its files are those of the manifest"]
    if was.model != now.model:
        model = State.DRIFTED, [f"another one: {now.model} in place of {was.model}"]
    outcomes: Mapping[str, _Outcome] = {
        "model": model,
        "engine": _engine(was.runner, now.runner),
        "instruction sets": _machine(was, now),
        "settings": _stated(was.settings, now.settings),
        "kernels": _kernels(was.kernels, now.kernels),
        "numbers": _numbers(lock, deviations),
        "speed": speed,
    }
    checks = [
        Check(name=name, state=state, texts=tuple(texts))
        for name, (state, texts) in outcomes.items()
    ]
    return Verification(
        model=names[0],
        lock=names[1],
        checks=checks,
        strict=strict,
        deviations=deviations,
        call_s=(now.call_s, was.call_s),
    )


def _engine(was: Runner, now: Runner) -> _Outcome:
    name = title_of(now.name)
    if was.version == now.version:
        return State.HOLDS, (f"{name} {now.version}",)
    version = now.version or "of an unknown version"
    return State.DRIFTED, [f"{name} {version} in place of {was.version}"]


def _machine(was: Observed, now: Observed) -> _Outcome:
    """Instruction sets decide numbers; the CPU's name and its cores do not."""
    before, after = was.machine, now.machine
    missing = [one for one in before.instruction_sets if one not in after.instruction_sets]
    more = [one for one in after.instruction_sets if one not in before.instruction_sets]
    drifted = [f"without {', '.join(missing)}"] if missing else []
    drifted += [f"with {', '.join(more)}, too"] if more else []
    notes = [f"{after.cpu} in place of {before.cpu}"] if before.cpu != after.cpu else []
    if before.cores != after.cores:
        notes.append(f"{after.cores} cores in place of {before.cores}")
    texts = (*drifted, *notes) or (", ".join(after.instruction_sets) or after.cpu,)
    state = State.DRIFTED if drifted else State.TOLD if notes else State.HOLDS
    return state, texts


def _stated(was: Mapping[str, str], now: Mapping[str, str]) -> _Outcome:
    drifted: list[str] = []
    notes: list[str] = []
    if was.keys() - _PROCESS and not now.keys() - _PROCESS:
        notes.append("what is deployed does not report its settings")
        was = {name: value for name, value in was.items() if name in _PROCESS}
    for name in dict.fromkeys((*was, *now)):
        before, after = was.get(name), now.get(name)
        if before != after:
            text = f"{name} is {after or 'not set'}, and was {before or 'not set'}"
            (notes if name in OF_SPEED else drifted).append(text)
    state = State.DRIFTED if drifted else State.TOLD if notes else State.HOLDS
    texts = (*drifted, *notes) or (f"{number_of(len(now), 'setting')} as in the manifest",)
    return state, texts


def _kernels(was: Sequence[LockedKernel], now: Sequence[LockedKernel]) -> _Outcome:
    """Which nodes run in another kernel; the code is compared, and what is fused with it."""
    if not was:
        return State.HOLDS, ["the engine does not report its kernels"]
    if not now:
        return State.TOLD, ["what is deployed does not report its kernels"]
    before, after = _homes(was), _homes(now)
    changes: dict[tuple[str, str], list[str]] = {}
    for node in dict.fromkeys((*before, *after)):
        old, new = before.get(node), after.get(node)
        if old == new:
            continue
        first, second = (one.code if one else "no kernel of its own" for one in (old, new))
        second = f"{second}, fused otherwise" if first == second else second
        changes.setdefault((first, second), []).append(node)
    if not changes:
        return State.HOLDS, [f"the same {number_of(len(now), 'kernel')}"]
    texts = [
        f"{second} in place of {first}: {listed(nodes, _MOST_NODES)}"
        for (first, second), nodes in changes.items()
    ]
    more = left_out(len(texts), _MOST_CHANGES, " changes")
    return State.DRIFTED, [*texts[:_MOST_CHANGES], *more]


def _homes(kernels: Sequence[LockedKernel]) -> dict[str, LockedKernel]:
    return {node: kernel for kernel in kernels for node in kernel.nodes}


def _numbers(lock: Lock, deviations: Mapping[str, float]) -> _Outcome:
    if lock.samples is None:
        return State.TOLD, [
            "the deployment manifest has no samples: they would have been too large"
        ]
    allowed = lock.samples.tolerances
    unbounded = [n for n in deviations if allowed.get(n, 0.0) == math.inf]
    deviations = {n: deviation for n, deviation in deviations.items() if n not in unbounded}
    beyond = [n for n, deviation in deviations.items() if not deviation <= allowed.get(n, 0.0)]
    worst = max(deviations, key=lambda n: deviations[n] - allowed.get(n, 0.0), default=None)
    if unbounded and not beyond:
        names = listed(unbounded, _MOST_CHANGES)
        return State.TOLD, [f"the deployment manifest has no tolerance for {names}"]
    if worst is None:
        return State.TOLD, [
            "nothing was compared: every output depends on what the model draws at random"
        ]
    named = beyond or [worst]
    texts = [
        f"output {n} is off by {100 * deviations[n]:.3g}%, and"
        f" {100 * allowed.get(n, 0.0):.3g}% is allowed"
        for n in named[:_MOST_CHANGES]
    ]
    return State.DRIFTED if beyond else State.HOLDS, texts


def _speed(lock: Lock, now: Observed) -> _Outcome:
    """The time of the call that the manifest times: that of the first golden sample.

    ``tune`` compares models in turns, on all the calls that it times; its factor is of these.
    """
    was, speedup = lock.observed, lock.speedup
    if was.call_s is None or now.call_s is None:
        return State.HOLDS, ("no time was promised",)
    calls = () if lock.samples is None else lock.samples.calls[:1]
    count = sample_count(calls)
    of = f" of {number_of(count, 'sample')}" if count > 1 else ""
    text = f"{now.call_s * 1e3:.3f} ms a call{of}, {was.call_s * 1e3:.3f} ms when tuned"
    text += f" ({was.denied:.0%} of it waiting for other processes)" if was.denied else ""
    text += "" if speedup is None else f"; x{speedup:.2f} as fast as fp32 in tune's table"
    slow = now.call_s > SLOWER * was.call_s
    doubts: list[str] = []
    if now.denied:
        doubts.append(f"calls wait {now.denied:.0%} of their time for other processes")
    if was.machine.cpu != now.machine.cpu:
        doubts.append("another CPU: no time was promised for it")
    state = State.HOLDS if not slow else State.TOLD if doubts else State.DRIFTED
    return state, (text, *(doubts if slow else ()))
