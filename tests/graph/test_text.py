"""The text form of graphs: what is written is read back, and reads well."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import ModelError
from finecast.graph import Attribute, ConstantStats, Dim, Graph, Node, Value
from finecast.numbers.formats import Format
from tests.graph.text import from_text, to_text

ATTENTION = """\
graph 0123456789abcdef
input %0 x fp32[batch, 8]
constant %1 w fp32[8, 8] size=64 largest=0.5 smallest_nonzero=0.0078125
constant %2 axes int64[1] size=1
node scores matmul onnx::MatMul fp32 (%0, %1) -> (%3 s fp32[batch, 8]) scope=layer.0
node "my softmax" softmax onnx::Softmax fp32 (%3) -> (%4 p fp32[batch, 8]) {"axis": -1}
node sum reduce_sum onnx::ReduceSum fp32 (%4, %2) -> (%5 y fp32[batch, 1])
output %4
output %5
"""

NAMES = st.text(max_size=8) | st.sampled_from(["-", "_", "->", "a->b", "%0", "(", "1", "e+5"])
DIMS = st.none() | st.integers(-1, 9) | NAMES
DTYPES = st.sampled_from(["fp32", "bf16", "int64", "fp64", "sequence(fp32)", "unknown"])
SCALARS = st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
ATTRIBUTES = SCALARS | st.lists(SCALARS, max_size=3).map(tuple)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph whose producers and uses are those of its nodes."""
    values: list[Value] = []
    uses: dict[int, list[int]] = {}

    def add(producer: int | None) -> int:
        shape: list[Dim] | None = draw(st.none() | st.lists(DIMS, max_size=3))
        kind = (
            "result" if producer is not None else draw(st.sampled_from(["input", "c", "free"]))
        )
        data = np.array(draw(st.lists(FLOATS, max_size=3)), np.float32)
        constant = ConstantStats(size=data.size, read=lambda: data) if kind == "c" else None
        values.append(
            Value(
                id=len(values),
                name=draw(NAMES),
                dtype=draw(DTYPES),
                shape=None if shape is None else tuple(shape),
                producer=producer,
                constant=constant,
                is_input=kind == "input",
                is_output=draw(st.booleans()),
            )
        )
        return len(values) - 1

    nodes: list[Node] = []
    for number in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(0, 2))):
            add(None)
        pool = st.none() | st.integers(0, len(values) - 1) if values else st.none()
        taken = draw(st.lists(pool, max_size=3))
        given_ = [add(number) if draw(st.booleans()) else None for _ in range(2)]
        for index in dict.fromkeys(i for i in taken if i is not None):
            uses.setdefault(index, []).append(number)
        attributes: dict[str, Attribute] = draw(st.dictionaries(NAMES, ATTRIBUTES, max_size=2))
        nodes.append(
            Node(
                id=number,
                name=draw(NAMES),
                op=draw(NAMES),
                native=draw(NAMES),
                inputs=tuple(taken),
                outputs=tuple(given_),
                follows_in=tuple(draw(st.booleans()) for _ in taken),
                follows_out=tuple(draw(st.booleans()) for _ in given_),
                format=draw(st.none() | st.sampled_from(Format)),
                admits=draw(st.frozensets(st.sampled_from(Format))),
                attributes=attributes,
                scope=draw(NAMES),
                region=draw(st.integers(0, 3)),
            )
        )
    linked = (replace(v, uses=tuple(uses.get(v.id, ()))) for v in values)
    return Graph(nodes=tuple(nodes), values=tuple(linked), digest=draw(NAMES))


@given(graphs())
def test_round_trip(graph: Graph) -> None:
    read = from_text(to_text(graph))
    assert read == graph
    assert to_text(read) == to_text(graph)


@given(graphs())
def test_magnitudes_of_constants_survive(graph: Graph) -> None:
    read = from_text(to_text(graph))
    for before, after in zip(graph.values, read.values, strict=True):
        if before.constant is None or before.format is None or not before.constant.size:
            continue
        assert after.constant is not None
        assert after.constant.largest == before.constant.largest
        assert after.constant.smallest_nonzero == before.constant.smallest_nonzero


def test_what_people_write_is_what_is_written() -> None:
    assert to_text(from_text(ATTENTION)) == ATTENTION


def test_reads_links_flags_and_defaults() -> None:
    graph = from_text(ATTENTION)
    scores, softmax, total = graph.nodes
    assert graph.values[3].producer == scores.id
    assert graph.values[3].uses == (softmax.id,)
    assert scores.scope == "layer.0"
    assert softmax.name == "my softmax"
    assert softmax.attributes == {"axis": -1}
    assert softmax.admits == {Format.FP32, Format.FP16, Format.BF16}
    assert total.follows_in == (True, False)  # the axes are no float
    assert [v.name for v in graph.outputs] == ["p", "y"]
    assert graph.values[0].shape == ("batch", 8)


def test_marks_ports_that_differ_from_the_usual() -> None:
    line = "node n op x::Op fp32 (~%0, _, !_) -> (%1 y fp32) admits=(fp32)"
    graph = from_text(f"input %0 x fp32\n{line}\n")
    assert graph.nodes[0].inputs == (0, None, None)
    assert graph.nodes[0].follows_in == (False, False, True)
    assert graph.nodes[0].admits == {Format.FP32}


def test_comments_and_blank_lines_are_skipped() -> None:
    assert from_text("# a comment\n\n  input %0 x fp32\n").inputs[0].name == "x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("edge %0 x fp32", "unknown declaration 'edge'"),
        ("input %0 x", "ends too early"),
        ("input %0 x fp32\ninput %0 y fp32", r"%0 is declared twice.*line 2"),
        ("input %1 x fp32", "without gaps"),
        ("output %0", "line 1"),
        ("node n op x::Op fp33 () -> ()", "unknown format 'fp33'"),
        ("node n op x::Op fp32 (%0) -> ()", "without gaps"),
        ("node n op x::Op fp32 () -> () sort=3", "unexpected 'sort'"),
        ("constant %0 w fp32[2]", "size"),
        ("node n op x::Op fp32 ( -> ()", "expected '%'"),
    ],
)
def test_errors_name_the_line(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        from_text(text)


def test_a_constant_that_is_computed_has_no_text() -> None:
    constant = ConstantStats(size=0, read=lambda: np.zeros(0, np.float32))
    value = Value(id=0, name="x", dtype="fp32", is_input=True, constant=constant)
    with pytest.raises(ValueError, match="constant 'x'"):
        to_text(Graph(nodes=(), values=(value,)))
