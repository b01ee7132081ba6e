"""Adjusted constants: what a plan adds to them, beside the formats of ops.

Laws: an adjustment adds one number for each channel to a constant that one op alone reads,
and to nothing else. The plan keeps those numbers and not the constant; the constant, bit for
bit, comes back when the conversion is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustConstant:
    """Add a number for each channel to the constant that ``node`` alone reads at ``port``.

    It is made before a plan's other edits: they convert what comes of it.
    """

    value: int
    node: int
    port: int
    add: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The numbers ``add`` are added to the constant that ``node`` reads at input ``port``.

    Why, the reasons of the op's decision say.
    """

    node: str
    port: int
    add: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """What JSON keeps of it: the numbers on one line."""
        add = " ".join(map(repr, self.add))
        return {"node": self.node, "port": self.port, "add": add}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Adjustment:
        """Read what ``to_dict`` gave.

        Raises:
            ValueError, TypeError, KeyError: If it is not that.
        """
        add, port = content["add"], content["port"]
        if type(add) is not str or type(port) is not int or port < 0:
            raise TypeError(f"input {port!r}, to which {add!r} is added")
        numbers = tuple(float(number) for number in add.split())
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("what is added is not finite")
        return cls(node=str(content["node"]), port=port, add=numbers)

    def edit(self, graph: Graph, nodes: Mapping[str, Node]) -> AdjustConstant | None:
        """The edit that does it; None if the op reads no such constant there, or not alone."""
        node = nodes.get(self.node)
        value = None if node is None else constant_at(graph, node, self.port)
        if node is None or value is None or not adjustable(value, len(self.add)):
            return None
        return AdjustConstant(value=value.id, node=node.id, port=self.port, add=self.add)


def constant_at(graph: Graph, node: Node, port: int) -> Value | None:
    """The constant that ``node`` reads at input ``port``; None if it is none."""
    source = node.inputs[port] if port < len(node.inputs) else None
    value = None if source is None else graph.values[source]
    return value if value is not None and value.constant is not None else None


def adjustable(value: Value, channels: int) -> bool:
    """Whether it has a number for each of ``channels``, and one op alone reads it."""
    shape = value.shape
    return (
        value.constant is not None
        and value.format is Format.FP32
        and len(value.uses) == 1
        and not (value.is_output or value.is_input)
        and shape is not None
        and shape[-1:] == (channels,)
        and all(d == 1 for d in shape[:-1])
    )
