"""Residual nets of many small ops, some of which are planted to need fp32.

A block adds to its input a small product of two matrix products. The sensitive ops are pairs:
the addition of one large number, and a product with a matrix whose columns sum to 0, so that
the large number cancels. In 8 or 11 bits of precision nothing is left of what it was added to.
Everything else bears low precision, so that the best plan is known by construction: all but
the pairs. A subtraction would not do: engines fuse it with the addition, and compute both in
fp32 under any hint. The number depends on the data, so that no compiler folds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_WIDTH: Final = 128
_ROWS: Final = 64
_CALLS: Final = 57  # of which 32, or 2,048 samples, are held
_CLASSES: Final = 16
_BLOCK: Final = 6  # ops of a block
_PAIR_EVERY: Final = 20  # blocks
# Times the mean size of the inputs: there bf16's numbers are 8 or 16 apart, fp16's 1 or 2, and
# the values that pass are about 1.
_LARGE: Final = 3000.0


def write(ops: int, path: Path) -> tuple[NDArray[np.float32], int]:
    """Write a net of about ``ops`` ops.

    Returns:
        Inputs of some calls, and how many ops are sensitive.
    """
    draw = np.random.default_rng(ops)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, array: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weights(name: str, columns: int = _WIDTH) -> str:
        drawn = draw.standard_normal((_WIDTH, columns)) / np.sqrt(_WIDTH)
        return constant(name, drawn)

    # Small branches keep the residual stream's size; together they change it altogether.
    scale = constant("scale", 2 / np.sqrt(ops / _BLOCK))
    value, sensitive, block = "x", 0, 0
    large = op("Mul", op("ReduceMean", op("Abs", "x"), axes=[1]), constant("large", _LARGE))
    while len(nodes) < ops - 1:
        inner = op("MatMul", value, weights(f"w{block}"))
        inner = op("Relu", op("Add", inner, constant(f"b{block}", np.full(_WIDTH, 0.01))))
        inner = op("MatMul", inner, weights(f"v{block}"))
        if block % _PAIR_EVERY == 3:
            drawn = draw.standard_normal((_WIDTH, _WIDTH)) / np.sqrt(_WIDTH)
            cancels = constant(f"c{block}", drawn - drawn.mean(axis=0))
            inner = op("MatMul", op("Add", inner, large), cancels)
            sensitive += 2
        value = op("Add", value, op("Mul", inner, scale))
        block += 1
    op("MatMul", value, weights("head", _CLASSES))
    nodes[-1].output[0] = "scores"
    graph = helper.make_graph(
        nodes, "synthetic",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [_ROWS, _WIDTH])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [_ROWS, _CLASSES])],
        constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return draw.standard_normal((_CALLS, _ROWS, _WIDTH), np.float32), sensitive
