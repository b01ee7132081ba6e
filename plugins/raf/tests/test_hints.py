"""RAF's names of ops and of types."""

from __future__ import annotations

import pytest

from finecast.ops import OP_TABLE
from finecast_raf.rule_set import RAF_OPS, DType, ops_named


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raf.op.softmax", ("softmax",)),
        ("raf.op.bias_add", ("bias_add",)),
        ("raf.op.batch_matmul_nt", ("matmul",)),
        ("raf.op.conv2d_dw", ("conv_backward",)),
        ("raf.op.batch_norm_train_dxwb", ("batch_norm_backward",)),
        ("raf.op.layer_norm_train_dx", ("layer_norm_backward",)),
        ("aten::softmax", ("aten::softmax",)),
    ],
)
def test_raf_s_names_of_ops_are_translated(name: str, expected: tuple[str, ...]) -> None:
    assert ops_named(name) == expected


def test_every_name_in_the_table_of_raf_s_is_an_op() -> None:
    known = {info.name for info in OP_TABLE}
    assert {one for names in RAF_OPS.values() for one in names} <= known


def test_types_equal_their_other_names() -> None:
    kind = DType("bf16")
    assert kind == "bfloat16"
    assert kind.checked_type.dtype == "bf16"
    assert kind != "fp16"
    assert len({kind, DType("bfloat16"), DType("half")}) == 2
