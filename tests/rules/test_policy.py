"""Policies are parsed from text; invalid ones are refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import UsageError
from finecast.numbers.formats import FLOATS, Format
from finecast.rules.policy import Adjust, Policy, Scope, formats_by_name, low_format, patterns
from finecast.rules.ranges import Calibration

LOW = [f for f in FLOATS if f.storage is not Format.FP32]


@given(st.sampled_from(Scope), st.lists(st.sampled_from(LOW), min_size=1, unique=True))
def test_label_is_read_back(scope: Scope, formats: list[Format]) -> None:
    policy = Policy(scope=scope, formats=(*formats,))
    assert Policy.parse(policy.label) == policy


@pytest.mark.parametrize(
    ("text", "scope", "fmt"),
    [
        ("all", Scope.ALL, Format.BF16),
        ("matmul:fp16", Scope.MATMULT, Format.FP16),
        ("MatMult:BF16", Scope.MATMULT, Format.BF16),
        ("auto:fp8_e4m3", Scope.AUTO, Format.FP8_E4M3),
    ],
)
def test_spellings(text: str, scope: Scope, fmt: Format) -> None:
    assert Policy.parse(text) == Policy(scope=scope, formats=(fmt,))


@pytest.mark.parametrize("how", Calibration)
def test_a_label_states_how_ranges_are_taken_where_it_matters(how: Calibration) -> None:
    formats = (Format.INT8, Format.INT4_WEIGHTS, Format.BF16)
    policy = Policy(formats=formats, calibration=how)
    assert Policy.parse(policy.label) == policy
    assert Policy(formats=(Format.BF16,), calibration=how).label == "auto:bf16"


@pytest.mark.parametrize("adjust", [None, (), (Adjust.BIAS,), (*Adjust,)])
def test_a_label_states_what_is_adjusted(adjust: tuple[Adjust, ...] | None) -> None:
    """None tries what helps, an empty tuple nothing."""
    policy = Policy(formats=(Format.INT8,), adjust=adjust)
    assert Policy.parse(policy.label) == policy


@pytest.mark.parametrize("text", ["all:int8@entropy", "all:bf16@mse", "all:int8@"])
def test_a_calibration_that_is_none_or_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Policy.parse(text)


def test_several_formats_are_in_order_of_preference() -> None:
    policy = Policy.parse("all:fp8_e4m3, bf16")
    assert policy.formats == (Format.FP8_E4M3, Format.BF16)
    assert policy.format is Format.FP8_E4M3
    assert policy.stored is Format.BF16, "inputs and outputs are not stored in fp8"
    assert policy.label == "all:fp8_e4m3,bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("some:bf16", "unknown scope 'some'.*--auto-cast.*none, matmult, all, auto"),
        ("all:bf17", "unknown format 'bf17'"),
        ("all:fp32", "fp32 is not a storage format lower.*use bf16 or fp16"),
        ("all:bf16,fp16,bf16", "named twice"),
        ("all:bf16,", "unknown format ''"),
    ],
)
def test_what_is_no_policy(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Policy.parse(text)


def test_tf32_is_a_policys_format_though_it_is_stored_as_fp32() -> None:
    assert Policy.parse("matmult:tf32").format is Format.TF32
    with pytest.raises(UsageError, match="tf32 is not a storage format lower"):
        low_format("tf32")


def test_low_formats_are_stored_in_fewer_bytes() -> None:
    assert [low_format(f.label) for f in LOW] == LOW
    assert all(f.bits < Format.FP32.bits for f in LOW)


def test_patterns_compile_or_name_the_option() -> None:
    assert patterns(("a.*",), option="--include")[0].search("xab")
    with pytest.raises(UsageError, match=r"invalid regular expression '\(' *.*Policy.exclude"):
        patterns(("(",), option="--exclude")


def test_assignments() -> None:
    read = formats_by_name(("Softmax=fp32", "a=b=bf16"), option="--op")
    assert read == {"Softmax": Format.FP32, "a=b": Format.BF16}


@pytest.mark.parametrize("text", ["Softmax", "=fp32", ""])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not NAME=FORMAT.*op_formats"):
        formats_by_name((text,), option="--op")


@pytest.mark.parametrize(
    "text",
    [
        "Policy('auto')",
        "Policy('auto@mse')",
        "Policy('all:int8,bf16@mse+bias')",
        "Policy('auto:bf16,fp16', keep={'Softmax': 'fp32'}, exclude=['h.*'], by_hint=True)",
        "Policy('matmult:fp16', io={'x': 'fp16'}, io_low=True, keep_ops=True)",
    ],
)
def test_a_policy_is_printed_as_it_is_made(text: str) -> None:
    made = eval(text, {"Policy": Policy})
    assert repr(made) == text
    assert eval(repr(made), {"Policy": Policy}) == made


def test_words_for_ports_are_read_in_python_too() -> None:
    call: Any = Policy
    assert call("all:bf16", io="reduced").io_low
    assert call("all:bf16", io="low").io_low
    with pytest.raises(UsageError, match=r"unknown word 'lo' .*did you mean low\?"):
        call("all:bf16", io="lo")
