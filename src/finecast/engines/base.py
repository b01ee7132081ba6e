"""Interfaces of engines, software that runs a model here, and of their sessions' ports."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.emulation import Emulation
from finecast.errors import EngineError, UsageError
from finecast.graph import Node
from finecast.naming import kind_of
from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.thresholds import PROBED_GAIN
from finecast.planning.detections import JoinedOutput
from finecast.planning.free_rows import FreeOutput
from finecast.plugin import title_of
from finecast.usercode import guarded

if TYPE_CHECKING:
    from finecast.engines.probe_models import Probe


Array: TypeAlias = NDArray[np.generic]
Feeds: TypeAlias = Mapping[str, Array]


@final
class Steps(dict[str, Array]):
    """The feeds of a sequence of calls, between which a model keeps its state.

    As a mapping it has the feeds of the first call, which tell names, types and most shapes.
    The first ``untimed`` calls make a state: where the sequence is timed, they do not count.
    """

    def __init__(self, calls: Sequence[Feeds], untimed: int = 0) -> None:
        super().__init__(calls[0])
        self.calls = tuple(calls)
        self.untimed = untimed


def calls_of(feeds: Feeds) -> tuple[Feeds, ...]:
    """The calls of a sequence, in order; other feeds are one call."""
    return feeds.calls if isinstance(feeds, Steps) else (feeds,)


def untimed_of(feeds: Feeds) -> int:
    """How many calls of a sequence do not count where it is timed."""
    return feeds.untimed if isinstance(feeds, Steps) else 0


T = TypeVar("T")


def each_call(feeds: Feeds, change: Callable[[Feeds], Mapping[str, Array]]) -> Feeds:
    """``feeds`` with each call changed; a sequence stays one."""
    if isinstance(feeds, Steps):
        return Steps([change(one) for one in feeds.calls], feeds.untimed)
    return change(feeds)


Loadable: TypeAlias = Any
"""What an engine loads: a path, the bytes of an ONNX file, or a model of its own library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, element type (a format's label or another type's name) and shape of a port.

    ``rows`` are the integers that an input takes, where they are known to index a table.
    ``aliases`` are other names of an input, by which data may name it, too.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    rows: range | None = None
    aliases: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Time of one kernel and the names of the model's nodes that run in it.

    ``ops`` is empty for kernels that the engine itself added (reorders, conversions).
    ``format`` is the one that it computes in; ``constants`` are the types of the constants
    that it reads, if the engine tells them. ``signature`` is its implementation with the
    shapes, types and layouts of what it reads and writes; empty if the engine does not tell.
    """

    kernel: str
    kind: str
    ops: tuple[str, ...]
    format: str
    time_s: float
    constants: frozenset[str] = frozenset()
    signature: str = ""


def does_not_run(
    name: str, kind: str, names: Iterable[str], *, where: str, more: str
) -> UsageError:
    """The error for an engine that runs no models of a ``kind``, as ``names`` do.

    ``more`` ends the advice.
    """
    return UsageError(
        f"engine {name!r} does not run {kind}",
        where=where,
        fix=f"use --engine {' or '.join(names)}, {more}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Whether a format runs on a device, and how fast against fp32, by probing.

    ``in_fp32`` says that its ops run, and that their kernels compute in fp32.
    """

    runs: bool
    speed: float | None = None
    reason: str = ""
    in_fp32: bool = False

    @property
    def worthwhile(self) -> bool:
        """Whether it runs, and faster than fp32 by more than the noise of short probes."""
        return self.runs and self.speed is not None and self.speed > PROBED_GAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFormats:
    """The nodes in one kernel, and labels of the formats of its arithmetic and result.

    ``reads`` are the types of the values that it reads, if the engine tells them.
    ``constants`` are as in ``KernelTime``. ``implementation`` is the engine's name of the code
    that runs, such as ``brgemm_avx512_bf16``; empty if the engine does not tell.
    """

    ops: tuple[str, ...]
    computed: str
    stored: str
    constants: frozenset[str] = frozenset()
    implementation: str = ""
    reads: tuple[str, ...] = ()


class Session(ABC):
    """A loaded model.

    Unless its class says otherwise, the model keeps no state and no kernel is known.

    Attributes:
        inputs: The model's inputs, in order.
        outputs: The model's outputs, in order.
        free: Outputs whose length depends on numbers, where what loaded the model knows them.
        joined: Likewise the outputs that the graph joins of parts, by name.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    free: Sequence[FreeOutput] = ()
    joined: Mapping[str, JoinedOutput] = MappingProxyType({})

    @abstractmethod
    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run once, with an empty state; outputs by name in model order, the caller's own.

        Of a sequence all calls are run, and each output has those of all calls, joined along
        the axis in which they differ or the first, or flat where several do.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If the engine fails.
        """

    def begin(self, feeds: Feeds) -> None:
        """Run the untimed calls of a sequence, which ``go_on`` runs the others of."""
        self.reset()
        for call in calls_of(feeds)[: untimed_of(feeds)]:
            self.step(call)

    def go_on(self, feeds: Feeds) -> None:
        """Run what is timed of ``feeds``: after ``begin`` the other calls of a sequence."""
        first = untimed_of(feeds)
        if not first:  # nothing was begun
            self.run(feeds)
            return
        for call in calls_of(feeds)[first:]:
            self.step(call)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Time of each kernel, without other load, from ``repeats`` runs; empty if unknown.

        Raises:
            UsageError: If kernels are known to sessions loaded with ``profiling`` alone.
        """
        del feeds, repeats
        return []

    def kernel_formats(self) -> Sequence[KernelFormats]:
        """The formats of each kernel: under a hint the engine's choice, else the model's.

        Nodes that the engine removed, or computed when it loaded the model, are in none. Empty
        if the engine does not report its kernels.
        """
        return ()

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that decide numbers and speed, as the engine itself reports them."""
        return {}

    @property
    def keeps_state(self) -> bool:
        """Whether outputs depend on the calls before."""
        return False

    @property
    def kv_caches(self) -> tuple[Format, ...]:
        """Formats, beside its own, that the model's keys and values may be kept in.

        Empty where the engine does not keep keys and values of earlier calls for attention.
        """
        return ()

    def reset(self) -> None:
        """Empty the state: the next step is the first of a sequence."""

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """Run once on the state that the step before left; raises as ``run`` does."""
        return self.run(feeds)

    def lend(self, feeds: Feeds) -> dict[str, Array]:
        """As ``step``, but the next run may overwrite the outputs: to read large ones once."""
        return self.step(feeds)

    def running(self, deployed: object) -> Session:
        """A session of this model that runs ``deployed`` in place of what this one loaded.

        By default that is a function, which takes arrays by the inputs' names and returns the
        outputs, by name or in order.

        Raises:
            UsageError: If it is nothing of the kind.
        """
        if not callable(deployed):
            raise UsageError(
                f"{kind_of(deployed)} runs no model",
                where="deployed",
                fix="give a function of the feeds, or what the engine compiled",
            )
        return CalledSession(deployed, self)


@final
class CalledSession(Session):
    """A function of the user's that runs the model of another session."""

    def __init__(self, function: Callable[[dict[str, Array]], Any], model: Session) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self._function = function

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Call the function; raises UserCodeError if it fails or returns something else."""
        return joined([self._called(one) for one in calls_of(feeds)])

    def _called(self, feeds: Feeds) -> dict[str, Array]:
        names = [spec.name for spec in self.outputs]
        with guarded("what is deployed failed", where="deployed", fix="call it by itself"):
            outputs = self._function(dict(feeds))
            arrays = (
                [outputs[n] for n in names] if isinstance(outputs, Mapping) else [*outputs]
            )
            return {n: np.asarray(array) for n, array in zip(names, arrays, strict=True)}


def outputs_of_calls(session: Session, feeds: Feeds) -> list[dict[str, Array]]:
    """The outputs of each call of a sequence, which starts with an empty state.

    Other feeds are one call. A model that keeps no state runs each call alone.
    """
    if not isinstance(feeds, Steps):
        return [session.run(feeds)]
    session.reset()
    return [session.step(one) for one in feeds.calls]


def lent_outputs(session: Session, feeds: Feeds) -> Iterator[dict[str, Array]]:
    """As ``outputs_of_calls``; the outputs of each call are there until the next one."""
    session.reset()
    return map(session.lend, calls_of(feeds))


def joined(outputs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several calls as those of one, as ``Session.run`` says."""
    if len(outputs) == 1:
        return dict(outputs[0])
    return {name: joined_arrays([one[name] for one in outputs]) for name in outputs[0]}


def joined_arrays(arrays: Sequence[Array]) -> Array:
    """Arrays one after another along the axis in which they differ, else the first one.

    Those that differ in several axes are made flat.
    """
    shapes = {array.shape for array in arrays}
    unlike = [i for i, sizes in enumerate(zip(*shapes, strict=False)) if len({*sizes}) > 1]
    if () in shapes or len({*map(len, shapes)}) > 1 or len(unlike) > 1:
        return np.concatenate([array.reshape(-1) for array in arrays])
    return np.concatenate(arrays, axis=unlike[0] if unlike else 0)


class UnorderedError(UsageError):
    """No order of summation can be chosen for models of a library."""


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


class Engine(ABC):
    """Loads models and says what its device can do.

    An engine's class states what differs: by default it has no precision hint, serves one
    request at a time, reads ONNX files, and does not know its kernels.

    Attributes:
        name: The name that ``get_engine`` knows the engine by.
        device: The device that it runs on.
        reads_onnx: Whether it loads ONNX models; the probes' models are then ONNX's, too.
        lowers_by_hint: Whether it has precision hints, under which it lowers an fp32 model by
            itself, and tells the kernels of every model.
        serves_streams: Whether it serves several requests at once, as in a server.
        loads_together: Whether models may be loaded and first run in several threads at once.
        tells_kernels: Whether sessions that are loaded with ``profiling`` tell their kernels.
        widens: Whether it turns low formats that the CPU has no kernels for into fp32 as it
            loads a model, so that its numbers take fp32's memory.
        untried: Which formats ``tune`` does not try where nobody names one, and how they are
            tried; empty if it tries all that gain.
    """

    name: str
    device: str
    reads_onnx: bool = True
    lowers_by_hint: bool = False
    serves_streams: bool = False
    loads_together: bool = False
    tells_kernels: bool = False
    widens: bool = False
    untried: str = ""

    @property
    def emulates(self) -> Emulation | None:
        """The device that it computes as; None if it runs models as fast as they are."""
        return None

    @property
    def label(self) -> str:
        """The name in plans and JSON: with the device where that decides the numbers."""
        return self.name

    @property
    def title(self) -> str:
        """What messages call it, with the device where that decides the numbers."""
        return title_of(self.label)

    @property
    def spec(self) -> str:
        """The engine's name for ``get_engine``."""
        return f"{self.name}:{self.device}"

    @property
    def judges(self) -> str:
        """The name, for ``get_engine``, of what gives the numbers that plans are judged by."""
        return self.spec

    def capabilities(self) -> Mapping[Format, Capability]:
        """By format, measured with small kernels: CPU flags alone do not tell."""
        from finecast.engines.probe import probe

        return probe(self)

    def capability(self, fmt: Format) -> Capability:
        """The capability in one format: a fraction of the time of ``capabilities``."""
        from finecast.engines.probe import probe_one

        return probe_one(self, fmt)

    def has_kernel(self, node: Node, fmt: Format) -> bool | None:
        """Whether there is a kernel for a node in a format; None if the engine cannot say."""
        del node
        return False if fmt is Format.TF32 else None

    @abstractmethod
    def load(self, model: Loadable, *, profiling: bool = False) -> Session:
        """Load an ONNX file or its bytes, or another model that the engine knows.

        Raises:
            EngineError: If the engine cannot read or run the model; says why.
        """

    def reads(self, model: Loadable) -> bool:
        """Whether the engine tells, much sooner than by loading ``model``, that it can.

        It knows the model's ops, and their ranks; then it mostly loads it.
        """
        del model
        return False

    def load_hinted(self, model: Loadable, fmt: Format) -> Session:
        """Load a model as ``load`` does, with the precision hint for ``fmt``.

        The engine then computes in ``fmt`` the ops that it chooses. With the hint for fp32 it
        computes in the types that the model states.

        Raises:
            EngineError: If it has no such setting, or cannot run the model.
        """
        del model
        raise EngineError(f"{self.title} has no precision hint for {fmt.label}")

    def load_tried(self, model: Loadable) -> Session:
        """Load a model for its outputs and not for timing, in another process if it can be.

        There a model that crashes the engine is an EngineError. It is loaded as by ``load``,
        or under the hint for fp32, so that the session tells its kernels.

        Raises:
            EngineError: If it cannot run the model.
        """
        if self.lowers_by_hint:
            return self.load_hinted(model, Format.FP32)
        return self.load(model)

    def load_streams(self, model: Loadable, fmt: Format = Format.FP32) -> Streams:
        """Load a model for throughput, with the engine's precision hint for ``fmt``.

        Raises:
            EngineError: If it cannot run the model, or not several requests of it at once.
        """
        del model, fmt
        raise EngineError(f"{self.name} serves one request at a time")

    def as_one_stream(self) -> Engine:
        """The engine whose sessions run one request as the streams above run each of theirs.

        Engines choose other kernels by the number of threads: what is right alone may be wrong
        here.
        """
        return self

    def on_one_thread(self) -> Engine | None:
        """The engine whose sessions run on one thread, as in small containers.

        None if the number of threads cannot be chosen.
        """
        return None

    def configured(self, settings: Mapping[str, str]) -> Engine:
        """The engine with these settings, by its own names, in place of those it has here.

        Raises:
            UsageError: If the engine takes none.
        """
        if not settings:
            return self
        raise UsageError(
            f"{self.name} takes no settings of a session",
            where=", ".join(settings),
            fix="set them where the process starts, and leave them out here",
        )

    def load_probe(self, probe: Probe, fmt: Format) -> Session:
        """A session of a probe in ``fmt``: its input is ``x``, its output ``y``, both fp32.

        Raises:
            EngineError: If it has no kernels in the format.
        """
        from finecast.engines.probe_models import build

        return self.load(build(probe, fmt))

    def load_cast_probe(self, low: Format, size: int) -> Session:
        """A session to profile a cast to ``low``, called ``cast``, of ``size`` elements.

        The ops around the cast do not absorb it. The input ``x`` is fp32, [size / 64, 64].

        Raises:
            EngineError: If it has no kernels in the format.
        """
        from finecast.frontends.onnx.statements import cast_model

        return self.load(cast_model(low, size), profiling=True)


def outputs_on(session: Session, calls: Iterable[Feeds]) -> list[Array]:
    """The outputs over all ``calls``; if there are several, those of each output joined.

    So a relative error of the outputs does not depend on how samples are split into calls.
    """
    return joined_outputs([[*session.run(feeds).values()] for feeds in calls])


def joined_outputs(found: Sequence[Sequence[Array]]) -> list[Array]:
    """The outputs of several calls as those of one."""
    if len(found) == 1:
        return [*found[0]]
    return [joined_arrays(of) for of in zip(*found, strict=True)]


# ---------------------------------------------------- how many CPUs there are for this process


def cpus() -> int:
    """The CPUs that this process may use, which in a container may be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ------------------------------------------------------------------- ports of a session

_FLOATS = {f.label: f.dtype for f in FLOATS if f is f.storage}
_LOW = _FLOATS.keys() - {"fp32"}
_OTHERS = {
    "fp64": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
    "string": np.dtype(object),
    **{f"{u}int{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)},
}
DTYPES: dict[str, np.dtype[np.generic]] = {**_FLOATS, **_OTHERS}
"""The numpy (or ml_dtypes) type of each element type's label."""

ONNX_LABELS: Final = {
    "float": "fp32",
    "double": "fp64",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8e4m3fn": "fp8_e4m3",
    "float8e5m2": "fp8_e5m2",
}
"""Labels of ONNX's float types; the label of another type is ONNX's own name."""
ONNX_NAMES: Final = {label: name for name, label in ONNX_LABELS.items()}

_LABELS = {dtype: label for label, dtype in DTYPES.items()}


def dtype_label(dtype: np.dtype[np.generic]) -> str:
    """The label of an array's element type; numpy's own name where there is none."""
    return _LABELS.get(dtype, "string" if dtype.kind in "OSU" else dtype.name)


def in_native_order(array: Array) -> Array:
    """The array with bytes in this machine's order; another order is no other type."""
    swapped = array.dtype.kind in "biufc" and not array.dtype.isnative
    return array.astype(array.dtype.newbyteorder("=")) if swapped else array


def by_own_names(values: Mapping[str, T], inputs: Sequence[TensorSpec]) -> Mapping[str, T]:
    """``values`` by the names of the inputs that are named by another name of theirs.

    An alias is no other name where it is the name of an input, or the input's name is given,
    too: such a value keeps the name that it has.
    """
    names = {spec.name for spec in inputs}
    free = [spec for spec in inputs if spec.aliases and spec.name not in values]
    own = {alias: spec.name for spec in free for alias in spec.aliases if alias not in names}
    taken = {name: own.get(name, name) for name in values}
    unique = len(set(taken.values())) == len(taken)
    return {taken[n]: value for n, value in values.items()} if own and unique else values


def ordered_feeds(feeds: Feeds, inputs: Sequence[TensorSpec]) -> list[Array]:
    """The arrays of ``feeds`` in the model's order, after checking names, types and shapes.

    An fp32 array is rounded where a plan has declared the input in a low type: the data of a
    model run its low version, too.

    Raises:
        UsageError: If an input is missing or unknown, or an array's type or shape is not
            the input's; names the input, what it got and what it expected.
    """
    names = [spec.name for spec in inputs]
    known = ", ".join(names) or "none"
    named = by_own_names(feeds, inputs)
    for name in named:
        if name not in names:
            raise UsageError(f"unknown input {name!r}", fix=f"the model's inputs are {known}")
    arrays: list[Array] = []
    for spec in inputs:
        if spec.name not in named:
            raise UsageError(
                f"input {spec.name!r} is missing", fix=f"the model's inputs are {known}"
            )
        array = in_native_order(named[spec.name])
        if spec.dtype in _LOW and array.dtype == np.float32:
            array = array.astype(DTYPES[spec.dtype])
        check_array(array, spec)
        arrays.append(array)
    return arrays


def check_array(array: Array, spec: TensorSpec) -> None:
    """Check an array's element type, rank and sizes against those of an input.

    Raises:
        UsageError: If it does not fit.
    """
    got = dtype_label(array.dtype)
    if got != spec.dtype:
        raise UsageError(
            f"input {spec.name!r} has type {got}, expected {spec.dtype}",
            fix="convert the array before running",
        )
    if spec.shape is None:
        return
    if not fits(array.shape, spec.shape):
        raise UsageError(
            f"input {spec.name!r} has shape {shape_text(array.shape)}, "
            f"expected {shape_text(spec.shape)}",
            fix="feed arrays of the declared shape",
        )


def fits(shape: Sequence[int], declared: Sequence[int | str | None]) -> bool:
    """Whether a shape is one that is declared, where a size may be open."""
    return len(shape) == len(declared) and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(declared, shape, strict=True)
    )


def shape_text(shape: Sequence[int | str | None]) -> str:
    """``[N, 3, ?]``: a shape as messages and tables show it."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


def feeds_for(session: Session, feeds: Feeds) -> Feeds:
    """The feeds that ``session`` takes, in the declared types of its inputs."""
    specs = [s for s in session.inputs if s.name in feeds]
    return each_call(
        feeds,
        lambda call: {s.name: np.asarray(call[s.name], DTYPES.get(s.dtype)) for s in specs},
    )
