"""Small ONNX models, and models planted so that one property of a device decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    outputs: dict[str, Sequence[int | str]],
    constants: Mapping[str, NDArray[Any]],
    opset: int = 17,
) -> Path:
    """Write a model whose inputs and outputs are fp32."""

    def ports(shapes: dict[str, Sequence[int | str]]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s))
            for n, s in shapes.items()
        ]

    graph = helper.make_graph(
        list(nodes),
        "g",
        ports(inputs),
        ports(outputs),
        initializer=[numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        kind, inputs.split(), [output], name=f"{output}_node", **attributes
    )


def mlp(path: Path) -> Path:
    """Product, bias, GELU written out, layer norm, softmax."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((16, 32)).astype(np.float32),
        "b": rng.standard_normal(32).astype(np.float32),
        "v": rng.standard_normal((32, 8)).astype(np.float32) * np.float32(0.2),
        "g": np.ones(32, np.float32) * np.float32(1.1),
        "h": rng.standard_normal(32).astype(np.float32),
        "root": np.array(2**0.5, np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
    }
    nodes = [
        node("MatMul", "x w", "m"),
        node("Add", "m b", "a"),
        node("Div", "a root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "p"),
        node("Mul", "a p", "q"),
        node("Mul", "q half", "gelu"),
        node("LayerNormalization", "gelu g h", "n", axis=-1),
        node("Transpose", "n", "t", perm=[0, 1]),
        node("MatMul", "t v", "z"),
        node("Softmax", "z", "y", axis=-1),
    ]
    return save(path, nodes, {"x": ["n", 16]}, {"y": ["n", 8]}, weights)


def lossless_transpose(path: Path) -> Path:
    """The largest of close numbers, read after a transpose: fp16 and bf16 make them equal.

    Nothing else rounds: there is no product, so in scope matmult only transposes do.
    """
    nodes = [
        node("Transpose", "x", "t", perm=[0, 2, 1]),
        node("ReduceMean", "t", "y", axes=[1], keepdims=0),
    ]
    return save(path, nodes, {"x": ["n", 4, 1]}, {"y": ["n", 4]}, {})


def labelled_ties(samples: int = 64) -> tuple[Floats, NDArray[np.int64]]:
    """Rows whose largest element leads by 2^-13, below half a step of fp16 at 1."""
    rng = np.random.default_rng(1)
    labels = rng.integers(1, 4, samples)
    x = np.ones((samples, 4), np.float32)
    x[np.arange(samples), labels] += np.float32(2.0**-13)
    return x, labels


def masked(path: Path) -> Path:
    """A mask of -Inf goes through a transpose of the matmul engine, then a softmax."""
    nodes = [
        node("Add", "x mask", "s"),
        node("Transpose", "s", "t", perm=[0, 2, 1]),
        node("Softmax", "t", "p", axis=1),
        node("ReduceSum", "p axes", "y", keepdims=0),
    ]
    mask = np.zeros((1, 4, 4), np.float32)
    mask[0, :, 3] = -np.inf
    constants = {"mask": mask, "axes": np.array([2], np.int64)}
    return save(path, nodes, {"x": ["n", 4, 4]}, {"y": ["n", 4]}, constants)


def scaled_product(path: Path, scale: float) -> Path:
    """x times ``scale`` through a product, and back: what is needed is range."""
    constants = {
        "w": np.eye(4, dtype=np.float32) * np.float32(scale),
        "u": np.array(1 / scale, np.float32),
    }
    nodes = [node("MatMul", "x w", "m"), node("Mul", "m u", "y")]
    return save(path, nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, constants)


def range_and_digits(path: Path, size: int = 256) -> Path:
    """One branch needs fp16's digits, the other bf16's range: see ``scaled_product``."""
    one = np.eye(size, dtype=np.float32)
    constants = {
        "w": one * np.float32(2.0**18),
        "u": np.array(2.0**-18, np.float32),
        "v": one,
    }
    nodes = [
        node("MatMul", "x w", "scaled"),
        node("Mul", "scaled u", "wide"),
        node("MatMul", "z v", "fine"),
        node("Concat", "wide fine", "y", axis=1),
    ]
    return save(
        path, nodes, {"x": ["n", size], "z": ["n", size]}, {"y": ["n", 2 * size]}, constants
    )


def plain_product(path: Path) -> Path:
    """x through a product with one: what is needed is digits."""
    constants = {"w": np.eye(4, dtype=np.float32)}
    return save(
        path, [node("MatMul", "x w", "y")], {"x": ["n", 4]}, {"y": ["n", 4]}, constants
    )
