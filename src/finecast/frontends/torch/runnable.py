"""What PyTorch's engine runs: modules as they are, and copies node by node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode

from finecast.frontends.torch.capture import Captured
from finecast.frontends.torch.reader import ValueSource, written


class Isolated(Interpreter):
    """Runs a graph on clones of what it writes to, so that the caller's tensors stay."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.written = written(module)

    def run_node(self, n: FxNode) -> Any:
        """Run one node; an input or a buffer that the graph writes to is cloned."""
        result = super().run_node(n)
        return result.clone() if n in self.written and is_tensor(result) else result

    def leaves(self, args: Sequence[Any]) -> Any:
        """The outputs for flattened inputs."""
        return self.run(*args, enable_io_processing=False)


def is_tensor(leaf: object) -> bool:
    """Whether an argument or a result is a tensor."""
    return isinstance(leaf, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableModule:
    """A module and the program whose inputs it takes; what PyTorch's engine loads.

    Attributes:
        module: A module that is called as the program is; a copy for inner values or roundings
            is a graph that takes the flattened inputs instead.
        program: The program.
        outputs: Names of the outputs of a copy; None for those of the program.
        further: Names of a copy's inputs after those of the program: ``SWITCH``, ``OFFSET``.
        is_copy: Whether it is such a copy.
    """

    module: torch.nn.Module
    program: ExportedProgram
    outputs: tuple[str, ...] | None = None
    further: tuple[str, ...] = ()
    is_copy: bool = False


def observable(captured: Captured, module: GraphModule) -> dict[str, int]:
    """Ids by name of the float values that ``module``, captured or edited, can show."""
    kept = {node.name for node in module.graph.nodes}
    return {
        value.name: value.id
        for value in captured.graph.values
        if value.format is not None
        and value.constant is None
        and value.producer is not None
        and captured.binding.values[value.id].node.name in kept
    }


def with_outputs(
    captured: Captured, module: GraphModule, names: Sequence[str]
) -> RunnableModule:
    """A copy of ``module``, of the same tensors, that gives the values called ``names``."""
    ids = observable(captured, module)
    graph = torch.fx.Graph()
    copied: dict[FxNode, FxNode] = {}
    graph.graph_copy(module.graph, copied)
    by_name = {old.name: new for old, new in copied.items()}

    def shown(source: ValueSource) -> FxNode:
        node = by_name[source.node.name]
        if source.index is None:
            return node
        return graph.call_function(operator.getitem, (node, source.index))

    graph.output(tuple(shown(captured.binding.values[ids[name]]) for name in names))
    return RunnableModule(
        module=GraphModule(module, graph),
        program=captured.program,
        outputs=tuple(names),
        is_copy=True,
    )
