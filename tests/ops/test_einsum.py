"""An Einsum written as a product gives what numpy.einsum gives, for any equation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.ops.einsum import Move, Moves, Product, as_product

Array = NDArray[np.float64]


def moved(array: Array, moves: Moves) -> Array:
    for move, argument in moves:
        if move is Move.TRANSPOSE:
            array = array.transpose(argument)
        elif move is Move.UNSQUEEZE:
            array = np.expand_dims(array, argument)
        elif move is Move.SQUEEZE:
            array = np.squeeze(array, argument)
        else:
            kept = [array.shape[i] if n == 0 else n for i, n in enumerate(argument)]
            array = array.reshape(kept)
    return array


def computed(product: Product, operands: tuple[Array, Array]) -> Array:
    a, b = reversed(operands) if product.swapped else operands
    return moved(moved(a, product.left) @ moved(b, product.right), product.after)


def arrays(equation: str, lengths: dict[str, int]) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    terms = "".join(equation.split()).partition("->")[0].split(",")
    one, other = (rng.integers(-4, 5, [lengths[x] for x in t]).astype(float) for t in terms)
    return one, other


@st.composite
def equations(draw: st.DrawFn) -> str:
    """Any equation of two operands without repeated labels."""
    labels = draw(st.permutations("abcdefg"))
    both, rows, columns = (draw(st.integers(n, 3)) for n in (1, 0, 0))
    summed = draw(st.integers(1, both))
    shared, rest = labels[:both], labels[both:]
    one = [*shared, *rest[:rows]]
    other = [*shared, *rest[rows : rows + columns]]
    kept = [*shared[summed:], *rest[: rows + columns]]
    terms = ["".join(draw(st.permutations(t))) for t in (one, other, kept)]
    space = draw(st.sampled_from(["", " "]))
    return f"{terms[0]},{space}{terms[1]}{space}->{terms[2]}"


@given(equations(), st.lists(st.integers(1, 4), min_size=7, max_size=7), st.data())
def test_any_equation(equation: str, lengths: list[int], data: st.DataObject) -> None:
    operands = arrays(equation, dict(zip("abcdefg", lengths, strict=True)))
    wanted = np.einsum(equation, *operands)
    assert np.array_equal(computed(as_product(equation), operands), wanted)
    first = data.draw(st.booleans())
    constant = [first, not first]
    known = operands[0 if first else 1].shape
    product = as_product(equation, constant=constant, lengths=known)
    assert product.swapped == first
    assert np.array_equal(computed(product, operands), wanted)


@given(equations(), st.data())
def test_any_equation_with_an_ellipsis(equation: str, data: st.DataObject) -> None:
    terms = "".join(equation.split()).replace("->", ",").split(",")
    places = [data.draw(st.integers(0, len(t))) for t in terms]
    both = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    has = (*both, True)
    written = [
        f"{t[:i]}...{t[i:]}" if on else t for t, i, on in zip(terms, places, has, strict=True)
    ]
    equation = f"{written[0]},{written[1]}->{written[2]}"
    more = (2, 3)[: data.draw(st.integers(0, 2))]
    rng = np.random.default_rng(0)
    one, other = (
        rng.integers(-4, 5, [*[2] * i, *more[: on * 2], *[2] * (len(t) - i)]).astype(float)
        for t, i, on in zip(terms[:2], places, both, strict=False)
    )
    try:
        product = as_product(equation)
    except ValueError as error:
        event(str(error))
        return
    assert np.array_equal(computed(product, (one, other)), np.einsum(equation, one, other))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij,...jk->...ik", ((2, 3, 4, 5), (2, 3, 5, 2))),
        ("...ij,jk->...ik", ((2, 3, 4, 5), (5, 2))),
        ("...ij,...jk", ((3, 4, 5), (3, 5, 2))),
        ("ij,...jk->...ik", ((4, 5), (3, 5, 2))),
        ("...j,j->...", ((2, 3, 5), (5,))),
        ("ij,jk", ((4, 5), (5, 2))),
        ("kj,ji", ((4, 5), (5, 2))),
    ],
)
def test_without_a_result_and_with_an_ellipsis(
    equation: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    rng = np.random.default_rng(0)
    one, other = (rng.integers(-4, 5, s).astype(float) for s in shapes)
    product = as_product(equation)
    assert np.array_equal(computed(product, (one, other)), np.einsum(equation, one, other))


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("ij->ji", "1 operands"),
        ("ij,jk,kl->il", "3 operands"),
        ("ii,ij->j", "diagonal"),
        ("i,j->ij", "over no axis of both"),
        ("bij,bij->bij", "over no axis of both"),
        ("ij,kj->k", "one operand alone"),
        ("...ij,...jk->ik", "sums over '...'"),
        ("...ji,...jk->...ik", "beside '...'"),
        ("...a,abc->b...c", "beside '...'"),
        ("b...s,bsc->b...c", "beside '...'"),
    ],
)
def test_what_is_no_product(equation: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        as_product(equation)


def test_a_plain_product_moves_nothing() -> None:
    assert as_product("bhik, bhkj -> bhij") == Product(left=(), right=(), after=())


def test_constant_weights_are_a_matrix() -> None:
    # As Keras and JAX write the heads of an attention.
    product = as_product("abc,cde->abde", constant=[False, True], lengths=(8, 2, 4))
    assert product.right == ((Move.RESHAPE, (8, 8)),)
    assert product.after == ((Move.RESHAPE, (0, 0, 2, 4)),)
