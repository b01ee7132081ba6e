"""Small detectors, whose boxes and scores lie in one output or in several.

Each place of a sample has a box and scores whose logits are small beside their bias, so that
formats of few digits change classes long before boxes move. ``pixels`` has the form of YOLO's:
boxes of 80 to 160 pixels beside the chances of classes, of which few are large.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from tests.frontends.tools import parse

WIDTH: Final = 32
PLACES: Final = 24
CLASSES: Final = 10
IMAGE: Final = 400.0

_HEADS: Final = """
    h = Relu(a) b = MatMul(h, wb) s = MatMul(h, ws) bs = Reshape(b, shape_b)
    ss = Reshape(s, shape_s) sb = Add(ss, bias) scores = Sigmoid(sb) t = Sigmoid(bs)
    middle, half = Split <axis = 2, num_outputs = 2> (t) size = Mul(half, tenth)
    first = Sub(middle, size) second = Add(middle, size)
    near = Concat <axis = 2> (first, second)"""
_PIXELS: Final = "boxes = Mul(near, image)"
# Rows of all places whose best score is beyond a threshold: a box, its score and its class.
_ROWS: Final = """
    best = ReduceMax <keepdims = 1> (scores, axes)
    kind = ArgMax <axis = 2, keepdims = 1> (scores) number = Cast <to = 1> (kind)
    every = Concat <axis = 2> (boxes, best, number) flat = Reshape(every, shape_rows)
    one = Reshape(best, shape_flat) over = Greater(one, threshold)
    rows = Compress <axis = 0> (flat, over)"""
FORMS: Final = {
    "apart": (_PIXELS, ("boxes", "scores")),
    "scores first": (_PIXELS, ("scores", "boxes")),
    "normalized": (
        "boxes = Identity(near) y = Concat <axis = 2> (boxes, scores)",
        ("y",),
    ),
    "pixels": (
        """wide = Add(size, tenth) left = Sub(middle, wide) right = Add(middle, wide)
        ends = Concat <axis = 2> (left, right) boxes = Mul(ends, image)
        y = Concat <axis = 2> (boxes, scores)""",
        ("y",),
    ),
    "centres": (
        "boxes = Identity(t) y = Concat <axis = 2> (boxes, scores)",
        ("y",),
    ),
    "rows": (_PIXELS + _ROWS, ("rows",)),
    "fixed rows": (_PIXELS + _ROWS, ("every",)),
}
"""What follows the heads, and the outputs."""
_SHAPES: Final = {
    "boxes": ["n", PLACES, 4],
    "scores": ["n", PLACES, CLASSES],
    "y": ["n", PLACES, 4 + CLASSES],
    "rows": ["m", 6],
    "every": ["n", PLACES, 6],
}


def detector(form: str) -> onnx.ModelProto:
    """A detector with its outputs in one of ``FORMS``."""
    rng = np.random.default_rng(0)
    after, outputs = FORMS[form]
    # As those of a trained detector: sure of most places, and near no other class.
    spread, bias = (4.8, -8.0) if form == "pixels" else (24.0, -5.0)
    ports = ", ".join(
        f"float[{', '.join(map(str, _SHAPES[name]))}] {name}" for name in outputs
    )
    model = parse(
        f"net (float[n, {WIDTH}] x) => ({ports}) {{ a = MatMul(x, w) {_HEADS} {after} }}",
        opset=18,
    )
    arrays = {
        "w": rng.standard_normal((WIDTH, 128)) / 6,
        "wb": rng.standard_normal((128, PLACES * 4)) / 8,
        "ws": rng.standard_normal((128, PLACES * CLASSES)) / spread,
        "bias": np.array(bias),
        "tenth": np.array(0.1),
        "image": np.array(IMAGE),
        "threshold": np.array(0.012),
    }
    shapes = {
        "shape_b": [-1, PLACES, 4],
        "shape_s": [-1, PLACES, CLASSES],
        "shape_rows": [-1, 6],
        "shape_flat": [-1],
        "axes": [2],
    }
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in arrays.items()
        if name in used
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(shape, np.int64), name)
        for name, shape in shapes.items()
        if name in used
    )
    return model


def samples(count: int = 48) -> dict[str, NDArray[np.float32]]:
    """What it is given."""
    rng = np.random.default_rng(1)
    return {"x": 2 * rng.standard_normal((count, WIDTH)).astype(np.float32)}
