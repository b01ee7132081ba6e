"""int8_weights in OpenVINO by rows, and int8 in ONNX Runtime beside its own tool.

    python -m benchmarks.bench_int8_kernels

Times are processor time of one thread, models in turns in one process, so that they hold on a
machine that others use. int8_weights is also shown with OpenVINO's default, which rounds the
other operand too, and with all other ops in bf16, which no plan gives but OpenVINO fuses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process

from benchmarks.common import report, shared_case, skip
from finecast import api
from finecast.engines.base import Array, Feeds
from finecast.engines.numerics import DYNAMIC_QUANTIZATION
from finecast.engines.openvino import config
from finecast.numbers.formats import Format

_TURNS: Final = 40
_WIDTH, _LAYERS = 2048, 4
# Names of the ways in which OpenVINO runs a model of int8_weights.
_AS_STATED, _BY_DEFAULT = "int8_weights", "int8_weights, dynamic quantization"
_LOW: Final = "int8_weights, the rest in bf16"


def main() -> None:
    """Run all cases."""
    with tempfile.TemporaryDirectory() as folder:
        _layers(Path(folder))
        _minilm(Path(folder))
        _resnet20(Path(folder))


def _layers(folder: Path) -> None:
    draw = np.random.default_rng(0)
    nodes, weights = [], []
    for i in range(_LAYERS):
        array = draw.standard_normal((_WIDTH, _WIDTH)) / np.sqrt(_WIDTH)
        weights.append(numpy_helper.from_array(array.astype(np.float32), f"w{i}"))
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("Relu", [f"p{i}"], [f"x{i + 1}"]))
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", _WIDTH])
        for name in ("x0", f"x{_LAYERS}")
    ]
    graph = helper.make_graph(nodes, "layers", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    path = folder / "layers.onnx"
    onnx.save(model, path)
    out = _converted(path, folder)
    bf16 = _in_bf16(out)
    for rows in (1, 2, 4, 8, 16, 32, 128):
        feeds = {"x0": draw.standard_normal((rows, _WIDTH)).astype(np.float32)}
        _weights(f"{_LAYERS} products {_WIDTH} wide, {rows} rows", path, out, feeds, bf16)


def _in_bf16(path: Path) -> Path:
    """The model of ``path``, with weights in int8, changed to compute in bf16."""
    model = onnx.load(path)
    graph, kind = model.graph, TensorProto.BFLOAT16
    model.ir_version = 9
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 19))  # the first with bf16 scales
    scales = {n.input[1] for n in graph.node if n.op_type == "DequantizeLinear"}
    for tensor in (t for t in graph.initializer if t.name in scales):
        low = numpy_helper.to_array(tensor).astype(Format.BF16.dtype)
        tensor.CopyFrom(
            helper.make_tensor(tensor.name, kind, low.shape, low.tobytes(), raw=True)
        )
    del graph.value_info[:]
    first, last = graph.input[0].name, graph.output[0].name
    for node in graph.node:
        node.input[:] = ["low" if name == first else name for name in node.input]
        node.output[:] = ["wide" if name == last else name for name in node.output]
    graph.node.insert(0, helper.make_node("Cast", [first], ["low"], to=kind))
    graph.node.append(helper.make_node("Cast", ["wide"], [last], to=TensorProto.FLOAT))
    out = path.with_name(f"{path.stem}-bf16.onnx")
    onnx.save(model, out)
    return out


def _minilm(folder: Path) -> None:
    case = shared_case("sts_minilm_l6")
    if case is None:
        skip("int8_weights minilm", "shared/models is absent")
        return
    feeds = {k: v[:1] for k, v in next(iter(case.calib(1))).items()}
    words = next(iter(feeds.values())).shape[1]
    path = Path(case.model())
    _weights(f"MiniLM, 1 x {words}", path, _converted(path, folder), feeds)


def _converted(path: Path, folder: Path) -> Path:
    out = folder / f"{path.stem}-weights.onnx"
    api.convert(path, out, "all:int8_weights", engine="openvino")
    return out


def _weights(what: str, path: Path, out: Path, feeds: Feeds, bf16: Path | None = None) -> None:
    core = openvino.Core()
    one = {**config(core, "CPU", "f32"), "INFERENCE_NUM_THREADS": 1}
    settings = {
        "fp32": (path, one),
        _AS_STATED: (out, one),
        _BY_DEFAULT: (out, {k: v for k, v in one.items() if k != DYNAMIC_QUANTIZATION}),
        **({} if bf16 is None else {_LOW: (bf16, one)}),
    }
    calls: dict[str, Callable[[], Array]] = {}
    for name, (file, held) in settings.items():
        request = core.compile_model(file, "CPU", held).create_infer_request()
        calls[name] = lambda request=request: request.infer(dict(feeds))[0].copy()
    _compare(what, calls, mb=[round(1e-6 * p.stat().st_size, 2) for p in (path, out)])


def _resnet20(folder: Path) -> None:
    case = shared_case("cifar10_resnet20")
    if case is None:
        skip("int8 in ONNX Runtime", "shared/models is absent")
        return
    model, own, other = Path(case.model()), folder / "own.onnx", folder / "other.onnx"
    stored = np.load(model.with_name("data.npz"))
    calib, feeds = (case._n(stored[k]) for k in ("calib_x", "test_x"))
    api.convert(model, own, "all:int8", data={"input": calib[:128]}, engine="onnxruntime")
    quant_pre_process(model, folder / "shaped.onnx")
    quantization.quantize_static(
        folder / "shaped.onnx", other, _Batches(calib[:128]), per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    calls: dict[str, Callable[[], Array]] = {}
    for name, path in {"fp32": model, "int8": own, "quantize_static": other}.items():
        session: Any = onnxruntime.InferenceSession(path, options)
        calls[name] = lambda session=session: session.run(None, {"input": feeds[:32]})[0]
    _compare("ResNet-20 in ONNX Runtime, batch 32", calls)


class _Batches(quantization.CalibrationDataReader):
    def __init__(self, images: Array) -> None:
        self.left: Iterator[dict[str, Array]] = iter([{"input": images}])

    def get_next(self) -> dict[str, Array]:
        """The next feeds; empty after the last ones."""
        return next(self.left, {})


def _compare(what: str, calls: Mapping[str, Callable[[], Array]], **detail: Any) -> None:
    outputs = {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    exact, baseline = outputs["fp32"].astype(np.float64), median(times["fp32"])
    for name in (n for n in calls if n != "fp32"):
        error = np.linalg.norm(outputs[name].astype(np.float64) - exact) / np.linalg.norm(
            exact
        )
        report(
            what, f"{name} against fp32", round(baseline / median(times[name]), 3), "x",
            ms=round(1e3 * median(times[name]), 3), error=round(float(error), 4), **detail,
        )  # fmt: skip


if __name__ == "__main__":
    main()
