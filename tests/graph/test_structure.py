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
    lacking,
    other_weights,
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
            inputs=st.just((0, -1, 0)),
            ports=st.sampled_from([(), ("0", "ab", "12")]),
            results=st.lists(st.sampled_from(["", "ab"])).map(tuple),
            decided=st.booleans(),
        ),
        min_size=1,
    ).map(tuple)
)
def test_what_is_written_is_read_back(structure: tuple[OpStructure, ...]) -> None:
    assert read_structure(write_structure(structure)) == structure


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a",
        "1||||||1|relu|late",
        "-2||||||1|relu|x",
        "x||||||1|r|x",
        "0:a||||||1|r|x",
        "0:-1||||||1|r|x",
    ],
)
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


def op_with(weights: NDArray[np.float32], attributes: str = "onnx:1") -> OpStructure:
    graph = prepared(NET, drawn(0, w=(4, 3))).graph
    constant = ConstantStats(size=weights.size, read=lambda: weights)
    values = tuple(replace(v, constant=v.constant and constant) for v in graph.values)
    return replace(structure_of(replace(graph, values=values))[0], attributes=attributes)


WEIGHTS = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
LAYOUTS = {
    "transposed": WEIGHTS.T,
    "reshaped": WEIGHTS.reshape(2, 2, 4),
    "with axes of size 1": WEIGHTS[:, None, :, None],
}
OTHERS = {
    "doubled": WEIGHTS * 2,
    "negated": -WEIGHTS,
    "reversed": WEIGHTS[::-1],
    "shuffled": np.random.default_rng(0).permutation(WEIGHTS.ravel()).reshape(4, 4),
    "pruned": np.where(WEIGHTS > 12, WEIGHTS, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_in_another_layout_are_the_same(name: str) -> None:
    op, laid_out = op_with(WEIGHTS), op_with(LAYOUTS[name], "ir:1")
    assert op.numbers == laid_out.numbers
    assert not other_weights(op, laid_out)


def test_a_layout_is_compared_where_attributes_are_equal() -> None:
    op = op_with(WEIGHTS)
    assert other_weights(op, op_with(LAYOUTS["transposed"]))
    assert not other_weights(op, op_with(LAYOUTS["with axes of size 1"]))


@pytest.mark.parametrize("attributes", ["onnx:1", "ir:1"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_and_other_orders_are_other_weights(name: str, attributes: str) -> None:
    op, other = op_with(WEIGHTS), op_with(OTHERS[name], attributes)
    assert other_weights(op, other)
    assert lacking(op, other) == [0]


def test_a_bias_may_be_an_op_of_its_own_in_another_library() -> None:
    op = op_with(WEIGHTS)
    biased = replace(op, weights=(*op.weights, "bias"))
    assert other_weights(op, biased)
    assert not other_weights(op, replace(biased, attributes="ir:1"))


def test_digests_of_another_version_are_not_compared() -> None:
    content = write_structure((OpStructure(name="x", op="relu", shape="8"),))
    earlier = {"version": 2, "ops": ["-1 0|w|8|onnx:a|1|relu|x|y"]}
    (read,) = read_structure(earlier)
    assert (read.inputs, read.ports, read.results) == ((MODEL_INPUT, 0), (), ())
    assert (read.weights, read.shape, read.op, read.name) == (("w",), "8", "relu", "x|y")
    assert read_structure(content | {"version": STRUCTURE_VERSION + 1}) == ()
