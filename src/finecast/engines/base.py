"""What an engine is: software that runs a model here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from finecast.devices.setting import Setting
from finecast.numbers.formats import Format

Array: TypeAlias = NDArray[np.generic]
Feeds: TypeAlias = Mapping[str, Array]

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
    ``constants`` are the types of the constants that it reads, where the engine tells.
    """

    kernel: str
    kind: str
    ops: tuple[str, ...]
    format: str
    time_s: float
    constants: frozenset[str] = frozenset()


_GAINS = 1.05  # a format that is no faster than this gains nothing: what short probes resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Whether a format runs on a device, and how fast against fp32, by probing."""

    runs: bool
    speed: float | None = None
    reason: str = ""

    @property
    def worthwhile(self) -> bool:
        """It runs, and faster than fp32 by more than short probes leave to chance."""
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
        """Undisturbed time of each kernel by ``repeats`` runs; empty if the engine cannot."""
        ...


class EmulatedSession(Session, Protocol):
    """A model as a device computes it; what is cast can be changed.

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
    """The nodes in one kernel, the format it computes in and that of its result, by label."""

    ops: tuple[str, ...]
    computed: str
    stored: str


class KernelSession(Session, Protocol):
    """A model whose kernels its engine tells."""

    def kernel_formats(self) -> Sequence[KernelFormats]:
        """The formats of each kernel: under a hint what the engine chose, else the model's.

        Nodes that it left out, or computed when it loaded the model, are in none.
        """
        ...


@runtime_checkable
class HintingEngine(Protocol):
    """An engine that lowers an fp32 model by itself where a setting asks for it."""

    def load_hinted(self, model: Loadable, fmt: Format) -> KernelSession:
        """Load a model as ``load`` does; where it pays, the engine computes in ``fmt``.

        In fp32 it computes in the types that the model states.

        Raises:
            EngineError: If it has no such setting, or cannot run the model.
        """
        ...


class Streams(Protocol):
    """A model loaded to serve several requests at once."""

    @property
    def requests(self) -> int:
        """How many are in flight: as many as the engine serves best."""
        ...

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Run the model on each; returns when all are done. Nobody gets the outputs.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If the engine fails.
        """
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that serves several requests at once, as in a server."""

    def load_streams(self, model: Loadable, fmt: Format = Format.FP32) -> Streams:
        """Load a model for throughput; ``fmt`` is that of the engine's own hint, if any.

        Raises:
            EngineError: If it cannot run the model, or not several requests of it at once.
        """
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
        """Per format, from running a small kernel, not from CPU flags alone."""
        ...

    def load(self, model: Loadable, *, profiling: bool = False) -> Session:
        """Load an ONNX file or its bytes, or another model that the engine knows.

        Raises:
            EngineError: If the engine cannot read or run the model; says why.
        """
        ...


def outputs_on(session: Session, calls: Iterable[Feeds]) -> list[Array]:
    """Each output of all ``calls``, one after the other: flat, if there are several.

    So an error relative to it does not depend on how samples are put into calls.
    """
    found = [[*session.run(feeds).values()] for feeds in calls]
    if len(found) == 1:
        return found[0]
    return [np.concatenate([a.reshape(-1) for a in of]) for of in zip(*found, strict=True)]
