from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast.engines.base import Array, Engine, Feeds, Session, TensorSpec
from finecast.engines.probe import PROBED, probe_one
from finecast.engines.probe_models import PROBES, Probe, admitted, build
from finecast.errors import EngineError
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to


class FakeSession(Session):
    def __init__(self, probe_model: Probe, fmt: Format, *, wrong: bool, exact: bool) -> None:
        y = probe_model.expected.astype(np.float32)
        self._y: Array = y if exact else round_to(y, fmt)
        if wrong:
            self._y = self._y * 2

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return {"y": self._y}


class FakeEngine(Engine):
    """Runs fp32 and bf16, computes fp16 in fp32, or gets it wrong, refuses all else."""

    def __init__(self, device: str, *, wrong: bool = False) -> None:
        self.name = "fake"
        self.device = device
        self._wrong = wrong

    def load(self, model: Path | bytes, *, profiling: bool = False) -> FakeSession:
        for candidate in PROBES:
            for fmt in (Format.FP32, Format.BF16, Format.FP16):
                if model == build(candidate, fmt):
                    return FakeSession(
                        candidate,
                        fmt,
                        wrong=self._wrong and fmt is Format.FP16,
                        exact=fmt is Format.FP16,
                    )
        raise EngineError("Fake cannot load the model: no kernel")


def test_what_is_computed_in_fp32_gains_nothing() -> None:
    found = FakeEngine("one").capabilities()
    assert list(found) == list(PROBED)
    assert found[Format.BF16].runs
    assert found[Format.BF16].reason == ""
    assert found[Format.FP16].runs
    assert found[Format.FP16].reason == "computed in fp32"
    assert found[Format.FP16].in_fp32
    assert not found[Format.FP16].worthwhile


def test_wrong_results_do_not_count_as_running() -> None:
    found = FakeEngine("two", wrong=True).capabilities()
    assert not found[Format.FP16].runs
    assert "computed wrongly" in found[Format.FP16].reason


class BusyMachine:
    """A clock, and what runs by it: other processes take up to 3 ms of every call."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._others = np.random.default_rng(1)

    def perf_counter(self) -> float:
        return self.now_s

    def running(self, alone_s: float) -> Callable[[FakeSession, Feeds], dict[str, Array]]:
        def run(session: FakeSession, feeds: Feeds) -> dict[str, Array]:
            self.now_s += alone_s + self._others.uniform(0, 3e-3)
            return FakeSession.run(session, feeds)

        return run


@pytest.mark.parametrize(("bf16_s", "gains"), [(0.4e-3, True), (1e-3, False)])
def test_a_busy_machine_hides_no_gain(
    monkeypatch: pytest.MonkeyPatch, bf16_s: float, gains: bool
) -> None:
    """Most calls' times lie between those of the other format: only the fastest tell."""
    machine = BusyMachine()
    takes = {Format.FP32: machine.running(1e-3), Format.BF16: machine.running(bf16_s)}

    class BusySession(FakeSession):
        def __init__(self, probe_model: Probe, fmt: Format) -> None:
            super().__init__(probe_model, fmt, wrong=False, exact=fmt is Format.FP16)
            self._takes = takes.get(fmt, takes[Format.FP32])

        def run(self, feeds: Feeds) -> dict[str, Array]:
            return self._takes(self, feeds)

    class BusyEngine(FakeEngine):
        def load(self, model: Path | bytes, *, profiling: bool = False) -> FakeSession:
            for candidate in PROBES:
                for fmt in (Format.FP32, Format.BF16):
                    if model == build(candidate, fmt):
                        return BusySession(candidate, fmt)
            raise EngineError("Fake cannot load the model: no kernel")

    monkeypatch.setattr("finecast.engines.probe.time", machine)
    assert probe_one(BusyEngine(f"busy {gains}"), Format.BF16).worthwhile == gains


def test_formats_that_onnx_lacks_are_not_tried() -> None:
    assert not FakeEngine("three").capabilities()[Format.FP8_E4M3].runs
    assert admitted("MatMul", Format.BF16)
    assert not admitted("MatMul", Format.FP8_E5M2)
    assert not admitted("MatMul", Format.FP8_E3M4)  # no type at all


@pytest.mark.parametrize("fmt", [Format.FP32, Format.BF16, Format.FP16])
@pytest.mark.parametrize("candidate", PROBES, ids=lambda p: p.name)
def test_probe_models_are_valid(candidate: Probe, fmt: Format) -> None:
    onnx.checker.check_model(onnx.load_from_string(build(candidate, fmt)), full_check=True)


@pytest.mark.parametrize("candidate", PROBES, ids=lambda p: p.name)
def test_probe_data_are_exact_in_every_format_and_results_are_not(candidate: Probe) -> None:
    for fmt in (Format.BF16, Format.FP16):
        for data in (candidate.x, candidate.w):
            np.testing.assert_array_equal(data, data.astype(fmt.dtype).astype(np.float64))
        rounded = candidate.expected.astype(fmt.dtype).astype(np.float64)
        assert (rounded != candidate.expected).any()
    single = candidate.expected.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(single, candidate.expected)
