"""Builds a TensorRT engine of the ONNX model beside this file, times and verifies it.

The text of this module is what is exported, with a docstring of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt  # pyright: ignore[reportMissingImports]
import torch

MODEL = Path(__file__).with_suffix(".onnx")
# One switch for all products in FP32; TensorRT has it on by default.
TF32 = False
SIZE = 1
"""What stands for sizes that are not fixed, where no data is given."""
ROUNDS = 200
TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's types by the names that TensorRT has for its own."""


def build(path: Path, shapes: Mapping[str, tuple[int, ...]], *, tf32: bool) -> Any:
    """An engine of the model at ``path``, for inputs of these shapes.

    No flag of the builder states a precision: types are those of the model.
    """
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    # TensorRT 11 has strongly typed networks alone; 10 has them by this flag.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = "\n".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        sys.exit(f"TensorRT cannot read {path}:\n{errors}")
    config = builder.create_builder_config()
    if not tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, shape in shapes.items():
        profile.set_shape(name, shape, shape, shape)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        sys.exit(f"TensorRT cannot build {path}: its messages above say why")
    return trt.Runtime(logger).deserialize_cuda_engine(plan)


class TimedEngine:
    """An engine with its inputs and outputs on the GPU."""

    def __init__(self, engine: Any, inputs: Mapping[str, torch.Tensor]) -> None:
        self.engine = engine
        self.context = engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        self.tensors: dict[str, torch.Tensor] = {}
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        for name in names:
            if name in inputs:
                self.tensors[name] = inputs[name].cuda()
                self.context.set_input_shape(name, tuple(inputs[name].shape))
        self.outputs = [name for name in names if name not in inputs]
        for name in self.outputs:
            shape = tuple(self.context.get_tensor_shape(name))
            dtype = TYPES[engine.get_tensor_dtype(name).name]
            self.tensors[name] = torch.empty(shape, dtype=dtype, device="cuda")
        for name, tensor in self.tensors.items():
            self.context.set_tensor_address(name, tensor.data_ptr())
        torch.cuda.synchronize()

    def run(self) -> dict[str, torch.Tensor]:
        """Outputs by name."""
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            sys.exit("TensorRT failed while it ran the engine")
        self.stream.synchronize()
        return {name: self.tensors[name].clone() for name in self.outputs}

    def time_ms(self) -> float:
        """The median time of a call."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
        for _ in range(ROUNDS // 10):
            self.run()
        for mark in marks[:-1]:
            mark.record(self.stream)
            self.context.execute_async_v3(self.stream.cuda_stream)
        marks[-1].record(self.stream)
        self.stream.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return float(np.median(times))


def inputs_of(path: Path, data: Path | None) -> dict[str, torch.Tensor]:
    """Inputs of the model at ``path``: of a file, or normally distributed.

    Integers are 0 where there is no data.
    """
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        sys.exit(f"TensorRT cannot read {path}")
    known = {} if data is None else dict(np.load(data, allow_pickle=False))
    draw = torch.Generator().manual_seed(0)
    inputs: dict[str, torch.Tensor] = {}
    for i in range(network.num_inputs):
        port = network.get_input(i)
        dtype = TYPES[port.dtype.name]
        shape = [size if size >= 0 else SIZE for size in port.shape]
        if data is not None and port.name not in known:
            sys.exit(f"{data} has no array {port.name!r}, which the model reads")
        if data is not None:
            inputs[port.name] = torch.from_numpy(known[port.name]).to(dtype).contiguous()
        elif dtype.is_floating_point:
            inputs[port.name] = torch.randn(shape, generator=draw).to(dtype)
        else:
            inputs[port.name] = torch.zeros(shape, dtype=dtype)
    return inputs


def error(low: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of an output."""
    wide = exact.double()
    size = float(wide.norm())
    return float((low.double() - wide).norm()) / (size or 1.0)


def main() -> None:
    """Build both engines, time them, and compare their outputs."""
    parser = argparse.ArgumentParser(description="Build, time and verify a TensorRT engine.")
    parser.add_argument("fp32", type=Path, help="the model in FP32, as ONNX")
    parser.add_argument("--data", type=Path, help="an npz file with an array for each input")
    parser.add_argument("--max-error", type=float, help="fail if an output is further off")
    parser.add_argument("--save", type=Path, help="where the engine is written")
    options = parser.parse_args()
    inputs = inputs_of(options.fp32, options.data)
    shapes = {name: tuple(array.shape) for name, array in inputs.items()}
    engine = build(MODEL, shapes, tf32=TF32)
    if options.save:
        options.save.write_bytes(engine.serialize())
    low = TimedEngine(engine, inputs)
    exact = TimedEngine(build(options.fp32, shapes, tf32=False), inputs)
    found, wanted = low.run(), exact.run()
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    fast_ms, exact_ms = low.time_ms(), exact.time_ms()
    print(f"fp32 {exact_ms:.3f} ms, this model {fast_ms:.3f} ms: x{exact_ms / fast_ms:.2f}")  # noqa: T201
    for name, off in errors.items():
        print(f"{name}: relative error {off:.3g}")  # noqa: T201
    worst = max(errors.values(), default=0.0)
    if not np.isfinite(worst) or (options.max_error is not None and worst > options.max_error):
        sys.exit(f"relative error {worst:.3g}, and at most {options.max_error} was asked for")


if __name__ == "__main__":
    main()
