"""The small ONNX models that probing runs: matrix products and a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

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


def build(probe: Probe, fmt: Format) -> bytes:
    """The probe as an ONNX model: fp32 in and out, everything between in ``fmt``."""
    from onnx import TensorProto, helper

    if fmt.has_scales:
        return build_scaled(probe, fmt)

    kinds = {
        Format.FP32: TensorProto.FLOAT,
        Format.BF16: TensorProto.BFLOAT16,
        Format.FP16: TensorProto.FLOAT16,
        Format.FP8_E4M3: TensorProto.FLOAT8E4M3FN,
        Format.FP8_E5M2: TensorProto.FLOAT8E5M2,
    }
    kind = kinds[fmt]
    raw = probe.w.astype(fmt.dtype).tobytes()
    weights = helper.make_tensor("w", kind, probe.w_shape, raw, raw=True)
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1]} if probe.op == "Conv" else {}
    nodes = [helper.make_node("Cast", ["x"], ["v0"], name="in", to=kind)]
    for i in range(probe.depth):
        nodes.append(
            helper.make_node(probe.op, [f"v{i}", "w"], [f"p{i}"], name=f"op{i}", **pads)
        )
        nodes.append(helper.make_node("Relu", [f"p{i}"], [f"v{i + 1}"], name=f"relu{i}"))
    last = f"v{probe.depth}"
    nodes.append(helper.make_node("Cast", [last], ["y"], name="out", to=TensorProto.FLOAT))
    return _finished(probe, nodes, [weights])


def of_weights(probe: Probe, fmt: Format) -> Scaled:
    """How the weights of a probe are stored in a format with scales."""
    channels = (1,) if fmt.group_sizes else ()
    return Scaled.of_constant(fmt, probe.w.astype(np.float32), channels)


def build_scaled(probe: Probe, fmt: Format) -> bytes:
    """The probe with products on codes, whose scales fit its data."""
    from onnx import TensorProto, helper, numpy_helper

    from finecast.frontends.onnx.editor import ROUNDING
    from finecast.planning.edits import APART

    nodes: list[Any] = []
    constants: list[Any] = []

    def parameters(name: str, encoding: Scaled) -> list[str]:
        scale = np.asarray(encoding.scale[0], np.float32)
        if encoding.group is not None:
            scale = encoding.spread(weights.shape).squeeze((encoding.axis or 0) + 1)
        stored = fmt.result.encode(scale)
        constants.append(numpy_helper.from_array(stored, f"{name}_scale"))
        if not (encoding.zero_point or fmt.runs_on_codes):
            return [f"{name}_scale"]
        zero = np.full(scale.shape, encoding.zero_point, encoding.dtype)
        constants.append(numpy_helper.from_array(zero, f"{name}_zero"))
        return [f"{name}_scale", f"{name}_zero"]

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        proto = helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes)
        nodes.append(proto)

    weights = probe.w.astype(np.float32)
    coded = of_weights(probe, fmt).moved(APART if probe.apart else 0)
    constants.append(numpy_helper.from_array(coded.encode(weights), "w"))
    stated = {"axis": coded.axis, "block_size": coded.group}
    grouping = stated if coded.group is not None else {}
    node("DequantizeLinear", ["w", *parameters("w", coded)], "w_read", **grouping)
    nodes[-1].metadata_props.add(key=ROUNDING, value=f"{fmt.label} w_read")
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1]} if probe.op == "Conv" else {}
    value = "x"
    if fmt.encodes_results:
        node("Cast", [value], "low", to=helper.np_dtype_to_tensor_dtype(fmt.result.dtype))
        value = "low"
    for i, stage in enumerate(probe.stages[:-1]):
        if fmt.runs_on_codes:
            of_value = Scaled.of_value(fmt, stage.min(), stage.max())
            scale_and_zero = parameters(f"v{i}", of_value)
            node("QuantizeLinear", [value, *scale_and_zero], f"q{i}")
            node("DequantizeLinear", [f"q{i}", *scale_and_zero], f"d{i}")
            value = f"d{i}"
        node(probe.op, [value, "w_read"], f"p{i}", **pads)
        value = f"r{i}"
        node("Relu", [f"p{i}"], value)
    last = probe.stages[-1]
    if not fmt.runs_on_codes:
        node("Cast", [value], "y", to=TensorProto.FLOAT)
    else:  # some engines have only kernels that give codes
        of_value = Scaled.of_value(fmt, last.min(), last.max())
        scale_and_zero = parameters("last", of_value)
        node("QuantizeLinear", [value, *scale_and_zero], "q_last")
        node("DequantizeLinear", ["q_last", *scale_and_zero], "y")
    return _finished(probe, nodes, constants)


def _finished(probe: Probe, nodes: list[Any], constants: list[Any]) -> bytes:
    """The model of ``nodes`` from ``x`` to ``y``."""
    from onnx import TensorProto, helper

    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", probe.x_shape), ("y", probe.expected.shape))
    ]
    graph = helper.make_graph(nodes, "probe", ports[:1], ports[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
    model.ir_version = _IR_VERSION
    return model.SerializeToString()
