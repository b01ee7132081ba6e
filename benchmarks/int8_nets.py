"""ResNet-50 as a topology: its shapes, seeded weights, batch norms folded away."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Blocks and inner channels of the four stages.
_STAGES: Final = ((3, 64), (4, 128), (6, 256), (3, 512))
# Gain of a block's last weights: with 1 the residual stream, which has no norms, would grow.
_LAST: Final = 0.3


class _Net:
    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def conv(
        self, x: str, shape: tuple[int, int, int], *, stride: int = 1, gain: float = 1.0
    ) -> str:
        """A convolution of (results, operands, width of the kernel)."""
        out, into, width = shape
        name = f"conv{len(self.weights) // 2}"
        spread = gain * np.sqrt(2 / (into * width * width))
        array = spread * self.draw.standard_normal((out, into, width, width))
        self._constant(f"{name}.w", array)
        self._constant(f"{name}.b", 0.1 * self.draw.standard_normal(out))
        pads = [width // 2] * 4
        inputs = [x, f"{name}.w", f"{name}.b"]
        return self.op("Conv", inputs, name, strides=[stride] * 2, pads=pads)

    def op(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node; it and its result are called ``name``."""
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def _constant(self, name: str, array: np.ndarray) -> None:
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))

    def block(self, x: str, into: int, inner: int, stride: int) -> str:
        """A bottleneck with its skip."""
        place = f"block{len(self.nodes)}"
        a = self.op("Relu", [self.conv(x, (inner, into, 1))], f"{place}.relu1")
        b = self.conv(a, (inner, inner, 3), stride=stride)
        b = self.op("Relu", [b], f"{place}.relu2")
        c = self.conv(b, (4 * inner, inner, 1), gain=_LAST)
        if into != 4 * inner:
            x = self.conv(x, (4 * inner, into, 1), stride=stride)
        added = self.op("Add", [c, x], f"{place}.add")
        return self.op("Relu", [added], f"{place}.relu3")


def resnet50(path: Path) -> None:
    """Write the model: ``x`` [n, 3, 224, 224] to ``y`` [n, 1000]."""
    net = _Net()
    x = net.op("Relu", [net.conv("x", (64, 3, 7), stride=2)], "stem")
    x = net.op("MaxPool", [x], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    into = 64
    for stage, (blocks, inner) in enumerate(_STAGES):
        for number in range(blocks):
            x = net.block(x, into, inner, 2 if stage and not number else 1)
            into = 4 * inner
    x = net.op("Flatten", [net.op("GlobalAveragePool", [x], "average")], "flat")
    head = 0.02 * net.draw.standard_normal((1000, into))
    net.weights.append(numpy_helper.from_array(head.astype(np.float32), "head.w"))
    net.op("Gemm", [x, "head.w"], "y", transB=1)
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 224, 224])
    scores = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1000])
    graph = helper.make_graph(net.nodes, "resnet50", [image], [scores], net.weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
