"""Builds a graph node by node: numbers values and nodes, keeps uses, producers and names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from finecast.graph import PHI, Attribute, Graph, Node, Value
from finecast.numbers.formats import Format

K = TypeVar("K", bound=Hashable)


class GraphBuilder(Generic[K]):
    """Collects what a frontend reads, in the order of the graph.

    ``K`` is what identifies a value in the frontend's library. Values are numbered as they are
    first asked for, nodes as they are added.

    Attributes:
        nodes: The nodes so far, by id.
        keys: What identifies each value, by value id.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names`` are the names of the model's own nodes, which no phi may have."""
        self.nodes: list[Node] = []
        self.keys: list[K] = []
        self._ids: dict[K, int] = {}
        self._names = set(names)
        self._uses: dict[int, list[int]] = {}
        self._producers: dict[int, int] = {}

    def value(self, key: K) -> int:
        """The id of a value, which is numbered where it is new."""
        value_id = self._ids.setdefault(key, len(self.keys))
        if value_id == len(self.keys):
            self.keys.append(key)
        return value_id

    def known(self, key: K) -> int | None:
        """The id of a value; None if it was never asked for."""
        return self._ids.get(key)

    def fresh_name(self, name: str) -> str:
        """``name``, with underscores behind it where a node has that name; then taken."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def add(self, node: Node) -> None:
        """Add a node, whose id is the number of nodes so far."""
        self.nodes.append(node)
        for index in dict.fromkeys(node.inputs):
            if index is not None:
                self._uses.setdefault(index, []).append(node.id)
        for index in node.outputs:
            if index is not None:
                self._producers[index] = node.id

    def add_phi(
        self,
        owner: str,
        suffix: str | int,
        ports: tuple[Sequence[int], Sequence[int]],
        fmt: Format | None,
        *,
        admits: frozenset[Format],
        attributes: Mapping[str, Attribute],
        region: int,
    ) -> None:
        """Add the node that gives values one format which control flow forces to share a type.

        Args:
            owner: The name of the op whose bodies force them.
            suffix: Tells this phi of the owner from its others.
            ports: The values that flow in, and those that flow out.
            fmt: The format that all of them have; None if they may not change.
            admits: The formats that they may have, if they may change.
            attributes: The phi's attributes.
            region: The region of the owner.
        """
        inputs, outputs = (tuple(side) for side in ports)
        node = Node(
            id=len(self.nodes),
            name=self.fresh_name(f"{owner}/{PHI}_{suffix}"),
            op=PHI,
            native=f"finecast::{PHI}",
            inputs=inputs,
            outputs=outputs,
            follows_in=(fmt is not None,) * len(inputs),
            follows_out=(fmt is not None,) * len(outputs),
            format=fmt,
            admits=admits if fmt else frozenset(),
            attributes=attributes,
            scope=owner,
            region=region,
        )
        self.add(node)

    def producer(self, value: int) -> int | None:
        """The node that makes a value; None for inputs and constants."""
        return self._producers.get(value)

    def uses(self, value: int) -> tuple[int, ...]:
        """The nodes that read a value, each once, in order."""
        return tuple(self._uses.get(value, ()))

    def finish(
        self,
        values: Iterable[Value],
        digest: str,
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
    ) -> Graph:
        """The graph of the nodes so far, and of ``values`` by id.

        ``inputs`` and ``outputs`` are names in the model's own order.
        """
        return Graph(
            nodes=tuple(self.nodes),
            values=tuple(values),
            digest=digest,
            ports=(tuple(inputs), tuple(outputs)),
        )


def scope_of(name: str) -> str:
    """The scope of an op, such as its layer: ``encoder/layer.0`` of ``encoder/layer.0/Add``.

    Empty where the name has no parts.
    """
    return name.rpartition("/" if "/" in name else ".")[0]


# A frame of a Python traceback, and the line of code below it.
_FRAME: Final = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)')
_LONGEST_LINE: Final = 300


def source_line(stack_trace: str) -> str:
    """The innermost frame of a stack trace of PyTorch: ``net.py:12 in forward: self.fc(x)``.

    Frames in installed packages count only if there are no others. Empty where there is none.
    """
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    own = [frame for frame in frames if "site-packages" not in frame["file"]]
    innermost = (own or frames)[-1]
    code = stack_trace[innermost.end() :].strip().partition("\n")[0]
    file = innermost["file"].rpartition("site-packages/")[2]  # as an import names it
    text = f"{file}:{innermost['line']} in {innermost['name']}"
    return f"{text}: {code}"[:_LONGEST_LINE] if code else text[:_LONGEST_LINE]
