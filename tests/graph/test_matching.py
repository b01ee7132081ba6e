"""Ops are found again: renamed, retrained, moved, restated; and not in another net."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.graph.matching import match
from finecast.graph.structure import MODEL_INPUT, OpStructure, Structure

KINDS = ["conv", "relu", "add", "softmax"]


@st.composite
def structures(draw: st.DrawFn) -> Structure:
    """Any acyclic structure, with few kinds so that ops are alike."""
    ops: list[OpStructure] = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        inputs = draw(st.lists(st.integers(MODEL_INPUT, number - 1), min_size=1, max_size=2))
        ops.append(
            OpStructure(
                name=f"op{number}",
                op=kind,
                shape=draw(st.sampled_from(["", "8", "16"])),
                weights=(f"w{number}",) if kind == "conv" else (),
                inputs=tuple(inputs),
            )
        )
    return tuple(ops)


def chain(*kinds: str, weights: Sequence[str] = (), names: str = "op") -> Structure:
    """Ops that each read the one before; convolutions have these weights in turn."""
    left = [*weights]
    return tuple(
        OpStructure(
            name=f"{names}{n}",
            op=kind,
            shape="8",
            weights=(left.pop(0),) if kind == "conv" and left else (),
            inputs=(n - 1,),
        )
        for n, kind in enumerate(kinds)
    )


def renamed(structure: Structure) -> Structure:
    return tuple(replace(op, name=f"new{n}") for n, op in enumerate(structure))


def retrained(structure: Structure) -> Structure:
    return tuple(
        replace(op, weights=tuple(f"{w} again" for w in op.weights)) for op in structure
    )


@given(structures())
def test_a_structure_is_matched_with_itself(structure: Structure) -> None:
    found = match(structure, structure)
    if any(op.inputs for op in structure):
        assert found.pairs == {n: n for n in range(len(structure))}
    assert not found.regroupings


@given(structures(), structures())
def test_each_op_is_used_once_and_kinds_are_kept(a: Structure, b: Structure) -> None:
    found = match(a, b)
    mine = [*found.pairs, *(n for g in found.regroupings for n in g.before)]
    theirs = [*found.pairs.values(), *(n for g in found.regroupings for n in g.after)]
    assert len(set(mine)) == len(mine)
    assert len(set(theirs)) == len(theirs)
    assert all(a[n].op == b[other].op for n, other in found.pairs.items())


@given(structures(), st.randoms(use_true_random=False))
def test_ops_with_weights_are_found_in_any_order(
    structure: Structure, chance: random.Random
) -> None:
    order = [*range(len(structure))]
    chance.shuffle(order)
    place = {old: new for new, old in enumerate(order)} | {MODEL_INPUT: MODEL_INPUT}
    moved = tuple(
        replace(
            structure[old],
            name=f"{old}",
            inputs=tuple(place[i] for i in structure[old].inputs),
        )
        for old in order
    )
    found = match(structure, moved)
    for number, op in enumerate(structure):
        if op.weights:
            assert found.pairs[number] == place[number]


def test_a_net_trained_further_and_exported_with_other_names() -> None:
    net = chain("conv", "relu", "conv", "relu", "conv", "softmax", weights="abc")
    found = match(net, renamed(retrained(net)))
    assert found.pairs == {n: n for n in range(len(net))}


def test_names_that_a_new_op_shifted_do_not_mislead() -> None:
    # Exporters number ops: the new convolution at the front takes the name of the first.
    before = chain("conv", "relu", "conv", "relu", weights="ab")
    after = chain("conv", "relu", "conv", "relu", "conv", "relu", weights="nab")
    assert match(before, after).pairs == {0: 2, 1: 3, 2: 4, 3: 5}


def test_a_gelu_written_out_is_a_regrouping() -> None:
    before = chain("conv", "gelu", "conv", weights="ab")
    after = chain("conv", "div", "erf", "add", "mul", "mul", "conv", weights="ab", names="x")
    found = match(before, after)
    assert found.pairs == {0: 0, 2: 6}
    (group,) = found.regroupings
    assert (group.before, group.after) == ((1,), (1, 2, 3, 4, 5))


def test_moves_whose_sizes_are_computed_are_found_between_what_is_sure() -> None:
    # One exporter states the sizes of a window; the other computes them of the value.
    moves = "pad", "reshape", "transpose", "reshape"
    before = chain("norm", *moves, "conv", "relu", weights="a")
    sizes = [OpStructure(name=f"s{n}", op="shape", inputs=(n,)) for n in range(5)]
    after = (
        *(replace(op, shape="?") if op.op in moves else op for op in renamed(before)),
        *sizes,
    )
    assert match(before, after).pairs == {n: n for n in range(len(before))}


def test_another_net_is_not_matched() -> None:
    before = chain("conv", "relu", "conv", "relu", weights="ab")
    after = tuple(
        replace(op, shape="64") for op in chain("conv", "relu", "add", weights="c", names="x")
    )
    assert not match(before, after).pairs
    assert not match(before, after).regroupings  # inputs and outputs are no evidence


@pytest.mark.parametrize("shared", ["op", "other"])
def test_without_edges_names_alone_count(shared: str) -> None:
    plan = tuple(OpStructure(name=f"op{n}", op="relu") for n in range(3))
    model = chain("relu", "relu", "relu", names=shared)
    expected = {0: 0, 1: 1, 2: 2} if shared == "op" else {}
    assert match(plan, model).pairs == expected


def test_cycles_of_loops_are_no_obstacle() -> None:
    loop = (
        OpStructure(name="phi", op="phi", shape="8", inputs=(MODEL_INPUT, 2)),
        OpStructure(name="product", op="matmul", weights=("w",), inputs=(0,)),
        OpStructure(name="sum", op="add", shape="8", inputs=(1, 0)),
    )
    assert match(loop, renamed(loop)).pairs == {0: 0, 1: 1, 2: 2}
