"""OpenVINO's models with fixed draws in place of random ops, to be run and never written."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.frontends.openvino.bodies import every_op
from finecast.numbers.draws import LENGTH, uniform

if TYPE_CHECKING:
    import openvino

_RANDOM: Final = "RandomUniform"


def with_fixed_draws(model: openvino.Model) -> openvino.Model:
    """A copy with tables in place of random ops; the model itself if it has none."""
    if not any(op.get_type_name() == _RANDOM for op in every_op(model)):
        return model
    copy = model.clone()
    numbers = count()
    for op in [op for op in every_op(copy) if op.get_type_name() == _RANDOM]:
        _replace(op, next(numbers))
    return copy


def _replace(op: Any, number: int) -> None:
    """Put a table between the bounds of the op in its place; whole numbers are rounded down.

    The ops have names of their own: those that OpenVINO gives differ from load to load, and
    kernels are compared by them.
    """
    from openvino import opset13 as ops

    name, tensors = op.get_friendly_name(), op.output(0).get_names()
    parts = count()

    def add(make: Callable[..., Any], *read: Any, **attributes: Any) -> Any:
        made = make(*read, **attributes)
        made.set_friendly_name(f"{name}/draw/{next(parts)}")
        return made

    shape, low, high = (op.input_value(port) for port in range(3))
    kind = op.output(0).get_element_type()
    zero, one, length = (add(ops.constant, np.int64(n)) for n in (0, 1, LENGTH))
    table = add(ops.constant, uniform(number))
    wide = add(ops.convert, shape, "i64")
    size = add(ops.reduce_prod, wide, zero, keep_dims=False)
    every = add(ops.range, zero, size, one, output_type="i64")
    flat = add(ops.gather, table, add(ops.floor_mod, every, length), zero)
    drawn = add(ops.reshape, flat, wide, special_zero=False)
    least, most = (add(ops.convert, bound, "f32") for bound in (low, high))
    found = add(ops.multiply, drawn, add(ops.subtract, most, least))
    found = add(ops.add, found, least)
    if not kind.is_real():
        found = add(ops.floor, found)
    found = ops.convert(found, kind.get_type_name())
    op.output(0).replace(found.output(0))
    found.set_friendly_name(name)
    found.output(0).set_names(tensors)
