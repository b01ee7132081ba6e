"""What the compilers' options ask of ``convert`` and ``tune``."""

from __future__ import annotations

import pytest

from finecast.devices.choice import CastChoice
from finecast.devices.emulation import Emulation, explicit_casts
from finecast.devices.targets import list_targets, load_target
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.ops import OpKind
from finecast.rules.policy import Scope
from finecast_neuron.choice import choose
from finecast_neuron.compilers import resolve
from finecast_neuron.flags import Given, read


def chosen(text: str, sdk: str | None = None) -> CastChoice:
    return choose(read(text.split()), sdk=sdk)


def device(choice: CastChoice) -> Emulation:
    assert choice.emulation is not None
    return choice.emulation


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("", "auto:bf16"),
        ("--auto-cast all", "all:bf16"),
        ("--auto-cast matmul --auto-cast-type fp16", "matmult:fp16"),
        ("--auto-cast-type fp16", "auto:fp16"),
        ("--auto-cast-type bf16,fp16", "auto:bf16,fp16"),
        ("--auto-cast all --auto-cast-type fp16,bf16", "all:fp16,bf16"),
        ("--auto-cast none --auto-cast-type fp16", "none:fp16"),
    ],
)
def test_without_a_device_the_policy_is_finecasts_own(text: str, label: str) -> None:
    found = chosen(text)
    assert found.policy.label == label
    assert found.emulation is None


@pytest.mark.parametrize(
    ("text", "target", "label"),
    [
        ("--target trn1", "trn1", "auto:bf16"),
        ("--target inf1", "inf1", "auto:bf16"),
        ("--target sm89 --auto-cast auto --auto-cast-type fp8_e4m3", "sm89", "auto:fp8_e4m3"),
        ("--target trn2 --auto-cast all --auto-cast-type fp8_e4m3", "trn2", "all:fp8_e4m3"),
        ("--enable-saturate-infinity", "trn1", "auto:bf16"),
        ("--target trn2 --auto-cast-type fp8_e4m3,bf16", "trn2", "auto:fp8_e4m3,bf16"),
        (
            "--target sm89 --auto-cast all --auto-cast-type fp8_e4m3,bf16",
            "sm89",
            "all:fp8_e4m3,bf16",
        ),
        ("--fast-math all", "inf1", "all:bf16"),
        ("--fast-math none", "inf1", "matmult:bf16"),
        ("--fp32-cast matmult-fp16", "inf1", "matmult:fp16"),
        ("--auto-cast matmult --target trn3", "trn3", "matmult:bf16"),
        ("--auto-cast matmult --auto-cast-type tf32 --target trn1", "trn1", "matmult:tf32"),
        ("--auto-cast-type tf32 --target sm80", "sm80", "auto:tf32"),
        ("--auto-cast all --auto-cast-type tf32 --target trn2", "trn2", "all:tf32"),
        ("--auto-cast none --auto-cast-type fp16 --target trn1", "trn1", "none:fp16"),
        (
            "--auto-cast none --auto-cast-type bf16,fp16 --target trn1",
            "trn1",
            "none:bf16,fp16",
        ),
    ],
)
def test_a_device_is_named_or_implied(text: str, target: str, label: str) -> None:
    found = chosen(text)
    assert found.policy.label == label
    assert device(found).target.name == target
    assert device(found).scope is Scope.NONE, "the casts are the model's own"
    assert device(found).format is found.policy.format


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--enable-saturate-infinity", True),
        ("--enable-saturate-infinity --auto-cast all", True),
        ("--disable-mixed-precision-accumulation", True),
        ("--enable-saturate-infinity --target trn2", False),
        ("--fast-math all", False),
        ("--auto-cast all", False),
    ],
)
def test_a_device_that_no_option_names_is_told(text: str, *, named: bool) -> None:
    assert any("the device is trn1" in note for note in chosen(text).notes) == named


@pytest.mark.parametrize(
    "text", ["--fast-math fp32-cast-all-fp16", "--auto-cast all --target trn1"]
)
def test_what_is_lowered_is_what_emulate_casts(text: str) -> None:
    found, emulated = chosen(text), resolve(read(text.split())).emulation
    assert (found.policy.scope, found.policy.format) == (emulated.scope, emulated.format)


def test_a_compilers_defaults_hold_where_its_release_is_named() -> None:
    assert chosen("", sdk="2.26").policy.scope is Scope.MATMULT
    assert not device(chosen("", sdk="2.26")).mixed_accumulation
    newest = chosen("", sdk="2.27")
    assert newest.policy.scope is Scope.NONE
    assert "casts nothing" in newest.notes[0]
    assert choose(Given(), compiler=True).policy.scope is Scope.NONE
    assert chosen("--auto-cast auto", sdk="2.27").policy.scope is Scope.AUTO


def test_what_touches_numbers_reaches_the_device() -> None:
    given = Given(target="trn1", stochastic_rounding=True, seed=3, mixed_accumulation=False)
    for found in (choose(given), choose(given.over(Given(auto_cast="all")))):
        assert device(found).rounding is Rounding.STOCHASTIC
        assert device(found).seed == 3
        assert not device(found).mixed_accumulation


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--auto-cast-type tf32", ("tf32", "--target", "(inf2, sm100, sm120, sm80", "bf16")),
        ("--auto-cast all --auto-cast-type tf32", ("tf32", "--target", "trn1")),
        ("--target amx --auto-cast-type tf32", ("tf32", "--target amx", "trn1")),
        ("--target sm75 --auto-cast all --auto-cast-type tf32", ("tf32", "--target sm75")),
        ("--target inf1 --auto-cast-type tf32", ("tf32", "inf1")),
        ("--target trn1 --auto-cast-type fp8_e4m3_ieee", ("fp8_e4m3_ieee", "no type")),
        ("--auto-cast all --auto-cast-type fp8_e4m3", ("fp8_e4m3", "--target", "trn1")),
        ("--auto-cast-type fp32", ("fp32",)),
        ("--auto-cast-type bf16,bf16", ("bf16,bf16", "twice")),
        ("--auto-cast-type bf16,tf32", ("tf32", "--target")),
        ("--target sm80 --auto-cast-type bf16,fp8_e4m3", ("fp8_e4m3", "sm80")),
        ("--auto-cast-type bf16,fp16 --fast-math all", ("bf16,fp16", "--fast-math")),
        ("--auto-cast-type fp8_e3m4 --target trn1", ("fp8_e3m4", "no type")),
        ("--target sm80 --auto-cast-type fp8_e4m3", ("fp8_e4m3", "sm80")),
        ("--auto-cast auto --fast-math all", ("--auto-cast auto", "--fast-math")),
        ("--auto-cast auto --fp32-cast all", ("--auto-cast auto", "--fp32-cast")),
        ("--auto-cast all --fast-math all", ("--auto-cast", "--fast-math")),
        ("--fast-math all --target trn1", ("--fast-math", "trn1")),
        ("--auto-cast all --target inf1", ("--auto-cast", "inf1")),
        ("--target trn9", ("trn9",)),
    ],
)
def test_errors_name_what_conflicts(text: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(text)
    assert all(n in caught.value.line for n in named), caught.value.line


def test_a_device_without_the_format_names_those_that_have_it() -> None:
    with pytest.raises(UsageError) as caught:
        chosen("--target inf1 --auto-cast-type tf32")
    named = caught.value.fix.partition("name one of ")[2].split(", ")
    products = {t: load_target(t).engine_for(OpKind.MATMUL) for t in list_targets()}
    capable = [
        t for t, engine in products.items() if engine.computes_in(Format.TF32) is Format.TF32
    ]
    assert named == capable
    assert {"trn1", "sm80"} <= set(named)
    assert "inf1" not in named


@pytest.mark.parametrize("scope", [None, "auto", "matmult"])
def test_arithmetic_in_the_model_rounds_to_nearest(scope: str | None) -> None:
    given = Given(
        auto_cast=scope, auto_cast_type="tf32", target="trn1", stochastic_rounding=True
    )
    with pytest.raises(UsageError, match=r"tf32 with --stochastic-rounding.*finecast emulate"):
        choose(given)


def test_what_casts_cannot_state_is_said() -> None:
    fp8 = chosen("--target trn1 --auto-cast-type fp8_e4m3,bf16")
    assert "240" in fp8.told({Format.FP8_E4M3, Format.FP32})[0]
    assert not fp8.told({Format.BF16, Format.FP32})
    assert "fast-relayout" in chosen("--fast-math fp32-cast-matmult").notes[0]
    assert not chosen("--fast-math fp32-cast-matmult no-fast-relayout").notes
    assert not chosen("--target trn1").notes
    for text in ("--target sm80", "--target trn1 --auto-cast all"):
        (note,) = chosen(f"{text} --auto-cast-type tf32").told({Format.TF32})
        assert "ONNX has no tf32" in note
        assert "original model to the compiler with --auto-cast-type tf32" in note


def test_weights_alone_in_8_bits_have_products_in_fp32_and_no_note() -> None:
    stated = "--target avx512-vnni --auto-cast-type int8_weights"
    assert not chosen(stated).told({Format.INT8_WEIGHTS})


@pytest.mark.parametrize("name", list_targets())
def test_explicit_casts_add_none(name: str) -> None:
    found = explicit_casts(name)
    assert found.target.name == name
    assert found.scope is Scope.NONE
    assert found.relayout in (None, Format.FP32)


def test_a_slip_in_the_environments_flags_is_told_from_other_options() -> None:
    with pytest.raises(UsageError, match=r"--auto-casts.*did you mean --auto-cast\?"):
        read(["--auto-casts=all"], lenient=True)
    others = "--model-type transformer -O1 --lnc=2 --cache_dir /x"
    others += " --enable-fast-loading-neuron-binaries"
    assert read(others.split(), lenient=True) == Given()
    assert not read(others.split(), lenient=True).unknown


def test_unknown_options_of_the_environment_are_named_with_close_ones() -> None:
    found = read(["--model-typ=transformer", "--fancy", "3", "-O1", "-lnc", "2"], lenient=True)
    assert found.passed_over == ("-O", "-lnc")
    passed, *unknown = found.notes
    assert passed == "-O, -lnc: for the compiler, no effect on numbers"
    assert [note.partition(":")[0] for note in unknown] == [
        "unknown compiler option --model-typ (did you mean --model-type?)",
        "unknown compiler option --fancy",
    ]
    assert all(note.endswith("to numbers is not known") for note in unknown)
    assert found.over(read(["--fancy"], lenient=True)).unknown == ("--fancy", "--model-typ")
