"""An op keeps fp32 where the engine is known to have no low kernel for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.formats import Format
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
        assert verdict.text == "toy has no bf16 kernel for onnx::Erf"


def test_it_cannot_be_waived() -> None:
    assert KERNEL.hard
