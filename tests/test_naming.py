"""Words in any case, and names that nothing has."""

from __future__ import annotations

import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.naming import close_names, kind_of, look_up, percent, switch, unknown_name
from finecast.numbers.formats import Format


def test_words_are_read_in_any_case_with_blanks_around() -> None:
    table = {"none": 0, "all": 1}
    for word in ("none", "NONE", " None\n"):
        assert look_up(word, table, what="scope") == 0


def test_an_unknown_word_names_option_and_vocabulary() -> None:
    with pytest.raises(UsageError) as caught:
        look_up("nine", {"none": 0, "all": 1, "auto": 2}, what="scope", where="--auto-cast")
    text = "unknown scope 'nine' (--auto-cast): did you mean none? use one of none, all, auto"
    assert str(caught.value) == text


@pytest.mark.parametrize("word", ["1", "true", "True", " ON ", "yes"])
def test_on(word: str) -> None:
    assert switch(word, where="VARIABLE")


@pytest.mark.parametrize("word", ["", "0", "false", "False", "FALSE", " off ", "No"])
def test_off(word: str) -> None:
    assert not switch(word, where="VARIABLE")


def test_neither_on_nor_off_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"'maybe' is neither on nor off \(VARIABLE\)"):
        switch("maybe", where="VARIABLE")


def test_the_closest_names_come_whatever_their_case() -> None:
    names = [f"/layer/{i}/MatMul" for i in range(30)] + ["/head/Softmax"]
    assert close_names("/head/softmax", names)[0] == "/head/Softmax"
    assert str(unknown_name("/Head/Sofmax", names, what="node")) == (
        "unknown node '/Head/Sofmax': did you mean /head/Softmax?"
    )


def test_names_that_contain_the_word_are_offered_where_none_is_like_it() -> None:
    names = [f"encoder.layer.{i}.attention.query/linear_{i}" for i in range(30)]
    assert str(unknown_name("Linear_29", [*names, "head"], what="node")) == (
        "unknown node 'Linear_29': did you mean encoder.layer.29.attention.query/linear_29?"
    )
    assert close_names("", names) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("int8_weigths", "int8_weights"),
        ("int8weights", "int8_weights"),
        ("int4", "int4_weights"),
    ],
)
def test_the_closest_format_is_offered(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"unknown format '{given}': did you mean {meant}\\b"):
        Format.parse(given)


def test_without_a_close_name_some_are_shown() -> None:
    names = [f"/layer/{i}/MatMul" for i in range(30)]
    shown = "there are 30: /layer/0/MatMul, /layer/1/MatMul, /layer/2/MatMul, ..."
    assert str(unknown_name("zzz", names, what="node")).endswith(shown)
    assert str(unknown_name("x", (), what="node")).endswith("there are none")


def test_what_a_value_is_has_its_article() -> None:
    assert [kind_of(value) for value in (object(), 1, {}, 1.5)] == [
        *("an object", "an int", "a dict", "a float"),
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.025, "2.5%"), (12.5, "1,250%"), (7.7e26, "over 1,000,000%"), (np.inf, "inf")],
)
def test_shares_of_which_no_digit_counts_are_bounded(share: float, text: str) -> None:
    assert percent(share) == text
