"""A decoder is tuned by tokens that it decodes one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.data.decoding import Decoding, DecodingSession
from finecast.data.workload import Workload
from finecast.engines import get_engine, installed
from finecast.engines.base import untimed_of
from finecast.measure.racing import Effort, Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from tests import decoder

pytest.importorskip("torch", reason="the example trains with PyTorch")
pytestmark = pytest.mark.skipif(not installed("onnxruntime"), reason="needs ONNX Runtime")

BY_KLD: dict[str, Any] = {"metric": "kld", "tolerance": 1.0, "progress": False}
OF_PAIRS: dict[str, Any] = {**BY_KLD, "batch": 2, "lock": False}

# Low plans take half of fp32's time in a first call, and more than fp32 in a step.
FIRST_S, STEP_S = (10.0, 5.0), (1.0, 1.5)


def times(
    self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
) -> Race:
    """Stated times of the calls that the workload times."""
    lengths = [feeds["input_ids"].shape[1] for feeds in workload.timing()]

    def seconds(low: bool) -> float:
        return sum((STEP_S if length == 1 else FIRST_S)[low] for length in lengths)

    lowered = {name: one.plan.lowers for name, one in built.items()}
    return Race.stated(seconds(False), {name: seconds(low) for name, low in lowered.items()})


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize("objective", ["latency", "first_token", "tokens_per_second"])
def test_no_plan_loses_in_one_call_for_the_other_unasked(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSubject, "times", times)
    with np.load(decoder.folder() / "texts.npz") as data:
        texts = {name: data[name][:4] for name in data.files}
    result = finecast.tune(
        decoder.folder() / "decoder.onnx",
        tmp_path / "low.onnx",
        data=texts,
        policy="all:bf16",
        engine="openvino",
        objective=objective,
        decode_steps=3,
        batch=4,
        **BY_KLD,
    )
    told = "a step is x0.67 as fast as in fp32"
    assert result.improved == (objective == "first_token")
    if objective == "first_token":
        assert result.gain == 2.0
        assert told in result.warnings
        assert 0 < result.tuned.metric <= 1
    if objective == "latency":
        assert f"by losing in the other: {told}" in result.why


def low_state_is_fast(
    self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
) -> Race:
    """Stated times: fp32 takes a second, other plans as long, those with a low state half."""
    seconds = {name: 0.5 if one.plan.io else 1.0 for name, one in built.items()}
    for one in built.values():  # a race runs each model once, too
        self.session(one).run(workload.timing()[0])
    return Race.stated(1.0, seconds)


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
def test_the_type_of_the_state_is_part_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSubject, "times", low_state_is_fast)
    with np.load(decoder.folder() / "texts.npz") as data:
        texts = {name: data[name][:2] for name in data.files}
    result = finecast.tune(
        decoder.folder() / "decoder.onnx",
        tmp_path / "low.onnx",
        data=texts,
        policy=finecast.Policy("all:bf16", io_state=True),
        engine="openvino",
        decode_steps=2,
        **OF_PAIRS,
    )
    state = {n: n.replace("past", "present") for n in decoder.empty(1)}
    assert result.plan.io == dict.fromkeys([*state, *state.values()], finecast.Format.BF16)
    assert "in bf16: past_0_key, past_0_value, past_1_key, past_1_value and 4 more" in str(
        result
    )
    assert result.tuned.metric > 0
    names: dict[str, Any] = {}
    exec("\n".join(result.run_notes), names)
    first, carry = names["outputs"], names["bf16"]
    given = {name: carry(first[made]) for name, made in state.items()}
    ids = np.ones((2, 1), np.int64)
    step = names["model"]({"input_ids": ids, **given})
    session = get_engine("openvino").load(tmp_path / "low.onnx")
    start: dict[str, Any] = {"input_ids": names["inputs"]["input_ids"], **decoder.empty(2)}
    mine = session.run(start)
    again = session.run({"input_ids": ids} | {n: mine[made] for n, made in state.items()})
    assert np.array_equal(step["logits"], again["logits"])


def test_an_objective_of_decoding_needs_steps(tmp_path: Path) -> None:
    model = decoder.folder() / "decoder.onnx"
    with pytest.raises(finecast.UsageError, match=r"give decode_steps"):
        finecast.tune(
            model,
            data={"input_ids": np.zeros((2, 3), np.int64), **decoder.empty(2)},
            objective="first_token",
            engine="onnxruntime",
            progress=False,
        )


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
def test_a_model_with_a_state_decodes_as_the_one_with_a_cache() -> None:
    engine = get_engine("openvino")
    feeds = {"input_ids": np.arange(24, dtype=np.int64).reshape(2, 12)}
    kept = engine.load(decoder.stateful())
    given = engine.load(decoder.folder() / "decoder.onnx")
    assert kept.keeps_state
    found: list[Any] = [
        DecodingSession(session, Decoding.of(session, 4, {})).run(feeds)["logits"]
        for session in (kept, given, kept)
    ]
    assert found[0].shape == (2, 4, 256)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)  # fp32 of numbers about 1
    assert np.array_equal(found[0], found[2])  # each text starts with an empty state


SECONDS = {Format.FP32: (3.0, 1.0), Format.FP16: (2.0, 0.7), Format.INT8: (1.5, 0.4)}
"""Stated times of a first call with a step, and of a step, by the format of the KV cache."""


def low_cache_is_fast(
    self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
) -> Race:
    (feeds,) = workload.timing()
    if feeds["input_ids"].shape[1] == 1:  # a first call reads no cache
        return Race.stated(1.0, dict.fromkeys(built, 1.0))
    step = untimed_of(feeds)
    for one in built.values():  # a race runs each model once, too
        self.session(one).run(feeds)
    seconds = {name: SECONDS[one.plan.kv_cache][step] for name, one in built.items()}
    return Race.stated(SECONDS[Format.FP32][step], seconds)


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize("objective", ["latency", "tokens_per_second"])
def test_the_format_of_a_kv_cache_is_part_of_the_plan(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    monkeypatch.setattr(EngineSubject, "times", low_cache_is_fast)
    with np.load(decoder.folder() / "texts.npz") as data:
        texts = {name: data[name][:4] for name in data.files}
    out = tmp_path / "low.xml"
    result = finecast.tune(
        decoder.stateful(),
        out,
        data=texts,
        policy="auto:int8_weights",
        objective=objective,
        decode_steps=4,
        **OF_PAIRS,
    )
    assert result.plan.kv_cache is Format.INT8
    assert "KV cache kept in int8" in str(result)
    assert "KV cache kept in int8" in str(
        finecast.explain(decoder.stateful(), plan=result.plan)
    )
    said = finecast.report(out.with_name("low.xml.plan.json")).lines
    assert any("KV cache kept in int8" in line for line in said)
    fp32 = finecast.diff(replace(result.plan, kv_cache=Format.FP32), result.plan)
    assert fp32.summary[1:] == ["only after: KV cache kept in int8"]
    step = objective != "latency"
    assert result.gain == pytest.approx(
        SECONDS[Format.FP32][step] / SECONDS[Format.INT8][step]
    )
    assert 0 < result.tuned.metric <= 1
    # A program that states nothing has that cache, and one that pastes what is printed.
    plain = openvino.Core().compile_model(out, "CPU")
    names: dict[str, Any] = {}
    exec("\n".join(result.run_notes), names)
    for compiled in (plain, names["model"]):
        assert compiled.get_property("KEY_CACHE_PRECISION") == openvino.Type.u8
    # The plan can be replayed.
    again = finecast.apply(result.plan, decoder.stateful(), tmp_path / "again.xml")
    assert again.plan.kv_cache is Format.INT8
