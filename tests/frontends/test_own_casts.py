"""Casts that the model's author wrote, beside those of a plan: as few and exact as can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.frontends.tools import convert, parse, run

HALF, LOW, WIDE = (
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.FLOAT,
)


def casts(text: str, folder: Path, policy: str) -> set[tuple[str, int]]:
    """What each cast of the converted model reads, and the type that it gives."""
    after, _, _ = convert(parse(text), folder, policy)
    found = [(n.input[0], n.attribute[0].i) for n in after.graph.node if n.op_type == "Cast"]
    assert len(found) == len(set(found))  # one cast per value and format
    return set(found)


def test_what_comes_back_to_fp32_is_cast_once(tmp_path: Path) -> None:
    text = """g (float[4] x) => (float[4] y) {
      a = Exp(x)
      h = Cast<to=10>(a)
      y = Cast<to=1>(h)
    }"""
    assert casts(text, tmp_path, "all:fp16") == {("x", HALF), ("a", WIDE)}
    assert casts(text, tmp_path, "all:bf16") == {("x", LOW), ("a", HALF), ("h", WIDE)}


@pytest.mark.parametrize(("policy", "low"), [("all:fp16", HALF), ("all:bf16", LOW)])
def test_a_cast_that_did_nothing_rounds_nothing(tmp_path: Path, policy: str, low: int) -> None:
    text = """g (float[4] x) => (float[4] y, float[4] z) {
      y = Cast<to=1>(x)
      w = Exp(x)
      z = Identity(w)
    }"""
    found = casts(text, tmp_path, policy)
    assert ("x", low) in found
    assert len(found) == 3  # and one for each output
    x = np.linspace(0.1, 1, 4, dtype=np.float32)
    if low is HALF:
        after, _, _ = convert(parse(text), tmp_path, policy)
        assert np.array_equal(run(after, x=x)[0], x)


def test_what_was_fp16_is_cast_to_bf16_directly(tmp_path: Path) -> None:
    text = """g (float16[4] x) => (float[4] y) {
      f = Cast<to=1>(x)
      t = Exp(f)
      h = Cast<to=10>(t)
      r = Tanh(h)
      y = Cast<to=1>(r)
    }"""
    found = casts(text, tmp_path, "all:bf16")
    assert found == {("x", LOW), ("t", HALF), ("r", WIDE)}  # nothing that is fp16 rounds again


def test_the_plan_uses_a_cast_that_is_there(tmp_path: Path) -> None:
    text = """g (float[4] x) => (float[4] y, float16[4] z) {
      h = Cast<to=10>(x)
      z = Tanh(h)
      y = Exp(x)
    }"""
    found = casts(text, tmp_path, "all:fp16")
    assert sorted(to for _, to in found) == [WIDE, HALF]
