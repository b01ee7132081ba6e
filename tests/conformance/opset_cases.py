"""Ops that opsets define anew, each written as one small model for many opsets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import parser

FIRST: Final = 7
"""The first opset that is looked at: ONNX Runtime runs no model of an earlier one."""
LAST: Final = 24
"""The last opset that a model is raised to."""

IMAGE: Final = "float[1, 4, 9, 9] x"
_BOX: Final = "float[2, 3, 4] x"
_SCALES = "float[4] s = {1, 1, 2, 3}"
_CROPPED = 'coordinate_transformation_mode = "tf_crop_and_resize"'
_BY_CHANNEL = "float[4] s = {1, 2, 3, 4}"
# Each a constant of its own: ONNX Runtime overwrites the mean and the variance as it trains.
_NORM = (
    f"{_BY_CHANNEL}, float[4] c = {{3, 1, 2, 1}}, "
    "float[4] n = {1, 0, 2, 1}, float[4] u = {2, 3, 1, 2}"
)
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
    *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)


@dataclass(frozen=True, kw_only=True)
class OpsetCase:
    """One op, and the opsets at which it can be written so.

    Attributes:
        text: The op, in the syntax of ``onnx.parser``.
        first: The first opset.
        last: The last opset; 0 if there is none.
        given: The input.
        constants: The initializers.
    """

    text: str
    first: int = 1
    last: int = 0
    given: str = IMAGE
    constants: str = ""

    @property
    def op(self) -> str:
        """The op that it is about: the first one."""
        return _ops(self.text)[0]

    @property
    def opsets(self) -> Sequence[int]:
        """The opsets, from ``FIRST`` to ``last``, at which the op is defined anew."""
        return _defined_anew(self.text, max(self.first, FIRST), self.last or LAST)

    @property
    def later(self) -> Sequence[int]:
        """The opsets, from the first one to ``LAST``, at which the op is defined anew."""
        first = self.opsets[0]
        return sorted({*_defined_anew(self.text, first, LAST), LAST})

    @property
    def outputs(self) -> Sequence[str]:
        """What the last op gives."""
        return [n.strip() for n in self.text.rpartition("\n")[2].partition("=")[0].split(",")]

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the input."""
        numbers = self.given.partition("[")[2].partition("]")[0]
        return [int(n) for n in numbers.split(",") if n.strip()]

    def model(self, opset: int) -> onnx.ModelProto:
        """The model at ``opset``."""
        ends = ", ".join(f"float[] {name}" for name in self.outputs)
        version = 3 if opset < 13 else 10  # 3 is PyTorch's and others' of that time
        header = f'<ir_version: {version}, opset_import: ["" : {opset}]>'
        made = parser.parse_model(
            f"{header} g ({self.given}) => ({ends}) <{self.constants}> {{ {self.text} }}"
        )
        for tensor in made.graph.initializer if version < 4 else ():
            made.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        for end in made.graph.output:
            end.ClearField("type")
        found = onnx.shape_inference.infer_shapes(made)
        for end in found.graph.output:
            if not end.HasField("type"):
                end.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        return found


def _ops(text: str) -> Sequence[str]:
    return re.findall(r"\b[A-Z]\w+(?=[<(])", text)


def _defined_anew(text: str, first: int, last: int) -> Sequence[int]:
    """``first``, and the opsets up to ``last`` at which an op of ``text`` is defined anew."""
    ops = frozenset(_ops(text))
    schemas = onnx.defs.get_all_schemas_with_history()
    versions = {s.since_version for s in schemas if s.name in ops and not s.domain}
    return sorted({first} | {v for v in versions if first < v <= last})


def _weights(*shape: int) -> str:
    numbers = ", ".join(f"{(i % 7) / 9 - 0.3:.3f}" for i in range(int(np.prod(shape))))
    return f"float[{', '.join(map(str, shape))}] w = {{{numbers}}}"


def _at(
    first: int, text: str, constants: str = "", *, last: int = 0, given: str = IMAGE
) -> OpsetCase:
    return OpsetCase(text=text, first=first, last=last, given=given, constants=constants)


def _of_attribute(op: str, last: int) -> list[OpsetCase]:
    """A reduction whose axes are an attribute, up to the opset ``last``."""
    return [
        _at(1, f"y = {op}<axes = [1]>(x)", last=last, given=_BOX),
        _at(1, f"y = {op}<axes = [0, 2], keepdims = 0>(x)", last=last, given=_BOX),
        _at(11, f"y = {op}<axes = [-1]>(x)", last=last, given=_BOX),
        _at(1, f"y = {op}(x)", last=last, given=_BOX),
    ]


def _of_input(op: str, first: int) -> list[OpsetCase]:
    """The same from the opset ``first`` on, at which the axes become an input."""
    axes = "int64[1] a = {1}"
    none = "int64[0] a = {}"
    return [
        _at(first, f"y = {op}(x, a)", axes, given=_BOX),
        _at(first, f"y = {op}<keepdims = 0>(x, a)", "int64[2] a = {0, -1}", given=_BOX),
        _at(first, f"y = {op}<noop_with_empty_axes = 1>(x, a)", none, given=_BOX),
    ]


def _reductions() -> list[OpsetCase]:
    cases: list[OpsetCase] = []
    for op in _REDUCTIONS:
        since = 13 if op == "ReduceSum" else 18
        cases += [*_of_attribute(op, since - 1), *_of_input(op, since)]
    return cases


CASES: Final[Sequence[OpsetCase]] = (
    *_reductions(),
    _at(1, "y = Squeeze<axes = [0]>(x)", last=12),
    _at(11, "y = Squeeze<axes = [-4]>(x)", last=12),
    _at(1, "y = Squeeze(x)"),
    _at(13, "y = Squeeze(x, a)", "int64[1] a = {0}"),
    _at(1, "y = Unsqueeze<axes = [0, 2]>(x)", last=12),
    _at(11, "y = Unsqueeze<axes = [-1]>(x)", last=12),
    _at(13, "y = Unsqueeze(x, a)", "int64[2] a = {0, -1}"),
    _at(2, "y, z = Split<axis = 1, split = [1, 3]>(x)", last=12),
    _at(2, "y, z = Split<axis = 1>(x)", last=17),
    _at(13, "y, z = Split<axis = 1>(x, s)", "int64[2] s = {1, 3}"),
    _at(18, "y, z = Split<axis = 2, num_outputs = 2>(x)"),
    _at(6, "y = Clip<max = 0.3>(x)", last=10),
    _at(6, "y = Clip<min = -0.5, max = 0.3>(x)", last=10),
    _at(6, "y = Clip(x)", last=10),
    _at(11, "y = Clip(x, , h)", "float h = {0.3}"),
    _at(2, 'y = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1], mode = "reflect">(x)', last=10),
    _at(2, "y = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1], value = 2.0>(x)", last=10),
    _at(2, "y = Pad<pads = [0, 0, -1, 1, 0, 0, 1, -2]>(x)", last=10),
    _at(11, "y = Pad(x, p, c)", "int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}, float c = {2}"),
    _at(18, "y = Pad(x, p, , a)", "int64[4] p = {1, 0, 1, 2}, int64[2] a = {-2, -1}"),
    _at(1, "y = Slice<starts = [1], ends = [3], axes = [2]>(x)", last=9),
    _at(1, "y = Slice<starts = [0, 1], ends = [1, -1]>(x)", last=9),
    _at(
        10,
        "y = Slice(x, b, e, a, s)",
        "int64[1] b = {7}, int64[1] e = {1}, int64[1] a = {3}, int64[1] s = {-2}",
    ),
    _at(1, "y, i = TopK<k = 3, axis = 2>(x)", last=9),
    _at(10, "y, i = TopK<axis = 2>(x, k)", "int64[1] k = {3}"),
    _at(11, "y, i = TopK<largest = 0>(x, k)", "int64[1] k = {3}"),
    _at(7, 'y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 3.0]>(x)', last=8),
    _at(7, 'y = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 1.7]>(x)', last=8),
    _at(9, 'y = Upsample<mode = "linear">(x, s)', _SCALES, last=9),
    _at(9, "y = Upsample(x, s)", "float[4] s = {1, 1, 1.5, 1.7}", last=9),
    _at(10, 'y = Resize<mode = "linear">(x, s)', _SCALES, last=10),
    _at(10, "y = Resize(x, s)", "float[4] s = {1, 1, 1.7, 2}", last=10),
    _at(10, "y = Resize(x, s)", "float[4] s = {1, 1, 0.6, 0.5}", last=10),
    _at(10, 'y = Resize<mode = "linear">(x, s)', "float[4] s = {1, 1, 0.6, 1.7}", last=10),
    _at(
        11,
        f'y = Resize<mode = "linear", {_CROPPED}>(x, r, s)',
        "float[4] s = {1, 1, 0.6, 1.6}, float[8] r = {0, 0, 0.1, 0.1, 1, 1, 0.8, 0.9}",
    ),
    _at(13, 'y = Resize<mode = "cubic">(x, , , s)', "int64[4] s = {1, 4, 13, 7}"),
    _at(7, "t = Dropout(x)\ny = Abs(t)"),
    _at(7, "t = Dropout<ratio = 0.4>(x)\ny = Abs(t)", last=11),
    _at(7, "t, m = Dropout(x)\ny = Abs(t)\nz = Cast<to = 1>(m)"),
    _at(7, "y = BatchNormalization<epsilon = 0.1>(x, s, c, n, u)", _NORM),
    _at(7, "y, m, v, sm, sv = BatchNormalization(x, s, c, n, u)", _NORM, last=13),
    _at(
        7,
        "t, m, v, a, b = BatchNormalization<momentum = 0.7>(x, s, c, n, u)\n"
        "w = Sum(m, v)\ny = Add(t, w)",
        _NORM,
        last=13,
        given="float[2, 4, 5, 4] x",
    ),
    _at(
        7,
        "t, m, v, a, b = BatchNormalization(x, s, c, n, u)\ny = Abs(t)",
        _NORM,
        last=13,
    ),
    _at(14, "y, m, v = BatchNormalization<training_mode = 1>(x, s, c, n, u)", _NORM),
    _at(1, "y = Hardmax(x)"),
    _at(1, "y = Hardmax<axis = 2>(x)"),
    _at(1, "y = Hardmax<axis = 3>(x)"),
    _at(1, "y = Softmax(x)"),
    _at(1, "y = Softmax<axis = 2>(x)"),
    _at(1, "y = LogSoftmax<axis = 3>(x)"),
    _at(1, "y = LogSoftmax<axis = 1>(x)"),
    _at(
        18,
        "y = GroupNormalization<num_groups = 2>(x, s, b)",
        "float[2] s = {1, 2}, float[2] b = {0.5, 0.1}",
        last=20,
    ),
    _at(
        16,
        'y = GridSample<mode = "bicubic">(x, r)',
        "float[1, 2, 2, 2] r = {0.1, 0.2, 0.3, -0.5, 0.9, -0.9, 0, 0}",
        last=19,
    ),
    _at(
        16,
        "y = GridSample(x, r)",
        "float[1, 2, 2, 2] r = {0.1, 0.2, 0.3, -0.5, 0.9, -0.9, 0, 0}",
    ),
    _at(
        10,
        "y = RoiAlign<output_height = 2, output_width = 2>(x, r, b)",
        "float[1, 4] r = {0, 0, 6, 6}, int64[1] b = {0}",
    ),
    _at(7, "y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)"),
    _at(10, "y = AveragePool<kernel_shape = [3, 3], ceil_mode = 1>(x)"),
    _at(7, 'y = AveragePool<kernel_shape = [3, 3], auto_pad = "SAME_UPPER">(x)'),
    _at(7, "y = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(x)"),
    _at(2, "y = LpPool<kernel_shape = [3, 3], strides = [2, 2]>(x)"),
    _at(
        7,
        "y = Gemm<alpha = 0.5>(x, w, c)",
        f"{_weights(4, 5)}, float[5] c = {{1, 2, 3, 4, 5}}",
        given="float[3, 4] x",
    ),
    _at(11, "y = Gemm<alpha = 0.5>(x, w)", _weights(4, 5), given="float[3, 4] x"),
    _at(7, "y = PRelu(x, s)", "float[4, 1, 1] s = {1, 2, 3, 4}"),
    _at(1, "y = Flatten(x)"),
    _at(11, "y = Flatten<axis = -2>(x)"),
    _at(1, "y = DepthToSpace<blocksize = 2>(x)"),
    _at(1, "y = SpaceToDepth<blocksize = 3>(x)"),
    _at(
        9,
        "y = Scatter<axis = 2>(x, i, u)",
        "int64[1, 4, 1, 1] i = {0, 1, 2, 3}, float[1, 4, 1, 1] u = {9, 9, 9, 9}",
        last=10,
    ),
    _at(
        11,
        "y = ScatterElements<axis = 2>(x, i, u)",
        "int64[1, 4, 1, 1] i = {0, 1, 2, 3}, float[1, 4, 1, 1] u = {9, 9, 9, 9}",
    ),
    _at(1, "y = ArgMax<axis = 1>(x)"),
    _at(1, "y = ArgMin<axis = 2, keepdims = 0>(x)"),
    _at(5, "y = Reshape(x, s)", "int64[2] s = {0, -1}"),
    _at(6, "y = InstanceNormalization(x, s, s)", _BY_CHANNEL),
    _at(9, "y = MeanVarianceNormalization(x)"),
    _at(1, "y = LRN<size = 3>(x)"),
    _at(1, "y = LpNormalization<axis = 1>(x)"),
    _at(7, "y = Pow(x, e)", "float e = {2}"),
    _at(8, "y = Max(x, h)", "float h = {0.3}"),
    _at(8, "y = Mean(x, h)", "float h = {0.3}"),
    _at(11, "y = CumSum(x, a)", "int64 a = {2}"),
    _at(
        9,
        "y = OneHot<axis = -1>(i, d, v)",
        "int64[3] i = {0, 7, 2}, int64 d = {10}, float[2] v = {0, 1}",
    ),
    _at(17, "y = DFT<axis = 1>(x)", given="float[1, 8, 1] x", last=19),
    _at(20, "y = DFT(x, , a)", "int64 a = {1}", given="float[1, 8, 1] x"),
    _at(
        7,
        "y, h, c = LSTM<hidden_size = 4>(x, w, r)",
        f"{_weights(1, 16, 3)}, {_weights(1, 16, 4).replace(' w ', ' r ')}",
        given="float[5, 2, 3] x",
    ),
    _at(
        7,
        "y, h = GRU<hidden_size = 4, linear_before_reset = 1>(x, w, r)",
        f"{_weights(1, 12, 3)}, {_weights(1, 12, 4).replace(' w ', ' r ')}",
        given="float[5, 2, 3] x",
    ),
    _at(1, 'y = ConvTranspose<auto_pad = "SAME_UPPER">(x, w)', _weights(4, 2, 3, 3)),
    _at(1, 'y = Conv<auto_pad = "SAME_LOWER", strides = [2, 2]>(x, w)', _weights(4, 4, 3, 3)),
)
