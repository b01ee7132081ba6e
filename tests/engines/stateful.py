"""OpenVINO models that keep a state from one run to the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from finecast.engines.base import Array

WIDTH, HEADS = 32, 2


def _constant(rng: np.random.Generator, *shape: int) -> Any:
    from openvino import opset13 as ops

    scaled = rng.standard_normal(shape) / np.sqrt(shape[0])
    return ops.constant(scaled.astype(np.float32))


def accumulator(width: int = WIDTH) -> Any:
    """``y = tanh(x w + s u) v`` with ``s`` the ``tanh`` of the step before, at first zeros."""
    import openvino as ov
    from openvino import opset13 as ops

    rng = np.random.default_rng(0)
    x = ops.parameter([-1, width], np.float32, name="x")
    x.output(0).set_names({"x"})
    rows = ops.gather(ops.shape_of(x, output_type="i64"), ops.constant([0]), ops.constant(0))
    shape = ops.concat([rows, ops.constant(np.array([width]))], 0)
    zeros = ops.broadcast(ops.constant(np.float32(0)), shape)
    state = ov.op.util.VariableInfo()
    state.data_shape = ov.PartialShape([-1, width])
    state.data_type = ov.Type.f32
    state.variable_id = "state"
    variable = ov.op.util.Variable(state)
    read = ops.read_value(zeros, variable)
    first = ops.matmul(x, _constant(rng, width, width), False, False, name="first")
    again = ops.matmul(read, _constant(rng, width, width), False, False, name="again")
    step = ops.tanh(ops.add(first, again, name="sum"), name="step")
    y = ops.matmul(step, _constant(rng, width, width), False, False, name="last")
    y.output(0).set_names({"y"})
    model: Any = ov.Model  # its stubs know no list of sinks
    return model([ops.result(y)], [ops.assign(step, variable)], [x], "accumulator")


def decoder(width: int = WIDTH, heads: int = HEADS) -> Any:
    """A block of attention whose keys and values of all steps so far are a state."""
    import openvino as ov
    from openvino import opset13 as ops

    rng = np.random.default_rng(0)
    size = width // heads
    x = ops.parameter([-1, -1, width], np.float32, name="x")
    x.output(0).set_names({"x"})
    beam = ops.parameter([-1], np.int32, name="beam")
    beam.output(0).set_names({"beam"})
    batch = ops.gather(ops.shape_of(x, output_type="i64"), ops.constant([0]), ops.constant(0))
    empty = ops.concat(
        [batch, ops.constant(np.array([heads])), ops.constant([0]), ops.constant([size])], 0
    )

    def split(name: str) -> Any:
        flat = ops.matmul(x, _constant(rng, width, width), False, False, name=name)
        parts = ops.reshape(flat, ops.constant(np.array([0, 0, heads, size])), True)
        return ops.transpose(parts, ops.constant(np.array([0, 2, 1, 3])))

    sinks: list[Any] = []

    def cached(name: str) -> Any:
        info = ov.op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, size])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_{name}"
        variable = ov.op.util.Variable(info)
        read = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), empty), variable)
        past = ops.gather(read, beam, ops.constant(0))
        joined = ops.concat([past, split(name)], 2)
        sinks.append(ops.assign(joined, variable))
        return joined

    found = ops.scaled_dot_product_attention(
        split("query"), cached("key"), cached("value"), causal=False, name="attention"
    )
    merged = ops.transpose(found, ops.constant(np.array([0, 2, 1, 3])))
    flat = ops.reshape(merged, ops.constant(np.array([0, 0, width])), True)
    y = ops.matmul(flat, _constant(rng, width, width), False, False, name="out")
    y.output(0).set_names({"y"})
    model: Any = ov.Model  # its stubs know no list of sinks
    return model([ops.result(y)], sinks, [x, beam], "decoder")


def steps(count: int, width: int = WIDTH, seed: int = 1) -> list[dict[str, Array]]:
    """Inputs of as many steps of ``decoder``, of one sample."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.standard_normal((1, 1, width)).astype(np.float32),
            "beam": np.zeros(1, np.int32),
        }
        for _ in range(count)
    ]
