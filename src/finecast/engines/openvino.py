"""OpenVINO: the default engine on CPU, the one with bf16 kernels for ONNX models.

Law: ops compute in the types that the model states. Sessions are compiled with the inference
precision hint ``f32``, under which OpenVINO adds no lower precision of its own, or with the
one that the model is made for, where its fp32 ops are marked; and with the settings of
``numerics``. Two exceptions remain on CPUs: fp16 ops compute in fp32 (unrounded between them),
and 64-bit integers in 32 bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, final

import numpy as np

from finecast.devices.faults import is_here
from finecast.devices.kv_cache import KV_CACHES, kv_cache_settings
from finecast.engines import other_engines
from finecast.engines.attribution import attribute
from finecast.engines.base import (
    DTYPES,
    Array,
    Engine,
    Feeds,
    KernelFormats,
    KernelTime,
    Loadable,
    Session,
    Steps,
    TensorSpec,
    joined,
    ordered_feeds,
    outputs_of_calls,
    untimed_of,
)
from finecast.engines.numerics import HINT, HINTS, openvino_settings
from finecast.engines.openvino_names import (
    SizeCheck,
    constants_of,
    kernels_of,
    model_source,
    nodes_by_friendly_name,
    specs_of,
    stored_in,
    with_unread,
)
from finecast.engines.source import ModelSource, to_run
from finecast.errors import EngineError, FinecastError, ModelError, UsageError, not_imported
from finecast.frontends.dry_run import DryRun, Feed, Kept, warm_up
from finecast.frontends.dry_run_worker import (
    KernelFacts,
    OpFacts,
    PortFacts,
    ops_of,
    plain,
    ports_of,
)
from finecast.frontends.dry_run_worker import kernels_of as runtime_kernels
from finecast.frontends.onnx.functions import without_functions
from finecast.frontends.onnx.model import without_links
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.changes import hint_of
from finecast.frontends.openvino.draws import with_fixed_draws
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.model import WEIGHTS_SUFFIX, load, reads, sent
from finecast.frontends.openvino.refused import (
    broadcast_stacks,
    computed_padding,
    confused_products,
    ignored_lengths,
    stacked_scales,
)
from finecast.frontends.openvino.types import LABELS
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.rules.scaled_operands import ONE_SCALE

T = TypeVar("T")

if TYPE_CHECKING:
    import openvino

    _Names: TypeAlias = Mapping[str, tuple[str, ...]]
    _Read: TypeAlias = tuple[openvino.Model, ModelSource, Callable[..., _Names], T]
    _Compiled: TypeAlias = tuple[tuple["_Here", SizeCheck], ModelSource, Callable[..., _Names]]


_MICROSECOND_S = 1e-6
_CUT_OFF_S = 0.5e-6
_NEEDS_RANK = (
    "set how many dimensions the input has before the model is saved: for an OpenVINO model"
    " ov.convert_model(..., input=[...]), or model.reshape({NAME: [-1, 3, 224, 224]})"
)
_OWN_MODEL = "check that this release of OpenVINO runs the model as it is"
# OpenVINO's names of kernels that read a state, and that attend to keys and values.
_STATE, _ATTENTION = "MemoryInput", "ScaledDotProductAttention"
# Levels of nested bodies. The time to compile doubles with each: 1 s at 14 (OpenVINO 2026.4).
_DEEPEST = 14


@final
class OpenVinoSession(Session):
    """A compiled model with one infer request; must not be run from two threads at once.

    ``names`` are the nodes by OpenVINO's name of an op; None without profiling. ``others``
    says which other engines may run the model; empty for OpenVINO's own models.
    """

    def __init__(
        self,
        made: tuple[_Here | _Elsewhere, SizeCheck],
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
        if self._names is None or not isinstance(self._model, _Here):
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
        return settings_of(model.compiled) if isinstance(model, _Here) else {}

    def running(self, deployed: object) -> Session:
        """The same model as the user compiled it; or a function, as ``Session.running``."""
        import openvino

        if not (
            isinstance(deployed, openvino.CompiledModel) and isinstance(self._model, _Here)
        ):
            return Session.running(self, deployed)
        compiled = _Here(deployed, self._model.dry_run)
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
class _Here:
    """A model compiled in this process; the other one runs it first, once for each shape.

    ``infer`` gives the outputs in order, which the next run may overwrite, and raises
    RuntimeError if OpenVINO fails; so it is in ``_Elsewhere``.
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
        return runtime_kernels(self.compiled)

    def infer(self, arrays: Sequence[Array]) -> Sequence[Array]:
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
class _Elsewhere:
    """A model that the process of dry runs has compiled and runs."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.inputs: Sequence[PortFacts] = kept.told["inputs"]
        self.outputs: Sequence[PortFacts] = kept.told["outputs"]
        self.keeps_state: bool = kept.told["keeps_state"]
        self._fresh = True

    def kernels(self) -> Sequence[KernelFacts]:
        return self._kept.kernels()

    def infer(self, arrays: Sequence[Array]) -> Sequence[Array]:
        fresh, self._fresh = self._fresh, False
        return self._kept.run(_feeds_of(self.inputs, arrays), fresh=fresh)

    def reset(self) -> None:
        self._fresh = True


def _feeds_of(ports: Sequence[PortFacts], arrays: Sequence[Array]) -> list[Feed]:
    return [(port["name"], array, None) for port, array in zip(ports, arrays, strict=True)]


@final
class OpenVinoEngine(Engine):
    """OpenVINO on one device, under its hint for latency, on as many threads as it chooses."""

    name = "openvino"
    lowers_by_hint = True
    serves_streams = True
    loads_together = True
    tells_kernels = True
    widens = True

    def __init__(self, device: str = "CPU") -> None:
        try:
            import openvino
        except ImportError as error:
            raise not_imported("OpenVINO", error, install="pip install openvino") from error
        warm_up(self.name)
        self._core = openvino.Core()
        self.device = device.upper()
        self._serving, self._threads = "LATENCY", 0
        self._overrides: Mapping[str, str] = {}
        present = self._core.available_devices
        if self.device.split(".")[0].split(":")[0] not in {
            *(d.split(".")[0] for d in present),
            "AUTO",
            "HETERO",
            "MULTI",
        }:
            raise EngineError(
                f"OpenVINO has no device {device!r} here",
                fix=f"use one of {', '.join(present) or 'none'}",
            )

    def load(self, model: Loadable, *, profiling: bool = False) -> OpenVinoSession:
        """Compile an ONNX file (external data beside it), its bytes, or OpenVINO's own."""
        return self._load(model, "f32", profiling=profiling, named=profiling)

    def reads(self, model: Loadable) -> bool:
        """Whether it reads the model and knows the rank of every value, without compiling."""
        try:
            with self._read(model, "", {}, DryRun.load) as (read, _, _, _):
                ports = (port for op in read.get_ops() for port in op.outputs())
                return all(port.get_partial_shape().rank.is_static for port in ports)
        except (RuntimeError, FinecastError):
            return False

    def load_hinted(self, model: Loadable, fmt: Format) -> OpenVinoSession:
        """Load a model under the precision hint for ``fmt``."""
        return self._load(model, _hint(fmt), profiling=False, named=True)

    def load_tried(self, model: Loadable) -> OpenVinoSession:
        """Load a model in another process, where it may crash; here if that cannot be."""
        where = str(model) if isinstance(model, Path) else ""
        with (
            _explained(model, where),
            self._read(model, where, self._settings("f32"), DryRun.keep) as parts,
        ):
            read, source, names, kept = parts
            if kept is not None:
                compiled, others = (_Elsewhere(kept), SizeCheck(read)), _other_engines(model)
                known = names(kept.told["ops"])
                return OpenVinoSession(
                    compiled, source, where=where, names=known, others=others
                )
        return self.load_hinted(model, Format.FP32)

    def load_streams(self, model: Loadable, fmt: Format = Format.FP32) -> OpenVinoStreams:
        """Load a model, which must keep no state, under the hint for throughput, too."""
        where = str(model) if isinstance(model, Path) else ""
        settings = self.as_one_stream()._settings(_hint(fmt))
        with self._compiled(model, where, settings) as ((loaded, _), source, _):
            inputs = specs_of(loaded.inputs, source.inputs)
            return OpenVinoStreams(loaded.compiled, inputs, where)

    def as_one_stream(self) -> OpenVinoEngine:
        """The same device under the hint for throughput."""
        return self._configured(serving="THROUGHPUT")

    def on_one_thread(self) -> OpenVinoEngine:
        """The same device; on CPUs its sessions run on one thread."""
        return self._configured(threads=1)

    def configured(self, settings: Mapping[str, str]) -> OpenVinoEngine:
        """The same device with these properties."""
        known = self._core.get_property(self.device, "SUPPORTED_PROPERTIES")
        for name in settings:
            if name not in known:
                raise unknown_name(name, known, what="property of OpenVINO", where="--set")
        engine = copy(self)
        engine._overrides = settings
        return engine

    def _configured(self, *, serving: str = "LATENCY", threads: int = 0) -> OpenVinoEngine:
        """The same device and library, in another configuration."""
        engine = copy(self)
        engine._serving, engine._threads = serving, threads
        return engine

    def _settings(self, hint: str, *, profiling: bool = False) -> dict[str, Any]:
        return config(
            self._core,
            self.device,
            hint,
            profiling=profiling,
            serving=self._serving,
            threads=self._threads,
        )

    def _made_for(
        self, model: openvino.Model | None, source: ModelSource, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """``settings`` as the model is made for; what the user sets takes their place."""
        stated = _stated(model, source, settings)
        return stated | dict(self._overrides) if settings else stated

    def _load(
        self, model: Loadable, hint: str, *, profiling: bool, named: bool
    ) -> OpenVinoSession:
        where = str(model) if isinstance(model, Path) else ""
        settings = self._settings(hint, profiling=profiling)
        with self._compiled(model, where, settings) as (compiled, source, names):
            known = names() if named else None
            others = _other_engines(model)
            return OpenVinoSession(compiled, source, where=where, names=known, others=others)

    @contextmanager
    def _compiled(
        self, model: Loadable, where: str, settings: dict[str, Any]
    ) -> Generator[_Compiled]:
        """The compiled model and a check of sizes, ports and steps, and nodes of each op."""
        with _explained(model, where):
            with self._read(model, where, settings, DryRun.load) as parts:
                read, source, names, dry_run = parts
                stated = self._made_for(read, source, settings)
                compiled = self._core.compile_model(read, self.device, stated)
                sizes = SizeCheck(read)
            yield (_Here(compiled, dry_run), sizes), source, names

    @contextmanager
    def _read(
        self, model: Any, where: str, settings: dict[str, Any], attempt: Callable[[DryRun], T]
    ) -> Generator[_Read[T]]:
        """The model as read, its ports and steps, a function for the nodes of each op.

        The ops are those of the model as another process read it, or by default as read here.
        And what ``attempt`` made of a dry run of it, which compiles if there are ``settings``.
        """
        if _is_onnx(model):
            with _inlined(model, where) as whole:
                given, source = to_run(whole)
                _check_depth(self.name, source, where)
                if source.miscomputed:
                    raise EngineError(
                        f"the model is not given to OpenVINO: {source.miscomputed}",
                        where=where,
                        fix=other_engines(self.name),
                    )
                stated = self._made_for(None, source, settings)
                with without_links(given) as place:
                    tried = attempt(self._dry_run(place, where, stated, data=source.data))
                    read = self._core.read_model(place)
                    _check_computed_rightly(read, where)

                    def names(ops: Sequence[OpFacts] | None = None) -> _Names:
                        return nodes_by_friendly_name(ops or ops_of(read), source)

                    yield read, source, names, tried
            return
        own = with_fixed_draws(load(model).model if isinstance(model, Path) else model)
        source = model_source(own)
        _check_depth(self.name, source, where)
        _check_computed_rightly(own, where)
        settings = self._made_for(own, source, settings)
        with sent(own) if settings else nullcontext((None, 0)) as (content, described):
            beside = (
                [content.with_suffix(WEIGHTS_SUFFIX).name] if isinstance(content, Path) else []
            )
            tried = attempt(self._dry_run(content, where, settings, described, beside))
        yield own, source, lambda ops=None: {s.name: (s.name,) for s in source.steps}, tried

    def _dry_run(
        self,
        model: Path | bytes | None,
        where: str,
        settings: Mapping[str, Any],
        described: int | None = None,
        data: Collection[str] = (),
    ) -> DryRun:
        """A dry run of the model; that kernels are timed is no part of it.

        Of OpenVINO's own models ``described`` bytes are no weights; ``data`` are the names of
        files that hold weights.
        """
        compiling = {name: value for name, value in settings.items() if name != "PERF_COUNT"}
        stated: dict[str, Any] = {"described": described, "compile": compiling}
        if settings:
            stated["device"] = self.device
        return DryRun(
            library=self.name,
            settings=stated,
            model=model,
            where=where,
            fix=_OWN_MODEL if described is not None else other_engines(self.name),
            data=data,
        )


@contextmanager
def _explained(model: Loadable, where: str) -> Generator[None]:
    """Raise an EngineError in place of what OpenVINO raises as it loads ``model``."""
    try:
        yield
    except RuntimeError as error:
        reason = explain(error)
        raise EngineError(
            f"OpenVINO cannot load the model: {reason}",
            where=where,
            fix=_NEEDS_RANK
            if "dynamic rank" in reason
            else _other_engines(model) or _OWN_MODEL,
        ) from error


def _is_onnx(model: Loadable) -> bool:
    """Whether other engines read the model, too."""
    return isinstance(model, bytes) or (isinstance(model, Path) and not reads(model))


def _other_engines(model: Loadable) -> str:
    """Which other engines to try; empty for a model that no other one reads."""
    return other_engines("openvino") if _is_onnx(model) else ""


def _stated(
    model: openvino.Model | None, source: ModelSource, settings: dict[str, Any]
) -> dict[str, Any]:
    """``settings`` as the model is made for: its hint, and whether kernels round values.

    The hint is that which is asked for, unless that is fp32. Without settings there are none.
    """
    asked = str(settings.get(HINT, ""))
    own = "" if model is None else hint_of(model)
    hint = own if own and asked == HINTS[Format.FP32] else asked
    made_for = openvino_settings(hint, source.rounded, source.kv_cache)
    known = {*settings}
    if known.intersection(kv_cache_settings(Format.FP32)):  # the device keeps such caches
        known |= {*kv_cache_settings(Format.FP32)}
    return settings | {k: v for k, v in made_for.items() if k in known}


def _hint(fmt: Format) -> str:
    """OpenVINO's name of the precision hint for ``fmt``; raises EngineError if it has none."""
    if fmt not in HINTS:
        raise EngineError(f"OpenVINO has no precision hint for {fmt.label}")
    return HINTS[fmt]


@contextmanager
def _inlined(model: Path | bytes, where: str) -> Generator[Path | bytes]:
    """The model without local functions, of which OpenVINO reads none, inside the block.

    Raises:
        EngineError: If they cannot be inlined.
    """
    with ExitStack() as stack:
        try:
            inlined = stack.enter_context(without_functions(model))
        except ModelError as error:
            raise EngineError(
                error.what, where=where, fix=other_engines(OpenVinoEngine.name)
            ) from error
        yield inlined


def _check_computed_rightly(model: openvino.Model, where: str) -> None:
    """Refuse a model that OpenVINO computes wrongly as it was given.

    Raises:
        EngineError: If it confuses the weights of two products, pads by another number than
            the model computes, ignores lengths of sequences, reads past scales, or cannot run
            a product; names the ops.
    """
    instead = f", or use {other_engines('openvino')}"
    second = f"store a transposed copy of these weights for the second product{instead}"
    constant = f"pad by a constant number, such as 0, and select the computed one{instead}"
    sizes = f"give the model fixed sizes, as by OpenVINO's model.reshape{instead}"
    faults = (
        (confused_products, second),
        (computed_padding, constant),
        (ignored_lengths, sizes),
        (broadcast_stacks, sizes),
        (stacked_scales, ONE_SCALE),
    )
    ops = [*every_op(model)]
    for find, fix in faults:
        if wrong := find(ops):
            text = f"the model is not given to OpenVINO: {wrong}"
            raise EngineError(text, where=where, fix=fix)


def _check_depth(engine: str, source: ModelSource, where: str) -> None:
    """Raise EngineError for a model that would take OpenVINO too long to compile."""
    if source.depth > _DEEPEST:
        raise EngineError(
            f"bodies of control flow nest {source.depth} deep, and OpenVINO's time to"
            f" compile doubles with each level: {_DEEPEST} at most",
            where=where,
            fix=other_engines(engine),
        )


def _typical_s(series: Sequence[float], runs: int) -> float:
    """The lower quartile of a kernel's times, or their mean if they are too short.

    Law: never 0. Each time is off by up to a microsecond for each of all ``runs`` so far, but
    the sum of the times by no more than a single one of them.
    """
    mean = float(np.mean(series))
    time_s = float(np.quantile(series, 0.25)) if mean > runs * _MICROSECOND_S else mean
    return max(time_s, _CUT_OFF_S)


def devices() -> tuple[str, ...]:
    """OpenVINO's devices on this machine."""
    import openvino

    return tuple(openvino.Core().available_devices)


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _typed(data: Array, spec: TensorSpec) -> Array:
    """The array in the type of its port: numpy lacks some, which come as integers."""
    wanted = DTYPES.get(spec.dtype, data.dtype)
    return data if data.dtype in (wanted, object) else data.view(wanted)


# Settings under which OpenVINO computes in the types that a model states.

_THREADS: Final = "INFERENCE_NUM_THREADS"


def config(
    core: openvino.Core,
    device: str,
    hint: str,
    *,
    profiling: bool = False,
    serving: str = "LATENCY",
    threads: int = 0,
) -> dict[str, Any]:
    """Settings of ``compile_model``.

    Args:
        core: The core that compiles.
        device: The device to compile for; settings that it does not know are left out.
        hint: OpenVINO's name of a precision.
        profiling: Whether times of kernels are recorded.
        serving: The performance hint: ``LATENCY`` or ``THROUGHPUT``.
        threads: Threads of a CPU; 0 for as many as OpenVINO chooses.
    """
    known = core.get_property(device, "SUPPORTED_PROPERTIES")
    stated = openvino_settings(hint) | ({_THREADS: threads} if threads else {})
    return {
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
        **{name: value for name, value in stated.items() if name in known},
    }


_REPORTED: Final = (
    *openvino_settings("f32"),
    *("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION", "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"),
    *("PERFORMANCE_HINT", "NUM_STREAMS", _THREADS),
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
