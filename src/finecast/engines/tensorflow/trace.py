"""Kernels that TensorFlow runs for a graph, attributed to the nodes of the model.

Grappler fuses a product with the ops after it, and the kernel has the name of the last node;
casts and transposes that it adds have new names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from finecast.engines.attribution import Kernel, attribute
from finecast.engines.base import KernelFormats, KernelTime
from finecast.engines.source import ModelStep
from finecast.frontends.tensorflow.functions import bodies, opened, plain_name, tensor_of
from finecast.frontends.tensorflow.library import dtype_label, grappler, tf
from finecast.frontends.tensorflow.model import FrozenModel

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
    found = [
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
    return sorted((k for k in found if k.time_s > 0), key=lambda k: -k.time_s)


def kernel_formats(model: FrozenModel, config: Any) -> list[KernelFormats]:
    """The format of each op of the graph after Grappler's optimization under ``config``."""
    graph, _ = model.imported()
    for port in model.outputs:
        graph.add_to_collection("train_op", graph.get_tensor_by_name(port.tensor).op)
    meta = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    left = grappler.OptimizeGraph(config, meta).node
    types = {n.name: _label(n.attr["T"].type) for n in left if "T" in n.attr}
    steps = _steps(model)
    ops = attribute(steps, _kernels(left, steps))
    return [
        KernelFormats(ops=ops[name], computed=label, stored=label)
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
