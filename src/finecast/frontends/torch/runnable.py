"""What PyTorch's engine runs: modules as they are, and copies node by node."""

from __future__ import annotations

import operator
from abc import abstractmethod
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
        return result.clone() if n in self.written and torch.is_tensor(result) else result

    def leaves(self, args: Sequence[Any]) -> Any:
        """The outputs for flattened inputs."""
        return self.run(*args, enable_io_processing=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableModule:
    """A module and the program whose inputs it takes; what PyTorch's engine loads.

    Attributes:
        module: A module, or a compiled one, that is called as the program is; a copy for inner
            values or roundings is a graph that takes the flattened inputs instead.
        program: The program.
        outputs: Names of the outputs of a copy; None for those of the program.
        further: Names of a copy's inputs after those of the program: ``SWITCH``, ``OFFSET``.
        is_copy: Whether it is such a copy.
    """

    module: Any
    program: ExportedProgram
    outputs: tuple[str, ...] | None = None
    further: tuple[str, ...] = ()
    is_copy: bool = False


class Shown:
    """A module, captured or edited, of which copies show inner values."""

    __slots__ = ()

    @abstractmethod
    def shown(self) -> tuple[Captured, GraphModule]:
        """The program that was captured, and the module whose values are shown."""

    def observable(self, *, decisions: bool = False) -> dict[str, int]:
        """Ids of the float values that a copy can output, by name for ``with_outputs``.

        With ``decisions`` of the integers and bools.
        """
        captured, module = self.shown()
        kept = {node.name for node in module.graph.nodes}
        return {
            value.name: value.id
            for value in captured.graph.values
            if (value.is_decision if decisions else value.format is not None)
            and value.constant is None
            and value.producer is not None
            and captured.binding.values[value.id].node.name in kept
        }

    def with_outputs(self, names: Sequence[str]) -> RunnableModule:
        """A copy, of the same tensors, whose outputs are just the values called ``names``."""
        captured, module = self.shown()
        ids = self.observable() | self.observable(decisions=True)
        graph, copied = torch.fx.Graph(), dict[FxNode, FxNode]()
        graph.graph_copy(module.graph, copied)
        by_name = {old.name: new for old, new in copied.items()}

        def read(source: ValueSource) -> FxNode:
            node = by_name[source.node.name]
            if source.index is None:
                return node
            return graph.call_function(operator.getitem, (node, source.index))

        graph.output(tuple(read(captured.binding.values[ids[name]]) for name in names))
        return RunnableModule(
            module=GraphModule(module, graph),
            program=captured.program,
            outputs=tuple(names),
            is_copy=True,
        )
