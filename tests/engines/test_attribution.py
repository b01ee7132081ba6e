from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.engines.attribution import Kernel, NameLists, attribute, node_of
from finecast.engines.source import ModelStep


def step(name: str, reads: str, op: str = "Op") -> ModelStep:
    return ModelStep(name=name, op=op, inputs=tuple(reads.split()), outputs=(f"{name}_out",))


CHAIN = [step("a", "x"), step("b", "a_out"), step("c", "b_out"), step("d", "c_out")]


@pytest.mark.parametrize(
    ("text", "known", "expected"),
    [
        ("a,b", {"a", "b"}, ("a", "b")),
        ("a,b,c", {"a,b", "c"}, ("a,b", "c")),
        ("a,b,c", {"a,b,c", "a", "b,c"}, ("a,b,c",)),
        ("", set[str](), ()),
        ("a,?", {"a"}, ("a", "?")),
    ],
)
def test_names_with_commas_stay_whole(
    text: str, known: set[str], expected: tuple[str, ...]
) -> None:
    assert NameLists(known).split(text) == expected


def split_by_definition(text: str, known: set[str]) -> tuple[str, ...]:
    """From the left, the longest run of pieces that is a known name, or one piece."""
    pieces, names = text.split(","), list[str]()
    while pieces:
        ends = range(len(pieces), 0, -1)
        end = next(e for e in ends if ",".join(pieces[:e]) in known or e == 1)
        names.append(",".join(pieces[:end]))
        pieces = pieces[end:]
    return tuple(name for name in names if name)


@given(
    st.text("ab,", max_size=14), st.sets(st.text("ab,", min_size=1, max_size=6), max_size=6)
)
def test_lists_are_split_by_the_definition(text: str, known: set[str]) -> None:
    assert NameLists(known).split(text) == split_by_definition(text, known)


def test_a_kernel_of_very_many_ops() -> None:
    """Where each pair of commas was tried, this took hours."""
    names = [f"relu{i}" for i in range(30_000)]
    assert NameLists([*names, "relu7,relu9", "relu9,relu10"]).split(",".join(names)) == (
        *names[:9],
        "relu9,relu10",
        *names[11:],
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv/WithoutBiases", "conv"),
        ("conv", "conv"),
        ("conv_nchwc", "conv"),
        ("block/conv/WithoutBiases", "block/conv"),
        ("convolution", None),
        ("other", None),
    ],
)
def test_suffixes_are_taken_off_at_joints_only(name: str, expected: str | None) -> None:
    assert node_of(name, {"conv", "block/conv"}) == expected


def test_a_node_that_no_kernel_names_belongs_to_its_only_reader() -> None:
    kernels = [Kernel(name="k1", named=("b",)), Kernel(name="k2", named=("d",))]
    assert attribute(CHAIN, kernels) == {"k1": ("a", "b"), "k2": ("c", "d")}


def test_a_node_read_by_two_kernels_is_left_out() -> None:
    steps = [step("a", "x"), step("b", "a_out"), step("c", "a_out")]
    kernels = [Kernel(name="k1", named=("b",)), Kernel(name="k2", named=("c",))]
    assert attribute(steps, kernels) == {"k1": ("b",), "k2": ("c",)}


def test_a_kernel_under_a_new_name_takes_the_unnamed_nodes_before_its_reader() -> None:
    kernels = [
        Kernel(name="k1", named=("a",), feeds=("made_up",)),
        Kernel(name="made_up", named=(), feeds=("k2",)),
        Kernel(name="k2", named=("d",)),
    ]
    found = attribute(CHAIN, kernels)
    assert found == {"k1": ("a",), "made_up": ("b", "c"), "k2": ("d",)}


def test_reorders_of_the_engines_own_have_no_nodes() -> None:
    kernels = [
        Kernel(name="reorder", named=(), feeds=("k",), added=True),
        Kernel(name="k", named=("d",)),
    ]
    assert attribute(CHAIN, kernels) == {"reorder": (), "k": ("a", "b", "c", "d")}


def test_constants_belong_to_no_kernel() -> None:
    steps = [step("w", "", op="Constant"), step("a", "x w_out")]
    assert attribute(steps, [Kernel(name="k", named=("a",))]) == {"k": ("a",)}
