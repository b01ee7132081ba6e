"""The structure of a graph without its numbers: enough to find its ops in another version.

Laws: two exports of one net that differ in names, node order and the layout of weights have
ops with equal ``op`` and ``weights``; the structure is small (a few words an op) and is kept
in plans, so that an old plan finds its ops when the model that it was made for is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from finecast.graph import ConstantStats, Graph, Node

MODEL_INPUT: Final = -1
"""Stands for the producer of the model's inputs in ``OpStructure.inputs``."""

_DIGITS: Final = 8
_PARTS: Final = 7
_IDENTITY: Final = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStructure:
    """One op.

    Attributes:
        name: Its name in the model.
        op: finecast's name of what it computes; the native name where it is unknown.
        shape: Digest of the types and shapes of its results.
        attributes: Digest of its native name and its attributes.
        weights: For each constant that it reads a digest of the number of elements and the
            largest magnitude, which transposing and reshaping leave as they are.
        inputs: For each other value that it reads the number of the op that computes it, past
            ops that only hand it on, or ``MODEL_INPUT``.
        decided: Whether a plan gives it a format.
    """

    name: str
    op: str
    shape: str = ""
    attributes: str = ""
    weights: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    decided: bool = True

    @property
    def text(self) -> str:
        """The op on one line; ``read`` is the inverse."""
        inputs = " ".join(map(str, self.inputs))
        weights, decided = " ".join(self.weights), "1" if self.decided else ""
        digests = weights, self.shape, self.attributes
        return "|".join((inputs, *digests, decided, self.op, self.name))

    @classmethod
    def read(cls, text: str, count: int) -> OpStructure:
        """The op of a line, in a structure of ``count`` ops.

        Raises:
            ValueError: If the line is not that of such an op.
        """
        parts = text.split("|", _PARTS - 1)
        if len(parts) != _PARTS:
            raise ValueError(f"an op of {len(parts)} parts")
        inputs, weights, shape, attributes, decided, op, name = parts
        numbers = tuple(map(int, inputs.split()))
        if not all(MODEL_INPUT <= number < count for number in numbers):
            raise ValueError(f"{name!r} reads an op that is not there")
        return cls(
            name=name,
            op=op,
            shape=shape,
            attributes=attributes,
            weights=tuple(weights.split()),
            inputs=numbers,
            decided=bool(decided),
        )


Structure = tuple[OpStructure, ...]
"""All ops of a graph, in its order."""


def structure_of(graph: Graph) -> Structure:
    """The structure of ``graph``; linear in its ports and in the elements of its constants."""
    return graph.once(_structure_of)


def read_structure(lines: Sequence[str]) -> Structure:
    """The structure whose ops have these lines.

    Raises:
        ValueError: If a line is not that of an op.
    """
    return tuple(OpStructure.read(str(line), len(lines)) for line in lines)


def digest(*parts: object) -> str:
    """A short digest of the parts' text."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_DIGITS // 2).hexdigest()


def _structure_of(graph: Graph) -> Structure:
    marks = {v.id: _mark(v.constant) for v in graph.values if v.constant is not None}
    sources = {v.id: MODEL_INPUT if v.producer is None else v.producer for v in graph.values}
    for node in graph.nodes:
        if node.op == _IDENTITY and node.inputs[0] not in (None, *marks):
            sources |= dict.fromkeys(node.outputs, sources[node.inputs[0]])
    return tuple(
        OpStructure(
            name=node.name,
            op=node.native if node.op == "unknown" else node.op,
            shape=_shape(graph, node),
            attributes=digest(node.native, sorted(node.attributes.items())),
            weights=tuple(marks[i] for i in node.inputs if i in marks),
            inputs=tuple(sources[i] for i in node.inputs if i is not None and i not in marks),
            decided=node.format is not None,
        )
        for node in graph.nodes
    )


def _mark(constant: ConstantStats) -> str:
    try:
        return digest(constant.size, repr(constant.largest))
    except (TypeError, ValueError):  # strings
        return digest(constant.size)


def _shape(graph: Graph, node: Node) -> str:
    values = (graph.values[i] for i in node.outputs if i is not None)
    return digest(*((v.dtype, v.shape) for v in values))
