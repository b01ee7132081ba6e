"""Locks, and what each planted drift looks like beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.data.golden import GoldenSamples, chosen
from finecast.engines.base import Array, Feeds, Session, Steps, TensorSpec
from finecast.engines.numerics import DENORMALS
from finecast.errors import UsageError
from finecast.files.saved import sealed
from finecast.measure.environment import Environment, instruction_sets
from finecast.native.drift import Check, State, Verification, VerifyOptions, compared, verify
from finecast.native.lock import Lock, LockedKernel, Machine, Observed, Runner, samples_of
from finecast.numbers.thresholds import SLOWER

Change = Callable[[Observed], Observed]
SAMPLES = Path(__file__).parent.parent / "samples" / "locks"

WAS = Observed(
    model="0123",
    runner=Runner(name="openvino:CPU", version="2026.4"),
    machine=Machine(cpu="some CPU", cores=4, instruction_sets=("avx2", "avx512_vnni")),
    settings={
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": "4",
        DENORMALS: "kept",
    },
    kernels=(
        LockedKernel(code="brgemm_avx512_I8 uint8", nodes=("product", "relu")),
        LockedKernel(code="jit_avx512_f32 fp32", nodes=("softmax",)),
    ),
    call_s=0.010,
)


class Scaled(Session):
    """y = x times a factor, and n = the rounded sum; ``x`` may come in steps."""

    inputs = (TensorSpec(name="x", dtype="fp32", shape=(None, 3)),)
    outputs = (
        TensorSpec(name="y", dtype="fp32", shape=None),
        TensorSpec(name="n", dtype="int64", shape=None),
    )

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = np.float32(factor)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        x = np.asarray(feeds["x"], np.float32)
        return {"y": x * self.factor, "n": np.round(x.sum(axis=1)).astype(np.int64)}


def calls(count: int = 3, rows: int = 8) -> list[Feeds]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(rows, 3)).astype(np.float32)} for _ in range(count)]


def lock(low: float = 1.01) -> Lock:
    samples = GoldenSamples.of(Scaled(low), Scaled(), calls())
    return Lock(plan="45", observed=WAS, samples=samples, speedup=2.0)


def verified(change: Change, factor: float = 1.01, **options: Any) -> Verification:
    was = lock()
    assert was.samples is not None
    deviations = was.samples.deviations(Scaled(factor))
    return compared(was, lambda: change(WAS), deviations, **options)


def setting(name: str, value: str) -> Change:
    return lambda was: replace(was, settings={**was.settings, name: value})


def other_sets(*sets: str) -> Change:
    return lambda was: replace(was, machine=replace(was.machine, instruction_sets=sets))


def other_code(was: Observed) -> Observed:
    avx2 = LockedKernel(code="jit_avx2_I8 uint8", nodes=("product", "relu"))
    return replace(was, kernels=(avx2, was.kernels[1]))


def unfused(was: Observed) -> Observed:
    parts = [replace(was.kernels[0], nodes=(node,)) for node in was.kernels[0].nodes]
    return replace(was, kernels=(*parts, was.kernels[1]))


def same(was: Observed) -> Observed:
    return was


DRIFTS: Mapping[str, tuple[Change, float, str]] = {
    "another hint": (setting("INFERENCE_PRECISION_HINT", "bf16"), 1.01, "settings"),
    "codes in the cache": (setting("KV_CACHE_PRECISION", "u8"), 1.01, "settings"),
    "dynamic quantization": (
        setting("DYNAMIC_QUANTIZATION_GROUP_SIZE", "32"),
        1.01,
        "settings",
    ),
    "denormals": (setting(DENORMALS, "0"), 1.01, "settings"),
    "a variable": (setting("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"), 1.01, "settings"),
    "no VNNI": (other_sets("avx2"), 1.01, "instruction sets"),
    "saturation": (same, 0.9, "numbers"),
    "an older engine": (
        lambda was: replace(was, runner=replace(was.runner, version="2025.1")),
        1.01,
        "engine",
    ),
    "a changed weight": (lambda was: replace(was, model="89ab"), 1.01, "model"),
    "other kernels": (other_code, 1.01, "kernels"),
    "no fusion": (unfused, 1.01, "kernels"),
    "a slow machine": (lambda was: replace(was, call_s=0.020), 1.01, "speed"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_each_planted_drift_is_caught_by_its_check(name: str) -> None:
    change, factor, check = DRIFTS[name]
    found = verified(change, factor)
    assert not found.holds
    assert [c.name for c in found.checks if c.state is State.DRIFTED] == [check]
    assert json.loads(json.dumps(found.to_dict()))["holds"] is False


def test_the_same_holds() -> None:
    found = verified(same)
    assert found.holds
    assert not found.drifted
    assert found.lines[0].endswith("computes the same here as where it was tuned")


TOLD: Mapping[str, Change] = {
    "threads": setting("INFERENCE_NUM_THREADS", "1"),
    "another CPU": lambda was: replace(was, machine=replace(was.machine, cpu="another")),
    "a busy machine": lambda was: replace(was, call_s=0.020, denied=0.5),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_changes_speed_alone_is_told_and_fails_strictly(name: str) -> None:
    found = verified(TOLD[name])
    assert found.holds
    assert len(found.drifted) == 1
    assert not verified(TOLD[name], strict=True).holds


def test_a_slow_call_is_timed_again_and_the_fastest_counts() -> None:
    seconds = iter([0.02, 0.01 * SLOWER])
    found = compared(lock(), lambda: replace(WAS, call_s=next(seconds)), {"y": 0.0})
    assert found.holds
    assert found.call_s == (0.01 * SLOWER, WAS.call_s)


def test_tolerances_are_shares_of_the_models_own_error() -> None:
    samples = GoldenSamples.of(Scaled(1.01), Scaled(), calls())
    assert samples.tolerances["y"] == pytest.approx(0.005, rel=0.02)
    exact = GoldenSamples.of(Scaled(), Scaled(), calls()).tolerances
    assert 0 < exact["y"] == exact["n"] < 1e-4
    assert samples.deviations(Scaled(1.02))["y"] > samples.tolerances["y"]
    assert samples.deviations(Scaled(math.nan))["y"] == math.inf


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    steps = Steps(calls(2))
    was = lock()
    samples = GoldenSamples.of(Scaled(2.0), Scaled(), [steps.calls[0], *calls()])
    was = replace(was, samples=replace(samples, calls=[steps, *calls()]))
    was.write(path)
    again = Lock.load(path)
    assert again.observed == WAS
    assert (again.plan, again.speedup) == (was.plan, was.speedup)
    assert again.samples is not None
    assert isinstance(again.samples.calls[0], Steps)
    assert len(again.samples.calls[0].calls) == 2
    assert not any(again.samples.deviations(Scaled(2.0)).values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "version 99"),
        ({"kind": "finecast.plan"}, "not a deployment manifest"),
        ({"kernels": [[]]}, "not a deployment manifest"),
        ({"machine": {}}, "not a deployment manifest"),
        ({"times": None}, "not a deployment manifest: times is None, expected an object"),
        ({"settings": 3}, "not a deployment manifest: settings is 3, expected an object"),
    ],
)
def test_what_is_no_lock_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "m.lock.json"
    lock().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=words):
        Lock.load(path)


def test_locks_of_version_1_are_read() -> None:
    was = lock()
    old = Lock.load(SAMPLES / "v1.lock.json")
    assert old.samples is not None
    assert was.samples is not None
    assert (old.observed, old.plan, old.speedup) == (was.observed, was.plan, was.speedup)
    assert old.samples.tolerances == was.samples.tolerances


def _set(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *above, key = place.split(".")
        for name in above:
            content = content[name]
        content[key] = value

    return change


BOUNDS: Mapping[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "any output passes": (
        _set("samples.tolerances.y", 1e9),
        "samples.tolerances.y is 1000000000.0, expected a number <= 1.0",
    ),
    "a negative tolerance": (_set("samples.tolerances.n", -1), "expected a number >= 0.0"),
    "a negative time": (_set("times.call_ms", -3.0), "times.call_ms is -3.0, expected"),
    "no time at all": (_set("times.call_ms", 0), "expected a number > 0.0"),
    "a time without end": (_set("times.call_ms", 1e300), "times.call_ms is 1e+300, expected"),
    "busier than busy": (_set("times.busy", 1.5), "expected a number <= 1.0"),
    "a negative speedup": (_set("times.speedup", -2), "expected a number > 0.0"),
    "no call": (_set("samples.calls", []), "expected a list of length >= 1"),
    "no core": (_set("machine.cores", 0), "machine.cores is 0, expected an integer >= 1"),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", BOUNDS)
def test_values_that_no_lock_has_are_refused(tmp_path: Path, version: int, name: str) -> None:
    change, says = BOUNDS[name]
    path = tmp_path / "m.lock.json"
    lock().write(path)
    content = json.loads(path.read_text())
    change(content)
    del content["checksum"]
    content["version"] = version
    path.write_text(json.dumps(sealed(content) if version > 1 else content))
    with pytest.raises(UsageError) as raised:
        Lock.load(path)
    assert says in raised.value.line


CHANGES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "samples": _set("samples", None),
    "a tolerance": _set("samples.tolerances.y", 1.0),
    "the time": _set("times.call_ms", 5.0),
    "the plan": _set("model.plan", "46"),
    "an instruction set": _set("machine.instruction_sets", ["avx2"]),
    "the accuracy": _set("accuracy", {"metric": 1.0}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_lock_that_was_changed_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.lock.json"
    lock().write(path)
    content = json.loads(path.read_text())
    CHANGES[name](content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="the manifest was changed: its checksum is not that"):
        Lock.load(path)
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="the manifest was changed: it has no checksum"):
        Lock.load(path)


def test_an_output_that_zeros_would_keep_has_no_tolerance() -> None:
    samples = GoldenSamples.of(Scaled(4.0), Scaled(), calls())
    assert samples.tolerances["y"] == math.inf
    assert GoldenSamples.of(Scaled(2.9), Scaled(), calls()).tolerances["y"] < 1


def test_samples_that_are_not_those_of_the_lock_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    lock().write(path)
    samples_of(path).write_bytes(samples_of(path).read_bytes() + b"0")
    with pytest.raises(UsageError, match="not the samples"):
        Lock.load(path)
    samples_of(path).unlink()
    with pytest.raises(UsageError, match="missing"):
        Lock.load(path)
    with pytest.raises(UsageError, match="there is no deployment manifest"):
        Lock.load(tmp_path / "other.lock.json")


def test_samples_are_whole_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ten = calls(10)
    assert len(chosen(ten[:1], ten)) == 3  # 24 samples
    assert len(chosen(ten[:1], [ten[0], {"x": np.zeros((2, 3), np.float32)}])) == 1
    assert len(chosen(calls(1, rows=64), ten)) == 1
    from finecast.data import golden

    monkeypatch.setattr(golden, "_MOST_BYTES", 150)
    assert len(chosen(ten[:1], ten)) == 1
    monkeypatch.setattr(golden, "_MOST_BYTES", 50)
    assert not chosen(ten[:1], ten)


def test_a_limit_takes_the_instruction_sets_beyond_it() -> None:
    flags = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_int8")
    machine = Environment(
        cpu="",
        flags=flags,
        isa_limit="ONEDNN_MAX_CPU_ISA=AVX2",
        cores=1,
        platform="",
        python="",
        finecast="",
        libraries={},
        numerics={},
    )
    assert instruction_sets(machine) == ("avx2",)
    assert instruction_sets(replace(machine, isa_limit=None)) == flags


def numbers(was: Lock, factor: float, path: Path) -> Check:
    """The check of the numbers by ``was`` as it is read from its file."""
    was.write(path)
    again = Lock.load(path)
    deviations = {} if again.samples is None else again.samples.deviations(Scaled(factor))
    found = compared(again, lambda: WAS, deviations)
    return next(check for check in found.checks if check.name == "numbers")


def test_a_lock_without_samples_compares_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    check = numbers(replace(lock(), samples=None), 1.01, path)
    assert check.state is State.TOLD
    assert check.texts == (
        "the deployment manifest has no samples: they would have been too large",
    )
    assert not samples_of(path).exists()


@pytest.mark.parametrize(
    ("tolerance", "factor", "state", "text"),
    [
        (0.0, 1.01, State.HOLDS, "output y is off by 0%, and 0% is allowed"),
        (0.0, 1.02, State.DRIFTED, "and 0% is allowed"),
        (
            math.inf,
            1.02,
            State.TOLD,
            "the deployment manifest has no tolerance for y",
        ),  # null in the file
    ],
)
def test_tolerances_at_their_ends(
    tmp_path: Path, tolerance: float, factor: float, state: State, text: str
) -> None:
    was = lock()
    assert was.samples is not None
    samples = replace(was.samples, tolerances={"y": tolerance, "n": 1.0})
    path = tmp_path / "m.lock.json"
    check = numbers(replace(was, samples=samples), factor, path)
    assert check.state is state
    assert any(text in line for line in check.texts), check.texts
    stated = json.loads(path.read_text(encoding="utf-8"))["samples"]["tolerances"]
    assert stated["y"] == (None if tolerance == math.inf else tolerance)


def test_a_lock_given_as_the_model_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    lock().write(path)
    with pytest.raises(UsageError, match="name of a deployment manifest, and not of a model"):
        verify(path, VerifyOptions())
