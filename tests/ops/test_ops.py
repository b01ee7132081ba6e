"""The op table covers every op of ONNX with floats, and its rows are consistent."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import files

import onnx.defs
import pytest

from finecast.ops import (
    OP_TABLE,
    UNKNOWN,
    FlopRule,
    OpInfo,
    OpKind,
    Tier,
    by_name,
    index_natives,
    lookup,
    read_rows,
)

MATMUL_SCOPE = {OpKind.MATMUL, OpKind.CONV, OpKind.RECURRENT, OpKind.ATTENTION}

# Ops of ORT with floats (ContribOperators.md) that models use in practice.
CONTRIB_NAMES = """
Attention BiasDropout BiasGelu BiasSoftmax BiasSplitGelu CropAndResize DecoderAttention
DequantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul EmbedLayerNormalization ExpandDims
FastGelu FusedConv FusedGemm FusedMatMul Gelu GridSample GroupNorm GroupQueryAttention Inverse
Irfft LongformerAttention MatMulNBits MoE MultiHeadAttention NhwcConv PackedAttention
PackedMultiHeadAttention Pad QAttention QLinearAdd QOrderedMatMul QuantizeLinear QuickGelu
RelativePositionBias Rfft RotaryEmbedding SkipGroupNorm SkipLayerNormalization
SkipSimplifiedLayerNormalization Trilu Unique BeamSearch GreedySearch Sampling
"""


def float_schemas() -> set[str]:
    """Native names of all ops, of any version, that a float tensor can go into or out of."""
    found: set[str] = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        types = {t for c in schema.type_constraints for t in c.allowed_type_strs}
        for port in (*schema.inputs, *schema.outputs):
            types |= set(port.types)
        if any("float" in t or "double" in t for t in types):
            found.add(f"{schema.domain or 'onnx'}::{schema.name}")
    return found


def test_every_float_op_of_onnx_has_a_row() -> None:
    natives = float_schemas()
    assert len(natives) > 190
    assert {n for n in natives if lookup(n) is UNKNOWN} == set()


def test_ml_domain_never_changes_type() -> None:
    natives = {n for n in float_schemas() if n.startswith("ai.onnx.ml::")}
    assert natives
    assert {lookup(n).tier for n in natives} == {Tier.NEVER}


@pytest.mark.parametrize("name", CONTRIB_NAMES.split())
def test_contrib_op_has_a_row(name: str) -> None:
    assert lookup(f"com.microsoft::{name}") is not UNKNOWN


def test_no_name_twice() -> None:
    names = Counter(i.name for i in OP_TABLE)
    natives = Counter(n for i in OP_TABLE for n in i.natives)
    assert [n for n, count in (names + natives).items() if count > 1] == []


HEADER = "name,kind,tier,exact,sums,flops,onnx,aten,openvino,tf"


def test_two_rows_for_one_name_are_rejected() -> None:
    rows = ["a,matmul,low,,sums,,MatMul,,,", "b,matmul,low,,sums,,Gemm MatMul,,,"]
    with pytest.raises(ValueError, match="a and b both claim onnx::MatMul"):
        index_natives(read_rows([HEADER, *rows]))


@pytest.mark.parametrize("wrong", ["a,matmull,low,,,,A,,,", "a,matmul,lo,,,,A,,,"])
def test_misspelt_kinds_and_tiers_are_rejected(wrong: str) -> None:
    with pytest.raises(KeyError):
        read_rows([HEADER, wrong])


def test_cells_say_nothing_but_what_the_header_lists() -> None:
    lines = files("finecast.ops").joinpath("ops.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines if line and not line.startswith("#")]
    assert ",".join(rows[0]) == HEADER
    assert {len(row) for row in rows} == {10}
    assert {row[3] for row in rows[1:]} == {"", "exact"}
    assert {row[4] for row in rows[1:]} == {"", "sums"}
    assert all(cell == " ".join(cell.split()) for row in rows for cell in row)


@pytest.mark.parametrize("info", OP_TABLE, ids=lambda i: i.name)
def test_row_is_sane(info: OpInfo) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", info.name)
    assert info.natives
    assert all(re.fullmatch(r"[a-z.]+::\w+", n) for n in info.onnx)
    assert all(
        re.fullmatch(r"(aten|quantized_decomposed|higher_order)::\w+", n) for n in info.aten
    )
    assert all(re.fullmatch(r"tf::\w+", n) for n in info.tf)
    assert all(re.fullmatch(r"openvino::\w+", n) for n in info.openvino)
    assert by_name(info.name) is info
    assert {lookup(n) for n in info.natives} == {info}
    if info.tier is Tier.LOW:  # only ops of the matmul engine, which sums products
        assert info.matmul_engine
        assert info.accumulates
        assert not info.exact
    if info.matmul_engine:
        assert info.kind in MATMUL_SCOPE
    if info.flops is FlopRule.ZERO:
        assert not info.accumulates
    if info.kind in {OpKind.RANDOM, OpKind.QUANTIZE, OpKind.TEXT, OpKind.ML, OpKind.SEQUENCE}:
        assert info.tier is Tier.NEVER
    if info.kind in {OpKind.SOFTMAX, OpKind.LOSS}:
        assert info.tier is Tier.SENSITIVE


def test_kinds_on_the_matmul_engine() -> None:
    assert {k for k in OpKind if k.matmul_engine} == MATMUL_SCOPE


@pytest.mark.parametrize(
    ("native", "kind", "tier", "exact"),
    [
        ("onnx::MatMul", OpKind.MATMUL, Tier.LOW, False),
        ("onnx::Transpose", OpKind.RELAYOUT, Tier.FOLLOW, True),
        ("onnx::Relu", OpKind.ELEMENTWISE, Tier.FOLLOW, True),
        ("onnx::Add", OpKind.ELEMENTWISE, Tier.FOLLOW, False),
        ("onnx::MaxPool", OpKind.POOL, Tier.FOLLOW, True),
        ("onnx::AveragePool", OpKind.POOL, Tier.FOLLOW, False),
        ("onnx::Softmax", OpKind.SOFTMAX, Tier.SENSITIVE, False),
        ("onnx::Range", OpKind.CONSTANT, Tier.NEVER, False),
        ("onnx::Cast", OpKind.CAST, Tier.FOLLOW, False),
        ("finecast::phi", OpKind.CONTROL, Tier.FOLLOW, True),
    ],
)
def test_known_rows(native: str, kind: OpKind, tier: Tier, exact: bool) -> None:
    info = lookup(native)
    assert (info.kind, info.tier, info.exact) == (kind, tier, exact)


@pytest.mark.parametrize("native", ["my.domain::MatMul", "onnx::NoSuchOp", "aten::nope", ""])
def test_anything_else_is_unknown(native: str) -> None:
    assert lookup(native) is UNKNOWN
    assert UNKNOWN.tier is Tier.NEVER


def test_aten_overloads_and_in_place_names() -> None:
    assert lookup("aten::add_.Tensor") is lookup("aten::add")
    assert lookup("aten::mm.default").name == "matmul"
    assert lookup("aten::_softmax").name == "softmax"
    # ``mask & other`` in Python.
    assert lookup("aten::__and__.Tensor") is lookup("aten::bitwise_and")
