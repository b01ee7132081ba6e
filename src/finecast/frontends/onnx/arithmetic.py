"""Rounding to a format that ONNX has no type for (tf32), by nodes that compute in fp32.

Laws: within 2^104 the nodes give ``rounding.round_to``, subnormals aside; larger numbers, Inf
and NaN pass as they are. What ``rounded`` puts into a model ``take_back`` takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from finecast.frontends.onnx.constants import MARK, ROUNDING, constant_tensor
from finecast.frontends.onnx.roundops import RoundOps
from finecast.frontends.onnx.types import every_node
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Conversion


class Arithmetic:
    """Makes the nodes; ``fresh`` gives names, ``register`` takes the scalars, once each."""

    def __init__(
        self, fresh: Callable[[str], str], register: Callable[[ir.Value], None]
    ) -> None:
        self.fresh = fresh
        self.register = register
        self.ops = RoundOps(register=self._scalar)

    def rounded(self, value: ir.Value, fmt: Format) -> tuple[list[ir.Node], ir.Value]:
        """Nodes, in order, and the value they end in: ``value`` rounded to nearest even."""
        name = self.fresh(f"{value.name}_{fmt.label}")
        nodes, out = self.ops.round(value, Conversion(format=fmt), name)
        for node in nodes:
            step = node.outputs[0]
            step.name = name if step is out else self.fresh(step.name or name)
            node.name = self.fresh(f"round_{step.name}")
            node.metadata_props[MARK] = ""
            node.metadata_props[ROUNDING] = f"{fmt.label} {name}"
        return nodes, out

    def _scalar(self, value: ir.Value) -> None:
        value.name = self.fresh(f"{value.name}_rounding")  # not a name that emulation takes
        self.register(value)


def take_back(model: ir.Model) -> None:
    """Let readers of rounded values read what was rounded.

    A rounding that another tool changed or reads from inside stays.
    """
    roundings: dict[str, list[ir.Node]] = {}
    for node in every_node(model.graph):
        label = node.metadata_props.get(ROUNDING)
        if label is not None:
            roundings.setdefault(label, []).append(node)
    for nodes in roundings.values():
        _take_out(nodes)


def _take_out(nodes: Sequence[ir.Node]) -> None:
    if not (nodes[0].inputs and nodes[-1].outputs):
        return
    graph, source, result = nodes[0].graph, nodes[0].inputs[0], nodes[-1].outputs[0]
    steps = [v for n in nodes for v in n.outputs]
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    scalars = [v for v in read if v is not source and v not in steps]
    inner = [u.node for v in steps if v is not result for u in v.uses()]
    whole = (
        graph is not None
        and all(n.graph is graph for n in nodes)
        and all(n in nodes for n in inner)
        and not any(v.is_graph_output() for v in steps)
        and all(constant_tensor(v) is not None for v in scalars)
    )
    if not whole or graph is None or source is None:
        return
    result.replace_all_uses_with(source)
    graph.remove(nodes, safe=True)
    for value in scalars:
        home = value.graph
        if value.uses() or value.is_graph_output() or not isinstance(home, ir.Graph):
            continue
        if value.is_initializer():
            home.initializers.pop(value.name or "")
            if value in home.inputs:
                home.inputs.remove(value)
