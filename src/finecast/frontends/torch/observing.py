"""Runs a captured module once and records facts of all of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from finecast.frontends.torch.capture import Captured
from finecast.frontends.torch.probing import Isolated
from finecast.rules.facts import ValueFacts


def observe(captured: Captured, leaves: Sequence[Any]) -> dict[int, ValueFacts]:
    """Facts of all float values of one run, by id; ``leaves`` are the flattened inputs."""
    found = _Observer(captured)
    with torch.no_grad():
        found.run(*leaves, enable_io_processing=False)
    return found.facts


class _Observer(Isolated):
    """Reduces each float value to its facts right after it is computed."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module)
        self.facts: dict[int, ValueFacts] = {}
        self.of: dict[FxNode, list[tuple[int, int | None]]] = {}
        for value in captured.graph.values:
            source = captured.binding.values[value.id]
            if value.format is not None and value.constant is None:
                self.of.setdefault(source.node, []).append((value.id, source.index))

    def run_node(self, n: FxNode) -> Any:
        """Run one node, and record the facts of its results."""
        result = super().run_node(n)
        for value_id, index in self.of.get(n, ()):
            tensor: torch.Tensor = result if index is None else result[index]
            array = tensor.detach().to("cpu", torch.float32).numpy()
            self.facts[value_id] = ValueFacts.of(array)
        return result
