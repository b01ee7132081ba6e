"""ONNX Runtime: any of its execution providers that is present."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast, final

import numpy as np

from finecast.devices.faults import is_here
from finecast.engines import other_engines
from finecast.engines.attribution import Kernel, attribute, node_of
from finecast.engines.base import (
    DTYPES,
    ONNX_LABELS,
    ONNX_NAMES,
    Array,
    Engine,
    Feeds,
    KernelTime,
    Session,
    TensorSpec,
    cpus,
    ordered_feeds,
)
from finecast.engines.numerics import ONNXRUNTIME
from finecast.engines.probe_models import Probe, build
from finecast.engines.source import ModelSource, ModelStep, read_source, to_run
from finecast.errors import EngineError, NoKernelError, UsageError, not_imported
from finecast.files.staging import staging
from finecast.frontends.dry_run import DryRun, warm_up
from finecast.frontends.dry_run_worker import onnxruntime_options, plain
from finecast.frontends.onnx.restating import lowered
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.rules.scaled_operands import ONE_SCALE

if TYPE_CHECKING:
    import onnxruntime


_ELEMENTS = {"bf16": 16, "fp8_e4m3": 17, "fp8_e5m2": 19}
"""onnx.TensorProto's numbers of the types that numpy lacks."""

_NO_KERNEL = re.compile(
    r"implementation for (?P<op>[\w.:]+)\((?P<version>\d+)\) node with name '(?P<name>.*?)'"
)
_NO_SCHEMA = re.compile(r"Fatal error: (?P<op>[\w.:]+)\(-?\d+\) is not a registered")
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_LOCATION = re.compile(r"\S+\.(?:cc|cpp|h):\d+ .*?\)>?\s(?=[A-Z'])")
_LONGEST = 240
_FUSES_TRANSPOSES = "MatmulTransposeFusion"
"""The optimization by which a product by a vector forgets the Transpose before it."""
_OLDEST_OPSET = 7  # ONNX Runtime's documentation, "Versioning": opset 7 and later
_RAISE_OPSET = (
    f"ONNX Runtime has the ops of opset {_OLDEST_OPSET} and later: raise the model's by"
    " onnx.version_converter.convert_version(onnx.load(FILE), 13)"
)
_OUT_OF_BOUNDS = re.compile(
    "out of data bounds|out of range value in index|invalid index found", re.IGNORECASE
)
_BATCHED_WEIGHTS = re.compile(
    r"running (?P<op>\w+) node\. Name:'(?P<name>.*?)' .*(IsBQuantParamSupported|b zero point)",
    re.DOTALL,
)
# OpenVINO is no way out of these: it does not check indices, and reads what lies beyond a
# table; and it reads past the scales of channels that a stack of matrices shares.
_FAILURES = (
    (_OUT_OF_BOUNDS, "check the numbers that index rows, such as token ids"),
    (_BATCHED_WEIGHTS, ONE_SCALE),
)
_TOO_NEW = re.compile("model IR version|is under development")
_LOWER_VERSIONS = (
    "write versions that it reads: opset_imports and ir_version of onnx.helper.make_model,"
    " or onnx.version_converter.convert_version(model, 21) and model.ir_version = 10"
)
_SUFFIX = "ExecutionProvider"
_THREADS = "threads"
_REMOTE = frozenset({"Azure"})
"""Providers that run models on other machines."""
_NEED_ROWS = frozenset({"GRU", "LSTM"})
"""The ops of the fault ``onnxruntime-empty-recurrent``: an empty batch ends the process."""
# The CPU provider runs an fp16 op that it has no kernel for in fp32, between casts of its own;
# of bf16 it knows only conversions.
_EMULATED = frozenset({("CPUExecutionProvider", Format.FP16)})


@final
class OnnxRuntimeSession(Session):
    """An inference session on one execution provider."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        source: ModelSource,
        *,
        where: str,
        profile: _SessionOpener | None,
        dry_run: DryRun,
    ) -> None:
        self._dry_run = dry_run
        self._session = session
        self._source = source
        self._where = where
        self._profile = profile
        # ONNX Runtime reports ports without a declared shape as scalars.
        ports = (*source.inputs, *source.outputs)
        shapeless = {spec.name for spec in ports if spec.shape is None}
        self.inputs = tuple(_spec(port, shapeless) for port in session.get_inputs())
        self.outputs = tuple(_spec(port, shapeless) for port in session.get_outputs())
        self._plain = all(s.dtype not in _ELEMENTS for s in (*self.inputs, *self.outputs))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """As ``Session.run``."""
        arrays = ordered_feeds(feeds, self.inputs)
        self._check(arrays)
        try:
            return self._run(self._session, arrays)
        except Exception as error:  # its exception classes share no base but Exception
            missing = lacks_kernel(error) or _BATCHED_WEIGHTS.search(str(error))
            raise (NoKernelError if missing else EngineError)(
                f"ONNX Runtime cannot run the model: {explain(error)}",
                where=self._where,
                fix=next(
                    (fix for found, fix in _FAILURES if found.search(str(error))),
                    "check the feeds' sizes, or try --engine openvino",
                ),
            ) from error

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Least time of each kernel, slowest first."""
        if self._profile is None:
            raise UsageError("this session has no profile", fix="load with profiling=True")
        arrays = ordered_feeds(feeds, self.inputs)
        self._check(arrays)
        try:
            # A session's profile can be ended once only, so each call has its own session.
            with staging() as folder:
                session = self._profile.open(folder)
                for _ in range(repeats + 1):
                    self._run(session, arrays)
                trace = Path(session.end_profiling())
                optimized = read_source(folder / _SessionOpener.OPTIMIZED)
                return kernel_times(trace, optimized, self._source, repeats=repeats)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime cannot profile the model: {explain(error)}", where=self._where
            ) from error

    def running(self, deployed: object) -> Session:
        """The same model as the user opened it; or a function, as ``Session.running``."""
        import onnxruntime

        if not isinstance(deployed, onnxruntime.InferenceSession):
            return Session.running(self, deployed)
        return OnnxRuntimeSession(
            deployed,
            self._source,
            where=self._where,
            profile=None,
            dry_run=self._dry_run,
        )

    @property
    def settings(self) -> Mapping[str, str]:
        """The options of the session."""
        return settings_of(self._session)

    def _check(self, arrays: Sequence[Array]) -> None:
        """Raise EngineError for inputs on which the model would end the process."""
        named = [*zip(self.inputs, arrays, strict=True)]
        empty = next((spec.name for spec, array in named if not array.size), None)
        needing = (step.op for step in self._source.steps if step.op in _NEED_ROWS)
        if empty is not None and (op := next(needing, "")):
            raise EngineError(
                f"the input {empty!r} is empty, and ONNX Runtime ends the process where"
                f" {op} reads no rows or no steps",
                where=self._where,
                fix="give sequences of at least one step",
            )
        self._dry_run.run(
            arrays, lambda: [(s.name, a, _ELEMENTS.get(s.dtype)) for s, a in named]
        )

    def _run(
        self, session: onnxruntime.InferenceSession, arrays: Sequence[Array]
    ) -> dict[str, Array]:
        names = [spec.name for spec in self.outputs]
        if self._plain:
            feeds = {s.name: a for s, a in zip(self.inputs, arrays, strict=True)}
            arrays_out: Sequence[Any] = session.run(names, feeds)
            return dict(_arrays(zip(names, arrays_out, strict=True)))
        return self._run_bound(session, arrays)

    def _run_bound(
        self, session: onnxruntime.InferenceSession, arrays: Sequence[Array]
    ) -> dict[str, Array]:
        from onnxruntime import OrtValue

        binding = session.io_binding()
        held: list[Array] = []  # the values point into these arrays
        for spec, array in zip(self.inputs, arrays, strict=True):
            data = np.ascontiguousarray(array).reshape(array.shape)
            held.append(data)
            if spec.dtype in _ELEMENTS:
                kind = _ELEMENTS[spec.dtype]
                value = OrtValue.ortvalue_from_numpy_with_onnx_type(plain(data), kind)
            else:
                value = OrtValue.ortvalue_from_numpy(data)
            binding.bind_ortvalue_input(spec.name, value)
        for spec in self.outputs:
            binding.bind_output(spec.name)
        session.run_with_iobinding(binding)
        return {
            spec.name: _array(value, spec)
            for spec, value in zip(self.outputs, binding.get_outputs(), strict=True)
        }


@final
class OnnxRuntimeEngine(Engine):
    """ONNX Runtime on one execution provider (``CPU``, ``CUDA``, ``Dnnl`` …).

    With ``spinning`` its threads wait busily within a run, which is faster if nothing else
    runs, but takes twice the CPU time; sessions that are not timed do without it.
    ``optimizing`` is graph optimization; sessions of models whose inner values are outputs do
    without it. ``fusing_codes``: quantized ops run in kernels on integers. ``threads`` share
    the work of one run; 0 for as many as ONNX Runtime chooses. ``device`` is the provider
    without its suffix.
    """

    name = "onnxruntime"
    serves_streams = True
    tells_kernels = True

    def __init__(
        self,
        device: str = "CPU",
        *,
        spinning: bool = True,
        optimizing: bool = True,
        fusing_codes: bool = True,
        threads: int = 0,
    ) -> None:
        try:
            present = devices()
        except ImportError as error:
            raise not_imported(
                "ONNX Runtime", error, install="pip install onnxruntime"
            ) from error
        wanted = device.lower().removesuffix(_SUFFIX.lower())
        match = {p.lower(): p for p in present}.get(wanted)
        if match is None:
            raise EngineError(
                f"this ONNX Runtime has no execution provider {device!r}",
                fix=f"use one of {', '.join(present)}, or install a build that has it",
            )
        warm_up(self.name)
        self._options = _Options(
            spinning=spinning,
            optimizing=optimizing,
            fusing_codes=fusing_codes,
            threads=threads,
        )
        self.device = match
        self._provider = match + _SUFFIX

    def load(self, model: Path | bytes, *, profiling: bool = False) -> OnnxRuntimeSession:
        """Open a session on an ONNX file (external data beside it) or its bytes."""
        where = str(model) if isinstance(model, Path) else ""
        model, source = to_run(model)
        opener = _SessionOpener(model, self._provider, self._options)
        dry_run = DryRun(
            library=self.name,
            settings=opener.settings(),
            model=model,
            where=where,
            fix=other_engines(self.name),
            data=source.data,
        ).load()
        try:
            session = opener.open(None)
        except Exception as error:  # its exception classes share no base but Exception
            raise EngineError(
                f"ONNX Runtime cannot load the model: {explain(error)}",
                where=where,
                fix=_fix(explain(error), source.opset) or other_engines(self.name),
            ) from error
        return OnnxRuntimeSession(
            session,
            source,
            where=where,
            profile=opener if profiling else None,
            dry_run=dry_run,
        )

    def has_kernel(self, node: Node, fmt: Format) -> bool | None:
        """Whether the provider's list of kernels has one; None for what the list lacks."""
        kernels = _registered_kernels()
        domain, _, op = node.native.rpartition("::")
        key = (self._provider, "" if domain == "onnx" else domain, op)
        if fmt is Format.TF32:
            return False
        if key not in kernels or (self._provider, fmt) in _EMULATED or fmt.has_scales:
            return None  # ops on codes become kernels by fusion, which only a run tells
        return f"tensor({ONNX_NAMES.get(fmt.label)})" in kernels[key]

    def load_probe(self, probe: Probe, fmt: Format) -> OnnxRuntimeSession:
        """A session of the probe as plans in ``fmt`` are written for this engine."""
        return self.load(lowered(build(probe, fmt), self.name))

    def load_streams(
        self, model: Path | bytes, fmt: Format = Format.FP32
    ) -> OnnxRuntimeStreams:
        """A session whose runs take one thread each, and threads that call it."""
        if fmt is not Format.FP32:
            raise EngineError(f"ONNX Runtime has no precision hint for {fmt.label}")
        return OnnxRuntimeStreams(self.as_one_stream().load(model).run, cpus())

    def as_one_stream(self) -> OnnxRuntimeEngine:
        """The engine on one thread: each stream has one."""
        return self.on_one_thread()

    def configured(self, settings: Mapping[str, str]) -> OnnxRuntimeEngine:
        """The same engine with these entries of the session's options, or ``threads``.

        Raises:
            UsageError: If the number of threads is none.
        """
        entries = dict(settings)
        threads = entries.pop(_THREADS, str(self._options.threads))
        if not threads.isdecimal():
            raise UsageError(f"{threads!r} is no number of threads", where="--set", fix="as 4")
        engine = copy(self)
        engine._options = replace(
            self._options, threads=int(threads), entries=tuple(entries.items())
        )
        return engine

    def on_one_thread(self) -> OnnxRuntimeEngine:
        """The same engine; its sessions run on one thread."""
        engine = copy(self)
        engine._options = replace(self._options, threads=1)
        return engine


@lru_cache(maxsize=1)
def _registered_kernels() -> dict[tuple[str, str, str], frozenset[str]]:
    """Tensor types of all kernels by provider, domain and op; empty if there is no list."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    listing = getattr(state, "get_all_opkernel_def", None)
    types_by_op: dict[tuple[str, str, str], set[str]] = {}
    for kernel in listing() if listing is not None else ():
        types = {t for allowed in kernel.type_constraints.values() for t in allowed}
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        types_by_op.setdefault((kernel.provider, domain, kernel.op_name), set()).update(types)
    return {key: frozenset(types) for key, types in types_by_op.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How sessions are opened.

    Without ``fusing_codes`` quantized ops compute as their definitions say on every CPU; in
    kernels on integers, sums of 8-bit products saturate on CPUs without VNNI. ``threads``
    share the work of one run; 0 for as many as ONNX Runtime chooses. ``entries`` of the
    session options take the place of those that finecast states.
    """

    spinning: bool
    optimizing: bool
    fusing_codes: bool
    threads: int = 0
    entries: tuple[tuple[str, str], ...] = ()


@final
class _SessionOpener:
    """Opens sessions on one model; with a folder, sessions that write their profile there."""

    OPTIMIZED = "optimized.onnx"

    def __init__(self, model: Path | bytes, provider: str, asked: _Options) -> None:
        self._asked = asked
        self._model = model
        self._provider = provider

    def open(self, folder: Path | None) -> onnxruntime.InferenceSession:
        import onnxruntime

        stated = self.settings()
        options = onnxruntime_options(stated, spinning=self._asked.spinning)
        if folder is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "trace")
            options.optimized_model_filepath = str(folder / self.OPTIMIZED)
            weights = "session.optimized_model_external_initializers_"
            options.add_session_config_entry(weights + "file_name", "weights.bin")
            options.add_session_config_entry(weights + "min_size_in_bytes", "1024")
        model = str(self._model) if isinstance(self._model, Path) else self._model
        return onnxruntime.InferenceSession(
            model,
            options,
            providers=stated["providers"],
            disabled_optimizers=stated["left_out"],
        )

    def settings(self) -> dict[str, Any]:
        """What decides how a model is compiled, as ``dry_run_worker`` reads it.

        Sessions that are asked for right numbers leave out an optimization that gives others.
        """
        # Between runs threads sleep, or they would take the processors of other sessions:
        # three that spun, timed in turns, took twice as long as each alone.
        entries = {"session.force_spinning_stop": "1", **ONNXRUNTIME}
        if not self._asked.fusing_codes:
            entries["session.disable_quant_qdq"] = "1"
        entries |= dict(self._asked.entries)
        wrong = not self._asked.fusing_codes and is_here("onnxruntime-transposed-vectors")
        providers = [self._provider]
        if self._provider != "CPUExecutionProvider":
            providers.append("CPUExecutionProvider")  # for ops on shapes and integers
        return {
            "threads": self._asked.threads,
            "optimizing": self._asked.optimizing,
            "entries": entries,
            "providers": providers,
            "left_out": [_FUSES_TRANSPOSES] if wrong else [],
        }


def settings_of(session: onnxruntime.InferenceSession) -> dict[str, str]:
    """The options of a session that decide its numbers or its speed."""
    options: Any = session.get_session_options()
    entries: dict[str, str] = {}
    for name in ONNXRUNTIME:
        with suppress(RuntimeError):  # an entry that was not set
            entries[name] = options.get_session_config_entry(name)
    return {
        **entries,
        "providers": ", ".join(session.get_providers()),
        "graph_optimization_level": options.graph_optimization_level.name,
        _THREADS: str(options.intra_op_num_threads or cpus()),
    }


def devices() -> tuple[str, ...]:
    """The execution providers of this ONNX Runtime, without their suffix."""
    import onnxruntime

    present = (p.removesuffix(_SUFFIX) for p in onnxruntime.get_available_providers())
    return tuple(p for p in present if p not in _REMOTE)


def lacks_kernel(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether ONNX Runtime raised ``error`` as it has no kernel of an op in its types."""
    return isinstance(error, Exception) and bool(_NO_KERNEL.search(str(error)))


def explain(error: Exception) -> str:
    """The reason in an ONNX Runtime exception, one line without source locations."""
    text = _PREFIX.sub("", " ".join(str(error).split()))
    if match := _NO_KERNEL.search(text):
        at = f" at {match['name']!r}" if match["name"] else ""
        return f"no kernel for {match['op']} (opset {match['version']}){at}"
    if match := _NO_SCHEMA.search(text):
        return f"no kernel for {match['op'].replace(':', '.')}"
    if match := _BATCHED_WEIGHTS.search(text):
        return (
            f"no kernel for the int8 product {match['name']!r} by a stack of matrices with"
            " more than one scale, a known fault (onnxruntime-batched-weights)"
        )
    text = _LOCATION.sub("", text) or type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _fix(reason: str, opset: int) -> str:
    """What to do about a model of a version that is not read; empty for other reasons."""
    if opset < _OLDEST_OPSET:
        return _RAISE_OPSET
    return _LOWER_VERSIONS if _TOO_NEW.search(reason) else ""


def _spec(port: Any, shapeless: Container[str]) -> TensorSpec:
    element: str = port.type.removeprefix("tensor(").removesuffix(")")
    shape = None if port.name in shapeless else port.shape
    dims = None if shape is None else tuple(d if d != "" else None for d in shape)
    return TensorSpec(name=port.name, dtype=ONNX_LABELS.get(element, element), shape=dims)


def _arrays(outputs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    """Outputs by name; the items of one that is a sequence are ``NAME[INDEX]``.

    An optional output without a value is an array without elements.
    """
    for name, value in outputs:
        if value is None:
            yield name, np.empty(0, np.float32)
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            yield from _arrays((f"{name}[{i}]", item) for i, item in enumerate(items))
        else:
            yield name, value


def _array(value: onnxruntime.OrtValue, spec: TensorSpec) -> Array:
    if spec.dtype not in _ELEMENTS:
        return value.numpy()
    # numpy() refuses types that numpy lacks, so the bytes are copied
    shape = tuple(value.shape())
    wanted = DTYPES[spec.dtype]
    size = math.prod(shape) * wanted.itemsize
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(data), dtype=wanted).reshape(shape)


# ONNX Runtime with several requests at a time: one thread for each, one session for all.


@final
class OnnxRuntimeStreams:
    """A session whose runs take one thread each, called from as many threads as CPUs.

    Servers that want throughput run it so: the work of one request is not split.
    """

    def __init__(self, run: Callable[[Feeds], object], requests: int) -> None:
        self._run = run
        self._requests = requests
        self._threads = ThreadPoolExecutor(requests, thread_name_prefix="finecast-request")

    @property
    def requests(self) -> int:
        """One for each CPU."""
        return self._requests

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Run the model on each of ``feeds``, as soon as a thread is free."""
        for _ in self._threads.map(self._run, feeds):
            pass


# Kernel times from ONNX Runtime's trace file, attributed to the nodes of the model.
#
# Its optimizer renames and fuses nodes but keeps the names of the values between them, so a
# kernel's outputs in the optimized model tell which node of the original model it ends with.

_TRACED = "_kernel_time"
# Kernels that read or give such numbers compute in the type of their first input.
_EIGHT_BITS = frozenset({"int8", "uint8"})
# Kernels by constant codes: the trace leaves out constants that were packed for a kernel.
_CODES = {"MatMulNBits": frozenset({"uint8"})}
# Kernels, by provider, op and attribute, that round what they read to 8 bits by themselves:
# they read and give floats, and multiply integers.
_ROUNDING = {("CPUExecutionProvider", "MatMulNBits", "accuracy_level=4")}
_ADDED = frozenset({"ReorderInput", "ReorderOutput", "MemcpyFromHost", "MemcpyToHost"})


def kernel_times(
    trace: Path, optimized: ModelSource, original: ModelSource, *, repeats: int
) -> list[KernelTime]:
    """Least time of each kernel over the last ``repeats`` runs, slowest first."""
    times: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, str] = {}
    formats: dict[str, str] = {}
    signatures: dict[str, str] = {}
    # The trace leaves out constants that were packed for a kernel. So products by 4 bits and
    # by 8, of exact values and of rounded ones, differ in their attributes alone.
    attributes = {step.name: step.attributes for step in optimized.steps}
    for event in json.loads(trace.read_text()):
        name, details = event.get("name", ""), event.get("args", {})
        if event.get("cat") != "Node" or not name.endswith(_TRACED):
            continue
        kernel = name.removesuffix(_TRACED)
        times[kernel].append(event["dur"] * 1e-6)
        kinds[kernel] = details.get("op_name", "")
        stated = attributes.get(kernel, "")
        sizes = (details.get(f"{port}_type_shape") for port in ("input", "output"))
        kind = f"{kinds[kernel]} {stated}"
        signatures[kernel] = f"{details.get('provider')} {kind} {[*sizes]}"
        types: list[str] = [t for shape in details.get("output_type_shape", ()) for t in shape]
        read = [t for shape in details.get("input_type_shape", ())[:1] for t in shape]
        if read and not _EIGHT_BITS.isdisjoint((*read, *types[:1])):
            types = read
        by = details.get("provider"), kinds[kernel]
        if any((*by, attribute) in _ROUNDING for attribute in stated.split()):
            types = ["int8"]
        formats[kernel] = ONNX_LABELS.get(types[0], types[0]) if types else ""
    ops = attribute(original.steps, _kernels(optimized, original))
    kernels = [
        KernelTime(
            kernel=name,
            kind=kinds[name],
            ops=ops.get(name, ()),
            format=formats[name],
            time_s=_per_run(series, repeats),
            signature=signatures[name],
            constants=_CODES.get(kinds[name], frozenset()),
        )
        for name, series in times.items()
    ]
    return sorted((k for k in kernels if k.time_s > 0), key=lambda k: -k.time_s)


def _per_run(series: list[float], repeats: int) -> float:
    # A kernel in a loop's body has several times in each run; the first run is a warm-up.
    each, rest = divmod(len(series), repeats + 1)
    if each == 0 or rest:
        return sum(series) / (repeats + 1)
    runs = [sum(series[i : i + each]) for i in range(each, len(series), each)]
    return min(runs)


def _kernels(optimized: ModelSource, original: ModelSource) -> list[Kernel]:
    producers = original.producers
    nodes = {step.name for step in original.steps}
    readers: dict[str, list[str]] = defaultdict(list)
    for step in optimized.steps:
        for value in step.inputs:
            readers[value].append(step.name)
    return [
        Kernel(
            name=step.name,
            named=_named(step, producers, nodes),
            feeds=tuple(r for value in step.outputs for r in readers[value]),
            added=step.op.rsplit(".", 1)[-1] in _ADDED,
        )
        for step in optimized.steps
    ]


def _named(step: ModelStep, producers: dict[str, str], nodes: set[str]) -> tuple[str, ...]:
    if step.op.rsplit(".", 1)[-1] in _ADDED:
        return ()
    by_value = {producers[value] for value in step.outputs if value in producers}
    if not by_value:
        name = step.name.removesuffix("_nchwc")
        by_value = {node} if (node := node_of(name, nodes)) else set[str]()
    return tuple(sorted(by_value))
