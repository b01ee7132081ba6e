"""What a later opset cannot state is refused by name, and training stays training.

``tests/conformance/test_opsets.py`` shows that a raised model computes what it did.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import finecast
from finecast.errors import ModelError
from finecast.frontends.onnx.opset import raise_opset
from finecast.rules.policy import Policy
from tests.conformance.opset_cases import IMAGE, OpsetCase
from tests.conformance.runners import by_onnxruntime, by_openvino
from tests.frontends.tools import parse, tensor


@pytest.mark.parametrize(
    ("opset", "given", "constants", "text", "why"),
    [
        (10, IMAGE, "float[4] s = {1, 1, 0.6, 1.7}", "y = Resize(x, s)", "one axis larger"),
        (10, f"{IMAGE}, float[4] s", "", "y = Resize(x, s)", "scales are computed"),
        (
            18,
            f"{IMAGE}, float[2] s",
            "",
            "y = GroupNormalization<num_groups = 2>(x, s, s)",
            "not constant",
        ),
        (7, IMAGE, "", "y, m = Dropout(x)", "its mask is read"),
        (10, IMAGE, "", "t, m = Dropout(x)\nc = Cast<to = 1>(m)\ny = Add(t, c)", "its mask"),
        (
            9,
            IMAGE,
            "float[4] s = {1, 2, 3, 4}",
            "t, m, v, a, b = BatchNormalization(x, s, s, s, s)\ny = Add(t, a)",
            "BatchNormalization '': its saved mean",
        ),
    ],
)
def test_what_a_later_opset_cannot_state_is_refused(
    opset: int, given: str, constants: str, text: str, why: str
) -> None:
    case = OpsetCase(text=text, given=given, constants=constants)
    with pytest.raises(ModelError, match=why):
        raise_opset(ir.from_proto(case.model(opset)), 22)


@pytest.mark.parametrize(("opset", "norm"), [(9, "y, m, v, a, b"), (14, "y, m, v")])
@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_a_norm_that_trains_is_not_folded(
    opset: int, norm: str, low: str, tmp_path: Path
) -> None:
    """Its mean and variance are those of its input, not the constants beside it."""
    rng = np.random.default_rng(0)
    mode = "<training_mode = 1>" if opset >= 14 else ""
    proto = parse(
        f"""g (float[2, 3, 8, 8] x) => (float[2, 4, 8, 8] z) {{
            c = Conv(x, w) {norm} = BatchNormalization{mode}(c, s, s, n, u) z = Relu(y) }}""",
        opset=opset,
    )
    proto.graph.initializer.extend(
        [
            tensor("w", rng.normal(size=(4, 3, 1, 1))),
            tensor("s", rng.uniform(0.5, 2, 4)),
            tensor("n", rng.normal(size=4)),
            tensor("u", rng.uniform(0.2, 4, 4)),
        ]
    )
    done = finecast.convert(
        proto, policy=Policy.parse(f"all:{low}"), engine="openvino", verify=False
    )
    source, target = tmp_path / "own.onnx", tmp_path / "low.onnx"
    onnx.save(proto, source)
    assert done.model is not None
    onnx.save(done.model, target)
    feeds = {"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)}
    wanted, got = by_onnxruntime(source, feeds)[0], by_openvino(target, feeds)[0]
    assert any(n.op_type == "BatchNormalization" for n in done.model.graph.node)
    assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)
