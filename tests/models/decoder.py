"""A small decoder with a cache of keys and values, as exporters of language models write it.

Its outputs are the logits and, for each layer, ``present.N.key`` and ``present.N.value``: the
cache that came in, with a few new rows behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from finecast.engines.base import Array

LAYERS, HEADS, SIZE, VOCABULARY = 2, 4, 16, 512
HIDDEN = HEADS * SIZE
CACHES = tuple(f"{n}.{kind}" for n in range(LAYERS) for kind in ("key", "value"))
PRESENTS = tuple(f"present.{name}" for name in CACHES)


def decoder(seed: int = 0) -> onnx.ModelProto:
    """The model: token ids and past keys and values in, logits and present ones out."""
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, array: Array) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(name: str, *shape: int) -> str:
        scale = 1 / np.sqrt(shape[0])
        return weight(name, (scale * rng.standard_normal(shape)).astype(np.float32))

    def op(kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    split = weight("split", np.array([0, 0, HEADS, SIZE]))
    joined = weight("joined", np.array([0, 0, HIDDEN]))
    scale = weight("scale", np.array(SIZE**-0.5, np.float32))
    x = op("Gather", "embedded", normal("table", VOCABULARY, HIDDEN), "ids")
    for n in range(LAYERS):
        heads: dict[str, str] = {}
        for kind in ("query", "key", "value"):
            product = op("MatMul", f"{n}.{kind}", x, normal(f"{n}.{kind}.w", HIDDEN, HIDDEN))
            parts = op("Reshape", f"{n}.{kind}.parts", product, split)
            heads[kind] = op("Transpose", f"{n}.{kind}.heads", parts, perm=[0, 2, 1, 3])
        for kind in ("key", "value"):
            past = f"past.{n}.{kind}"
            heads[kind] = op("Concat", f"present.{n}.{kind}", past, heads[kind], axis=2)
        keys = op("Transpose", f"{n}.keys", heads["key"], perm=[0, 1, 3, 2])
        scores = op("Mul", f"{n}.scaled", op("MatMul", f"{n}.qk", heads["query"], keys), scale)
        chances = op("Softmax", f"{n}.softmax", scores, axis=-1)
        mixed = op("MatMul", f"{n}.mixed", chances, heads["value"])
        rows = op("Transpose", f"{n}.rows", mixed, perm=[0, 2, 1, 3])
        flat = op("Reshape", f"{n}.flat", rows, joined)
        out = op("MatMul", f"{n}.out", flat, normal(f"{n}.out.w", HIDDEN, HIDDEN))
        x = op("Add", f"{n}.added", x, out)
        wide = op("MatMul", f"{n}.wide", x, normal(f"{n}.wide.w", HIDDEN, 4 * HIDDEN))
        narrow = normal(f"{n}.narrow.w", 4 * HIDDEN, HIDDEN)
        x = op(
            "Add",
            f"{n}.after",
            x,
            op("MatMul", f"{n}.mlp", op("Relu", f"{n}.relu", wide), narrow),
        )
    op("MatMul", "logits", x, normal("head", HIDDEN, VOCABULARY))

    def port(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        kind = TensorProto.INT64 if name == "ids" else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            port("ids", "batch", "new"),
            *(port(f"past.{name}", "batch", HEADS, "past", SIZE) for name in CACHES),
        ],
        [
            port("logits", "batch", "new", VOCABULARY),
            *(port(name, "batch", HEADS, "all", SIZE) for name in PRESENTS),
        ],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def decoder_data(samples: int = 8, past: int = 128, new: int = 4) -> dict[str, Array]:
    """Arrays for the inputs: past keys and values are several times what a layer computes."""
    rng = np.random.default_rng(1)
    arrays: dict[str, Array] = {"ids": rng.integers(0, VOCABULARY, (samples, new))}
    for name in CACHES:
        cache = 4 * rng.standard_normal((samples, HEADS, past, SIZE))
        arrays[f"past.{name}"] = cache.astype(np.float32)
    return arrays
