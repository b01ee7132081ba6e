"""Loads and runs models in an engine's library, for a process that does not want to crash.

``dry_run`` has this done in a ``worker_process``; the library's name is its argument. This
file imports nothing of finecast, so that the process starts as fast as the library does.

Each request has the ``key`` of a model, and the ``number`` of who asks. One to ``load`` has
the ``settings`` of the library and a ``path``, or the model's bytes as payload. One to ``run``
has ``feeds``: for each input its name, numpy's type, its shape and its type in the library.
What the library raises is no matter here: it is raised in the other process, too.

A request to ``keep`` loads a model, which then stays until a request has its number in
``drop``. The answer has what the library tells of the model, and runs of that number give
outputs. One for its ``kernels`` gives these, which are many.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np

_MOST_HELD_BYTES: Final = 256 << 20
"""Of the models together that are held; a larger one is held alone."""
_MEMORY_BYTES: Final = (
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
)
_LARGEST_HELD_BYTES: Final = max(_MOST_HELD_BYTES, _MEMORY_BYTES // 8)
"""A larger model is let go as soon as it is loaded, and never run: it is in memory here and in
the process that asks, and each time compiled, which may take twice its size."""

_COPIES: Final = 3
"""Of a model's files that a load takes: the file, weights as kernels read them, and one on the
way."""
_OWN_BYTES: Final = 128 << 20
"""What a load takes for kernels and pools, whatever the model. What it takes beyond these two
are constants that the model states in few bytes: such a model counts as that many bytes."""

_MOST_RESIDENT_BYTES: Final = 2 << 30
"""Models are let go after a run that leaves the process larger: their buffers are large."""

_Feeds: TypeAlias = Sequence[tuple[str, Any, Any]]
"""Names, arrays, and their types in the library."""
_Stage: TypeAlias = Callable[[str], None]


class _Loaded(Protocol):
    """A model that a library has loaded."""

    @property
    def keeps_state(self) -> bool:
        """Whether a run depends on those before it."""
        ...

    def told(self) -> Mapping[str, Any] | None:
        """What the library tells of it, for JSON; None if runs give no outputs."""
        ...

    def kernels(self) -> Sequence[KernelFacts]:
        """Its kernels, if the library tells them."""
        ...

    def run(self, feeds: _Feeds, *, fresh: bool) -> Sequence[Any]:
        """Run once, with an empty state if ``fresh``; the outputs in order, or nothing."""
        ...


_Load: TypeAlias = Callable[[Mapping[str, Any], "str | bytes"], "_Loaded | None"]
_Answer: TypeAlias = tuple[dict[str, Any], bytes]


class PortFacts(TypedDict):
    """An input or output of a compiled OpenVINO model, and what is known of its shape."""

    name: str
    tensors: list[str]
    type: str
    shape: list[int | None] | None


class KernelFacts(TypedDict):
    """A kernel of a compiled OpenVINO model, by OpenVINO's own names.

    ``signature`` has its implementation, and for each input and output type, shape and layout.
    """

    name: str
    kind: str
    computed: str
    stored: str
    layers: str
    sources: list[str]
    feeds: list[str]
    signature: str


class OpFacts(TypedDict):
    """An op of an OpenVINO model that is read, and not compiled."""

    name: str
    kind: str
    tensors: list[str]
    readers: list[str]


def ops_of(model: Any) -> list[OpFacts]:
    """The ops of an OpenVINO model, each after those that it reads."""
    return [
        {
            "name": op.get_friendly_name(),
            "kind": op.get_type_name(),
            "tensors": sorted({name for port in op.outputs() for name in port.get_names()}),
            "readers": _readers(op),
        }
        for op in model.get_ordered_ops()
    ]


def _readers(op: Any) -> list[str]:
    targets = (t for port in op.outputs() for t in port.get_target_inputs())
    return [target.get_node().get_friendly_name() for target in targets]


def ports_of(ports: Sequence[Any]) -> list[PortFacts]:
    """The inputs or outputs of a compiled OpenVINO model."""
    return [
        {
            "name": port.get_node().get_friendly_name(),
            "tensors": sorted(port.get_names()),
            "type": port.get_element_type().get_type_name(),
            "shape": _dims(port.get_partial_shape()),
        }
        for port in ports
    ]


def _dims(shape: Any) -> list[int | None] | None:
    if not shape.rank.is_static:
        return None
    return [dim.get_length() if dim.is_static else None for dim in shape]


def kernels_of(compiled: Any) -> list[KernelFacts]:
    """The kernels of a compiled OpenVINO model, in the order in which they run."""
    kernels: list[KernelFacts] = []
    layouts: dict[str, list[str]] = {}
    for op in compiled.get_runtime_model().get_ordered_ops():
        info, name = op.get_rt_info(), op.get_friendly_name()
        layouts[name] = _text(info, "outputLayouts").split(",")
        kernels.append(
            {
                "name": name,
                "kind": _text(info, "layerType"),
                "computed": _text(info, "runtimePrecision"),
                "stored": _text(info, "outputPrecisions"),
                "layers": _text(info, "originalLayersNames"),
                "sources": [v.get_node().get_friendly_name() for v in op.input_values()],
                "feeds": _readers(op),
                "signature": _signature(op, _text(info, "primitiveType"), layouts),
            }
        )
    return kernels


def _signature(op: Any, primitive: str, layouts: Mapping[str, Sequence[str]]) -> str:
    def told(port: Any) -> str:
        of, index = layouts[port.get_node().get_friendly_name()], port.get_index()
        layout = of[index] if index < len(of) else ""
        return f"{port.get_element_type().get_type_name()}{port.get_partial_shape()}{layout}"

    read, written = (", ".join(map(told, p)) for p in (op.input_values(), op.outputs()))
    return f"{primitive} ({read}) -> ({written})"


def _text(info: Any, key: str) -> str:
    if key not in info:
        return ""
    value = info[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def _openvino(tell_stage: _Stage) -> _Load:
    modules: dict[str, Any] = sys.modules  # pyright: ignore[reportAssignmentType]
    modules.setdefault("openvino_telemetry", None)  # as in ``finecast/__init__.py``
    import openvino

    core = openvino.Core()

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Loaded | None:
        tell_stage("read")
        described = settings.get("described")
        if isinstance(model, bytes) and described is not None:
            read = core.read_model(model[:described], model[described:])
        else:
            read = core.read_model(model)
        if not settings.get("compile"):
            return None
        tell_stage("compiled")
        compiled = core.compile_model(read, settings["device"], settings["compile"])
        return _OpenVinoModel(compiled, ops_of(read))

    return load


class _OpenVinoModel:
    """A compiled model and a request, and the ops of the model as it was read.

    OpenVINO numbers the ops that an ONNX node becomes by a count of the process's own, so that
    kernels are named after these, and not after those of another process.
    """

    def __init__(self, compiled: Any, ops: Sequence[OpFacts]) -> None:
        self.compiled, self.ops = compiled, ops
        self.request = compiled.create_infer_request()
        self.keeps_state = bool(self.request.query_state())

    def told(self) -> Mapping[str, Any] | None:
        """Its ports and ops, and whether it keeps a state. None if a port is text."""
        inputs, outputs = map(ports_of, (self.compiled.inputs, self.compiled.outputs))
        if any(port["type"] == "string" for port in (*inputs, *outputs)):
            return None
        return {
            "inputs": inputs,
            "outputs": outputs,
            "ops": self.ops,
            "keeps_state": self.keeps_state,
        }

    def run(self, feeds: _Feeds, *, fresh: bool) -> Sequence[Any]:
        """Run once; the request's own outputs, which the next run overwrites."""
        import openvino

        if fresh and self.keeps_state:
            self.request.reset_state()
        for index, (_, array, _) in enumerate(feeds):
            kind = self.compiled.inputs[index].get_element_type()
            tensor = openvino.Tensor(array, list(array.shape), kind)
            if self.keeps_state:  # for the fault openvino-given-tensors
                self.request.get_input_tensor(index).copy_from(tensor)
            else:
                self.request.set_input_tensor(index, tensor)
        self.request.infer(share_outputs=True)
        count = len(self.compiled.outputs)
        return [self.request.get_output_tensor(index) for index in range(count)]

    def kernels(self) -> Sequence[KernelFacts]:
        """As ``_Loaded.kernels``."""
        return kernels_of(self.compiled)


def onnxruntime_options(settings: Mapping[str, Any], *, spinning: bool) -> Any:
    """Options of a session; with ``spinning`` its threads wait busily within a run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal only: failures reach the caller as exceptions
    options.intra_op_num_threads = settings["threads"]
    if not settings["optimizing"]:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    for name, value in settings["entries"].items():
        options.add_session_config_entry(name, value)
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class _Run:
    """A model whose outputs nobody asks for."""

    keeps_state = False

    def __init__(self, run: Callable[[_Feeds], object]) -> None:
        self.call = run

    def told(self) -> None:
        """Nothing."""

    def kernels(self) -> Sequence[KernelFacts]:
        """None are told."""
        return ()

    def run(self, feeds: _Feeds, *, fresh: bool) -> Sequence[Any]:
        """Run once."""
        del fresh
        self.call(feeds)
        return ()


def _onnxruntime(tell_stage: _Stage) -> _Load:
    import onnxruntime
    from onnxruntime import OrtValue

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Loaded:
        tell_stage("compiled")
        session = onnxruntime.InferenceSession(
            model,
            onnxruntime_options(settings, spinning=False),
            providers=settings["providers"],
            disabled_optimizers=settings["left_out"],
        )

        def run(feeds: _Feeds) -> None:
            tensors = {
                name: OrtValue.ortvalue_from_numpy(array)
                if kind is None
                else OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
                for name, array, kind in feeds
            }
            session.run_with_ort_values([o.name for o in session.get_outputs()], tensors)

        return _Run(run)

    return load


def _tensorflow(tell_stage: _Stage) -> _Load:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import importlib

    tf: Any = importlib.import_module("tensorflow")

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Loaded:
        tell_stage("read")
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(tf.compat.v1.GraphDef.FromString(model), name="")
        config = tf.compat.v1.ConfigProto.FromString(bytes.fromhex(settings["config"]))
        session = tf.compat.v1.Session(graph=graph, config=config)

        def run(feeds: _Feeds) -> None:
            arrays = {name: array for name, array, _ in feeds}
            session.run(settings["outputs"], arrays)

        return _Run(run)

    return load


_LIBRARIES: Final[Mapping[str, Callable[[_Stage], _Load]]] = {
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "tensorflow": _tensorflow,
}


def resident_bytes() -> int:
    """The memory that this process takes; 0 where the system does not tell."""
    statm = "/proc/self/statm"
    if not os.path.exists(statm):
        return 0
    with open(statm) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def has_many_mappings() -> bool:
    """Whether this process has a third of the mappings that the system allows it.

    OpenVINO takes one for each kernel, and ends the process where there are no more.
    """
    limit, own = "/proc/sys/vm/max_map_count", "/proc/self/maps"
    if not (os.path.exists(limit) and os.path.exists(own)):
        return False
    with open(limit) as most, open(own, "rb") as file:
        return 3 * sum(1 for _ in file) > int(most.read())


def plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array; of a type that numpy lacks, its bytes as unsigned integers."""
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    return array


def arrays_of(stated: Sequence[Sequence[Any]], payload: bytes) -> list[np.ndarray[Any, Any]]:
    """Copies of the arrays in ``payload``; numpy's type and the shape of each are stated."""
    arrays: list[np.ndarray[Any, Any]] = []
    start = 0
    for dtype, shape in stated:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(payload, dtype=dtype, count=count, offset=start)
        start += array.nbytes
        arrays.append(array.reshape(shape).copy())
    return arrays


class _Kept(NamedTuple):
    """A model that is kept, and the bytes that it counts as."""

    loaded: _Loaded
    size: int
    key: str


class _Served:
    """The library, and the models that it has loaded lately, of a bounded size together."""

    def __init__(self, library: str) -> None:
        self.stages: list[_Stage] = []
        self.load_model = _LIBRARIES[library](lambda stage: self.stages[-1](stage))
        self.held: OrderedDict[str, tuple[_Loaded, int]] = OrderedDict()
        self.kept: dict[int, _Kept] = {}

    def answer(
        self, request: Mapping[str, Any], payload: bytes, tell_stage: _Stage
    ) -> _Answer:
        """Do what ``request`` calls for; raises what the library raises."""
        self.stages[:] = [tell_stage]
        for number in request["drop"]:
            kept = self.kept.pop(number, None)
            if kept is not None and self._shared(kept.key) is None:
                self._hold(kept.key, kept.loaded, kept.size)
        calls = {
            call.__name__: call for call in (self.load, self.keep, self.run, self.kernels)
        }
        try:
            return calls[request["call"]](request, payload)
        except MemoryError as error:  # the caller reads its text, as that of other errors
            raise RuntimeError(str(error)) from error

    def load(self, request: Mapping[str, Any], payload: bytes) -> _Answer:
        """Load a model and hold it, if it is not too large."""
        loaded = self._loaded(request, payload)
        if loaded is not None:
            self._hold(request["key"], *loaded)
        return {"status": "done"}, b""

    def keep(self, request: Mapping[str, Any], payload: bytes) -> _Answer:
        """Load a model, unless it is here, and keep it; absent if it tells nothing."""
        key = request["key"]
        known = self._shared(key) or self.held.pop(key, None) or self._loaded(request, payload)
        facts = None if known is None else known[0].told()
        if known is None or facts is None:
            return {"status": "absent"}, b""
        self.kept[request["number"]] = _Kept(known[0], known[1], key)
        return {"status": "done", "told": facts}, b""

    def kernels(self, request: Mapping[str, Any], payload: bytes) -> _Answer:
        """The kernels of a model that is kept; absent if it is not here."""
        del payload
        if (known := self.kept.get(request["number"])) is None:
            return {"status": "absent"}, b""
        return {"status": "done", "kernels": known.loaded.kernels()}, b""

    def run(self, request: Mapping[str, Any], payload: bytes) -> _Answer:
        """Run a model; absent if it is not here. Outputs are given of one that is kept."""
        key, kept = request["key"], self.kept.get(request["number"])
        known = kept or self.held.get(key) or self._shared(key)
        if known is None:
            return {"status": "absent"}, b""
        if key in self.held:
            self.held.move_to_end(key)
        stated = [(dtype, shape) for _, dtype, shape, _ in request["feeds"]]
        arrays = arrays_of(stated, payload)
        feeds = [
            (name, array, kind)
            for (name, _, _, kind), array in zip(request["feeds"], arrays, strict=True)
        ]
        self.stages[-1]("run")
        tensors = known[0].run(feeds, fresh=request["fresh"])
        if kept is None:
            if resident_bytes() > _MOST_RESIDENT_BYTES:
                self.held.clear()  # the process that asks needs as much to run them itself
            return {"status": "done"}, b""
        outputs = [plain(np.array(tensor.data)) for tensor in tensors]
        types_and_shapes = [(array.dtype.str, array.shape) for array in outputs]
        content = b"".join(array.tobytes() for array in outputs)
        return {"status": "done", "outputs": types_and_shapes}, content

    def _shared(self, key: str) -> _Kept | None:
        """A model that is kept for another number, and keeps no state from run to run."""
        of_key = (kept for kept in self.kept.values() if kept.key == key)
        return next((kept for kept in of_key if not kept.loaded.keeps_state), None)

    def _loaded(
        self, request: Mapping[str, Any], payload: bytes
    ) -> tuple[_Loaded, int] | None:
        """The model, with the bytes that it counts as."""
        path, size = request.get("path"), request["bytes"]
        self._make_room(size)  # before, so that two large ones are never here
        before = resident_bytes()
        loaded = self.load_model(request["settings"], payload if path is None else path)
        stated = resident_bytes() - before - _COPIES * size - _OWN_BYTES
        return None if loaded is None else (loaded, max(size, stated))

    def _hold(self, key: str, loaded: _Loaded, size: int) -> None:
        if size > _LARGEST_HELD_BYTES:
            return
        self._make_room(size)
        self.held[key] = loaded, size

    def _make_room(self, size: int) -> None:
        """Let go models that are held, the oldest first, until one of ``size`` fits beside."""
        while self.held and (
            size + sum(s for _, s in self.held.values()) > _MOST_HELD_BYTES
            or has_many_mappings()
        ):
            self.held.popitem(last=False)


if __name__ == "finecast_served":
    answer = _Served(sys.argv[1]).answer
