"""The small ONNX models that probing runs: matrix products and a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import ONNX_NAMES
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format

_OPSET = 22  # the first in which bf16 convolutions are legal
_IR_VERSION = 10


@final
@dataclass(frozen=True, kw_only=True)
class Probe:
    """``op``, then Relu, ``depth`` times, on seeded data; large beside the cost of a call.

    With ``apart`` values stay exact though the format is dynamic: the codes of constants are
    those that plans have for such products beside others whose kernels round values.
    """

    name: str
    op: str
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    depth: int
    apart: bool = False

    @cached_property
    def x(self) -> NDArray[np.float64]:
        """Input, exact in every probed format (multiples of 1/4 up to 1)."""
        return self._data(self.x_shape, seed=0)

    @cached_property
    def w(self) -> NDArray[np.float64]:
        """Weights, exact in every probed format but for a power-of-two scale."""
        fan_in = int(np.prod(self.w_shape[1:] if self.op == "Conv" else self.w_shape[:1]))
        scale = 2.0 ** -np.floor(np.log2(fan_in) / 2)
        return self._data(self.w_shape, seed=1) * scale

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """The result in double precision."""
        return self.stages[-1]

    @cached_property
    def stages(self) -> list[NDArray[np.float64]]:
        """The input, and the values after each ``op`` and Relu, in double precision."""
        values = [self.x]
        for _ in range(self.depth):
            values.append(np.maximum(self._step(values[-1]), 0))
        return values

    def _step(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.op == "MatMul":
            return x @ self.w
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, self.w, optimize=True)

    @staticmethod
    def _data(shape: tuple[int, ...], *, seed: int) -> NDArray[np.float64]:
        return np.random.default_rng(seed).integers(-4, 5, shape) / 4.0


PROBES = (
    Probe(name="matmul", op="MatMul", x_shape=(256, 384), w_shape=(384, 384), depth=2),
    Probe(name="conv", op="Conv", x_shape=(1, 64, 28, 28), w_shape=(64, 64, 3, 3), depth=2),
)
# One row by weights of 16 MB, which are more than the caches of a core hold.
_WEIGHT_PROBES = (
    Probe(name="matvec", op="MatMul", x_shape=(1, 2048), w_shape=(2048, 2048), depth=1),
)


def probes_of(fmt: Format) -> tuple[Probe, ...]:
    """The probes for ``fmt``; they are run in fp32 as well, for comparison."""
    return PROBES if fmt.runs_on_codes or not fmt.has_scales else _WEIGHT_PROBES


def admitted(op: str, fmt: Format) -> bool:
    """Whether ONNX's definition of ``op`` admits the format."""
    from onnx import defs

    (constraint,) = (
        c for c in defs.get_schema(op, _OPSET).type_constraints if c.type_param_str == "T"
    )
    return f"tensor({ONNX_NAMES.get(fmt.label)})" in constraint.allowed_type_strs


def of_weights(probe: Probe, fmt: Format) -> Scaled:
    """How the weights of a probe are stored in a format with scales."""
    channels = (1,) if fmt.group_sizes else ()
    return Scaled.of_constant(fmt, probe.w.astype(np.float32), channels)


def build(probe: Probe, fmt: Format) -> bytes:
    """The probe as an ONNX model: fp32 in and out, everything between in ``fmt``.

    Of a format with scales products are on codes, and the scales fit the probe's data.
    """
    import onnx_ir as ir

    from finecast.frontends.onnx.editor import ROUNDING, Editor
    from finecast.frontends.onnx.statements import Maker, dequantize, quantize
    from finecast.planning.edits import APART

    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(probe.x_shape))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": _OPSET}, name="probe")
    editor = Editor(ir.Model(graph, ir_version=_IR_VERSION))
    maker = Maker(editor)

    def coded(value: ir.Value, stage: NDArray[np.float64]) -> ir.Value:
        encoding = Scaled.of_value(fmt, stage.min(), stage.max())
        return dequantize(maker, quantize(maker, value, encoding), encoding)

    if fmt.has_scales:
        encoding = of_weights(probe, fmt).moved(APART if probe.apart else 0)
        codes = encoding.encode(probe.w.astype(np.float32))
        weights = dequantize(maker, editor.constant("w", codes), encoding)
        editor.made[-1].metadata_props[ROUNDING] = f"{fmt.label} {weights.name}"
        value = maker.cast(x, fmt.result) if fmt.encodes_results else x
    else:
        weights = editor.constant("w", probe.w.astype(fmt.dtype))
        value = maker.cast(x, fmt)
    pads = {"pads": [1, 1, 1, 1]} if probe.op == "Conv" else {}
    for number, stage in enumerate(probe.stages[:-1]):
        read = [coded(value, stage) if fmt.runs_on_codes else value, weights]
        product = editor.op(probe.op, read, pads, name=f"p{number}", dtype=value.dtype)
        editor.made[-1].name = f"op{number}"
        value = editor.op("Relu", [product], name=f"r{number}", dtype=value.dtype)
    if fmt.runs_on_codes:  # some engines have only kernels that give codes
        value = coded(value, probe.expected)
    else:
        value = maker.cast(value, Format.FP32)
    value.name, value.shape = "y", ir.Shape(probe.expected.shape)
    graph.outputs.append(value)
    graph.extend(editor.take())
    return ir.to_proto(editor.model).SerializeToString()
