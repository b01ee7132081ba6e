"""int8 on devices that are not here: the codes are ONNX's own, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.native.onnx import OnnxModel
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy

# A matmul whose weights another op reads along another axis, a moved value and a convolution.
NET = """<ir_version: 9, opset_import: ["" : 19]>
net (float[n, 1, 8, 8] x) => (float[n, 16] y)
<int64[2] flat = {-1, 64}> {
  [flatten] f = Reshape (x, flat)
  [one] a = MatMul (f, w)
  [act] r = Relu (a)
  [two] b = Gemm <transB = 1> (r, w)
  [conv] c = Conv <kernel_shape = [8, 8]> (x, k, kb)
  [flat1] d = Flatten (c)
  [sum] e = Add (b, d)
  [head] y = MatMul (e, v)
}"""


def whole(draw: np.random.Generator, *shape: int, end: int) -> NDArray[np.float32]:
    """Whole numbers up to an end that is there in each channel: scales are powers of two."""
    array = draw.integers(-end, end + 1, shape).astype(np.float32)
    array[..., 0] = array[0, ...] = end
    return array


def write(path: Path, *, largest: int) -> None:
    """Values up to a largest integer, which is reached: then their scale is 1 / 16."""
    draw = np.random.default_rng(1)
    x = draw.integers(0, largest + 1, (16, 1, 8, 8)).astype(np.float32) / 16
    x[0, 0, 0, :2] = 0, largest / 16
    np.savez(path, x=x)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(0)
    made = parser.parse_model(NET)
    weights = {
        "w": whole(draw, 64, 64, end=127) / 64,
        "k": whole(draw, 64, 64, end=127).reshape(64, 1, 8, 8) / 64,
        "kb": draw.integers(-9, 9, 64).astype(np.float32),
        "v": draw.standard_normal((64, 16)).astype(np.float32),
    }
    for name, array in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, tmp_path / "net.onnx")
    write(tmp_path / "x.npz", largest=255)
    return tmp_path / "net.onnx", tmp_path / "x.npz"


@pytest.mark.parametrize(
    ("target", "largest"), [("sm80", 127), ("inf1", 255), ("avx512-vnni", 255)]
)
def test_products_of_codes_are_the_reference_s(
    target: str, largest: int, files: tuple[Path, Path]
) -> None:
    net, data = files
    write(data, largest=largest)
    # The products whose scales are powers of two, so that fp32 adds up their codes exactly.
    policy = Policy(formats=(Format.INT8,), scope=Policy.parse("all").scope)
    rules = {"some": lambda view: None if view.name in ("one", "conv") else "fp32"}
    done = api.convert(
        net, None, policy, target=target, data=str(data), user_rules=rules, verify=False
    )
    assert done.plan.counts["int8"] == 2
    feeds = dict(np.load(data))
    model = onnx.load_from_string(done.model.SerializeToString())
    shown = ["a", "c"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown)
    want = dict(zip(shown, ReferenceEvaluator(model).run(shown, feeds), strict=True))
    # What the emulator shows of the same values, by the plan and by the plan's model.
    source = api.load(net)
    assert isinstance(source, OnnxModel)
    grown = onnx.load(net)
    grown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown)
    emulation = explicit_casts(target)
    shown_net = api.load(grown)
    plan = api.explain(
        grown, policy=policy, target=target, data=str(data), user_rules=rules
    ).plan
    session = shown_net.program(emulation).plan_session(plan, emulation)
    found = session.run(feeds)
    for name in shown:
        assert np.array_equal(found[name], want[name]), name
