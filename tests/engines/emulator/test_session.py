"""Models of other libraries than ONNX and PyTorch, computed as a device would."""

from __future__ import annotations

import numpy as np
import pytest
from openvino import opset13 as op

from finecast.devices.emulation import Emulation, setting_of
from finecast.devices.targets import load_target
from finecast.engines.emulator.session import EmulatorSession
from finecast.frontends.openvino.native import OvNative
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.rules.policy import Scope
from tests.frontends.openvino_graphs import WIDTH, model_of


@pytest.mark.parametrize(
    ("scope", "real"),
    [(Scope.NONE, Format.BF16), (Scope.MATMULT, Format.FP16)],
)
def test_a_cast_takes_the_place_of_what_the_engine_does_itself(
    scope: Scope, real: Format
) -> None:
    # inf1 has no fp32 product: uncast it runs in bf16, cast to fp16 in fp16, never in both.
    rng = np.random.default_rng(5)
    w = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    x = rng.standard_normal((2, WIDTH)).astype(np.float32)

    def copy() -> OvNative:
        read = op.parameter([2, WIDTH], np.float32, name="x")
        read.output(0).set_names({"x"})
        product = op.matmul(read, op.constant(w), False, False, name="product")
        return OvNative.copy_of(model_of([product], [read]))

    how = Emulation(target=load_target("inf1"), scope=scope, format=Format.FP16)
    setting = setting_of(copy().graph, how)
    session = EmulatorSession(copy=copy, emulation=how, setting=setting)
    (got,) = session.run({"x": x}).values()
    expected = round_to(x, real) @ round_to(w, real)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=1e-5, atol=1e-5)
