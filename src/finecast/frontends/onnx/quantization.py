"""QuantizeLinear and DequantizeLinear: the nodes for encodings with scale and zero point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.constants import constant_tensor, constant_value
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled

if TYPE_CHECKING:
    from finecast.frontends.onnx.statements import Maker

_CHANNELS_SINCE: Final = 13
_GROUPS_SINCE: Final = 21


def since(fmt: Format) -> int:
    """The first opset whose nodes take scales as ``fmt`` has them: by channel, or by group."""
    return _GROUPS_SINCE if fmt.group_sizes else _CHANNELS_SINCE


def quantize(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    """A node from fp32 to the codes of ``to``."""
    assert isinstance(to, Scaled)
    inputs = [value, *_parameters(maker, value, to)]
    dtype = ir.DataType.from_numpy(to.dtype)
    return [maker.node("QuantizeLinear", inputs, _attributes(to), label=to.label, dtype=dtype)]


def dequantize(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    """A node from the codes of ``to`` to fp32; it shares the constants of ``quantize``'s."""
    assert isinstance(to, Scaled)
    before = value.producer()
    shared = before is not None and before.op_type == "QuantizeLinear"
    given = before.inputs[1:] if before is not None and shared else ()
    parameters = [v for v in given if v is not None] or _parameters(maker, value, to)
    label, dtype = Format.FP32.label, ir.DataType.FLOAT
    inputs = [value, *parameters]
    return [maker.node("DequantizeLinear", inputs, _attributes(to), label=label, dtype=dtype)]


def reader(fmt: Format) -> Callable[[Sequence[ir.Node]], Scaled]:
    """A function that reads the encoding in ``fmt`` off the node that ``dequantize`` made."""

    def read(nodes: Sequence[ir.Node]) -> Scaled:
        scale, zero = (constant_tensor(v) for v in nodes[0].inputs[1:] if v is not None)
        if scale is None or zero is None:
            raise ValueError("the scale or zero point is not a constant")
        stated = nodes[0].attributes
        axis, group = stated.get("axis"), stated.get("block_size")
        return Scaled(
            format=fmt,
            grid=fmt.grid(constant=True),
            scale=tuple(float(s) for s in scale.numpy().reshape(-1)),
            zero_point=int(zero.numpy().reshape(-1)[0]),
            axis=axis.as_int() if axis is not None else None,
            group=group.as_int() if group is not None else None,
        )

    return read


def _attributes(to: Scaled) -> dict[str, int]:
    stated = {"axis": to.axis, "block_size": to.group}
    return {name: number for name, number in stated.items() if number is not None}


def _parameters(maker: Maker, value: ir.Value, to: Scaled) -> list[ir.Value]:
    if to.group is not None:
        shape = tuple(d for d in value.shape or () if isinstance(d, int))
        scale = to.spread(shape).squeeze((to.axis or 0) + 1)
    else:
        scale = np.array(to.scale if to.axis is not None else to.scale[0], np.float32)
    zero = np.full_like(scale, to.zero_point, to.dtype)
    made: list[ir.Value] = []
    for what, array in (("scale", scale), ("zero", zero)):
        new = constant_value(maker.fresh(f"{value.name}_{what}"), array)
        maker.register(new)
        made.append(new)
    return made
