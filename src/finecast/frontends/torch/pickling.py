"""Graphs of ATen ops as plain data, for pickles.

Pickles of torch's own keep the generated code and trace it where they are read. Tensors of the
module are no proxies there: what is computed of them alone is computed while tracing and stays
a constant, weights that are decoded from int8 and counts that a call adds to among them.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, treespec_leaf

from finecast.errors import ModelError
from finecast.frontends.torch.codes import OPS_MODULE
from finecast.frontends.torch.reader import attribute

_REGISTERED_BY: Final = {"quantized_decomposed": OPS_MODULE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOp:
    """An op by its name, as ``aten``, ``add``, ``Tensor``; ``cond`` has no ``overload``."""

    namespace: str
    name: str
    overload: str = ""

    def found(self) -> Any:
        """The op of this name.

        Raises:
            ModelError: If it is not registered in this process.
        """
        if self.namespace in _REGISTERED_BY:
            importlib.import_module(_REGISTERED_BY[self.namespace])
        try:
            op = getattr(getattr(torch.ops, self.namespace), self.name)
            return getattr(op, self.overload) if self.overload else op
        except AttributeError as error:
            raise ModelError(
                f"the module calls {self.namespace}::{self.name}, which is not known here",
                fix=f"import the package that defines the ops of {self.namespace} first",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The result of the node of this name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConstant:
    """A memory format or layout by its name in ``torch``; neither can be pickled."""

    name: str

    def found(self) -> Any:
        """The constant of this name."""
        return getattr(torch, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpec:
    """How tensors are nested in arguments or results; a leaf has no ``type``.

    Torch's own class for a leaf warns of itself where it is read from a pickle.
    """

    type: Any
    context: Any
    children: tuple[StoredSpec, ...]

    @classmethod
    def of(cls, spec: TreeSpec) -> Self:
        """Describe ``spec``."""
        children = tuple(cls.of(child) for child in spec.children())
        return cls(type=spec.type, context=spec.context, children=children)

    def found(self) -> TreeSpec:
        """The specification described."""
        if self.type is None:
            return treespec_leaf()
        return TreeSpec(self.type, self.context, [c.found() for c in self.children])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNode:
    """A node of the graph; other nodes in its arguments are references."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """A module of a graph; ``attributes`` are its tensors, and its bodies as this class."""

    nodes: tuple[StoredNode, ...]
    codegen: Any
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, module: GraphModule) -> Self:
        """Describe ``module``; its tensors are shared."""
        nodes = tuple(
            StoredNode(
                op=node.op,
                name=node.name,
                target=_named(node.target),
                args=map_aggregate(node.args, _named),
                kwargs=map_aggregate(node.kwargs, _named),
            )
            for node in module.graph.nodes
        )
        paths = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
        found = {path: attribute(module, path) for path in sorted(paths)}
        return cls(
            nodes=nodes,
            codegen=_with_specs(_codegen_of(module), StoredSpec.of, TreeSpec),
            attributes={
                path: cls.of(one) if isinstance(one, GraphModule) else one
                for path, one in found.items()
            },
        )

    def module(self) -> GraphModule:
        """The module described.

        Raises:
            ModelError: If an op is not registered in this process.
        """
        graph = Graph()
        made: dict[str, FxNode] = {}

        def found(one: Any) -> Any:
            if isinstance(one, Reference):
                return made[one.name]
            return one.found() if isinstance(one, StoredOp | StoredConstant) else one

        for node in self.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), found)  # type: ignore[misc]
            target = found(node.target)
            made[node.name] = graph.create_node(node.op, target, args, kwargs, node.name)
        graph.set_codegen(_with_specs(self.codegen, StoredSpec.found, StoredSpec))
        attributes = {
            path: one.module() if isinstance(one, StoredModule) else one
            for path, one in self.attributes.items()
        }
        return GraphModule(attributes, graph)


def _codegen_of(module: GraphModule) -> Any:
    return module.graph._codegen  # pyright: ignore[reportPrivateUsage] - no public name


def _with_specs(codegen: Any, changed: Callable[[Any], Any], kind: type) -> Any:
    """A copy of ``codegen`` whose specifications of that ``kind`` are ``changed``."""
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        return codegen
    found = {n: changed(s) for n, s in info._asdict().items() if isinstance(s, kind)}
    result = copy.copy(codegen)
    result.pytree_info = info._replace(**found)
    return result


def _named(one: Any) -> Any:
    """What stands for a node, an op or a constant; other things are themselves."""
    if isinstance(one, FxNode):
        return Reference(name=one.name)
    if isinstance(one, OpOverload):
        namespace, _, name = one.name().partition("::")
        overload = one._overloadname  # pyright: ignore[reportPrivateUsage]
        return StoredOp(namespace=namespace, name=name.partition(".")[0], overload=overload)
    if isinstance(one, HigherOrderOperator):
        return StoredOp(namespace="higher_order", name=one.name())
    if isinstance(one, torch.memory_format | torch.layout):
        return StoredConstant(name=str(one).removeprefix("torch."))
    return one
