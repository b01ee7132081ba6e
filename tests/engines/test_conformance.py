"""What every engine must do. A new engine is listed in ``NAMES`` and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

from finecast.engines import ONNX, get_engine, installed, reading
from finecast.engines.base import Engine
from finecast.errors import EngineError, UsageError
from finecast.numbers.formats import Format
from tests.engines import toy

NAMES = (*reading(ONNX), "toy")
HEADER = '<ir_version: 10, opset_import: ["" : 22, "no.such.domain" : 1]>'
MLP = f"""{HEADER}
net (float[N,4] x) => (float[N,3] second, float[N,3] first)
<float[4,3] w = {{1,0,0, 0,1,0, 0,0,1, 1,1,1}}, float[3] b = {{0.5, -0.5, 0}}> {{
  [matmul] p = MatMul(x, w)
  [add] second = Add(p, b)
  [relu] first = Relu(second)
}}"""
STORED = f"""{HEADER}
net (KIND[N,4] x) => (KIND[N,4] y) {{
  [up] wide = Cast<to=1>(x)
  [double] twice = Add(wide, wide)
  [down] y = Cast<to=CODE>(twice)
}}"""
UNKNOWN = f"""{HEADER}
net (float[N,4] x) => (float[N,4] y) {{
  [strange] y = no.such.domain.Strange(x)
}}"""
OPEN_SHAPES = f"""{HEADER}
net (float[N,4] x, float[M,K] w) => (float[N,K] y) {{
  [matmul] y = MatMul(x, w)
}}"""
PORTS = f"""{HEADER}
net (int64[N] i, bool[N] b, double[N] d) => (int64[N] i2, bool[N] b2, double[N] d2) {{
  [first] i2 = Add(i, i)
  [second] b2 = Not(b)
  [third] d2 = Add(d, d)
}}"""


def proto(text: str) -> ModelProto:
    return parser.parse_model(text)


def model(text: str) -> bytes:
    return proto(text).SerializeToString()


X = np.arange(8, dtype=np.float32).reshape(2, 4)
SECOND = X @ np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32) + [
    0.5,
    -0.5,
    0,
]


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each engine that is installed; the toy is what a newcomer writes."""
    name: str = request.param
    if name == "toy":
        toy.install(monkeypatch)
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    return get_engine(name)


class TestEngine:
    def test_states_its_ports_in_model_order_with_symbols(self, engine: Engine) -> None:
        session = engine.load(model(MLP))
        (x,) = session.inputs
        assert (x.name, x.dtype, x.shape) == ("x", "fp32", ("N", 4))
        assert [spec.name for spec in session.outputs] == ["second", "first"]

    def test_runs_with_outputs_in_model_order(self, engine: Engine) -> None:
        outputs = engine.load(model(MLP)).run({"x": X})
        assert list(outputs) == ["second", "first"]
        # sums of a few small multiples of 1/2 are exact
        np.testing.assert_array_equal(outputs["second"], SECOND)
        np.testing.assert_array_equal(outputs["first"], np.maximum(SECOND, 0))

    def test_outputs_survive_the_next_run(self, engine: Engine) -> None:
        session = engine.load(model(MLP))
        before = session.run({"x": X})["second"]
        session.run({"x": -X})
        np.testing.assert_array_equal(before, SECOND)

    def test_takes_arrays_that_are_not_contiguous(self, engine: Engine) -> None:
        wide = np.repeat(X, 2, axis=1)
        outputs = engine.load(model(MLP)).run({"x": wide[:, ::2]})
        np.testing.assert_array_equal(outputs["second"], SECOND)

    def test_follows_the_batch_size(self, engine: Engine) -> None:
        session = engine.load(model(MLP))
        for rows in (1, 5, 2):
            outputs = session.run({"x": np.ones((rows, 4), np.float32)})
            assert outputs["first"].shape == (rows, 3)

    @pytest.mark.parametrize(
        ("kind", "code", "dtype", "label"),
        [
            ("bfloat16", TensorProto.BFLOAT16, ml_dtypes.bfloat16, "bf16"),
            ("float16", TensorProto.FLOAT16, np.float16, "fp16"),
        ],
    )
    def test_half_precision_ports(
        self, engine: Engine, kind: str, code: int, dtype: type[np.generic], label: str
    ) -> None:
        session = engine.load(model(STORED.replace("KIND", kind).replace("CODE", str(code))))
        x = X.astype(dtype)
        y = session.run({"x": x})["y"]
        assert session.inputs[0].dtype == session.outputs[0].dtype == label
        assert y.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(y, (X + X).astype(dtype))
        # The data of the fp32 model run its low one, too; wider numbers are refused.
        thirds = session.run({"x": (X / 3).astype(dtype)})["y"]
        np.testing.assert_array_equal(session.run({"x": X / 3})["y"], thirds)
        with pytest.raises(UsageError, match="has type fp64"):
            session.run({"x": X.astype(np.float64)})

    def test_other_types_pass(self, engine: Engine) -> None:
        session = engine.load(model(PORTS))
        assert [spec.dtype for spec in session.inputs] == ["int64", "bool", "fp64"]
        # small integers: OpenVINO's CPU plugin computes int64 in 32 bits
        feeds = {
            "i": np.array([1, 2**20]),
            "b": np.array([True, False]),
            "d": np.array([1.5, 2.5]),
        }
        outputs = session.run(feeds)
        assert outputs["i2"].tolist() == [2, 2**21]
        assert outputs["b2"].tolist() == [False, True]
        assert outputs["d2"].tolist() == [3.0, 5.0]

    def test_reads_external_data_beside_the_file(self, engine: Engine, tmp_path: Path) -> None:
        path = tmp_path / "net.onnx"
        net = proto(MLP)
        for tensor in net.graph.initializer:  # only raw data can be kept outside
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name)
            )
        onnx.save_model(
            net, path, save_as_external_data=True, location="w.bin", size_threshold=0
        )
        assert (tmp_path / "w.bin").exists()
        outputs = engine.load(path).run({"x": X})
        np.testing.assert_array_equal(outputs["second"], SECOND)

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({}, "input 'x' is missing: the model's inputs are x"),
            ({"x": X, "z": X}, "unknown input 'z': the model's inputs are x"),
            ({"x": X.astype(np.float16)}, "input 'x' has type fp16, expected fp32"),
            ({"x": X[0]}, r"input 'x' has shape \[4\], expected \[N, 4\]"),
            ({"x": X[:, :3]}, r"input 'x' has shape \[2, 3\], expected \[N, 4\]"),
        ],
    )
    def test_feeds_that_do_not_fit(
        self, engine: Engine, feeds: dict[str, np.ndarray], message: str
    ) -> None:
        session = engine.load(model(MLP))
        with pytest.raises(UsageError, match=message):
            session.run(feeds)

    @pytest.mark.parametrize("data", [b"", b"garbage", model(MLP)[: len(model(MLP)) // 2]])
    def test_what_is_no_model(self, engine: Engine, data: bytes) -> None:
        with pytest.raises(EngineError, match="not an ONNX model"):
            engine.load(data)

    def test_a_file_that_is_missing(self, engine: Engine, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            engine.load(tmp_path / "none.onnx")

    def test_a_file_that_is_empty(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "empty.onnx").touch()
        with pytest.raises(EngineError, match="not an ONNX model"):
            engine.load(tmp_path / "empty.onnx")

    def test_an_op_without_kernel_is_named(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match=r"no kernel for no\.such\.domain\.Strange"):
            engine.load(model(UNKNOWN))

    def test_a_failing_run_gives_one_line_without_source_locations(
        self, engine: Engine
    ) -> None:
        session = engine.load(model(OPEN_SHAPES))
        feeds = {"x": X, "w": np.ones((3, 5), np.float32)}
        with pytest.raises(EngineError) as caught:
            session.run(feeds)
        assert "\n" not in str(caught.value)
        assert ".cpp:" not in str(caught.value)

    def test_profile_names_the_models_nodes(self, engine: Engine) -> None:
        session = engine.load(model(MLP), profiling=True)
        x = np.ones((4096, 4), np.float32)
        kernels = session.profile({"x": x}, repeats=3)
        assert all(k.time_s > 0 for k in kernels)
        times = [k.time_s for k in kernels]
        assert times == sorted(times, reverse=True)
        assert {op for k in kernels for op in k.ops} == {"matmul", "add", "relu"}
        assert all(k.format == "fp32" for k in kernels if k.ops)

    def test_profile_has_to_be_asked_for(self, engine: Engine) -> None:
        with pytest.raises(UsageError, match="profiling=True"):
            engine.load(model(MLP)).profile({"x": X})

    def test_capabilities_come_with_reasons(self, engine: Engine) -> None:
        found = engine.capabilities()
        assert found[Format.FP32].runs
        assert found[Format.FP32].speed == 1.0
        for capability in found.values():
            assert capability.runs or capability.reason
            assert capability.speed is None or capability.speed > 0
        assert engine.capabilities() == found  # measured once
