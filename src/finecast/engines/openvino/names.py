"""From OpenVINO's names of ports, ops and kernels to the names in the model that was given.

How OpenVINO's ONNX frontend names: an op has the node's name if the node became that one op,
or the output's name if that is a model output; the outputs of every node keep their ONNX
names as tensor names; if a node became several ops, these are called ``MatMul_123`` or
``<node>/WithoutBiases``. Compilation then merges ops, and lists the names of *some* of them in
``originalLayersNames``; ops made by a transformation have new names. So nodes are found in
three steps: by tensor names; else by the first ops that read the op and whose nodes are known;
else (in ``attribution``) by the kernel's place in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from finecast.engines.attribution import Kernel, NameLists, node_of
from finecast.engines.base import TensorSpec
from finecast.engines.source import ModelSource, ModelStep
from finecast.frontends.dry_run_worker import KernelFacts, OpFacts, PortFacts
from finecast.frontends.openvino.bodies import bodies
from finecast.frontends.openvino.changes import kv_cache_of, rounded_to
from finecast.frontends.openvino.reader import port_name, shape_of
from finecast.frontends.openvino.types import LABELS, label_of

if TYPE_CHECKING:
    import openvino

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
    nodes_by_op: dict[str, tuple[str, ...]] = {}
    # Reverse topological order, so that an op's readers are settled before it.
    for op in reversed(ops):
        if op["kind"] in ("Constant", "Parameter", "Result"):
            continue
        own = {producers[name] for name in op["tensors"] if name in producers}
        if not own and (node := node_of(op["name"], nodes)):
            own = {node}
        if not own:
            own = {n for reader in op["readers"] for n in nodes_by_op.get(reader, ())[:1]}
        nodes_by_op[op["name"]] = tuple(sorted(own))
    return nodes_by_op


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
    types_by_kernel: dict[str, frozenset[str]] = {}
    fixed: set[str] = set()
    kinds: dict[str, str] = {}
    for op in ops:
        name = op["name"]
        kinds[name] = op["stored"]
        if _is_fixed(op, fixed):
            fixed.add(name)
            continue
        types_by_kernel[name] = frozenset(
            kinds[source] for source in fixed.intersection(op["sources"])
        )
    return types_by_kernel


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


# Ports of a compiled model under the names that the model declares.

_SINK: Final = "/sink_port_"


def specs_of(
    ports: Sequence[PortFacts], declared: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Specs of a compiled model's ports, with the declared names and symbolic sizes."""
    names = {spec.name: spec for spec in declared}
    specs: list[TensorSpec] = []
    for port, name in zip(ports, _port_names(ports, declared), strict=True):
        dims = port["shape"]
        shape = None if dims is None else tuple(dims)
        if name in names and names[name].shape is not None:
            shape = names[name].shape  # keeps the symbols' names
        label = LABELS.get(port["type"], port["type"])
        aliases = names[name].aliases if name in names else ()
        specs.append(TensorSpec(name=name, dtype=label, shape=shape, aliases=aliases))
    return tuple(specs)


def with_unread(
    compiled: Sequence[TensorSpec], declared: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """The inputs of a compiled model, with those that it was declared with and has lost."""
    own = {spec.name: spec for spec in compiled}
    if len(compiled) >= len(declared) or not own.keys() <= {spec.name for spec in declared}:
        return tuple(compiled)
    return tuple(own.get(spec.name, spec) for spec in declared)


def _port_names(ports: Sequence[PortFacts], declared: Sequence[TensorSpec]) -> list[str]:
    """The declared name of each port: a tensor can have several names, or have lost its own.

    An input that an op only passes on (Dropout) has the name of that op's output. Such a port
    gets a declared name that no other port has.
    """
    free = [spec.name for spec in declared]
    names: list[str | None] = []
    friendly = [port["name"].rsplit(_SINK, 1)[0] for port in ports]
    for port, own in zip(ports, friendly, strict=True):
        name = next((c for c in (own, *port["tensors"]) if c in free), None)
        names.append(name)
        if name is not None:
            free.remove(name)
    rest = iter(free if len(ports) == len(declared) else ())
    return [
        name if name is not None else next(rest, own)
        for name, own in zip(names, friendly, strict=True)
    ]


# Ports and ops of an ``ov.Model`` as a ``ModelSource``, as ONNX files have one.

_NO_STEPS = frozenset({"Parameter", "Result", "Constant"})


def model_source(model: openvino.Model) -> ModelSource:
    """Ports and steps of a model whose ops have names: each op is a step of that name."""
    ops = [op for op in model.get_ordered_ops() if op.get_type_name() not in _NO_STEPS]
    return ModelSource(
        inputs=tuple(_spec(port) for port in model.inputs),
        outputs=tuple(_spec(port) for port in model.outputs),
        steps=tuple(_step(op) for op in ops),
        depth=_depth(model),
        rounded=rounded_to(model),
        kv_cache=kv_cache_of(model),
    )


def _spec(port: openvino.Output) -> TensorSpec:
    label = label_of(port.get_element_type())
    name = port_name(port)
    aliases = {*port.get_names(), port.get_node().get_friendly_name()} - {name}
    shape = shape_of(port)
    return TensorSpec(name=name, dtype=label, shape=shape, aliases=tuple(sorted(aliases)))


def _step(op: openvino.Node) -> ModelStep:
    return ModelStep(
        name=op.get_friendly_name(),
        op=op.get_type_name(),
        inputs=tuple(_tensor(value) for value in op.input_values()),
        outputs=tuple(_tensor(port) for port in op.outputs()),
    )


def _tensor(port: openvino.Output) -> str:
    return f"{port.get_node().get_friendly_name()}:{port.get_index()}"


def _depth(model: openvino.Model) -> int:
    inner = (body for op in model.get_ops() for body in bodies(op))
    return max((1 + _depth(body) for body in inner), default=0)


# Whether inputs of some sizes fit an OpenVINO model, asked of its shape inference.
#
# OpenVINO's kernels for open shapes do not check this. A window that is larger than what it
# moves over, or a concatenation of parts that do not match, reads beyond the end of its
# memory: that gives numbers of nothing, or ends the process.

_READ_MOST: Final = 64
"""Constants of more elements are no axes, pads or shapes, and their numbers are not kept."""

_BODIES: Final = frozenset({"If", "Loop", "TensorIterator"})
"""Ops with bodies. A branch that is not taken may refuse sizes that the model takes."""


@final
class SizeCheck:
    """Asks a copy of a model, without its weights and bodies, if sizes fit.

    Where all inputs have fixed shapes there is nothing to ask, and no copy.
    """

    def __init__(self, model: openvino.Model) -> None:
        self._model = _without_weights(model) if model.is_dynamic() else None
        self._count = len(model.inputs)
        self._ports = [port.get_names() for port in model.inputs]
        self._fit: set[tuple[tuple[int, ...], ...]] = set()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse inputs of ``shapes``, by name in order, that an op cannot take.

        Raises:
            RuntimeError: As OpenVINO states it.
        """
        if self._model is None or (key := tuple(shapes.values())) in self._fit:
            return
        import openvino

        parameters = self._model.get_parameters()[: self._count]
        for parameter, dims in zip(parameters, self._read(shapes), strict=True):
            parameter.set_partial_shape(openvino.PartialShape(list(dims)))
        # ``reshape`` would take a batch that is constant in the model for a free one.
        self._model.validate_nodes_and_infer_types()
        self._fit.add(key)

    def _read(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shapes of the inputs that OpenVINO reads: it drops some that no op reads."""
        if len(shapes) == self._count:
            return [*shapes.values()]
        named = (next((n for n in shapes if n in names), None) for names in self._ports)
        return [shapes[name] for name in named if name is not None]


def _without_weights(model: openvino.Model) -> openvino.Model:
    """A copy whose large constants and ops with bodies are further inputs."""
    from openvino import PartialShape
    from openvino import opset13 as opset

    copy = model.clone()
    added: list[openvino.Node] = []
    for node in copy.get_ordered_ops():
        kind = node.get_type_name()
        large = kind == "Constant" and math.prod(node.get_output_shape(0)) > _READ_MOST
        for output in node.outputs() if large or kind in _BODIES else ():
            shape = output.get_partial_shape() if large else PartialShape.dynamic()
            stand_in = opset.parameter(shape, output.get_element_type())
            output.replace(stand_in.output(0))
            added.append(stand_in)
    copy.add_parameters(added)
    return copy
