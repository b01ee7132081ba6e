"""Which of the formats asked for are tried: those that gain something here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from finecast.engines.probe import Speed, drop_slow_formats
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy

BOTH = Policy.parse("auto:bf16,fp16")


def gains(*fast: Format) -> Callable[[Format], Speed]:
    """What is measured where only ``fast`` formats gain anything."""
    return lambda fmt: Speed(gains=fmt in fast, text=fmt.label)


def unasked(fmt: Format) -> Speed:
    pytest.fail(f"{fmt.label} was measured, and there is nothing to choose")


@pytest.mark.parametrize("asked", ["all:bf16", "all:bf16,fp16", "none:bf16,fp16"])
def test_where_nothing_is_to_choose_nothing_is_measured(asked: str) -> None:
    policy = Policy.parse(asked)
    assert drop_slow_formats(policy, unasked) == (policy, ())


def test_users_rules_choose_themselves() -> None:
    assert drop_slow_formats(BOTH, unasked, [object()]) == (BOTH, ())


@pytest.mark.parametrize("fast", [Format.BF16, Format.FP16])
def test_what_gains_nothing_is_left_out_and_told(fast: Format) -> None:
    (slow,) = {*BOTH.formats} - {fast}
    found, told = drop_slow_formats(BOTH, gains(fast))
    assert found == replace(BOTH, formats=(fast,))
    assert told == (f"skipped: {slow.label}",)


@pytest.mark.parametrize(
    ("asked", "notes"),
    [
        ("auto:bf16,fp16", ("bf16: no speed is gained here", "skipped: fp16")),
        ("auto:bf16", ("bf16: no speed is gained here",)),  # PyTorch models on most targets
    ],
)
def test_one_format_stays_and_is_said_to_be_slow(asked: str, notes: tuple[str, ...]) -> None:
    found, told = drop_slow_formats(Policy.parse(asked), gains())
    assert found.formats == (Format.BF16,)
    assert told == notes


def test_a_format_given_to_an_op_by_name_stays() -> None:
    named = replace(BOTH, op_formats={"MatMul": Format.FP16})
    assert drop_slow_formats(named, gains(Format.BF16)) == (named, ())
