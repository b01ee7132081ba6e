"""From OpenVINO's names of ops and kernels to the nodes of the ONNX model.

How OpenVINO's ONNX frontend names: an op has the node's name if the node became that one op,
or the output's name if that is a model output; the outputs of every node keep their ONNX
names as tensor names; if a node became several ops, these are called ``MatMul_123`` or
``<node>/WithoutBiases``. Compilation then merges ops, and lists the names of *some* of them in
``originalLayersNames``; ops made by a transformation have new names. So nodes are found in
three steps: by tensor names; else by the first ops that read the op and whose nodes are known;
else (in ``attribution``) by the kernel's place in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finecast.engines.attribution import Kernel, NameLists, node_of

if TYPE_CHECKING:
    import openvino

    from finecast.engines.source import ModelSource

_PORTS = frozenset({"Input", "Output"})
_ADDED = frozenset({"Reorder", *_PORTS})


def nodes_by_friendly_name(
    model: openvino.Model, source: ModelSource
) -> dict[str, tuple[str, ...]]:
    """The ONNX nodes of each op, by its name, in a model that is read but not compiled.

    There are several where OpenVINO removed nodes that do nothing (Identity).
    """
    producers = source.producers
    nodes = {step.name for step in source.steps}
    found: dict[str, tuple[str, ...]] = {}
    # Reverse topological order, so that an op's readers are settled before it.
    for op in reversed(model.get_ordered_ops()):
        kind, friendly = op.get_type_name(), op.get_friendly_name()
        if kind in ("Constant", "Parameter", "Result"):
            continue
        outputs = op.outputs()
        tensors = {name for port in outputs for name in port.get_names()}
        own = {producers[name] for name in tensors if name in producers}
        if not own and (node := node_of(friendly, nodes)):
            own = {node}
        if not own:
            readers = [t.get_node() for port in outputs for t in port.get_target_inputs()]
            own = {n for r in readers for n in found.get(r.get_friendly_name(), ())[:1]}
        found[friendly] = tuple(sorted(own))
    return found


def kernels_of(
    compiled: openvino.CompiledModel, names: Mapping[str, tuple[str, ...]]
) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels of a compiled model with the nodes that they name, and their formats."""
    nodes = {node for group in names.values() for node in group}
    lists = NameLists(names)
    kernels: list[Kernel] = []
    formats: dict[str, str] = {}
    fixed: set[str] = set()
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        name = op.get_friendly_name()
        if _is_fixed(op, _text(info, "layerType"), fixed):
            fixed.add(name)  # computed from constants while compiling, not by the node
            continue
        formats[name] = _text(info, "runtimePrecision")
        kind = _text(info, "layerType")
        # An output of the model has the name of the op that computes it.
        own = "" if kind in _PORTS else _text(info, "originalLayersNames")
        layers = lists.split(own)
        kernels.append(
            Kernel(
                name=name,
                named=tuple(n for layer in layers for n in _nodes(layer, names, nodes)),
                feeds=tuple(
                    target.get_node().get_friendly_name()
                    for port in op.outputs()
                    for target in port.get_target_inputs()
                ),
                added=not layers or kind in _ADDED,
            )
        )
    return kernels, formats


def stored_in(compiled: openvino.CompiledModel) -> dict[str, str]:
    """OpenVINO's name of the format of each kernel's first result."""
    ops = compiled.get_runtime_model().get_ordered_ops()
    text = {op.get_friendly_name(): _text(op.get_rt_info(), "outputPrecisions") for op in ops}
    return {name: kinds.partition(",")[0] for name, kinds in text.items()}


def constants_of(compiled: openvino.CompiledModel) -> dict[str, frozenset[str]]:
    """OpenVINO's names of the types of the constants that each kernel reads."""
    found: dict[str, frozenset[str]] = {}
    fixed: set[str] = set()
    kinds: dict[str, str] = {}
    for op in compiled.get_runtime_model().get_ordered_ops():
        info, name = op.get_rt_info(), op.get_friendly_name()
        kinds[name] = _text(info, "outputPrecisions")
        if _is_fixed(op, _text(info, "layerType"), fixed):
            fixed.add(name)
            continue
        sources = {v.get_node().get_friendly_name() for v in op.input_values()}
        found[name] = frozenset(kinds[source] for source in sources & fixed)
    return found


def _is_fixed(op: openvino.Node, kind: str, fixed: set[str]) -> bool:
    """Whether ``op`` is a constant, or all its inputs are ops whose names are in ``fixed``."""
    sources = op.input_values()
    return kind == "Const" or (
        bool(sources) and all(v.get_node().get_friendly_name() in fixed for v in sources)
    )


def _nodes(
    layer: str, names: Mapping[str, tuple[str, ...]], nodes: set[str]
) -> tuple[str, ...]:
    if layer in names:
        return names[layer]
    node = node_of(layer, nodes)
    return (node,) if node else ()


def _text(info: Any, key: str) -> str:
    if key not in info:
        return ""
    value = info[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)
