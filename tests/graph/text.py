"""The graph's text form: for people, for golden files, and for graphs in tests.

One line for each declaration; blank lines and lines that start with ``#`` are ignored::

    graph DIGEST
    input %0 x fp32[batch, 8]
    constant %1 w fp32[8, 8] size=64 largest=0.5 smallest_nonzero=0.01
    node mm matmul onnx::MatMul fp32 (%0, %1) -> (%2 y fp32[batch, 8]) scope=layer {"k": 1}
    output %2

A node's words are its name, canonical op, native op and format (``-`` for none). Ports: ``_``
is an omitted one, ``~%1`` a float port that does not follow the node's format, ``!%1`` a port
of another type that does. A node's id is its position among the nodes, a value's id is its
``%`` number. A shape is left out where the rank is unknown, and ``?`` is an unknown dimension.
Words with other characters than letters, digits and usual punctuation are JSON strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from finecast.errors import ModelError, UsageError
from finecast.graph import Attribute, ConstantStats, Dim, Graph, Node, Value
from finecast.graph.builder import GraphBuilder
from finecast.numbers.formats import Format

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:*$@<>|+-]+")
_TOKEN: Final = re.compile(
    rf'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<punct>->|[()\[\]=,%~!?])|(?P<word>{_PLAIN.pattern}))'
)
# What ONNX admits for most ops, so that only other sets are written.
_USUAL: Final = frozenset({Format.FP32, Format.FP16, Format.BF16})

_STATS: Final = ("size", "largest", "smallest_nonzero")


def to_text(graph: Graph) -> str:
    """The text of ``graph``; magnitudes of its float constants are computed.

    Raises:
        ValueError: If a value is both a constant and an input, or a node's result.
    """
    lines = [f"graph {_word(graph.digest)}"]
    for value in graph.values:
        if value.constant is not None:
            if value.is_input or value.producer is not None:
                raise ValueError(f"constant {value.name!r} is also computed or an input")
            lines.append(f"constant {_declared(value)} {_stats(value, value.constant)}")
        elif value.producer is None:
            lines.append(f"{'input' if value.is_input else 'value'} {_declared(value)}")
    lines += [_node(graph, node) for node in graph.nodes]
    lines += [f"output %{v.id}" for v in graph.outputs]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Graph:
    """The graph that ``to_text`` wrote, or that a person did.

    Law: ``from_text(to_text(g)) == g`` for every graph whose producers and uses are those of
    its nodes, up to what is not written: ``Value.came_as``, and the data of constants, for
    which arrays of two elements stand.

    Raises:
        ModelError: If the text is not of this form; names the line.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                reader.line(_Cursor(line))
            except (ValueError, KeyError, TypeError, UsageError) as error:
                raise ModelError(
                    f"not a line of a graph: {error}",
                    where=f"line {number}",
                    fix="see tests/graph/text.py for the form",
                ) from error
    return reader.graph()


def _word(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text not in {"-", "->", "_"}
    return text if plain and not text.startswith("->") else json.dumps(text)


def _declared(value: Value) -> str:
    shape = "" if value.shape is None else f"[{', '.join(_dim(d) for d in value.shape)}]"
    return f"%{value.id} {_word(value.name)} {_word(value.dtype)}{shape}"


def _dim(dim: Dim) -> str:
    if isinstance(dim, str):
        return json.dumps(dim) if dim.lstrip("-").isdigit() else _word(dim)
    return "?" if dim is None else str(dim)


def _stats(value: Value, stats: ConstantStats) -> str:
    size = f"size={stats.size}"
    if value.format is None or not stats.size:
        return size
    return f"{size} largest={stats.largest!r} smallest_nonzero={stats.smallest_nonzero!r}"


def _node(graph: Graph, node: Node) -> str:
    words = [_word(node.name), _word(node.op), _word(node.native)]
    label = node.format.label if node.format else "-"
    taken = [_port(graph, *p) for p in zip(node.inputs, node.follows_in, strict=True)]
    given = [
        _port(graph, *p, declare=True)
        for p in zip(node.outputs, node.follows_out, strict=True)
    ]
    line = f"node {' '.join(words)} {label} ({', '.join(taken)}) -> ({', '.join(given)})"
    if node.admits != (_USUAL if node.format else frozenset()):
        line += f" admits=({', '.join(sorted(f.label for f in node.admits))})"
    line += f" scope={_word(node.scope)}" if node.scope else ""
    line += f" region={node.region}" if node.region else ""
    return f"{line} {json.dumps(dict(node.attributes))}" if node.attributes else line


def _port(graph: Graph, index: int | None, follows: bool, *, declare: bool = False) -> str:
    value = None if index is None else graph.values[index]
    usual = value is not None and value.format is not None
    mark = "" if follows == usual else "!" if follows else "~"
    if value is None:
        return f"{mark}_"
    return mark + (_declared(value) if declare else f"%{value.id}")


class _Cursor:
    """The tokens of one line, and its attributes, which are JSON."""

    def __init__(self, line: str) -> None:
        self.tokens: list[str] = []
        self.attributes: dict[str, Any] = {}
        at, end = 0, len(line.rstrip())
        while at < end:
            found = _TOKEN.match(line, at)
            if found is None:
                self.attributes = json.loads(line[at:])
                break
            self.tokens.append(found[0].strip())
            at = found.end()
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        if self.at == len(self.tokens):
            raise ValueError("the line ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def skip(self, token: str) -> bool:
        """Whether ``token`` comes next; steps over it."""
        found = self.peek() == token
        self.at += found
        return found

    def expect(self, token: str) -> None:
        if not self.skip(token):
            raise ValueError(f"expected {token!r}, got {self.peek() or 'end of line'!r}")

    def word(self) -> str:
        token = self.next()
        return str(json.loads(token)) if token.startswith('"') else token

    def index(self) -> int:
        self.expect("%")
        return int(self.next())

    def options(self, *known: str) -> dict[str, str]:
        """``name=word`` or ``name=(word, word)`` to the end of the line."""
        found: dict[str, str] = {}
        while self.peek():
            name = self.next()
            if name not in known:
                raise ValueError(f"unexpected {name!r}")
            self.expect("=")
            if self.skip("("):
                words: list[str] = []
                while not self.skip(")"):
                    words.append(self.word())
                    self.skip(",")
                found[name] = " ".join(words)
            else:
                found[name] = self.word()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    index: int | None
    mark: str = ""


@dataclass(slots=True)
class _Reader:
    digest: str = ""
    values: dict[int, Value] = field(default_factory=dict[int, Value])
    nodes: list[tuple[Node, list[_Port], list[_Port]]] = field(
        default_factory=list[tuple[Node, list[_Port], list[_Port]]]
    )

    def line(self, cursor: _Cursor) -> None:
        kind = cursor.next()
        if kind == "graph":
            self.digest = cursor.word()
        elif kind == "node":
            self._node(cursor)
        elif kind == "output":
            index = cursor.index()
            self.values[index] = replace(self.values[index], is_output=True)
        elif kind in {"input", "value", "constant"}:
            value = self._declare(cursor)
            options = cursor.options(*(_STATS if kind == "constant" else ()))
            if kind == "constant":
                self.values[value.id] = replace(value, constant=_constant(value, options))
            elif kind == "input":
                self.values[value.id] = replace(value, is_input=True)
        else:
            raise ValueError(f"unknown declaration {kind!r}")

    def _declare(self, cursor: _Cursor) -> Value:
        index, name, dtype = cursor.index(), cursor.word(), cursor.word()
        shape: list[Dim] | None = None
        if cursor.skip("["):
            shape = []
            while not cursor.skip("]"):
                shape.append(_read_dim(cursor))
                cursor.skip(",")
        if index in self.values:
            raise ValueError(f"%{index} is declared twice")
        value = Value(
            id=index, name=name, dtype=dtype, shape=None if shape is None else tuple(shape)
        )
        self.values[index] = value
        return value

    def _node(self, cursor: _Cursor) -> None:
        name, op, native, label = (cursor.word() for _ in range(4))
        taken = self._ports(cursor, declare=False)
        cursor.expect("->")
        given = self._ports(cursor, declare=True)
        options = cursor.options("admits", "scope", "region")
        fmt = None if label == "-" else Format.parse(label)
        admits = _USUAL if fmt else frozenset[Format]()
        if "admits" in options:
            admits = frozenset(Format.parse(f) for f in options["admits"].split())
        node = Node(
            id=len(self.nodes),
            name=name,
            op=op,
            native=native,
            inputs=tuple(p.index for p in taken),
            outputs=tuple(p.index for p in given),
            follows_in=(),
            follows_out=(),
            format=fmt,
            admits=admits,
            attributes=_attributes(cursor.attributes),
            scope=options.get("scope", ""),
            region=int(options.get("region", "0")),
        )
        self.nodes.append((node, taken, given))

    def _ports(self, cursor: _Cursor, *, declare: bool) -> list[_Port]:
        cursor.expect("(")
        ports: list[_Port] = []
        while not cursor.skip(")"):
            mark = cursor.next() if cursor.peek() in {"~", "!"} else ""
            if cursor.skip("_"):
                ports.append(_Port(index=None, mark=mark))
            else:
                index = self._declare(cursor).id if declare else cursor.index()
                ports.append(_Port(index=index, mark=mark))
            cursor.skip(",")
        return ports

    def graph(self) -> Graph:
        builder: GraphBuilder[int] = GraphBuilder()
        for node, taken, given in self.nodes:
            builder.add(
                replace(node, follows_in=self._flags(taken), follows_out=self._flags(given))
            )
        ids = range(len(self.values))
        read = {i for node in builder.nodes for i in node.inputs if i is not None}
        if sorted(self.values) != list(ids) or not read <= set(ids):
            raise ModelError(
                "values are not numbered from %0 without gaps",
                where="graph text",
                fix="declare each value once, as input, constant, value or a node's result",
            )
        values = (
            replace(self.values[i], producer=builder.producer(i), uses=builder.uses(i))
            for i in ids
        )
        return builder.finish(values, self.digest)

    def _flags(self, ports: Iterable[_Port]) -> tuple[bool, ...]:
        return tuple(
            p.mark == "!" if p.mark else p.index in self.values and self._is_float(p.index)
            for p in ports
        )

    def _is_float(self, index: int | None) -> bool:
        return index is not None and self.values[index].format is not None


def _read_dim(cursor: _Cursor) -> Dim:
    token = cursor.peek()
    word = cursor.word()
    if token == "?":
        return None
    return int(word) if word.lstrip("-").isdigit() and not token.startswith('"') else word


def _constant(value: Value, options: Mapping[str, str]) -> ConstantStats:
    """Stats with the size in ``options``, over an array with the magnitudes in them."""
    ends = [float(options.get(name, "1")) for name in _STATS[1:]]
    array = np.array(ends if value.format is not None else [], dtype=np.float32)
    return ConstantStats(size=int(options["size"]), read=lambda: array)


def _attributes(content: Mapping[str, Any]) -> dict[str, Attribute]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
