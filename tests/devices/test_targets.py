"""Every target loads, agrees with its sources, and a broken file says where it is broken."""

from __future__ import annotations

from importlib.resources import files

import pytest

from finecast.devices.choice import CastRequest
from finecast.devices.targets import (
    EngineRole,
    Relayout,
    Target,
    list_targets,
    load_target,
    parse_target,
    products_of,
    role_of,
    target_named,
)
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.ops import OpKind

EXPECTED = {
    "inf1", "trn1", "inf2", "trn2", "trn3",
    "sm70", "sm75", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx950",
    "avx512-bf16", "amx", "avx2", "neoverse-v1", "avx512-vnni", "avx2-vnni",
}  # fmt: skip


def source(name: str) -> str:
    return (files("finecast.devices.targets") / f"{name}.toml").read_text(encoding="utf-8")


@pytest.fixture(params=sorted(EXPECTED))
def target(request: pytest.FixtureRequest) -> Target:
    return load_target(str(request.param))


def test_blocks_are_those_of_formats_with_products(target: Target) -> None:
    for spec in target.engines.values():
        assert spec.blocks.keys() <= spec.rates_tflops.keys()
        assert all(length & (length - 1) == 0 for length in spec.blocks.values())


def test_all_targets_are_there() -> None:
    assert set(list_targets()) == EXPECTED


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("h100", "sm90"),
        ("A100", "sm80"),
        ("T4", "sm75"),
        ("Trainium2", "trn2"),
        ("inferentia2", "inf2"),
        ("Sapphire Rapids", "amx"),
        ("trn1n", "trn1"),
    ],
)
def test_devices_are_known_by_the_names_of_products(word: str, name: str) -> None:
    assert load_target(word) is load_target(name)


def test_the_names_of_products_mean_targets() -> None:
    for name in EXPECTED:
        for product in products_of(name):
            assert product not in EXPECTED
            assert target_named(product) == name
            request = CastRequest(auto_cast_type="bf16", target=product.upper())
            assert request.target == name


def test_target_is_sane(target: Target) -> None:
    assert target.description
    assert target.unit
    assert target.bandwidth_gb_s > 0
    assert Relayout.BYTE_MOVE in target.relayouts
    for role in EngineRole:
        engine = target.engine(role)
        assert engine.rate_tflops(Format.FP32) is not None, "fp32 models must be priced"
        for fmt in Format:
            real = engine.computes_in(fmt)
            assert (real is None) == (engine.rate_tflops(fmt) is None)
            if real is not None:
                assert engine.computes_in(real) is real
            assert engine.accumulation_of(fmt) in {Format.FP32, Format.FP16}


def test_narrow_formats_are_no_slower(target: Target) -> None:
    for engine in target.engines.values():
        fp32 = engine.rate_tflops(Format.FP32)
        assert fp32 is not None
        assert all(rate >= fp32 for rate in engine.rates_tflops.values())


def test_the_vector_engine_reads_what_the_matmul_engine_writes(target: Target) -> None:
    products = {f for f in Format if target.engine(EngineRole.MATMUL).computes_in(f)}
    taken = {f if f.blocks is None else f.result for f in products}
    read = {f for f in Format if target.engine(EngineRole.VECTOR).computes_in(f)}
    assert taken <= read


def test_every_number_has_a_comment() -> None:
    # A figure without its source nearby: on its line, or above the block it stands in.
    for name in list_targets():
        commented = False
        for line in source(name).splitlines():
            if not line.strip() or line.startswith("["):
                commented = False
            elif "#" in line:
                commented = True
            elif "= 0.0" not in line and any(c.isdigit() for c in line.partition("=")[2]):
                assert commented or line.startswith(("description", "unit")) or '"' in line, (
                    f"{name}: {line}"
                )


@pytest.mark.parametrize(
    ("name", "fmt", "tflops"),
    [  # contracts.md, section 1
        ("inf1", "bf16", 16), ("inf1", "fp16", 16), ("inf1", "int8", 32),
        ("trn1", "bf16", 92), ("trn1", "tf32", 92), ("trn1", "fp32", 23),
        ("trn2", "fp8_e4m3", 158), ("trn2", "fp16", 79), ("trn2", "fp32", 20),
        ("trn3", "bf16", 79), ("trn3", "fp32", 20),
    ],
)  # fmt: skip
def test_neuron_rates_are_the_documented_ones(name: str, fmt: str, tflops: float) -> None:
    engine = load_target(name).engine(EngineRole.MATMUL)
    assert engine.rate_tflops(Format.parse(fmt)) == tflops


def test_inferentia1_has_no_fp32_product() -> None:
    engine = load_target("inf1").engine(EngineRole.MATMUL)
    assert engine.computes_in(Format.FP32) is Format.BF16
    assert engine.computes_in(Format.TF32) is None


@pytest.mark.parametrize("name", ["sm75", "sm80", "avx512-vnni", "avx2-vnni", "avx512-bf16"])
def test_integer_products_are_faster_and_give_fp32(name: str) -> None:
    target = load_target(name)
    engine = target.engine(EngineRole.MATMUL)
    fp32, int8 = engine.rate_tflops(Format.FP32), engine.rate_tflops(Format.INT8)
    assert fp32 is not None
    assert int8 is not None
    assert int8 > 3.9 * fp32
    assert target.engine(EngineRole.VECTOR).computes_in(Format.INT8) is Format.FP32


def test_trainium1_and_inferentia2_share_a_core() -> None:
    trn1, inf2 = load_target("trn1"), load_target("inf2")
    assert trn1.engines == inf2.engines
    assert trn1.saturate_infinity
    assert load_target("inf1").saturate_infinity  # neuron-cc has the switch, too
    assert not inf2.saturate_infinity


def test_relayouts() -> None:
    assert load_target("inf1").relayouts == (Relayout.MATMUL, Relayout.BYTE_MOVE)
    assert load_target("sm90").relayouts == (Relayout.BYTE_MOVE,)


def test_accumulation_exceptions() -> None:
    engine = load_target("neoverse-v1").engine(EngineRole.MATMUL)
    assert engine.accumulation_of(Format.FP16) is Format.FP16
    assert engine.accumulation_of(Format.BF16) is Format.FP32


def test_roles() -> None:
    assert role_of(OpKind.CONV) is EngineRole.MATMUL
    assert role_of(OpKind.SOFTMAX) is EngineRole.SCALAR
    assert role_of(OpKind.NORM) is EngineRole.VECTOR


def test_unknown_target_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'tpu'.*amx.*trn1"):
        load_target("tpu")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "bandwidth_gb_s = ",
            "bandwith = ",
            r"memory has (no 'bandwidth_gb_s'|'bandwith').*\(bad\.toml\)",
        ),
        (
            "bandwidth_gb_s = 410.0",
            "bandwidth_gb_s = 0",
            r"memory\.bandwidth_gb_s is 0, expected a number > 0\.0",
        ),
        ("bandwidth_gb_s = 410.0", 'bandwidth_gb_s = "fast"', r"'fast'.*bad\.toml"),
        (
            "bandwidth_gb_s = 410.0",
            "bandwidth_gb_s = nan",
            r"bandwidth_gb_s is nan, expected a number > 0",
        ),
        (
            "free_casts = true",
            "free_casts = 1",
            r"overhead\.free_casts is 1, expected true or false",
        ),
        ("op_us = 1.0", "op_us = true", r"overhead\.op_us is True"),
        (
            "op_us = 1.0",
            "op_us = 1.0\nop_ms = 1.0",
            r"overhead has 'op_ms', which is not known",
        ),
        ("tf32 = 92.0", "fp99 = 92.0", r"matmul\.rates_tflops has 'fp99', which is not known"),
        (
            '"byte_move"]',
            '"teleport"]',
            r"transposes\.by\[1\] is 'teleport', which is not known",
        ),
        (
            'fp8_e4m3 = "fp8_e4m3_ieee"',
            'bf16 = "fp16"',
            r"engines\.matmul: runs_as\.bf16 maps bf16",
        ),
        ('"fp8_e4m3_ieee"', '"fp8_e4m3"', r"matmul: runs_as\.fp8_e4m3 maps fp8_e4m3 to"),
        (
            "[engines.vector]",
            "[engines.vectors]",
            r"engines has 'vectors', which is not known",
        ),
        ('description = "AWS', "description = AWS", r"not TOML.*bad\.toml"),
    ],
)
def test_broken_file_names_the_file_and_the_key(old: str, new: str, message: str) -> None:
    text = source("trn1")
    assert old in text
    with pytest.raises(UsageError, match=message):
        parse_target(text.replace(old, new, 1), file="bad.toml")


def test_empty_rates_are_rejected() -> None:
    head, _, tail = source("avx2").partition("[engines.matmul.rates_tflops]")
    text = (
        f"{head}[engines.matmul.rates_tflops]\n[engines.matmul.runs_as]"
        + tail.partition("[engines.matmul.runs_as]")[2]
    )
    with pytest.raises(
        UsageError, match=r"rates_tflops is \{\}, expected an object of length >= 1"
    ):
        parse_target(text, file="bad.toml")


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("amx", "bf16 int8 int8_weights"),
        ("avx2", "bf16 int8_weights"),
        ("avx512-vnni", "bf16 int8 int8_weights"),
        ("inf1", "bf16 fp16 int8"),
        ("neoverse-v1", "bf16 fp16"),
        ("trn1", "bf16 fp16 tf32"),  # its 8 bits are as fast as its 16
        ("trn2", "bf16 fp16 tf32 fp8_e4m3"),
        ("sm70", "fp16"),
        ("sm75", "fp16 int8"),
        ("sm80", "bf16 fp16 tf32 int8"),
        ("sm90", "bf16 fp16 tf32 fp8_e4m3 int8"),
    ],
)
def test_formats_that_are_tried_where_none_is_named(name: str, formats: str) -> None:
    assert " ".join(f.label for f in load_target(name).low_formats) == formats


def test_vnni_computes_bf16_in_fp32() -> None:
    target = load_target("avx512-vnni")
    assert not target.computes_in(Format.BF16)
    assert target.computes_in(Format.INT8)
    assert not load_target("sm70").computes_in(Format.BF16)


def test_tf32_is_stored_as_fp32_but_is_an_arithmetic_of_its_own() -> None:
    assert load_target("sm80").computes_in(Format.TF32)
    assert not load_target("sm75").computes_in(Format.TF32)
    assert not load_target("avx2").computes_in(Format.TF32)


@pytest.mark.parametrize("policy", ["matmult:int8", "auto:int8"])
def test_integers_of_gpus_are_signed(policy: str) -> None:
    """Without zero points: no library for them multiplies unsigned codes."""
    from finecast import api
    from finecast.numbers.encodings import Scaled

    for name, signed in (("sm90", True), ("avx512-vnni", False)):
        plan = api.convert(
            "examples/digits/digits.onnx",
            policy=policy,
            target=name,
            data="examples/digits/digits_calib.npz",
            verify=False,
        ).plan
        low = [e for d in plan.decisions for e in d.encodings.operands.values()]
        assert low
        assert all(isinstance(e, Scaled) and e.grid.symmetric is signed for e in low)
