"""Kernel times from ONNX Runtime's trace file, attributed to the nodes of the model.

Its optimizer renames and fuses nodes but keeps the names of the values between them, so a
kernel's outputs in the optimized model tell which node of the original model it ends with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from finecast.engines.attribution import Kernel, attribute, node_of
from finecast.engines.base import KernelTime
from finecast.engines.ports import ONNX_LABELS
from finecast.engines.source import ModelSource, ModelStep

_SUFFIX = "_kernel_time"
# Kernels that read or give such numbers compute in the type of their first input.
_EIGHT_BITS = frozenset({"int8", "uint8"})
_ADDED = frozenset({"ReorderInput", "ReorderOutput", "MemcpyFromHost", "MemcpyToHost"})


def kernel_times(
    trace: Path, optimized: ModelSource, original: ModelSource, *, repeats: int
) -> list[KernelTime]:
    """Least time of each kernel over the last ``repeats`` runs, slowest first."""
    times: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, str] = {}
    formats: dict[str, str] = {}
    for event in json.loads(trace.read_text()):
        name, details = event.get("name", ""), event.get("args", {})
        if event.get("cat") != "Node" or not name.endswith(_SUFFIX):
            continue
        kernel = name.removesuffix(_SUFFIX)
        times[kernel].append(event["dur"] * 1e-6)
        kinds[kernel] = details.get("op_name", "")
        types: list[str] = [t for shape in details.get("output_type_shape", ()) for t in shape]
        read = [t for shape in details.get("input_type_shape", ())[:1] for t in shape]
        if read and not _EIGHT_BITS.isdisjoint((*read, *types[:1])):
            types = read
        formats[kernel] = ONNX_LABELS.get(types[0], types[0]) if types else ""
    ops = attribute(original.steps, _kernels(optimized, original))
    found = [
        KernelTime(
            kernel=name,
            kind=kinds[name],
            ops=ops.get(name, ()),
            format=formats[name],
            time_s=_per_run(series, repeats),
        )
        for name, series in times.items()
    ]
    return sorted((k for k in found if k.time_s > 0), key=lambda k: -k.time_s)


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
