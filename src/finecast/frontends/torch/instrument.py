"""Copies of a captured module whose outputs are its inner values, or whose values are rounded.

Copies are run node by node (``Isolated``): no code is generated for them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode

from finecast.frontends.native_model import NativeModel
from finecast.frontends.torch.aten import DTYPES
from finecast.frontends.torch.capture import Captured, shared_copy
from finecast.frontends.torch.reader import (
    FxBinding,
    ValueSource,
    read,
    register,
    tensor_inputs,
    written,
)
from finecast.frontends.torch.writer import origin_of, replace_input
from finecast.numbers import roundmodes
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding
from finecast.planning.edits import Use
from finecast.planning.points import SWITCH

_END: Final = "output"


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
        switches: Elements of the extra, last input of a copy that switches roundings on.
        is_copy: Whether it is such a copy.
    """

    module: torch.nn.Module
    program: ExportedProgram
    outputs: tuple[str, ...] | None = None
    switches: int = 0
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


class _Rounded(torch.nn.Module):
    """Rounds a tensor; with an element number of a switch only if that is on."""

    def __init__(self, how: Rounder, element: int | None = None) -> None:
        super().__init__()
        self.how = how
        self.element = element

    def forward(self, x: torch.Tensor, switch: torch.Tensor | None = None) -> torch.Tensor:
        if self.element is not None and switch is not None and not switch[self.element]:
            return x
        return _rounded(x, self.how)


class _Selected(torch.nn.Module):
    """The first tensor if an element of a switch is on, else the second."""

    def __init__(self, element: int) -> None:
        super().__init__()
        self.element = element

    def forward(
        self, switch: torch.Tensor, on: torch.Tensor, off: torch.Tensor
    ) -> torch.Tensor:
        return on if switch[self.element] else off


def _rounded(x: torch.Tensor, how: Rounder) -> torch.Tensor:
    plain = how.encoding is None and how.rounding is Rounding.NEAREST_EVEN
    if plain and not how.saturate and not how.flush_subnormals and how.format in DTYPES:
        return rounded(x, how.format)
    array = roundmodes.convert(x.detach().cpu().numpy(), how)
    return torch.from_numpy(array).to(x.device)


def rounded(tensor: torch.Tensor, low: Format) -> torch.Tensor:
    """``tensor`` cast to ``low`` and back."""
    return tensor.to(DTYPES[low]).to(tensor.dtype)


@final
class TorchRoundable(NativeModel):
    """A copy of a captured module whose values are rounded; its tensors are FX nodes.

    Edits of a plan are replayed by ``writer``, which keeps what the compiler recognises.
    """

    library: ClassVar[str] = "PyTorch"
    states: ClassVar[Collection[Format]] = (Format.BF16, Format.FP16, Format.INT8)

    def __init__(self, captured: Captured) -> None:
        self._program = captured.program
        self._module = shared_copy(captured.module)
        graph, binding = read(self._module)
        super().__init__(graph)
        self._binding: FxBinding = binding
        (self._end,) = self._module.graph.find_nodes(op=_END)
        self._outputs = tensor_inputs(self._end)
        self._made = 0

    def tensor(self, value: int) -> FxNode:
        """The node whose result is the value with this id."""
        return origin_of(self._binding, value)

    def read_at(self, node: int, index: int) -> FxNode:
        """The node that input ``index`` of ``node`` reads after the changes so far."""
        return tensor_inputs(self._binding.nodes[node])[index]

    def give(self, value: int, uses: Iterable[Use], tensor: FxNode) -> None:
        """Have ``uses`` of the value read ``tensor`` instead."""
        for use in uses:
            if use.node is not None:
                replace_input(self._binding.nodes[use.node], use.index, tensor)
                continue
            origin = self.tensor(value)
            for place, node in enumerate(self._outputs):
                if node is origin:
                    replace_input(self._end, place, tensor)

    def constant(self, array: NDArray[np.float32]) -> FxNode:
        """A new node that reads a constant of these numbers."""
        held = next(iter((*self._module.parameters(), *self._module.buffers())), None)
        tensor = torch.from_numpy(np.array(array))
        tensor = tensor if held is None else tensor.to(held.device)
        name = register(self._module, self._name("constant"), tensor)
        with self._after(*self._placeholders()):
            return self._module.graph.get_attr(name)

    def rounded(self, tensor: FxNode, how: Rounder) -> FxNode:
        """``tensor`` rounded, in fp32."""
        return self._call(_Rounded(how), tensor)

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> FxNode:
        """Not needed: values are rounded by PyTorch's own casts, and by numpy."""
        raise NotImplementedError(kind)

    def switched(self, k: int, on: FxNode, off: FxNode) -> FxNode:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        switch = self.switch_in(0)
        made = self._module.get_submodule(str(on.target)) if on.op == "call_module" else None
        if isinstance(made, _Rounded) and on.args == (off,):
            # Rounded only where it is switched on: a run has most of the switches off.
            return self._call(_Rounded(made.how, k), off, switch)
        return self._call(_Selected(k), switch, on, off)

    def add_switch(self) -> FxNode:
        """The new input ``SWITCH``, after all others."""
        with self._after(*self._placeholders()):
            return self._module.graph.placeholder(SWITCH)

    def finish(
        self, switches: int = 0, outputs: Mapping[str, FxNode] | None = None
    ) -> RunnableModule:
        """The changed module; its extra input has as many elements as ``switches``."""
        assert outputs is None
        self._module.graph.eliminate_dead_code()
        return RunnableModule(
            module=self._module, program=self._program, switches=switches, is_copy=True
        )

    def _call(self, made: torch.nn.Module, *inputs: FxNode) -> FxNode:
        name = self._name("finecast")
        self._module.add_submodule(name, made)
        with self._after(*inputs):
            return self._module.graph.call_module(name, inputs)

    def _name(self, kind: str) -> str:
        self._made += 1
        return f"{kind}_{self._made}"

    def _placeholders(self) -> list[FxNode]:
        return list(self._module.graph.find_nodes(op="placeholder"))

    def _after(self, *nodes: FxNode) -> Any:
        """A block whose new nodes stand after the last of ``nodes`` and of the inputs."""
        places = max((*nodes, *self._placeholders())) if nodes else None
        graph = self._module.graph
        if places is None:
            return graph.inserting_before(next(iter(graph.nodes)))
        return graph.inserting_after(places)
