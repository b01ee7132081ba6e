"""ONNX files of a model's text and of weights that are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser


def write_drawn(path: Path, text: str, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write the model of ``text``, its weights drawn so that sums keep their scale."""
    made = parser.parse_model(text)
    draw = np.random.default_rng(1)
    for name, shape in shapes.items():
        array = draw.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 4))
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, path)
    return path
