"""OpenVINO: the default engine on CPU, the one with bf16 kernels for ONNX models.

Law: ops compute in the types that the model states. Sessions are compiled with the inference
precision hint ``f32``, under which OpenVINO adds no lower precision of its own, or with the
one that the model is made for, where its fp32 ops are marked; and with the settings of
``numerics``. Two exceptions remain on CPUs: fp16 ops compute in fp32 (unrounded between them),
and 64-bit integers in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from finecast.devices.kv_cache import kv_cache_settings
from finecast.engines import other_engines
from finecast.engines.base import Engine, Loadable
from finecast.engines.numerics import HINT, HINTS, openvino_settings
from finecast.engines.openvino.names import (
    SizeCheck,
    model_source,
    nodes_by_friendly_name,
    specs_of,
)
from finecast.engines.openvino.session import (
    THREADS,
    InOtherProcess,
    InProcess,
    OpenVinoSession,
    OpenVinoStreams,
)
from finecast.engines.source import ModelSource, to_run
from finecast.errors import EngineError, FinecastError, ModelError, not_imported
from finecast.frontends.dry_run import DryRun, warm_up
from finecast.frontends.dry_run_worker import OpFacts, ops_of
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
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.rules.scaled_operands import ONE_SCALE

T = TypeVar("T")

if TYPE_CHECKING:
    import openvino

    _Names: TypeAlias = Mapping[str, tuple[str, ...]]
    _Read: TypeAlias = tuple[openvino.Model, ModelSource, Callable[..., _Names], T]
    _Compiled: TypeAlias = tuple[
        tuple[InProcess, SizeCheck], ModelSource, Callable[..., _Names]
    ]


_NEEDS_RANK = (
    "set how many dimensions the input has before the model is saved: for an OpenVINO model"
    " ov.convert_model(..., input=[...]), or model.reshape({NAME: [-1, 3, 224, 224]})"
)
_OWN_MODEL = "check that this release of OpenVINO runs the model as it is"
# Levels of nested bodies. The time to compile doubles with each: 1 s at 14 (OpenVINO 2026.4).
_DEEPEST = 14


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
                compiled, others = (
                    (InOtherProcess(kept), SizeCheck(read)),
                    _other_engines(model),
                )
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
            yield (InProcess(compiled, dry_run), sizes), source, names

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


def devices() -> tuple[str, ...]:
    """OpenVINO's devices on this machine."""
    import openvino

    return tuple(openvino.Core().available_devices)


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
    stated = openvino_settings(hint) | ({THREADS: threads} if threads else {})
    return {
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
        **{name: value for name, value in stated.items() if name in known},
    }
