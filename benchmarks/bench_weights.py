"""Layers of a 7B decoder's shapes by weights in codes: each format beside the engine's best.

    python -m benchmarks.bench_weights [--shapes 7b] [ROWSxCOLUMNS ...]

A layer is one product of as many rows as a batch has. It is written in each format for each
engine, as finecast writes it. The ways beside those formats are what an engine has without
finecast: its own precision hint, and its default settings for the same file. All ways of an
engine are timed in turns, and each is given as how many times as fast as fp32 it is, and how
many as the fastest way of that shape: a format that is slower than fp32 misses its bar. Times
are processor time of one thread, so that they hold on a machine that others use in part; but a
busy machine's memory and caches are shared, and then batch 1, which reads weights alone, is
slower than it would be. Between calls an array that is larger than the caches is read: the
weights of a whole decoder do not fit them.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import report
from finecast import api
from finecast.engines.base import Array
from finecast.engines.numerics import ONNXRUNTIME_CHANGED, openvino_settings
from finecast.numbers.formats import Format

# Numbers that are summed, and columns: projections of attention, and both of a feed-forward
# layer, in Llama-7B.
_SHAPES: Final = {"7b": ((4096, 4096), (4096, 11008), (11008, 4096))}
_BATCHES: Final = (1, 64)
_TURNS: Final = {1: 25, 64: 9}
_FORMATS: Final = {
    "openvino": (
        *("bf16", "int8_weights", "int4_weights", "int8_dynamic", "int4_dynamic"),
        *("int8_weights_bf16", "int4_weights_bf16"),
    ),
    "onnxruntime": (
        *("int4_weights", "int8_dynamic", "int8_dynamic_128", "int4_dynamic"),
        "int4_dynamic_128",
    ),
}
_CACHE_BYTES: Final = 128 << 20

_Run = Callable[[Array], Array]
# What loads a file and gives a function that runs it.
_Load = Callable[[Path], _Run]


def main() -> None:
    """Time all layers, or those of the shapes that are named."""
    parser = argparse.ArgumentParser(description="Layers by weights in codes.")
    parser.add_argument("--shapes", choices=tuple(_SHAPES), default="7b")
    parser.add_argument("named", nargs="*", metavar="ROWSxCOLUMNS")
    asked = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in asked.named]
    with tempfile.TemporaryDirectory() as folder:
        for rows, columns in shapes or _SHAPES[asked.shapes]:
            path = _layer(Path(folder), rows, columns)
            for engine, formats in _FORMATS.items():
                _formats(path, engine, formats, rows, f"{rows} x {columns}")
                gc.collect()


def _layer(folder: Path, rows: int, columns: int) -> Path:
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(rows)
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", rows), ("y", columns))
    ]
    # The Relu stands for the ops between layers: nothing is fused with an input of the model.
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="product"),
    ]
    constants = [numpy_helper.from_array(weights.astype(np.float32), "w")]
    graph = helper.make_graph(nodes, "layer", ports[:1], ports[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    path = folder / "layer.onnx"
    onnx.save(model, path)
    return path


def _formats(path: Path, engine: str, formats: tuple[str, ...], rows: int, shape: str) -> None:
    draw = np.random.default_rng(1)
    feeds = {n: draw.standard_normal((n, rows)).astype(np.float32) for n in _BATCHES}
    runs: dict[str, _Run] = {"fp32": _LOADS[engine](path)}
    sizes: dict[str, float] = {}
    for name, file, load in _candidates(path, engine, formats):
        runs[name], sizes[name] = load(file), round(1e-6 * file.stat().st_size, 1)
    for batch, x in feeds.items():
        _compare(f"{shape}, batch {batch}, {engine}", runs, x, _TURNS[batch], sizes)


def _candidates(
    path: Path, engine: str, formats: tuple[str, ...]
) -> Iterator[tuple[str, Path, _Load]]:
    """The name of each way to run the layer low, its file, and what loads that."""
    if engine == "openvino":
        yield "bf16 by the engine's hint", path, _hinted
    for label in formats:
        fmt, out = Format.parse(label), path.with_name(f"{engine}-{label}.onnx")
        # The ops around a product that gives bf16 are in bf16, too.
        low = ",".join(dict.fromkeys((label, fmt.storage.label)))
        done = api.convert(path, out, f"all:{low}", engine=engine, verify=False, force=True)
        if fmt not in done.plan.low_formats:
            report(path.stem, f"{label} in {engine}", 0, "", why="; ".join(done.warnings))
            continue
        yield label, out, _LOADS[engine]
        if engine == "openvino" and label.endswith("_weights"):
            yield f"{label} by the engine's defaults", out, _by_default
        out.unlink()


def _openvino(settings: Callable[[Path], dict[str, object]]) -> _Load:
    def load(path: Path) -> _Run:
        stated = settings(path) | {"INFERENCE_NUM_THREADS": 1}
        request = openvino.Core().compile_model(path, "CPU", stated).create_infer_request()
        return lambda x: request.infer({"x": x})[0].copy()

    return load


def _stated(path: Path) -> dict[str, object]:
    """The settings that finecast prints for the file."""
    return dict(openvino_settings("f32", path.stem.partition("-")[2].split()))


_hinted: Final = _openvino(lambda path: dict(openvino_settings("bf16")))
_by_default: Final = _openvino(lambda path: {"INFERENCE_PRECISION_HINT": "f32"})


def _onnxruntime(path: Path) -> _Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in ONNXRUNTIME_CHANGED.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: np.asarray(session.run(None, {"x": x})[0])


_LOADS: Final[dict[str, _Load]] = {
    "openvino": _openvino(_stated),
    "onnxruntime": _onnxruntime,
}


def _compare(
    what: str, runs: dict[str, _Run], x: Array, turns: int, sizes: dict[str, float]
) -> None:
    """Time all ways in turns; a figure for each but fp32, the first."""
    outputs = {name: run(x).astype(np.float64) for name, run in runs.items()}
    other, times = np.ones(_CACHE_BYTES // 8), {name: list[float]() for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            other.sum()
            start = time.process_time()
            run(x)
            times[name].append(time.process_time() - start)
    found = {name: median(seen) for name, seen in times.items()}
    exact, best_s = outputs["fp32"], min(found.values())
    for name, took_s in found.items():
        if name == "fp32":
            continue
        error = float(np.linalg.norm(outputs[name] - exact) / np.linalg.norm(exact))
        report(
            what, f"{name} against fp32", round(found["fp32"] / took_s, 3), "x",
            bar=1.0, at_least=True, of_best=round(best_s / took_s, 3),
            ms=round(1e3 * took_s, 3), fp32_ms=round(1e3 * found["fp32"], 3),
            mb=sizes[name], error=round(error, 4),
        )  # fmt: skip


if __name__ == "__main__":
    main()
