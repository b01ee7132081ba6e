"""Compiled OpenVINO models that run: one call at a time, or several requests at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from finecast.devices.faults import is_here
from finecast.devices.kv_cache import KV_CACHES
from finecast.engines.attribution import attribute
from finecast.engines.base import (
    DTYPES,
    Array,
    Feeds,
    KernelFormats,
    KernelTime,
    Session,
    Steps,
    TensorSpec,
    joined,
    ordered_feeds,
    outputs_of_calls,
    untimed_of,
)
from finecast.engines.numerics import openvino_settings
from finecast.engines.openvino.names import (
    SizeCheck,
    constants_of,
    kernels_of,
    specs_of,
    stored_in,
    with_unread,
)
from finecast.engines.source import ModelSource
from finecast.errors import EngineError, UsageError
from finecast.frontends.dry_run import DryRun, Feed, Kept
from finecast.frontends.dry_run_worker import (
    KernelFacts,
    PortFacts,
    plain,
    ports_of,
)
from finecast.frontends.dry_run_worker import kernels_of as runtime_kernels
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.types import LABELS
from finecast.numbers.formats import Format

if TYPE_CHECKING:
    import openvino

_MICROSECOND_S = 1e-6
_CUT_OFF_S = 0.5e-6
# OpenVINO's names of kernels that read a state, and that attend to keys and values.
_STATE, _ATTENTION = "MemoryInput", "ScaledDotProductAttention"
THREADS: Final = "INFERENCE_NUM_THREADS"
"""OpenVINO's property for the threads of a CPU."""


@final
class OpenVinoSession(Session):
    """A compiled model with one infer request; must not be run from two threads at once.

    ``names`` are the nodes by OpenVINO's name of an op; None without profiling. ``others``
    says which other engines may run the model; empty for OpenVINO's own models.
    """

    def __init__(
        self,
        made: tuple[InProcess | InOtherProcess, SizeCheck],
        source: ModelSource,
        *,
        where: str,
        names: Mapping[str, tuple[str, ...]] | None,
        others: str,
    ) -> None:
        self._model, self._sizes = made
        self._source = source
        self._where = where
        self._fix = "; or ".join(filter(None, ("check the feeds' sizes", others)))
        self._names = names
        compiled = specs_of(self._model.inputs, source.inputs)
        self.inputs = with_unread(compiled, source.inputs)
        # Compiled for int8, a model may have lost inputs that no op reads.
        self._read = [self.inputs.index(spec) for spec in compiled]
        self.outputs = specs_of(self._model.outputs, source.outputs)
        self._runs = 0
        self._shapes: list[tuple[int, ...]] | None = None  # those of the last run

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """As ``Session.run``."""
        if isinstance(feeds, Steps):
            return joined(outputs_of_calls(self, feeds))
        self.reset()
        return self.step(feeds)

    @property
    def keeps_state(self) -> bool:
        """Whether outputs depend on the calls before."""
        return self._model.keeps_state

    @property
    def kv_caches(self) -> tuple[Format, ...]:
        """fp16, of which OpenVINO's attention in fp32 reads, and codes.

        It ignores bf16 there, and keeps fp32 (2026.4).
        """
        facts = self._model.kernels() if self.keeps_state else ()
        states = {fact["name"] for fact in facts if fact["kind"] == _STATE}
        attends = any(
            fact["kind"] == _ATTENTION and states.intersection(fact["sources"])
            for fact in facts
        )
        return tuple(f for f in KV_CACHES if f not in (Format.FP32, Format.BF16) and attends)

    def reset(self) -> None:
        """Empty the state."""
        if self._model.keeps_state:
            self._model.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """Run once on the state that the step before left."""
        return {name: array.copy() for name, array in self.lend(feeds).items()}

    def lend(self, feeds: Feeds) -> dict[str, Array]:
        """As ``step``; the outputs are the request's own, which the next run overwrites."""
        arrays = ordered_feeds(feeds, self.inputs)
        shapes = [array.shape for array in arrays]
        try:
            self._sizes.check(
                {s.name: a.shape for s, a in zip(self.inputs, arrays, strict=True)}
            )
            outputs = self._model.infer([arrays[place] for place in self._read])
            self._runs += 1
            self._shapes = shapes
            return {
                spec.name: _typed(array, spec)
                for spec, array in zip(self.outputs, outputs, strict=True)
            }
        except RuntimeError as error:
            raise EngineError(
                f"OpenVINO cannot run the model: {explain(error)}",
                where=self._where,
                fix=self._fix,
            ) from error

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Time of each executed kernel, slowest first: the lower quartile of the runs.

        The lower quartile, because other processes only make a time longer. OpenVINO reports
        the mean over all runs since it compiled, in whole microseconds. The time of a single
        run follows from the change of the mean, to within some microseconds; so the minimum
        would be noise, and for kernels shorter than that the mean of the runs is given.
        """
        if self._names is None or not isinstance(self._model, InProcess):
            raise UsageError("this session has no profile", fix="load with profiling=True")
        if isinstance(feeds, Steps) or self._shapes != [
            array.shape for array in ordered_feeds(feeds, self.inputs)
        ]:
            self.run(feeds)  # the first run prepares kernels for these shapes
        kinds, before_s = self._model.means()
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            if untimed_of(feeds):
                self.begin(feeds)
                _, before_s = self._model.means()
            runs = self._runs
            self.go_on(feeds)
            seen, mean_s = self._model.means()
            kinds |= seen  # kernels shorter than a microsecond are listed only in some runs
            for name, mean in mean_s.items():
                total_s = self._runs * mean - runs * before_s.get(name, mean)
                last_s = total_s / (self._runs - runs)
                times[name].append(last_s)
            before_s = mean_s
        facts = self._model.kernels()
        ops, formats = self._attributed(facts, self._names)
        constants, signatures = constants_of(facts), _signatures(facts, feeds)
        kernels = [
            KernelTime(
                kernel=name,
                kind=kinds[name],
                ops=ops.get(name, ()),
                format=_label(formats.get(name, "")),
                time_s=_typical_s(series, self._runs),
                constants=frozenset(map(_label, constants.get(name, ()))),
                signature=signatures.get(name, ""),
            )
            for name, series in times.items()
        ]
        return sorted(kernels, key=lambda k: -k.time_s)

    def kernel_formats(self) -> Sequence[KernelFormats]:
        """The formats of each kernel that runs nodes of the model; raises as ``profile``."""
        if self._names is None:
            raise UsageError("this session has no profile", fix="load with profiling=True")
        facts = self._model.kernels()
        ops, formats = self._attributed(facts, self._names)
        stored, constants = stored_in(facts), constants_of(facts)
        sources = {op["name"]: op["sources"] for op in facts}
        implementations = {op["name"]: op["signature"].partition(" (")[0] for op in facts}
        return [
            KernelFormats(
                ops=nodes,
                computed=_label(formats.get(kernel, "")),
                stored=_label(stored.get(kernel, "")),
                constants=frozenset(map(_label, constants.get(kernel, ()))),
                implementation=implementations.get(kernel, ""),
                reads=tuple(_label(stored.get(s, "")) for s in sources.get(kernel, ())),
            )
            for kernel, nodes in ops.items()
            if nodes
        ]

    @property
    def settings(self) -> Mapping[str, str]:
        """Properties of the compiled model; none of one in another process."""
        model = self._model
        return settings_of(model.compiled) if isinstance(model, InProcess) else {}

    def running(self, deployed: object) -> Session:
        """The same model as the user compiled it; or a function, as ``Session.running``."""
        import openvino

        if not (
            isinstance(deployed, openvino.CompiledModel) and isinstance(self._model, InProcess)
        ):
            return Session.running(self, deployed)
        compiled = InProcess(deployed, self._model.dry_run)
        return OpenVinoSession(
            (compiled, self._sizes),
            self._source,
            where=self._where,
            names=self._names,
            others="",
        )

    def _attributed(
        self, facts: Sequence[KernelFacts], names: Mapping[str, tuple[str, ...]]
    ) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]]:
        """The nodes in each kernel, and OpenVINO's name of its format."""
        kernels, formats = kernels_of(facts, names)
        return attribute(self._source.steps, kernels), formats


def _signatures(facts: Sequence[KernelFacts], feeds: Feeds) -> dict[str, str]:
    """The signature of each kernel, with the feeds' shapes if it has free dimensions."""
    shapes = f" of {sorted((name, a.shape) for name, a in feeds.items())}"
    stated = {op["name"]: op["signature"] for op in facts}
    return {
        n: text + shapes if "?" in text or ".." in text else text for n, text in stated.items()
    }


@final
class InProcess:
    """A model compiled in this process; the other one runs it first, once for each shape.

    ``infer`` gives the outputs in order, which the next run may overwrite, and raises
    RuntimeError if OpenVINO fails; so it is in ``InOtherProcess``.
    """

    def __init__(self, compiled: openvino.CompiledModel, dry_run: DryRun) -> None:
        self.compiled = compiled
        self.inputs: Sequence[PortFacts] = ports_of(compiled.inputs)
        self.outputs: Sequence[PortFacts] = ports_of(compiled.outputs)
        self._request = compiled.create_infer_request()
        self._types = [port.get_element_type() for port in compiled.inputs]
        self.dry_run = dry_run
        self.keeps_state = bool(self._request.query_state())
        self.reset = self._request.reset_state
        self._copies = self.keeps_state and is_here("openvino-given-tensors")

    def kernels(self) -> Sequence[KernelFacts]:
        """OpenVINO's facts of each kernel."""
        return runtime_kernels(self.compiled)

    def infer(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The outputs in order."""
        self.dry_run.run(arrays, lambda: _feeds_of(self.inputs, arrays))
        shared = [shareable(array) for array in arrays]  # the request reads them as it runs
        for index, (data, kind) in enumerate(zip(shared, self._types, strict=True)):
            tensor = tensor_of(data, kind)
            if self._copies:
                self._request.get_input_tensor(index).copy_from(tensor)
            else:
                self._request.set_input_tensor(index, tensor)
        # share_outputs: without it infer() copies all outputs into a result that is not used
        self._request.infer(share_outputs=True)
        tensors = (self._request.get_output_tensor(i) for i in range(len(self.outputs)))
        return [
            np.array(tensor.str_data, dtype=object)
            if port["type"] == "string"
            else tensor.data
            for port, tensor in zip(self.outputs, tensors, strict=True)
        ]

    def means(self) -> tuple[dict[str, str], dict[str, float]]:
        """The kind of each kernel, and its mean time over all runs so far."""
        ran = [i for i in self._request.get_profiling_info() if i.status == i.Status.EXECUTED]
        kinds = {i.node_name: f"{i.node_type}/{i.exec_type}" for i in ran}
        # Means are rounded down to whole microseconds: on average half of one is missing.
        times = {i.node_name: i.real_time.total_seconds() + _CUT_OFF_S for i in ran}
        return kinds, times


@final
class InOtherProcess:
    """A model that the process of dry runs has compiled and runs."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.inputs: Sequence[PortFacts] = kept.told["inputs"]
        self.outputs: Sequence[PortFacts] = kept.told["outputs"]
        self.keeps_state: bool = kept.told["keeps_state"]
        self._fresh = True

    def kernels(self) -> Sequence[KernelFacts]:
        """OpenVINO's facts of each kernel."""
        return self._kept.kernels()

    def infer(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The outputs in order."""
        fresh, self._fresh = self._fresh, False
        return self._kept.run(_feeds_of(self.inputs, arrays), fresh=fresh)

    def reset(self) -> None:
        """Empty the state before the next call."""
        self._fresh = True


def _feeds_of(ports: Sequence[PortFacts], arrays: Sequence[Array]) -> list[Feed]:
    return [(port["name"], array, None) for port, array in zip(ports, arrays, strict=True)]


def _typical_s(series: Sequence[float], runs: int) -> float:
    """The lower quartile of a kernel's times, or their mean if they are too short.

    Law: never 0. Each time is off by up to a microsecond for each of all ``runs`` so far, but
    the sum of the times by no more than a single one of them.
    """
    mean = float(np.mean(series))
    time_s = float(np.quantile(series, 0.25)) if mean > runs * _MICROSECOND_S else mean
    return max(time_s, _CUT_OFF_S)


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _typed(data: Array, spec: TensorSpec) -> Array:
    """The array in the type of its port: numpy lacks some, which come as integers."""
    wanted = DTYPES.get(spec.dtype, data.dtype)
    return data if data.dtype in (wanted, object) else data.view(wanted)


_REPORTED: Final = (
    *openvino_settings("f32"),
    *("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION", "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"),
    *("PERFORMANCE_HINT", "NUM_STREAMS", THREADS),
)
"""Properties that a compiled model reports, and that decide its numbers or its speed."""


def settings_of(compiled: openvino.CompiledModel) -> dict[str, str]:
    """The properties of a compiled model that decide its numbers or its speed."""
    known = compiled.get_property("SUPPORTED_PROPERTIES")
    return {n: _as_text(compiled.get_property(n)) for n in _REPORTED if n in known}


def _as_text(value: Any) -> str:
    """A property's value in the words in which it is given."""
    if hasattr(value, "to_string"):  # an element type
        return value.to_string()
    return str(getattr(value, "name", value))


# OpenVINO with several requests at a time, and tensors that share memory with arrays.


def shareable(array: Array) -> Array:
    """The array, or a copy that OpenVINO can share: contiguous and writable."""
    return np.require(array, requirements=("C", "W")).reshape(array.shape)


def tensor_of(data: Array, kind: Any) -> openvino.Tensor:
    """A tensor of type ``kind`` in the memory of ``data``, which has to outlive it."""
    import openvino

    if (raw := plain(data)) is not data:
        return openvino.Tensor(raw, list(data.shape), kind)
    return openvino.Tensor(data, shared_memory=data.dtype.kind != "O")


@final
class OpenVinoStreams:
    """A model compiled for throughput, with as many requests as OpenVINO calls optimal."""

    def __init__(
        self, compiled: openvino.CompiledModel, inputs: Sequence[TensorSpec], where: str
    ) -> None:
        import openvino

        if compiled.create_infer_request().query_state():
            raise EngineError(
                "the model keeps a state from one request to the next",
                where=where,
                fix="use --objective latency",
            )
        self._inputs = inputs
        self._types = [port.get_element_type() for port in compiled.inputs]
        self._where = where
        self._queue = openvino.AsyncInferQueue(compiled)

    @property
    def requests(self) -> int:
        """How many requests run at a time, by OpenVINO's choice."""
        return len(self._queue)

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Run the model on each of ``feeds``, as soon as a request is free."""
        shared: list[list[Array]] = []  # requests read them until they are done
        try:
            for arrays in [ordered_feeds(one, self._inputs) for one in feeds]:
                shared.append([shareable(array) for array in arrays])
                tensors = map(tensor_of, shared[-1], self._types)
                self._queue.start_async(dict(enumerate(tensors)), share_inputs=True)
            self._queue.wait_all()
        except RuntimeError as error:
            raise EngineError(
                f"OpenVINO cannot run the model: {explain(error)}",
                where=self._where,
                fix="check the feeds' sizes, or use --objective latency",
            ) from error
