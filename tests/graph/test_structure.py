"""What is kept of a graph: written and read back, and independent of how weights lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.graph import ConstantStats, Graph
from finecast.graph.structure import (
    MODEL_INPUT,
    STRUCTURE_VERSION,
    OpStructure,
    fed,
    read_structure,
    structure_of,
    write_structure,
)
from tests.graph.test_text import graphs
from tests.planning.nets import drawn, prepared

NET = """
net (float[2,4] x) => (float[2,3] y) {
  [first] a = MatMul(x, w)
  [same] b = Identity(a)
  [last] y = Relu(b)
}"""


WORDS = st.text(st.characters(exclude_characters=" |", exclude_categories=["Cs", "Z", "C"]))


def test_ops_on_constants_and_sizes_are_not_fed() -> None:
    ops = {"x2": ("mul", (MODEL_INPUT,)), "size": ("shape", (0,)), "half": ("div", (1,))}
    ops |= {"table": ("range", ()), "scaled": ("mul", (3, 2)), "end": ("add", (0, 4))}
    structure = tuple(
        OpStructure(name=name, op=op, inputs=inputs) for name, (op, inputs) in ops.items()
    )
    assert {structure[n].name for n in fed(structure)} == {"x2", "end"}
    names_alone = tuple(replace(op, inputs=()) for op in structure)
    assert fed(names_alone) == {*range(len(ops))}


@given(
    st.lists(
        st.builds(
            OpStructure,
            name=st.text(),
            op=WORDS,
            shape=WORDS,
            attributes=WORDS,
            weights=st.lists(WORDS.filter(bool)).map(tuple),
            inputs=st.lists(st.integers(-1, 0)).map(tuple),
            decided=st.booleans(),
        ),
        min_size=1,
    ).map(tuple)
)
def test_what_is_written_is_read_back(structure: tuple[OpStructure, ...]) -> None:
    assert read_structure(write_structure(structure)) == structure


@pytest.mark.parametrize("line", ["", "a", "1|||||1|relu|late", "-2|||||relu|x", "x||||1|r|x"])
def test_lines_of_no_op_are_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - as int() says it
        read_structure({"version": STRUCTURE_VERSION, "ops": [line]})


@given(graphs())
def test_every_graph_has_one(graph: Graph) -> None:
    structure = structure_of(graph)
    assert [op.name for op in structure] == [node.name for node in graph.nodes]
    assert read_structure(write_structure(structure)) == structure


def test_identities_are_passed_over() -> None:
    graph = prepared(NET, drawn(0, w=(4, 3))).graph
    by_name = {op.name: op for op in structure_of(graph)}
    first = next(n.id for n in graph.nodes if n.name == "first")
    assert by_name["last"].inputs == (first,)


def test_a_transposed_weight_is_the_same_one_and_another_is_not() -> None:
    (weights,) = drawn(0, w=(4, 3)).values()
    graph = prepared(NET, {"w": weights}).graph

    def marks(array: NDArray[np.float32]) -> tuple[str, ...]:
        constant = ConstantStats(size=array.size, read=lambda: array)
        values = tuple(replace(v, constant=v.constant and constant) for v in graph.values)
        return structure_of(replace(graph, values=values))[0].weights

    assert marks(weights.T) == marks(weights)
    assert marks(weights * 2) != marks(weights)


def test_digests_of_another_version_are_not_compared() -> None:
    content = write_structure((OpStructure(name="x", op="relu", shape="8"),))
    assert read_structure(content | {"version": STRUCTURE_VERSION + 1}) == ()
