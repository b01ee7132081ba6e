"""The laws of both compilers' command lines, as their references state them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.rules.policy import Scope
from finecast_neuron.compilers import (
    CASTS,
    FAST_MATH_KEYWORDS,
    LADDERS,
    Compiler,
    NeuronOptions,
    ladder,
    resolve,
)
from finecast_neuron.flags import Given, after_environment, from_environment, read

CAST_WORDS = [f"fp32-cast-{c}" for c in CASTS]
RELAYOUTS = ["fast-relayout", "no-fast-relayout"]
WORDS = st.lists(
    st.sampled_from(
        [
            "--auto-cast all",
            "--auto-cast=none",
            "--auto-cast matmul",
            "--auto-cast-type tf32",
            "--auto-cast-type=fp16",
            "--enable-mixed-precision-accumulation",
            "--disable-mixed-precision-accumulation",
            "--enable-saturate-infinity",
            "--target trn1",
            "--target=trn2",
            "--fast-math all",
            "--fast-math fp32-cast-matmult no-fast-relayout",
            "--fp32-cast matmult",
        ]
    ),
    max_size=6,
)


def options(text: str, **more: str) -> NeuronOptions:
    return resolve(read(text.split()), **more)


def meaning(o: NeuronOptions) -> tuple[Scope, Format, Format | None]:
    return rounding(o.emulation)


def rounding(e: Emulation) -> tuple[Scope, Format, Format | None]:
    return e.scope, e.format, e.relayout


@given(WORDS, WORDS)
def test_the_right_most_wins(left: list[str], right: list[str]) -> None:
    words = [w.split() for w in (" ".join(left), " ".join(right))]
    assert read(words[0] + words[1]) == read(words[1]).over(read(words[0]))


@pytest.mark.parametrize(
    ("sdk", "scope", "mixed"),
    [
        ("2.9", Scope.MATMULT, False),
        ("2.26.1", Scope.MATMULT, False),
        ("2.27", Scope.NONE, True),
        (None, Scope.NONE, True),
        ("2.32.0", Scope.NONE, True),
    ],
)
def test_neuronx_defaults_by_release(sdk: str | None, scope: Scope, mixed: bool) -> None:
    found = resolve(Given(), sdk=sdk, target="trn1").emulation
    assert (found.scope, found.mixed_accumulation) == (scope, mixed)
    assert found.format is Format.BF16
    assert not found.saturate_infinity


@pytest.mark.parametrize("scope", ["matmult", "all"])
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e4m3"])
def test_auto_cast(scope: str, fmt: str) -> None:
    found = options(f"--auto-cast {scope} --auto-cast-type {fmt}")
    assert found.policy.label == f"{scope}:{fmt}"
    assert found.compiler is Compiler.NEURONX_CC
    assert found.emulation.format is Format.parse(fmt)


def test_both_spellings_of_matmult() -> None:
    assert options("--auto-cast matmul") == options("--auto-cast matmult")


TABLE = {
    "fp32-cast-all": (Scope.ALL, Format.BF16, Format.BF16),
    "fp32-cast-all-fp16": (Scope.ALL, Format.FP16, Format.FP16),
    "fp32-cast-matmult": (Scope.MATMULT, Format.BF16, Format.FP16),
    "fp32-cast-matmult-bf16": (Scope.MATMULT, Format.BF16, Format.BF16),
    "fp32-cast-matmult-fp16": (Scope.MATMULT, Format.FP16, Format.FP16),
}


@pytest.mark.parametrize("keyword", TABLE)
def test_fast_math_table(keyword: str) -> None:
    scope, fmt, transposes = TABLE[keyword]
    assert meaning(options(f"--fast-math {keyword}")) == (scope, fmt, transposes)
    assert meaning(options(f"--fast-math {keyword} fast-relayout")) == (scope, fmt, transposes)
    assert meaning(options(f"--fast-math {keyword} no-fast-relayout")) == (scope, fmt, None)
    twin = keyword.removeprefix("fp32-cast-")
    assert meaning(options(f"--fp32-cast {twin}")) == (scope, fmt, transposes)


def test_shorthands() -> None:
    default = meaning(resolve(Given(), target="inf1"))
    assert default == meaning(options("--fast-math all"))
    assert default == meaning(options("--fast-math fp32-cast-all fast-relayout"))
    assert meaning(options("--fast-math none")) == meaning(
        options("--fast-math fp32-cast-matmult-bf16 no-fast-relayout")
    )


@given(
    st.sampled_from(["all", "none"]), st.sampled_from(CAST_WORDS), st.permutations(RELAYOUTS)
)
def test_cast_and_relayout_override_the_shorthands(
    short: str, cast: str, relayouts: list[str]
) -> None:
    full = meaning(options(f"--fast-math {cast} {relayouts[0]}"))
    assert meaning(options(f"--fast-math {relayouts[0]} {short} {cast}")) == full


@given(st.lists(st.sampled_from(FAST_MATH_KEYWORDS), min_size=1, max_size=4))
def test_keywords_are_legal_or_an_error_names_the_pair(keywords: list[str]) -> None:
    groups = (["all", "none"], CAST_WORDS, RELAYOUTS)
    clash = next((c for g in groups if len(c := set(keywords) & set(g)) > 1), None)
    if clash is None:
        options("--fast-math " + " ".join(keywords))
        return
    with pytest.raises(UsageError) as caught:
        options("--fast-math " + " ".join(keywords))
    assert sum(k in str(caught.value) for k in clash) >= 2


@given(st.sampled_from(sorted(CASTS)), st.sampled_from(["all", "none", *CAST_WORDS]))
def test_fp32_cast_comes_before_fast_math(cast: str, keyword: str) -> None:
    both = options(f"--fp32-cast {cast} --fast-math {keyword}")
    alone = options(f"--fast-math {keyword}")
    expected = CASTS[cast]
    transposes = None if alone.emulation.relayout is None else expected.transposes
    assert meaning(both) == (expected.scope, expected.format, transposes)
    assert both == options(f"--fast-math {keyword} --fp32-cast {cast}")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--auto-cast all --target inf1", ("--auto-cast", "inf1")),
        ("--fast-math all --target trn1", ("--fast-math", "trn1")),
        ("--fp32-cast all --target trn2", ("--fp32-cast", "trn2")),
        ("--fast-math all --auto-cast all", ("--auto-cast", "--fast-math")),
        ("--auto-cast auto", ("auto", "none, matmult or all")),
        ("--auto-cast all --auto-cast-type int8", ("int8", "fp8_e4m3")),
        ("--fast-math fast", ("fast", "no-fast-relayout")),
        ("--target trn9", ("trn9",)),
        ("--auto-cast", ("--auto-cast",)),
        ("--fast-math", ("--fast-math",)),
        ("--speed 3", ("--speed",)),
    ],
)
def test_errors_name_what_conflicts(text: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        options(text)
    assert all(n in str(caught.value) for n in named), str(caught.value)


@pytest.mark.parametrize("option", ["--auto-cast", "--auto-cast-type", "--target"])
def test_an_empty_value_is_an_error(option: str) -> None:
    with pytest.raises(UsageError, match="the value is empty"):
        read([option, " "])
    with pytest.raises(UsageError, match=r"the value is empty.*--fast-math"):
        Given(fast_math=())


@pytest.mark.parametrize("target", ["trn2", "inf2"])
def test_a_switch_of_trn1_is_told_elsewhere_and_does_nothing(target: str) -> None:
    found = options(f"--enable-saturate-infinity --auto-cast all --target {target}")
    (note,) = found.notes
    assert note.startswith(f"--enable-saturate-infinity with --target {target} has no effect")
    assert not found.emulation.saturate_infinity
    assert "--enable-saturate-infinity" not in found.arguments


def test_a_format_that_the_target_lacks() -> None:
    with pytest.raises(UsageError, match=r"fp8_e4m3.*sm80"):
        options("--auto-cast all --auto-cast-type fp8_e4m3 --target sm80")


def test_the_environment() -> None:
    found = from_environment(
        {
            "NEURON_CC_FLAGS": "--model-type x --auto-cast=all -O1 --auto-cast-type fp16",
            "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
            "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "7",
        }
    )
    assert found == Given(
        auto_cast="all", auto_cast_type="fp16", stochastic_rounding=True, seed=7
    )
    emulation = resolve(found, target="trn1").emulation
    assert (emulation.rounding, emulation.seed) == (Rounding.STOCHASTIC, 7)
    with pytest.raises(UsageError, match=f"{2**128} is no seed"):
        resolve(replace(found, seed=2**128), target="trn1")
    assert from_environment({}) == Given()
    # the command line stands to the right of the environment
    assert read(["--auto-cast", "matmult"]).over(found).auto_cast == "matmult"


def test_casts_of_the_command_line_come_before_those_of_the_environment() -> None:
    old = Given(fp32_cast="matmult")
    found, notes = after_environment(Given(fast_math=("all",)), old)
    assert found == Given(fast_math=("all",))
    assert "--fp32-cast matmult" in notes[0]
    # it says nothing of casts, or the same option
    assert after_environment(Given(fast_math=("no-fast-relayout",)), old)[0].fp32_cast
    assert after_environment(Given(fp32_cast="all"), old) == (Given(fp32_cast="all"), ())


@pytest.mark.parametrize("off", ["", " ", "0"])
def test_an_empty_switch_of_the_environment_is_off(off: str) -> None:
    found = from_environment({"NEURON_RT_STOCHASTIC_ROUNDING_EN": off})
    assert found.stochastic_rounding is False


@pytest.mark.parametrize(
    ("text", "label"),
    [  # lines of public code, as they are
        ("--auto-cast none --auto-cast-type bf16", "none:bf16"),
        ("--auto-cast=matmul --auto-cast-type=bf16", "matmult:bf16"),
        ("--auto-cast all --auto-cast-type bf16", "all:bf16"),
        ("--model-type=transformer -O1 --auto-cast=none", "none:bf16"),
        ("--target=trn2 --lnc=2 --model-type=transformer -O1 --auto-cast=none", "none:bf16"),
        ("--model-type=unet-inference -O3 --auto-cast=all --auto-cast-type=bf16", "all:bf16"),
        ("--auto-cast matmult --optlevel 3 --model-type unet-inference", "matmult:bf16"),
        (
            "--enable-saturate-infinity --auto-cast=none --model-type=transformer -O1",
            "none:bf16",
        ),
        ("--auto-cast-type fp16 --logfile /tmp/log-neuron-cc.txt", "none:fp16"),
        ("--tensorizer-options='--enable-ccop-compute-overlap' --auto-cast=none", "none:bf16"),
        ("--model-type transformer --distribution-strategy llm-training", "none:bf16"),
        ("--auto-cast all --auto-cast-type bf16 --auto-cast none", "none:bf16"),
        # quoted twice, in capitals, and copied from a document that typesets two hyphens
        ("'--auto-cast all --auto-cast-type fp16'", "all:fp16"),
        ("--lnc=2 '--auto-cast=all --auto-cast-type fp16'", "all:fp16"),
        ("'--model-type=transformer --auto-cast all'", "all:bf16"),
        ("--AUTO-CAST ALL --Auto-Cast-Type=FP16", "all:fp16"),
        ("--auto-cast all \N{EM DASH}-auto-cast-type fp16", "all:fp16"),
        ("--tensorizer-options='--auto-cast all --x' --auto-cast=none", "none:bf16"),
        ("''", "none:bf16"),
    ],
)
def test_command_lines_in_use_are_read(text: str, label: str) -> None:
    found = from_environment({"NEURON_CC_FLAGS": text})
    options = resolve(found, target="trn1")
    assert options.policy.label == label
    if "-O" in text or "--optlevel" in text:
        assert "--model-type" in found.notes[0]
        assert found.notes[0].endswith("no effect on numbers")
    assert read(options.arguments) == replace(
        read(options.arguments), auto_cast=options.emulation.scope.value
    )


def test_the_type_alone_says_that_nothing_is_cast() -> None:
    (note,) = options("--auto-cast-type fp16").notes
    assert "--auto-cast-type fp16 alone casts nothing" in note
    assert not options("--auto-cast none --auto-cast-type fp16").notes
    old = options("--auto-cast-type fp16", sdk="2.26")
    assert (old.policy.label, old.notes) == ("matmult:fp16", ())


def test_ladders_are_the_guides() -> None:
    rungs = ladder("trn1")
    assert [f"{r.emulation.scope.value}:{r.emulation.format.label}" for r in rungs] == [
        "none:bf16",
        "matmult:tf32",
        "all:tf32",
        "matmult:fp16",
        "all:fp16",
        "matmult:bf16",
        "all:bf16",
    ]
    assert len(ladder("inf1")) == 4
    assert "--auto-cast all --auto-cast-type bf16" in rungs[-1].command()
    assert '"--auto-cast-type", "bf16"' in rungs[-1].snippet
    for target in ("trn1", "inf1"):
        saturated = ladder(target, Given(saturate_infinity=True))
        assert all("--enable-saturate-infinity" in r.command() for r in saturated)


@pytest.mark.parametrize("target", ["trn1", "inf2", "trn2", "trn3"])
def test_flags_for_a_model_of_explicit_casts_add_none(target: str) -> None:
    assert options(load_target(target).casts_off, target=target).emulation.scope is Scope.NONE


def test_a_device_without_such_a_compiler_needs_no_flags() -> None:
    assert load_target("sm80").casts_off == ""
    assert load_target("inf1").casts_off == LADDERS[Compiler.NEURON_CC][0]


def test_every_rung_states_itself() -> None:
    for target, compiler in (("trn1", Compiler.NEURONX_CC), ("inf1", Compiler.NEURON_CC)):
        for rung, text in zip(ladder(target), LADDERS[compiler], strict=True):
            assert meaning(options(rung.name, target=target)) == rounding(rung.emulation)
            assert rung.name == text
    assert len(set(itertools.chain(*LADDERS.values()))) == 11


def test_a_ladders_rungs_state_the_casts_themselves() -> None:
    base = Given(auto_cast="all", auto_cast_type="fp16", target="trn2", saturate_infinity=True)
    rungs = ladder("trn1", base)
    assert [r.name for r in rungs] == [r.name for r in ladder("trn1")]
    assert rungs[0].emulation.scope is Scope.NONE
    assert all(r.emulation.target.name == "trn1" for r in rungs)
    assert all(r.emulation.saturate_infinity for r in rungs)


def test_stochastic_rounding_needs_the_device() -> None:
    given = replace(read(["--auto-cast", "all"]), stochastic_rounding=True)
    assert math.isfinite(resolve(given, target="trn1").emulation.seed)
    with pytest.raises(UsageError, match="stochastic"):
        resolve(given, target="sm80")
