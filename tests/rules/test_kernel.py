"""An op keeps fp32 where the engine is known to have no low kernel for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.engines import get_engine
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.kernels import kernel_query
from finecast.formats import Format
from finecast.neuron import explicit_casts
from finecast.rules import Verdict
from finecast.rules.kernel import KERNEL

Judged = Callable[..., dict[str, Verdict | None]]
GRAPH = "input %0 x fp32[4]\nnode n erf onnx::Erf fp32 (%0) -> (%1 y fp32[4])\n"


@pytest.mark.parametrize(("known", "kept"), [(True, False), (None, False), (False, True)])
def test_only_a_known_lack_counts(judged: Judged, known: bool | None, kept: bool) -> None:
    asked: list[tuple[str, Format]] = []

    def kernels(native: str, fmt: Format) -> bool | None:
        asked.append((native, fmt))
        return known

    verdict = judged(KERNEL, GRAPH, kernels=kernels, engine="toy")["n"]
    assert asked == [("onnx::Erf", Format.BF16)]
    assert (verdict is not None) == kept
    if verdict is not None:
        assert verdict.permits == {Format.FP32}
        assert verdict.text == "toy has no working bf16 kernel for onnx::Erf"


@pytest.mark.parametrize("target", ["trn1", "sm80", "amx", "sm75"])
def test_tf32_is_for_products_of_devices_that_have_it(target: str) -> None:
    asked = kernel_query(EmulatorEngine(emulation=explicit_casts(target)))
    assert asked("onnx::MatMul", Format.TF32) is (target in ("trn1", "sm80"))
    assert asked("onnx::Conv", Format.TF32) is (target in ("trn1", "sm80"))
    assert asked("onnx::Add", Format.TF32) is False
    assert asked("onnx::Add", Format.BF16) is (False if target == "sm75" else None)


def test_a_device_computes_in_what_that_part_of_it_has() -> None:
    asked = kernel_query(EmulatorEngine(emulation=explicit_casts("sm89")))
    assert asked("onnx::MatMul", Format.FP8_E4M3) is None
    assert asked("onnx::Softmax", Format.FP8_E4M3) is False, "fp8 is for tensor cores"
    assert kernel_query(get_engine("onnxruntime"))("onnx::MatMul", Format.TF32) is False


def test_it_cannot_be_waived() -> None:
    assert KERNEL.hard
