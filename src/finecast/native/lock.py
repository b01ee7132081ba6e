"""The lock of a model: what its numbers and its speed were when they were judged.

Laws: a lock is made of the model as it was written, loaded as it will be loaded. It has what
decides numbers, and samples of the numbers themselves, so that a machine which lacks the data
can tell within seconds whether it computes what was judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from finecast.data.golden import GoldenSamples, SavedSamples
from finecast.engines import get_engine, library_of
from finecast.engines.base import Engine, Feeds, KernelTime, Session, feeds_for
from finecast.engines.numerics import process_settings
from finecast.errors import UsageError
from finecast.files import read_text, write_bytes, write_text
from finecast.files.saved import Saved, SavedPart, reading, sealed
from finecast.measure.environment import Environment, environment, instruction_sets, version_of
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.native.opening import lock_beside, opened
from finecast.numbers.formats import Format
from finecast.terminal import finite

_VERSION: Final = 2
"""All locks have a checksum from this version on."""
_DAY_MS: Final = 24 * 60 * 60 * 1e3
"""No call that was timed takes longer."""
_MOST_BYTES: Final = 64 << 20
"""Of a lock without its samples: names of a million ops."""
TIMED: Final = Effort(min_time_s=0.5, rounds=11)

_FIX: Final = "give the NAME.lock.json that tune wrote, unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedKernel:
    """A kernel that runs: the engine's name of its code with its format, and its nodes."""

    code: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """What runs a model: an engine, its version, and whether it serves several requests.

    ``name`` is that of ``get_engine``, with the device.
    """

    name: str
    version: str
    throughput: bool = False

    @classmethod
    def of(cls, name: str, *, throughput: bool = False) -> Runner:
        """The engine as it is installed here."""
        needs = library_of(name.partition(":")[0])
        version = version_of(needs) or version_of(f"{needs}-cpu") or ""
        return cls(name=name, version=version, throughput=throughput)

    def engine(self) -> Engine:
        """The engine in that configuration.

        Raises:
            EngineError: If it is not installed, or has no such device.
        """
        installed_engine = get_engine(self.name)
        return installed_engine.as_one_stream() if self.throughput else installed_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine, as far as it decides numbers or times."""

    cpu: str
    cores: Annotated[int, msgspec.Meta(ge=1)]
    instruction_sets: tuple[str, ...]

    @classmethod
    def here(cls, found: Environment | None = None) -> Machine:
        """This machine."""
        host = found or environment()
        return cls(cpu=host.cpu, cores=host.cores, instruction_sets=instruction_sets(host))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a model does in a process: all that a lock holds but its samples.

    Attributes:
        model: The digest of the model's files.
        runner: What ran it.
        machine: Where.
        settings: What the engine reports of the session, and the process.
        kernels: What ran; none if the engine does not tell.
        call_s: Seconds of a call of the first golden sample; None if it was not timed.
        denied: The share of the processor time wanted that other processes had meanwhile.
    """

    model: str
    runner: Runner
    machine: Machine
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    kernels: Sequence[LockedKernel] = ()
    call_s: float | None = None
    denied: float = 0.0


class _Model(SavedPart):
    """The digests of the model's files and of its plan."""

    digest: str
    plan: str = ""


class _Times(SavedPart):
    call_ms: Annotated[float, msgspec.Meta(gt=0, le=_DAY_MS)] | None
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    speedup: Annotated[float, msgspec.Meta(gt=0)] | None


class _SavedLock(Saved, kw_only=True, tag_field="kind", tag="finecast.lock"):
    finecast: str
    model: _Model
    engine: Runner
    machine: Machine
    settings: Mapping[str, str]
    kernels: list[Annotated[list[str], msgspec.Meta(min_length=1)]]
    """Of each kernel its code and the names of its nodes."""
    times: _Times
    accuracy: dict[str, Any]
    samples: SavedSamples | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What a model did where it was judged.

    Attributes:
        plan: The digest of its plan.
        observed: What it did.
        samples: Golden samples; None if they would have been too large.
        accuracy: The metric of both models, and the certificate, if there is one.
        speedup: How many times as fast as fp32 it was in the last race; None if it did not.
    """

    plan: str
    observed: Observed
    samples: GoldenSamples | None = None
    accuracy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    speedup: float | None = None

    def write(self, path: Path) -> None:
        """Write the lock, and its samples beside it.

        Raises:
            UsageError: If a file cannot be written.
        """
        seen, samples = self.observed, None
        if self.samples is not None:
            content, samples = self.samples.to_npz()
            write_bytes(samples_of(path), content)
        call_ms = None if seen.call_s is None else seen.call_s * 1e3
        file = _SavedLock(
            version=_VERSION,
            finecast=environment().finecast,
            model=_Model(digest=seen.model, plan=self.plan),
            engine=seen.runner,
            machine=seen.machine,
            settings=seen.settings,
            kernels=[[k.code, *k.nodes] for k in seen.kernels],
            times=_Times(call_ms=call_ms, busy=seen.denied, speedup=self.speedup),
            accuracy=dict(self.accuracy),
            samples=samples,
        )
        stated = sealed(finite(msgspec.to_builtins(file, enc_hook=np.generic.item)))
        write_text(path, json.dumps(stated, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock, and its samples beside it.

        Raises:
            UsageError: If there is none, or it is not one that this release reads, or it was
                changed.
        """
        text = _read(path)
        with reading("deployment manifest", str(path), _FIX) as at:
            file = at.parsed(text, _SavedLock, newest=_VERSION, sealed_from=2)
        call_ms, samples = file.times.call_ms, file.samples
        observed = Observed(
            model=file.model.digest,
            runner=file.engine,
            machine=file.machine,
            settings=file.settings,
            kernels=tuple(
                LockedKernel(code=code, nodes=tuple(nodes)) for code, *nodes in file.kernels
            ),
            call_s=None if call_ms is None else call_ms / 1e3,
            denied=file.times.busy,
        )
        return cls(
            plan=file.model.plan,
            observed=observed,
            samples=samples and GoldenSamples.from_npz(samples_of(path), samples),
            accuracy=file.accuracy,
            speedup=file.times.speedup,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A model that was written, and what it is compared with to lock it.

    Attributes:
        reference: The fp32 model.
        calls: Calls to keep as golden samples; none if they are too large.
    """

    path: Path
    runner: Runner
    reference: Session
    calls: Sequence[Feeds]

    def lock(self, plan: str, accuracy: Mapping[str, Any], speedup: float | None) -> Lock:
        """The lock of the model as it is loaded from its file.

        Raises:
            EngineError: If the engine cannot load it.
        """
        session = load_to_verify(self.runner.engine(), self.path)
        samples, call = None, None
        if self.calls:
            call = feeds_for(session, self.calls[0])
            samples = GoldenSamples.of(session, self.reference, self.calls)
        seen = observed(opened(self.path).digest, self.runner, session, call)
        return Lock(
            plan=plan, observed=seen, samples=samples, accuracy=accuracy, speedup=speedup
        )


def lock_files(output: Path) -> tuple[Path, Path]:
    """The lock of a model that is written to ``output``, and the lock's samples."""
    lock = lock_beside(output)
    return lock, samples_of(lock)


def samples_of(lock: Path) -> Path:
    """The file of the golden samples of a lock: ``m.lock.npz`` of ``m.lock.json``."""
    return lock.with_suffix(".npz")


def load_to_verify(engine: Engine, model: Path) -> Session:
    """A session as the model is deployed, which tells its kernels if the engine can.

    Raises:
        EngineError: If the engine cannot load it.
    """
    if engine.lowers_by_hint:
        return engine.load_hinted(model, Format.FP32)
    return engine.load(model, profiling=engine.tells_kernels)


def observed(model: str, runner: Runner, session: Session, call: Feeds | None) -> Observed:
    """What a session does, on the first golden sample if there is one.

    ``call`` is the one that is timed and whose kernels count.
    """
    kernels: Sequence[LockedKernel] = ()
    took, denied = None, 0.0
    if call is not None:
        session.run(call)  # kernels are chosen by the shapes of the last call
        kernels = _kernels(session, call)
        if not runner.throughput:
            race = Race.of(lambda: session.run(call), {}, TIMED)
            took, denied = race.latency(ANCHOR).median_s, race.denied
    return Observed(
        model=model,
        runner=runner,
        machine=Machine.here(),
        settings={**session.settings, **process_settings()},
        kernels=kernels,
        call_s=took,
        denied=denied,
    )


def _kernels(session: Session, call: Feeds) -> tuple[LockedKernel, ...]:
    """The kernels that ran, in the order of their nodes' names."""
    kernels = [
        LockedKernel(code=f"{k.implementation} {k.computed}".strip(), nodes=k.ops)
        for k in session.kernel_formats()
    ]
    if not kernels:
        seen: Sequence[KernelTime] = ()
        with suppress(UsageError):  # a session that was opened without its profile
            seen = session.profile(call, repeats=1)
        kernels = [
            LockedKernel(code=f"{k.kind} {k.format}", nodes=k.ops) for k in seen if k.ops
        ]
    return tuple(sorted(kernels, key=lambda kernel: (kernel.nodes, kernel.code)))


def _read(path: Path) -> str:
    """The text of a lock's file.

    Raises:
        UsageError: If there is none, or it cannot be read.
    """
    if not path.is_file():
        raise UsageError(
            "there is no deployment manifest of the model",
            where=str(path),
            fix="tune writes it beside a model that it timed on this machine, and none for a"
            " --target; convert writes one with --lock; verify's --lock names another file",
        )
    return read_text(path, what="deployment manifest", most_bytes=_MOST_BYTES, fix=_FIX)
