"""TensorFlow on this machine's CPU, with the kernels of oneDNN."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from finecast import Format
from finecast.engines import (
    TENSORFLOW,
    TENSORFLOW_REWRITES,
    Array,
    Engine,
    Feeds,
    Kernel,
    KernelFormats,
    KernelTime,
    Loadable,
    ModelStep,
    Probe,
    Session,
    TensorSpec,
    attribute,
    cpus,
    ordered_feeds,
)
from finecast.errors import EngineError, UsageError
from finecast.frontends import KERAS_SUFFIX, DryRun, load_keras
from finecast.graph import PHI, Node
from finecast_tensorflow.frontend.draws import with_fixed_draws
from finecast_tensorflow.frontend.functions import bodies, opened, plain_name, tensor_of
from finecast_tensorflow.frontend.library import (
    DTYPES,
    FLOATS,
    dtype_label,
    grappler,
    kernels,
    tf,
)
from finecast_tensorflow.frontend.loading import load, of_keras
from finecast_tensorflow.frontend.model import FrozenModel, SignaturePort
from finecast_tensorflow.frontend.regions import precision_attribute

NAME: Final = "tensorflow"
_REWRITES: Final = {Format.FP32: "", **TENSORFLOW_REWRITES}
"""Names of Grappler's setting that lowers a model to each format on a CPU."""
_ON: Final = 1
"""``RewriterConfig.Toggle.ON``."""
_OFF: Final = 2
"""``RewriterConfig.Toggle.OFF``."""
_LONGEST: Final = 240
_AT_NODE: Final = re.compile(r"^Node: '(?P<node>.*)'\n(?P<what>.*)$", re.MULTILINE)


def devices() -> tuple[str, ...]:
    """The devices that finecast runs TensorFlow on."""
    return ("CPU",)


@final
class TensorFlowEngine(Engine):
    """Runs graphs without variables; ops compute in the types that the graph states.

    It reads SavedModels and Keras files, and not ONNX files as other engines do.
    """

    name = NAME
    device = "CPU"
    reads_onnx = False
    lowers_by_hint = True
    tells_kernels = True
    untried = (
        "int8 was not tried, as TensorFlow has no fast int8 here; -o NAME.xml writes a model"
        " for OpenVINO, in which it is tried"
    )

    def __init__(self, device: str = "CPU") -> None:
        if device.upper() not in devices():
            raise EngineError(
                f"finecast does not drive TensorFlow on {device!r}", fix="use tensorflow:CPU"
            )

    def load(self, model: Loadable, *, profiling: bool = False) -> TensorFlowSession:
        """Open a SavedModel, by its folder, a ``.keras`` file, or a model in memory.

        Raises:
            UsageError: If it is none of them.
            ModelError: If it cannot be read, or a ``.keras`` file brings code.
            EngineError: If TensorFlow cannot run it.
        """
        return TensorFlowSession(_taken(model), profiling=profiling)

    def load_hinted(self, model: Loadable, fmt: Format) -> TensorFlowSession:
        """Load a model with Grappler's automatic mixed precision, which chooses types itself.

        Raises:
            EngineError: If Grappler has no such setting, or TensorFlow cannot run the model.
        """
        if fmt not in _REWRITES:
            raise EngineError(f"Grappler has no setting for {fmt.label} on a CPU")
        return TensorFlowSession(_taken(model), rewrite=_REWRITES[fmt])

    def has_kernel(self, node: Node, fmt: Format) -> bool:
        """Whether TensorFlow has registered a kernel of the op in ``fmt`` for CPUs.

        A phi runs nothing and needs no kernel.
        """
        return node.op == PHI or fmt in registered_formats(node.native.removeprefix("tf::"))

    def load_probe(self, probe: Probe, fmt: Format) -> TensorFlowSession:
        """A session on the probe in ``fmt``.

        Raises:
            EngineError: If TensorFlow has no kernel for it.
        """
        return self.load(probe_graph(probe, fmt))

    def load_cast_probe(self, low: Format, size: int) -> TensorFlowSession:
        """A session for profiling a cast to ``low``.

        Raises:
            EngineError: If TensorFlow cannot run it.
        """
        return self.load(cast_graph(low, size), profiling=True)


def _taken(model: Loadable) -> FrozenModel:
    if isinstance(model, FrozenModel):
        return model
    if isinstance(model, Path) and model.suffix.lower() == KERAS_SUFFIX:
        return of_keras(load_keras(tf.keras, model, trust=False), str(model))
    if isinstance(model, Path):
        return load(model)
    raise EngineError(
        "TensorFlow cannot load the model: it is no SavedModel",
        fix="give the folder of a SavedModel, or use another engine",
    )


@final
class TensorFlowSession(Session):
    """A TensorFlow session on one graph.

    ``rewrite`` is the name of Grappler's setting for automatic mixed precision; empty: off.
    """

    def __init__(
        self, model: FrozenModel, *, profiling: bool = False, rewrite: str = ""
    ) -> None:
        model = with_fixed_draws(model)
        self.inputs = tuple(map(_spec, model.inputs))
        self.outputs = tuple(map(_spec, model.outputs))
        self._model = model
        self._profiling = profiling
        self._config = _config(profiling, rewrite)
        graph, tensors = model.imported()
        self._feeds = [tensors[p.tensor] for p in model.inputs]
        self._fetches = {p.name: tensors[p.tensor] for p in model.outputs}
        self._session = tf.compat.v1.Session(graph=graph, config=self._config)
        self._calls: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._dry_run = DryRun(
            library=NAME,
            settings={
                "config": self._config.SerializeToString(deterministic=True).hex(),
                "outputs": [p.tensor for p in model.outputs],
            },
            model=model.graph.SerializeToString(deterministic=True),
            fix="keep its ops in fp32, or use another engine",
        )

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run once; outputs by name in model order.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If TensorFlow fails.
        """
        return self.show(feeds, [*self._fetches])

    def show(self, feeds: Feeds, names: Sequence[str]) -> dict[str, Array]:
        """Run once and give the outputs called ``names``.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If TensorFlow fails.
        """
        arrays = ordered_feeds(feeds, self.inputs)
        key = tuple(names)
        self._check(arrays)
        try:
            if key not in self._calls:
                wanted = [self._fetches[n] for n in names]
                self._calls[key] = self._session.make_callable(wanted, self._feeds)
            return dict(zip(names, self._calls[key](*arrays), strict=True))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise EngineError(
                f"TensorFlow cannot run the model: {explain(error)}",
                fix="check the feeds' sizes, or keep the op named in fp32",
            ) from error

    def _check(self, arrays: Sequence[Array]) -> None:
        """Raise EngineError for inputs on which the model would end the process."""
        if not self._dry_run.key:  # TensorFlow makes kernels as it first runs them
            self._dry_run.load()
        ports = zip(self._model.inputs, arrays, strict=True)
        self._dry_run.run(
            arrays, lambda: [(port.tensor, array, None) for port, array in ports]
        )

    @property
    def settings(self) -> Mapping[str, str]:
        """Grappler's settings that lower a model, and the threads."""
        rewriter, config = self._config.graph_options.rewrite_options, self._config
        return {
            **{n: "ON" if getattr(rewriter, n) == _ON else "OFF" for n in TENSORFLOW},
            "intra_op_num_threads": str(config.intra_op_parallelism_threads or cpus()),
            "inter_op_num_threads": str(config.inter_op_parallelism_threads or cpus()),
        }

    def kernel_formats(self) -> Sequence[KernelFormats]:
        """The formats of each op that is in the graph after Grappler's optimization."""
        return kernel_formats(self._model, self._config)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Least time of each kernel, slowest first.

        Raises:
            UsageError: If the session was loaded without ``profiling=True``.
            EngineError: If TensorFlow fails.
        """
        if not self._profiling:
            raise UsageError("this session has no profile", fix="load with profiling=True")
        arrays = ordered_feeds(feeds, self.inputs)
        self._check(arrays)
        given = dict(zip(self._feeds, arrays, strict=True))
        options = tf.compat.v1.RunOptions(
            trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        runs: list[Any] = []
        try:
            for _ in range(repeats + 1):
                seen = tf.compat.v1.RunMetadata()
                self._session.run(
                    [*self._fetches.values()], given, options=options, run_metadata=seen
                )
                runs.append(seen)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise EngineError(
                f"TensorFlow cannot profile the model: {explain(error)}"
            ) from error
        return kernel_times(self._model, runs[1:])


def _spec(port: SignaturePort) -> TensorSpec:
    return TensorSpec(name=port.name, dtype=port.dtype, shape=port.shape)


def explain(error: Exception) -> str:
    """The reason that an exception of TensorFlow's states, in one line."""
    message = str(getattr(error, "message", None) or error)
    stated = _AT_NODE.search(message)  # after a traceback of where Python made the node
    plain = f"{stated['what']} at {stated['node']!r}" if stated else message
    text = " ".join(plain.partition("\n\n")[0].split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


@lru_cache(maxsize=1024)
def registered_formats(op: str) -> frozenset[Format]:
    """Float formats of an op's kernels for CPUs; all if a kernel has no restriction."""
    attribute = precision_attribute(op)
    formats: set[Format] = set()
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type != "CPU":
            continue
        stated = [c for c in kernel.constraint if c.name == attribute]
        named = [t for c in stated for t in c.allowed_values.list.type]
        formats |= {FLOATS[t] for t in named if t in FLOATS} if stated else set(DTYPES)
    return frozenset(formats)


def _config(profiling: bool, rewrite: str) -> Any:
    config = tf.compat.v1.ConfigProto()
    if profiling:  # kernels that overlap cannot be timed one by one
        config.inter_op_parallelism_threads = 1
    for name in TENSORFLOW:
        toggle = _ON if name == rewrite else _OFF
        setattr(config.graph_options.rewrite_options, name, toggle)
    return config


# The probes as TensorFlow graphs: the same products as in the probes' ONNX models.


def probe_graph(probe: Probe, fmt: Format) -> FrozenModel:
    """The probe: fp32 in and out, everything between in ``fmt``.

    Convolutions keep the channels last, as TensorFlow's kernels for CPUs take them.

    Raises:
        EngineError: If TensorFlow's ops do not compute in the format.
    """
    if fmt not in DTYPES:
        raise EngineError(f"TensorFlow has no {probe.op} in {fmt.label}")
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, probe.x_shape, name="x")
        convolves = probe.op == "Conv"
        value = tf.transpose(x, [0, 2, 3, 1]) if convolves else x
        value = tf.cast(value, DTYPES[fmt])
        weights = np.transpose(probe.w, (2, 3, 1, 0)) if convolves else probe.w
        w = tf.constant(weights.astype(fmt.dtype), DTYPES[fmt])
        for _ in range(probe.depth):
            made = tf.nn.conv2d(value, w, 1, "SAME") if convolves else tf.matmul(value, w)
            value = tf.nn.relu(made)
        value = tf.cast(value, tf.float32)
        y = tf.transpose(value, [0, 3, 1, 2]) if convolves else value
        tf.identity(y, name="y")
    return FrozenModel(
        graph=graph.as_graph_def(),
        inputs=(_port("x", probe.x_shape),),
        outputs=(_port("y", probe.expected.shape),),
    )


def _port(name: str, shape: tuple[int, ...]) -> SignaturePort:
    return SignaturePort(name=name, tensor=f"{name}:0", dtype="fp32", shape=shape)


def cast_graph(low: Format, size: int) -> FrozenModel:
    """Graph of a cast to ``low`` between two softmax ops, which do not absorb it.

    ``x`` is fp32 of shape [size / 64, 64]; the cast is called ``cast``.
    """
    shape = (size // 64, 64)
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, shape, name="x")
        low_value = tf.cast(tf.nn.softmax(x), DTYPES[low], name="cast")
        tf.cast(tf.nn.softmax(low_value), tf.float32, name="y")
    return FrozenModel(
        graph=graph.as_graph_def(), inputs=(_port("x", shape),), outputs=(_port("y", shape),)
    )


# Kernels that TensorFlow runs for a graph, attributed to the nodes of the model.
#
# Grappler fuses a product with the ops after it, and the kernel has the name of the last
# node; casts and transposes that it adds have new names.

# Types of nodes that TensorFlow adds, and names of entries of a trace that are no kernels.
_CONTROL: Final = ("Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch", "_SwitchN")
_ADDED: Final = ("_Arg", "_Retval", "NoOp", "Const", "Cast", "Identity", *_CONTROL)
_BOOKKEEPING: Final = ("Func/", "_SOURCE", "_SINK", "_arg_", "_retval_", "_Arg", "_Retval")


def kernel_times(model: FrozenModel, runs: Sequence[Any]) -> list[KernelTime]:
    """Least time of each kernel over ``runs``, which are RunMetadata; slowest first."""
    times: dict[str, list[float]] = defaultdict(list)
    formats: dict[str, str] = {}
    for seen in runs:
        taken: dict[str, float] = defaultdict(float)
        for name, time_s, label in _kernels_of(seen):
            taken[name] += time_s  # in a loop it runs many times
            formats[name] = label
        for name, time_s in taken.items():
            times[name].append(time_s)
    steps = _steps(model)
    graph = [n for part in runs[0].partition_graphs for n in part.node]
    kinds = {n.name: n.op for n in graph}
    ops = attribute(steps, _kernels(graph, steps))
    timings = [
        KernelTime(
            kernel=name,
            kind=kinds.get(name, ""),
            ops=ops.get(name, ()),
            format=formats[name],
            time_s=min(series),
        )
        for name, series in times.items()
        if kinds.get(name) not in ("Const", "NoOp", "_Arg", "_Retval", None)
    ]
    return sorted((k for k in timings if k.time_s > 0), key=lambda k: -k.time_s)


def kernel_formats(model: FrozenModel, config: Any) -> list[KernelFormats]:
    """The format of each op of the graph after Grappler's optimization under ``config``."""
    graph, _ = model.imported()
    for port in model.outputs:
        graph.add_to_collection("train_op", graph.get_tensor_by_name(port.tensor).op)
    meta = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    left = grappler.OptimizeGraph(config, meta).node
    types = {n.name: _label(n.attr["T"].type) for n in left if "T" in n.attr}
    kinds = {n.name: n.op for n in left}
    steps = _steps(model)
    ops = attribute(steps, _kernels(left, steps))
    return [
        KernelFormats(ops=ops[name], computed=label, stored=label, implementation=kinds[name])
        for name, label in types.items()
        if ops.get(name)
    ]


def _kernels_of(seen: Any) -> Iterator[tuple[str, float, str]]:
    """Of each kernel of one run its name, time in seconds and the type of its first result."""
    for device in seen.step_stats.dev_stats:
        if "CPU" not in device.device:
            continue
        for one in device.node_stats:
            if one.node_name.startswith(_BOOKKEEPING):
                continue
            taken_s = (one.op_end_rel_nanos - one.op_start_rel_nanos) * 1e-9
            first = next(iter(one.output), None)
            label = "" if first is None else _label(first.tensor_description.dtype)
            yield one.node_name, taken_s, label


def _label(number: int) -> str:
    return dtype_label(tf.as_dtype(number)) if number else ""


def _steps(model: FrozenModel) -> list[ModelStep]:
    """The ops of a model and of the bodies in it."""
    return [
        ModelStep(
            name=f"{prefix}{n.name}",
            op="Constant" if n.op == "Const" else n.op,
            inputs=tuple(f"{prefix}{tensor_of(i)}" for i in n.input if not i.startswith("^")),
            # More than there are: a NodeDef does not say how many outputs its op has.
            outputs=tuple(f"{prefix}{n.name}:{i}" for i in range(_MOST_OUTPUTS)),
        )
        for prefix, part in opened(model)
        for n in part.graph.node
        if not bodies(n)  # their ops run as kernels of their own
    ]


_MOST_OUTPUTS: Final = 8
"""No op that is fused with a reader has more outputs."""


def _kernels(graph: Sequence[Any], steps: Sequence[ModelStep]) -> list[Kernel]:
    nodes = {s.name for s in steps}
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph:
        for source in node.input:
            readers[source.removeprefix("^").partition(":")[0]].append(node.name)
    return [
        Kernel(
            name=n.name,
            named=(name,) if (name := plain_name(n.name)) in nodes else (),
            feeds=tuple(readers[n.name]),
            added=name not in nodes and n.op in _ADDED,
        )
        for n in graph
    ]
