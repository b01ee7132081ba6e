"""A model in parts, between which some of its nodes are computed by functions of arrays.

An engine runs a whole model or nothing of it. What is to be computed in Python in the middle
of a model cuts it: a part has all the nodes that can run before the next such node needs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.types import bodies

Computed: TypeAlias = Callable[..., NDArray[Any]]
"""Gives the one result of a node for its inputs; None stands for an absent one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A part of a model, or a function in place of a node.

    Attributes:
        reads: Names of what it reads; a function may read constants.
        gives: Names of what it gives.
        last: Names that no later step reads, and that are no outputs.
        run: The part, a model by itself; or the function.
    """

    reads: tuple[str, ...]
    gives: tuple[str, ...]
    last: tuple[str, ...]
    run: ir.Model | Computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInParts:
    """A model of which some nodes are computed by functions.

    Attributes:
        model: The whole model.
        functions: The functions, by node.
    """

    model: ir.Model
    functions: Mapping[ir.Node, Computed]

    def constants(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The constants of the model among ``names``."""
        held = self.model.graph.initializers
        tensors = ((name, held[name].const_value) for name in names if name in held)
        return {name: tensor.numpy() for name, tensor in tensors if tensor is not None}

    def steps(self) -> list[RunStep]:
        """What is run, in order.

        Law: each node is in one step, after all that it reads; the steps are as few as the
        longest chain of functions asks for.
        """
        graph = self.model.graph
        depth: dict[ir.Value, int] = {}
        parts: dict[int, list[ir.Node]] = defaultdict(list)
        functions: dict[int, list[ir.Node]] = defaultdict(list)
        for node in graph:
            level = max((depth.get(value, 0) for value in _reads(node)), default=0)
            computed = node in self.functions
            (functions if computed else parts)[level].append(node)
            depth |= dict.fromkeys(node.outputs, level + computed)
        groups: list[list[ir.Node]] = []
        for level in range(max((*parts, *functions), default=-1) + 1):
            groups += [parts[level]] if parts[level] else []
            groups += [[node] for node in functions[level]]
        return [*self._steps(groups)]

    def _steps(self, groups: Sequence[Sequence[ir.Node]]) -> Iterator[RunStep]:
        outputs = set(self.model.graph.outputs)
        home = {
            value: k for k, nodes in enumerate(groups) for n in nodes for value in n.outputs
        }
        until: dict[ir.Value, int] = {}
        for k, nodes in enumerate(groups):
            until |= dict.fromkeys((v for node in nodes for v in _reads(node)), k)
        known = {*home, *self.model.graph.inputs} - {*_constants(self.model)}
        for k, nodes in enumerate(groups):
            reads = dict.fromkeys(v for node in nodes for v in _reads(node))
            outer = [v for v in reads if v in known and home.get(v) != k]
            last = [v for v in outer if until[v] == k and v not in outputs]
            function = self.functions.get(nodes[0])
            if function is not None:
                arguments = tuple(_name(value) for value in nodes[0].inputs)
                shown = nodes[0].outputs
                yield RunStep(
                    reads=arguments, gives=_names(shown), last=_names(last), run=function
                )
                continue
            results = [v for node in nodes for v in node.outputs]
            shown = [v for v in results if until.get(v, k) > k or v in outputs]
            yield RunStep(
                reads=_names(outer),
                gives=_names(shown),
                last=_names(last),
                run=self._part(nodes, outer, shown, reads),
            )

    def _part(
        self,
        nodes: Sequence[ir.Node],
        reads: Sequence[ir.Value],
        gives: Sequence[ir.Value],
        every: Mapping[ir.Value, object],
    ) -> ir.Model:
        """The nodes as a model by themselves, which shares the constants that they read."""
        constants = {_name(v): v.const_value for v in _constants(self.model) if v in every}
        graph = onnx.GraphProto(
            name=self.model.graph.name or "part",
            node=[ir.serde.serialize_node(node) for node in nodes],
            input=[_port(v) for v in (*reads, *(v for v in every if _name(v) in constants))],
            output=[_port(value) for value in gives],
        )
        proto = onnx.ModelProto(
            ir_version=self.model.ir_version or onnx.IR_VERSION,
            graph=graph,
            opset_import=[
                onnx.helper.make_opsetid(domain, version)
                for domain, version in self.model.graph.opset_imports.items()
            ],
            functions=[ir.serde.serialize_function(f) for f in self.model.functions.values()],
        )
        model = ir.from_proto(proto)
        inputs = model.graph.inputs
        for value in [v for v in inputs if v.name in constants]:
            inputs.remove(value)
            tensor = value.const_value = constants[_name(value)]
            if tensor is not None:
                value.type = ir.TensorType(tensor.dtype)
            model.graph.register_initializer(value)
        return model


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """All that a node reads, and what its bodies read from outside."""
    yield from (value for value in node.inputs if value is not None)
    for body in bodies(node):
        yield from body.outputs
        for inner in body:
            yield from _reads(inner)


def _constants(model: ir.Model) -> Iterator[ir.Value]:
    """Constants that no caller gives."""
    inputs = set(model.graph.inputs)
    return (v for v in model.graph.initializers.values() if v not in inputs)


def _port(value: ir.Value) -> onnx.ValueInfoProto:
    """A value as an input or an output, of any shape; fp32 where its type is not known."""
    kind = value.type or ir.TensorType(ir.DataType.FLOAT)
    return ir.serde.serialize_value(ir.Value(name=value.name, type=kind))


def _name(value: ir.Value | None) -> str:
    return "" if value is None else value.name or ""


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_name, values)))
