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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from finecast.engines.attribution import Kernel, NameLists, node_of
from finecast.frontends.dry_run_worker import KernelFacts, OpFacts

if TYPE_CHECKING:
    from finecast.engines.source import ModelSource

_PORTS = frozenset({"Input", "Output"})
_ADDED = frozenset({"Reorder", *_PORTS})


def nodes_by_friendly_name(
    ops: Sequence[OpFacts], source: ModelSource
) -> dict[str, tuple[str, ...]]:
    """The ONNX nodes of each op, by its name, in a model that is read but not compiled.

    There are several where OpenVINO removed nodes that do nothing (Identity).
    """
    producers = source.producers
    nodes = {step.name for step in source.steps}
    found: dict[str, tuple[str, ...]] = {}
    # Reverse topological order, so that an op's readers are settled before it.
    for op in reversed(ops):
        if op["kind"] in ("Constant", "Parameter", "Result"):
            continue
        own = {producers[name] for name in op["tensors"] if name in producers}
        if not own and (node := node_of(op["name"], nodes)):
            own = {node}
        if not own:
            own = {n for reader in op["readers"] for n in found.get(reader, ())[:1]}
        found[op["name"]] = tuple(sorted(own))
    return found


def kernels_of(
    ops: Sequence[KernelFacts], names: Mapping[str, tuple[str, ...]]
) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels of a compiled model with the nodes that they name, and their formats."""
    nodes = {node for group in names.values() for node in group}
    lists = NameLists(names)
    kernels: list[Kernel] = []
    formats: dict[str, str] = {}
    fixed: set[str] = set()
    for op in ops:
        name, kind = op["name"], op["kind"]
        if _is_fixed(op, fixed):
            fixed.add(name)  # computed from constants while compiling, not by the node
            continue
        formats[name] = op["computed"]
        # An output of the model has the name of the op that computes it.
        layers = lists.split("" if kind in _PORTS else op["layers"])
        kernels.append(
            Kernel(
                name=name,
                named=tuple(n for layer in layers for n in _nodes(layer, names, nodes)),
                feeds=tuple(op["feeds"]),
                added=not layers or kind in _ADDED,
            )
        )
    return kernels, formats


def stored_in(ops: Sequence[KernelFacts]) -> dict[str, str]:
    """OpenVINO's name of the format of each kernel's first result."""
    return {op["name"]: op["stored"].partition(",")[0] for op in ops}


def constants_of(ops: Sequence[KernelFacts]) -> dict[str, frozenset[str]]:
    """OpenVINO's names of the types of the constants that each kernel reads."""
    found: dict[str, frozenset[str]] = {}
    fixed: set[str] = set()
    kinds: dict[str, str] = {}
    for op in ops:
        name = op["name"]
        kinds[name] = op["stored"]
        if _is_fixed(op, fixed):
            fixed.add(name)
            continue
        found[name] = frozenset(kinds[source] for source in fixed.intersection(op["sources"]))
    return found


def _is_fixed(op: KernelFacts, fixed: set[str]) -> bool:
    """Whether ``op`` is a constant, or all its inputs are ops whose names are in ``fixed``."""
    return op["kind"] == "Const" or (bool(op["sources"]) and fixed.issuperset(op["sources"]))


def _nodes(
    layer: str, names: Mapping[str, tuple[str, ...]], nodes: set[str]
) -> tuple[str, ...]:
    if layer in names:
        return names[layer]
    node = node_of(layer, nodes)
    return (node,) if node else ()
