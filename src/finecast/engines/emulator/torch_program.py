"""A PyTorch program prepared for emulation, and facts of its values in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.devices.emulation import Emulation, is_parameter
from finecast.engines.base import Feeds
from finecast.engines.torch.session import ProgramSignature
from finecast.errors import ModelError
from finecast.frontends.torch import Captured
from finecast.frontends.torch.capture import shared_copy
from finecast.frontends.torch.expand import (
    ACCUMULATIONS,
    ATTENTION,
    STEP_OF,
    expand,
)
from finecast.frontends.torch.instrument import Isolated
from finecast.frontends.torch.layout import free_of_strides
from finecast.frontends.torch.reader import FxBinding, read
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.rules.facts import ValueFacts, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedProgram:
    """A program as the emulator runs it.

    Attributes:
        module: A copy that shares the parameters of the captured module.
        graph: The graph of ``module``. Scale and shift of norms follow their op's format,
            because a device's compiler casts them.
        binding: From ``graph`` to ``module``.
        signature: The program's inputs and outputs.
        steps: Ids of the nodes in ``graph`` that each node of the captured graph became, by
            its name.
        fp32_parameters: Nodes whose scale and shift PyTorch keeps in fp32 beside low values.
    """

    module: GraphModule
    graph: Graph
    binding: FxBinding
    signature: ProgramSignature
    steps: Mapping[str, tuple[int, ...]]
    fp32_parameters: frozenset[int]


def prepare_program(captured: Captured, emulation: Emulation) -> PreparedProgram:
    """A copy of ``captured`` with attention, and where asked accumulations, in single steps.

    Raises:
        ModelError: If the program has control flow, whose bodies are not emulated, or an
            input that is neither a tensor nor a constant.
    """
    signature = ProgramSignature.of(captured.program)
    module = shared_copy(captured.module)
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(
            getattr(module, str(node.target), None), GraphModule
        ):
            raise ModelError(
                "the program has control flow, whose bodies the emulator cannot round",
                where=node.name,
                fix="export the module without torch.cond, while_loop and the like",
            )
    with torch.no_grad():
        free_of_strides(module)
        expand(module, ATTENTION)
        if not emulation.mixed_accumulation:
            expand(module, ACCUMULATIONS)
    graph, binding = read(module)
    pairs = zip(captured.binding.nodes, captured.graph.nodes, strict=True)
    names = {fx.name: node.name for fx, node in pairs}
    steps: dict[str, tuple[int, ...]] = {}
    for number, fx in enumerate(binding.nodes):
        own = names[str(fx.meta.get(STEP_OF, fx.name))]
        steps[own] = (*steps.get(own, ()), number)
    low, fixed = _parameters_followed(graph)
    return PreparedProgram(
        module=module,
        graph=low,
        binding=binding,
        signature=signature,
        steps=steps,
        fp32_parameters=fixed,
    )


def _parameters_followed(graph: Graph) -> tuple[Graph, frozenset[int]]:
    """``graph`` with norms' scales and shifts following the format; the nodes changed so."""
    changed = frozenset(
        n.id
        for n in graph.float_nodes
        if n.format is Format.FP32 and any(_kept(graph, n.id, k) for k in range(len(n.inputs)))
    )
    nodes = tuple(
        replace(
            node,
            follows_in=tuple(
                follows or _kept(graph, node.id, k)
                for k, follows in enumerate(node.follows_in)
            ),
        )
        if node.id in changed
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes), changed


# The op whose parameters keep their format: its statistics were observed, not learned.
_STATISTICS = "batch_norm"


def _kept(graph: Graph, node_id: int, index: int) -> bool:
    """Whether the input is a scale or shift that PyTorch's kernels keep in fp32."""
    node = graph.nodes[node_id]
    value = node.inputs[index]
    return (
        value is not None
        and node.op != _STATISTICS
        and is_parameter(node, index)
        and not node.follows_in[index]
        and graph.values[value].format is Format.FP32
    )


def observe_program(
    prepared: PreparedProgram, feeds: Iterable[Feeds]
) -> dict[int, ValueFacts]:
    """Facts of all float values, over all feeds."""
    facts: dict[int, ValueFacts] = {}
    for one in feeds:
        seen: dict[int, ValueFacts] = {}
        _Observer(prepared, seen.__setitem__).run_feeds(one)
        facts = merge(facts, seen)
    return facts


class ProgramRun(Isolated):
    """An interpreter that runs a program on arrays by name."""

    def __init__(self, prepared: PreparedProgram) -> None:
        super().__init__(prepared.module)
        self.prepared = prepared

    def run_feeds(self, feeds: Feeds) -> list[Any]:
        """The program's outputs, flattened."""
        leaves = self.prepared.signature.leaves(feeds)
        with torch.no_grad():
            found: Any = self.run(*leaves, enable_io_processing=False)
        return list(found)


class _Observer(ProgramRun):
    """Reduces each float value to facts as soon as it is computed."""

    def __init__(
        self, prepared: PreparedProgram, seen: Callable[[int, ValueFacts], None]
    ) -> None:
        super().__init__(prepared)
        self.seen = seen
        self.of: dict[FxNode, list[tuple[int, int | None]]] = {}
        for value in prepared.graph.values:
            source = prepared.binding.values[value.id]
            if value.format is not None and value.constant is None:
                self.of.setdefault(source.node, []).append((value.id, source.index))

    def run_node(self, n: FxNode) -> Any:
        """Run one node and report facts of its results."""
        result = super().run_node(n)
        for value_id, index in self.of.get(n, ()):
            tensor: torch.Tensor = result if index is None else result[index]
            array = tensor.detach().to("cpu", torch.float32).numpy()
            self.seen(value_id, ValueFacts.of(np.asarray(array)))
        return result
