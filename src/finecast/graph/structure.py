"""The structure of a graph without its numbers: enough to find its ops in another version.

Laws: two exports of one net that differ in names, node order and the layout of weights have
ops with equal ``op`` and ``numbers``, and ``other_weights`` is False of them; the structure
is small (a few words an op) and is kept in plans, so that an old plan finds its ops when the
model that it was made for is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

from finecast.files.saved import SavedPart, converted
from finecast.graph import ConstantStats, Graph, Node
from finecast.graph.worklist import Worklist

STRUCTURE_VERSION: Final = 3
"""Version of a structure: each op with its ports."""

_WITHOUT_PORTS: Final = 2
"""The version before, with the same digests: that of other versions cannot be compared."""

MODEL_INPUT: Final = -1
"""Stands for the producer of the model's inputs in ``OpStructure.inputs``."""

READS_SHAPE_ONLY: Final = frozenset({"shape", "size"})
"""Canonical ops that use only the shape of what they read, so that rounding it is harmless."""

SAME_NUMBERS: Final = frozenset(
    {"flatten", "identity", "reshape", "squeeze", "transpose", "unsqueeze"}
)
"""Canonical ops whose result has each number of their first input once, in another shape or
order."""

_DIGITS: Final = 8
_SEPARATOR: Final = "|"
_PARTS: Final = 8
_PORT: Final = ":"
"""Stands between the number of an op and that of its result."""
_INSIDE: Final = "-"
"""Stands for a result that is no output of the model."""
_IDENTITY: Final = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStructure:
    """One op.

    Attributes:
        name: Its name in the model.
        op: finecast's name of what it computes; the native name where it is unknown.
        shape: Digest of the shapes of its results; free sizes have no names.
        attributes: Its library, and a digest of its native name and its attributes there.
        weights: For each constant that it reads four digests, one after the other: of its
            numbers in any order; of its sizes in any order; of its numbers at each place along
            an axis, for the axes in any order; and the same in the order of the axes.
        inputs: For each other value that it reads the number of the op that computes it, past
            ops that only hand it on, or ``MODEL_INPUT``.
        ports: For each of ``inputs`` which result of that op it is, or a digest of the name of
            the model's input. Empty if that is not known.
        results: For each of its results a digest of its name if it is an output of the model,
            else nothing. Empty if that is not known.
        decided: Whether a plan gives it a format.
    """

    name: str
    op: str
    shape: str = ""
    attributes: str = ""
    weights: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    ports: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    decided: bool = True

    @property
    def numbers(self) -> tuple[str, ...]:
        """Digests of its weights that transposing and reshaping leave as they are."""
        return tuple(one[:_DIGITS] for one in self.weights)

    @property
    def text(self) -> str:
        """The op on one line; ``read`` is the inverse."""
        reads = zip_longest(self.inputs, self.ports, fillvalue="")
        inputs = " ".join(f"{number}{_PORT}{port}".rstrip(_PORT) for number, port in reads)
        results = " ".join(name or _INSIDE for name in self.results)
        weights, decided = " ".join(self.weights), "1" if self.decided else ""
        digests = weights, self.shape, self.attributes
        return _SEPARATOR.join((inputs, results, *digests, decided, self.op, self.name))

    @classmethod
    def read(cls, text: str, count: int) -> OpStructure:
        """The op of a line, in a structure of ``count`` ops.

        Raises:
            ValueError: If the line is not that of such an op.
        """
        parts = text.split(_SEPARATOR, _PARTS - 1)
        if len(parts) != _PARTS:
            raise ValueError(f"an op of {len(parts)} parts")
        inputs, results, weights, shape, attributes, decided, op, name = parts
        split = (one.partition(_PORT) for one in inputs.split())
        reads = [(int(number), port) for number, _, port in split]
        numbers, ports = tuple(n for n, _ in reads), tuple(port for _, port in reads)
        if not all(MODEL_INPUT <= number < count for number in numbers):
            raise ValueError(f"{name!r} reads an op that is not there")
        if any(i != MODEL_INPUT and int(port or 0) < 0 for i, port in reads):
            raise ValueError(f"{name!r} reads a result that is not there")
        return cls(
            name=name,
            op=op,
            shape=shape,
            attributes=attributes,
            weights=tuple(weights.split()),
            inputs=numbers,
            ports=ports if all(ports) else (),
            results=tuple("" if one == _INSIDE else one for one in results.split()),
            decided=bool(decided),
        )


Structure = tuple[OpStructure, ...]
"""All ops of a graph, in its order."""


def structure_of(graph: Graph) -> Structure:
    """The structure of ``graph``; linear in its ports and in the elements of its constants."""
    return graph.once(_structure_of)


def other_weights(one: OpStructure, two: OpStructure) -> bool:
    """Whether two ops that correspond have other weights.

    Ops of equal attributes read their weights in one layout. Of others each has to have
    weights that its partner lacks: a bias may be an op of its own. These may be transposed; or
    reshaped, where the order of the numbers is not compared.
    """
    if one.attributes == two.attributes:
        return one.weights != two.weights
    return bool(lacking(one, two)) and bool(lacking(two, one))


def lacking(one: OpStructure, two: OpStructure) -> list[int]:
    """The weights of ``one``, by their place, that ``two`` has in no layout."""
    return [i for i, a in enumerate(one.weights) if not any(_alike(a, b) for b in two.weights)]


def _alike(one: str, two: str) -> bool:
    """Whether two weights have the same numbers, transposed or reshaped."""
    numbers, sizes, places = (
        one[at : at + _DIGITS] == two[at : at + _DIGITS] for at in (0, _DIGITS, 2 * _DIGITS)
    )
    return numbers and (places or not sizes)


def fed(structure: Structure) -> frozenset[int]:
    """The ops that compute from the numbers of an input, by their place in the structure.

    The others compute from constants, or from sizes: engines do that before they run, and
    exporters state it in very different ways. Without edges all ops are counted.
    """
    readers: list[list[int]] = [[] for _ in structure]
    fed_ops = Worklist[int](())
    for number, op in enumerate(structure):
        if op.op in READS_SHAPE_ONLY:
            continue
        for maker in op.inputs:
            if maker == MODEL_INPUT:
                fed_ops.add([number])
            else:
                readers[maker].append(number)
    for number in fed_ops:
        fed_ops.add(readers[number])
    return frozenset(fed_ops.seen or range(len(structure)))


def write_structure(structure: Structure) -> dict[str, Any]:
    """A structure as JSON content."""
    return {"version": STRUCTURE_VERSION, "ops": [op.text for op in structure]}


def read_structure(content: Mapping[str, Any]) -> Structure:
    """The structure that ``write_structure`` gave; empty if it has other digests.

    Raises:
        ValueError: If ``content`` is not that of a structure.
    """
    saved = converted(content, _SavedStructure)
    if saved.version not in (_WITHOUT_PORTS, STRUCTURE_VERSION):
        return ()
    lines = saved.ops
    if saved.version == _WITHOUT_PORTS:
        lines = [line.replace(_SEPARATOR, 2 * _SEPARATOR, 1) for line in lines]
    return tuple(OpStructure.read(line, len(lines)) for line in lines)


class _SavedStructure(SavedPart):
    version: int
    ops: list[str]


def digest(*parts: object) -> str:
    """A short digest of the parts' text."""
    return _hashed("\0".join(map(str, parts)))


@lru_cache(maxsize=1 << 12)  # few shapes and attributes recur in all ops of a model
def _hashed(text: str) -> str:
    content = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=_DIGITS // 2).hexdigest()


def _structure_of(graph: Graph) -> Structure:
    marks = {v.id: _mark(v.constant) for v in graph.values if v.constant is not None}
    sources = {
        i: (node.id, str(port))
        for node in graph.nodes
        for port, i in enumerate(node.outputs)
        if i is not None
    }
    others = (v for v in graph.values if v.id not in sources)
    sources |= {v.id: (MODEL_INPUT, digest(v.name)) for v in others}
    for node in graph.nodes:
        if node.op == _IDENTITY and node.inputs[0] not in (None, *marks):
            sources |= dict.fromkeys(node.outputs, sources[node.inputs[0]])
    reads = [[sources[i] for i in n.input_ids if i not in marks] for n in graph.nodes]
    ends = {v.id: digest(v.name) for v in graph.outputs}
    return tuple(
        OpStructure(
            name=node.name,
            op=_plain(node.native if node.op == "unknown" else node.op),
            shape=_shape(graph, node),
            attributes=_attributes(node),
            weights=tuple(marks[i] for i in node.inputs if i in marks),
            inputs=tuple(op for op, _ in read),
            ports=tuple(port for _, port in read),
            results=tuple("" if i is None else ends.get(i, "") for i in node.outputs),
            decided=node.format is not None,
        )
        for node, read in zip(graph.nodes, reads, strict=True)
    )


def _mark(constant: ConstantStats) -> str:
    """Its four digests, as in ``OpStructure.weights``."""
    content = constant.fingerprint
    return (
        digest(constant.size, content.numbers)
        + digest(sorted(size for size, _ in content.axes))
        + digest(sorted(content.axes))
        + digest(content.axes)
    )


def _shape(graph: Graph, node: Node) -> str:
    shapes = (graph.values[i].shape for i in node.output_ids)
    return digest(
        *(s if s is None else [n if isinstance(n, int) else None for n in s] for s in shapes)
    )


def _plain(name: str) -> str:
    """A name of a model's own op, which may have any characters, as a part of a line."""
    return name.replace(_SEPARATOR, "/")


def _attributes(node: Node) -> str:
    library = _plain(node.native.partition("::")[0])
    return f"{library}:{digest(node.native, sorted(node.attributes.items()))}"


def turned_axes(graph: Graph, node: Node, rank: int) -> tuple[int, ...] | None:
    """For each axis behind a Transpose the axis that it was before; None if that is unknown.

    Libraries state all axes, in an attribute or a constant, or the two that change places.
    """
    attributes = node.attributes
    order = attributes.get("perm", attributes.get("dims"))
    if order is None and len(node.inputs) > 1:
        value = graph.read(node, 1)
        constant = None if value is None else value.constant
        if constant is not None and constant.size == rank:
            order = tuple(int(axis) for axis in constant.read().reshape(-1))
    first, second = attributes.get("dim0"), attributes.get("dim1")
    if isinstance(first, int) and isinstance(second, int) and rank:
        axes = [*range(rank)]
        axes[first], axes[second] = axes[second], axes[first]
        order = tuple(axes)
    if not isinstance(order, tuple) or len(order) != rank:
        return None
    return tuple(int(axis) % rank for axis in order)
