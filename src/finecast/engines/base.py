"""Interfaces of engines: software that runs a model here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from finecast.devices.setting import Setting
from finecast.numbers.formats import Format

Array: TypeAlias = NDArray[np.generic]
Feeds: TypeAlias = Mapping[str, Array]


@final
class Steps(dict[str, Array]):
    """The feeds of a sequence of calls, between which a model keeps its state.

    As a mapping it has the feeds of the first call, which tell names, types and most shapes.
    """

    def __init__(self, calls: Sequence[Feeds]) -> None:
        super().__init__(calls[0])
        self.calls = tuple(calls)


def calls_of(feeds: Feeds) -> tuple[Feeds, ...]:
    """The calls of a sequence, in order; other feeds are one call."""
    return feeds.calls if isinstance(feeds, Steps) else (feeds,)


def each_call(feeds: Feeds, change: Callable[[Feeds], Mapping[str, Array]]) -> Feeds:
    """``feeds`` with each call changed; a sequence stays one."""
    if isinstance(feeds, Steps):
        return Steps([change(one) for one in feeds.calls])
    return change(feeds)


Loadable: TypeAlias = Any
"""What an engine loads: a path, the bytes of an ONNX file, or a model of its own library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, element type (a format's label or another type's name) and shape of a port."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Time of one kernel and the names of the model's nodes that run in it.

    ``ops`` is empty for kernels that the engine itself added (reorders, conversions).
    ``format`` is the one that it computes in; ``constants`` are the types of the constants
    that it reads, if the engine tells them.
    """

    kernel: str
    kind: str
    ops: tuple[str, ...]
    format: str
    time_s: float
    constants: frozenset[str] = frozenset()


_GAINS = 1.05  # short probes cannot tell smaller speedups from noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Whether a format runs on a device, and how fast against fp32, by probing."""

    runs: bool
    speed: float | None = None
    reason: str = ""

    @property
    def worthwhile(self) -> bool:
        """Whether it runs, and faster than fp32 by more than the noise of short probes."""
        return self.runs and self.speed is not None and self.speed > _GAINS


class Session(Protocol):
    """A loaded model."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The model's inputs, in order."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The model's outputs, in order."""
        ...

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run once; outputs by name in model order."""
        ...

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Time of each kernel, without other load, from ``repeats`` runs; empty if unknown."""
        ...


@runtime_checkable
class StatefulSession(Session, Protocol):
    """A session of a model that may keep a state.

    ``run`` starts with an empty state. Of a sequence it runs all calls and gives the outputs
    of all of them, each joined along its first axis, or flat where sizes differ.
    """

    @property
    def keeps_state(self) -> bool:
        """Whether outputs depend on the calls before."""
        ...

    def reset(self) -> None:
        """Empty the state: the next step is the first of a sequence."""
        ...

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """Run once on the state that the step before left; raises as ``run`` does."""
        ...


def keeps_state(session: Session) -> bool:
    """Whether outputs of the session's model depend on the calls before."""
    return isinstance(session, StatefulSession) and session.keeps_state


def reset_state(session: Session) -> None:
    """Empty the state of the session's model, if it may keep one."""
    if isinstance(session, StatefulSession):
        session.reset()


def next_step(session: Session, feeds: Feeds) -> dict[str, Array]:
    """Run once on the state that the step before left; alone where no state is kept."""
    return session.step(feeds) if isinstance(session, StatefulSession) else session.run(feeds)


def outputs_of_calls(session: Session, feeds: Feeds) -> list[dict[str, Array]]:
    """The outputs of each call of a sequence, which starts with an empty state.

    Other feeds are one call. A model that keeps no state runs each call alone.
    """
    if not isinstance(feeds, Steps):
        return [session.run(feeds)]
    reset_state(session)
    return [next_step(session, one) for one in feeds.calls]


def joined(outputs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several calls as those of one, as ``StatefulSession`` says."""
    if len(outputs) == 1:
        return dict(outputs[0])
    return {name: _joined([one[name] for one in outputs]) for name in outputs[0]}


def _joined(arrays: Sequence[Array]) -> Array:
    if arrays[0].ndim and len({a.shape[1:] for a in arrays}) == 1:
        return np.concatenate(arrays)
    return np.concatenate([a.reshape(-1) for a in arrays])


class EmulatedSession(Session, Protocol):
    """A model as a device computes it; ``apply`` changes which nodes are cast.

    Law: with stochastic rounding, draws depend on the index of the sample since ``apply`` or
    ``restart``, not on how samples were split into batches.
    """

    def apply(self, setting: Setting) -> EmulatedSession:
        """Cast what ``setting`` says from now on; the stream of samples starts anew."""
        ...

    def restart(self) -> EmulatedSession:
        """The next sample is the first of the stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFormats:
    """The nodes in one kernel, and labels of the formats of its arithmetic and result."""

    ops: tuple[str, ...]
    computed: str
    stored: str


@runtime_checkable
class KernelSession(Session, Protocol):
    """A model whose engine tells which kernels it runs."""

    def kernel_formats(self) -> Sequence[KernelFormats]:
        """The formats of each kernel: under a hint the engine's choice, else the model's.

        Nodes that the engine removed, or computed when it loaded the model, are in none.
        """
        ...


@runtime_checkable
class ReadingEngine(Protocol):
    """An engine that tells much sooner than by loading a model whether it can."""

    def reads(self, model: Loadable) -> bool:
        """Whether it knows the model's ops, and their ranks; then it mostly loads it."""
        ...


@runtime_checkable
class HintingEngine(Protocol):
    """An engine with a precision hint, under which it lowers an fp32 model by itself."""

    def load_hinted(self, model: Loadable, fmt: Format) -> KernelSession:
        """Load a model as ``load`` does, with the precision hint for ``fmt``.

        The engine then computes in ``fmt`` the ops that it chooses. With the hint for fp32 it
        computes in the types that the model states.

        Raises:
            EngineError: If it has no such setting, or cannot run the model.
        """
        ...


@runtime_checkable
class TryingEngine(Protocol):
    """An engine that runs a model in another process, for its outputs and not for timing."""

    def load_tried(self, model: Loadable) -> KernelSession:
        """Load a model as ``load`` does, in another process if there can be one.

        A model that crashes the engine ends that process, and is an EngineError here.

        Raises:
            EngineError: If the engine cannot run the model.
        """
        ...


class Streams(Protocol):
    """A model loaded to serve several requests at once."""

    @property
    def requests(self) -> int:
        """How many requests run at a time: as many as the engine serves best."""
        ...

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Run the model on each of ``feeds`` and drop the outputs; returns when all are done.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If the engine fails.
        """
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that serves several requests at once, as in a server."""

    def load_streams(self, model: Loadable, fmt: Format = Format.FP32) -> Streams:
        """Load a model for throughput, with the engine's precision hint for ``fmt``.

        Raises:
            EngineError: If it cannot run the model, or not several requests of it at once.
        """
        ...

    def as_one_stream(self) -> Engine:
        """The engine whose sessions run one request as the streams above run each of theirs.

        Engines choose other kernels by the number of threads: what is right alone may be wrong
        here.
        """
        ...

    def on_one_thread(self) -> Engine:
        """The engine whose sessions run on one thread, as in small containers."""
        ...


class Engine(Protocol):
    """Loads models and says what its device can do."""

    @property
    def name(self) -> str:
        """The name that ``get_engine`` knows it by."""
        ...

    @property
    def device(self) -> str:
        """The device it runs on."""
        ...

    def capabilities(self) -> Mapping[Format, Capability]:
        """By format, measured with small kernels: CPU flags alone do not tell."""
        ...

    def load(self, model: Loadable, *, profiling: bool = False) -> Session:
        """Load an ONNX file or its bytes, or another model that the engine knows.

        Raises:
            EngineError: If the engine cannot read or run the model; says why.
        """
        ...


def outputs_on(session: Session, calls: Iterable[Feeds]) -> list[Array]:
    """The outputs over all ``calls``; if there are several, each output flat and concatenated.

    So a relative error of the outputs does not depend on how samples are split into calls.
    """
    return joined_outputs([[*session.run(feeds).values()] for feeds in calls])


def joined_outputs(found: Sequence[Sequence[Array]]) -> list[Array]:
    """The outputs of several calls as those of one."""
    if len(found) == 1:
        return [*found[0]]
    return [np.concatenate([a.reshape(-1) for a in of]) for of in zip(*found, strict=True)]
