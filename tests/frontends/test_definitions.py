"""What an op's definition says of its ports' types."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")

from finecast.frontends.onnx.definitions import definition, signature


def test_values_that_a_loop_carries_have_types_of_their_own() -> None:
    """A trip count, a condition, and from there on as many values as there are."""
    loop = definition("Loop", "", 17)
    assert loop is not None
    assert [loop.inputs.binds(port) for port in range(6)] == [True, True, *[False] * 4]
    joined = definition("Concat", "", 17)
    assert joined is not None
    assert all(joined.inputs.binds(port) for port in range(6))


@pytest.mark.parametrize(
    ("op", "port", "output"),
    [("GridSample", 1, False), ("Resize", 1, False), ("LayerNormalization", 1, True)],
)
def test_a_second_type_of_floats_does_not_follow_the_op(
    op: str, port: int, output: bool
) -> None:
    """Positions, regions and statistics have a type variable of their own."""
    found = signature(op, "", 21)
    assert found is not None
    assert found.follows(0, output=output)
    assert not found.follows(port, output=output)
