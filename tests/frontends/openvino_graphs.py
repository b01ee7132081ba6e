"""Small OpenVINO models, random and known, for the tests of their frontend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op

WIDTH = 8
CONFIG = {"INFERENCE_PRECISION_HINT": "f32"}


def model_of(results: list[Any], inputs: list[Any]) -> openvino.Model:
    """A model; the type of ``openvino.Model`` has no constructor that a checker knows."""
    make: Any = openvino.Model
    made: openvino.Model = make(results, inputs, "net")
    return made


def chain(seed: int = 0) -> openvino.Model:
    """softmax(relu(x @ w + b) @ v), with a name for each op; ``x`` is [?, 8]."""
    rng = np.random.default_rng(seed)
    w, v = (rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2))
    x = op.parameter([-1, WIDTH], np.float32, name="x")
    first = op.matmul(x, op.constant(w, name="w"), False, False, name="first")
    added = op.add(first, op.constant(rng.normal(size=WIDTH).astype(np.float32)), name="bias")
    second = op.matmul(
        op.relu(added, name="relu"), op.constant(v), False, False, name="second"
    )
    last = op.softmax(second, -1, name="softmax")
    last.output(0).set_names({"y", "probabilities"})
    return model_of([last], [x])


def random_model(seed: int) -> openvino.Model:
    """A graph of 5 to 20 ops on [?, 8], with shared values, two outputs and integer parts."""
    rng = np.random.default_rng(seed)
    inputs = [op.parameter([-1, WIDTH], np.float32, name=f"in{i}") for i in range(2)]
    values: list[Any] = [node.output(0) for node in inputs]
    for number in range(int(rng.integers(5, 20))):
        made = _random_op(rng, values)
        made.set_friendly_name(f"op{number}")
        values += [made.output(i) for i in range(made.get_output_size())]
        values = [v for v in values if v.get_element_type() == openvino.Type.f32]
    ends = [op.relu(value) for value in values[-2:]]
    for number, end in enumerate(ends):
        end.set_friendly_name(f"end{number}")
        end.output(0).set_names({f"out{number}"})
    return model_of(ends, inputs)


def _random_op(rng: np.random.Generator, values: list[Any]) -> Any:
    def pick() -> Any:
        return values[int(rng.integers(len(values)))]

    weights = (rng.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32)
    row = rng.normal(size=(1, WIDTH)).astype(np.float32)
    half = op.split(pick(), op.constant(1), 2)
    kinds = (
        lambda: op.matmul(pick(), op.constant(weights), False, bool(rng.integers(2))),
        lambda: op.add(pick(), pick()),
        lambda: op.multiply(pick(), op.constant(row)),
        lambda: op.subtract(pick(), op.constant(row)),
        lambda: op.tanh(pick()),
        lambda: op.softmax(pick(), -1),
        lambda: op.concat([half.output(1), half.output(0)], 1),
        lambda: op.reshape(op.reshape(pick(), [-1, 2, 4], False), [-1, WIDTH], False),
        lambda: op.select(op.greater(pick(), pick()), pick(), pick()),
        lambda: op.add(pick(), op.reduce_mean(pick(), op.constant([1]), True)),
        lambda: op.convert(op.convert(pick(), "i32"), "f32"),
        lambda: op.clamp(pick(), -1.0, 1.0),
    )
    return kinds[int(rng.integers(len(kinds)))]()


def run(model: openvino.Model | Path, feeds: dict[str, Any]) -> dict[str, Any]:
    """Outputs by name, in the types that the model states."""
    compiled = openvino.Core().compile_model(model, "CPU", CONFIG)
    found = compiled(feeds)
    return {port.get_any_name(): found[port] for port in compiled.outputs}


def feeds_of(model: openvino.Model, seed: int = 0) -> dict[str, Any]:
    """A batch of 5 for every input."""
    rng = np.random.default_rng(seed)
    shapes = {
        port.get_any_name(): [
            5 if d.is_dynamic else d.get_length() for d in port.partial_shape
        ]
        for port in model.inputs
    }
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
