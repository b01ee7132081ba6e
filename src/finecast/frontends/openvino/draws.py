"""OpenVINO's models with fixed draws in place of random ops, to be run and never written."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.frontends.openvino.bodies import every_op
from finecast.numbers.draws import LENGTH, uniform

if TYPE_CHECKING:
    import openvino

_UNIFORM: Final = "RandomUniform"
_RANDOM: Final = frozenset({_UNIFORM, "Multinomial"})


def with_fixed_draws(model: openvino.Model) -> openvino.Model:
    """A copy with tables in place of random ops; the model itself if it has none."""
    if not any(op.get_type_name() in _RANDOM for op in every_op(model)):
        return model
    copy = model.clone()
    numbers = count()
    for op in [op for op in every_op(copy) if op.get_type_name() in _RANDOM]:
        _replace(op, next(numbers))
    return copy


def _replace(op: Any, number: int) -> None:
    """Put what a table gives in the place of a random op, with its name and type."""
    name, tensors = op.get_friendly_name(), op.output(0).get_names()
    nodes = _Nodes(f"{name}/draw", number)
    uniform_op = op.get_type_name() == _UNIFORM
    drawn = _between_bounds(op, nodes) if uniform_op else _classes(op, nodes)
    drawn = _opset().convert(drawn, op.output(0).get_element_type().get_type_name())
    op.output(0).replace(drawn.output(0))
    drawn.set_friendly_name(name)
    drawn.output(0).set_names(tensors)


class _Nodes:
    """Makes the nodes that stand for a random op, with names of their own.

    The names that OpenVINO gives differ from load to load, and kernels are compared by names.
    """

    def __init__(self, base: str, number: int) -> None:
        self._base, self._number = base, number
        self._parts = count()

    def add(self, kind: str, *read: Any, **attributes: Any) -> Any:
        """A node of that kind."""
        node = getattr(_opset(), kind)(*read, **attributes)
        node.set_friendly_name(f"{self._base}/{next(self._parts)}")
        return node

    def whole(self, number: int) -> Any:
        """A constant integer."""
        return self.add("constant", np.int64(number))

    def uniform(self, shape: Any) -> Any:
        """Numbers between 0 and 1 of that shape, which is a vector of int64."""
        zero = self.whole(0)
        size = self.add("reduce_prod", shape, zero, keep_dims=False)
        every = self.add("range", zero, size, self.whole(1), output_type="i64")
        table = self.add("constant", uniform(self._number))
        places = self.add("floor_mod", every, self.whole(LENGTH))
        flat = self.add("gather", table, places, zero)
        return self.add("reshape", flat, shape, special_zero=False)


def _opset() -> Any:
    """OpenVINO's functions that make nodes; their types say little."""
    from openvino import opset13 as ops

    return ops


def _between_bounds(op: Any, nodes: _Nodes) -> Any:
    """Uniform numbers between the bounds; whole ones are rounded down."""
    add = nodes.add
    shape, low, high = (op.input_value(port) for port in range(3))
    drawn = nodes.uniform(add("convert", shape, "i64"))
    least, most = (add("convert", bound, "f32") for bound in (low, high))
    drawn = add("add", add("multiply", drawn, add("subtract", most, least)), least)
    is_real = op.output(0).get_element_type().is_real()
    return drawn if is_real else add("floor", drawn)


def _classes(op: Any, nodes: _Nodes) -> Any:
    """Classes by their chances.

    A class is the first up to which chances add up to more than what is drawn. Without
    replacement these are the classes of the largest log p + g of Gumbel numbers g, which have
    the distribution of one draw after the other.
    """
    add, stated = nodes.add, op.get_attributes()
    chances = add("convert", op.input_value(0), "f32")
    vector = add("constant", np.array([1]))
    samples = add(
        "reshape", add("convert", op.input_value(1), "i64"), vector, special_zero=False
    )
    chances = add("exp", chances) if stated["log_probs"] else chances
    sizes = add("shape_of", chances, output_type="i64")
    if not stated["with_replacement"]:
        drawn = add("negative", add("log", add("negative", add("log", nodes.uniform(sizes)))))
        scores = add("add", add("log", chances), drawn)
        first = add("squeeze", samples, nodes.whole(0))
        return add("topk", scores, first, 1, "max", "value", index_element_type="i64").output(
            1
        )
    rows = add("gather", sizes, add("constant", np.array([0])), nodes.whole(0))
    drawn = nodes.uniform(add("concat", [rows, samples], 0))
    total = add("reduce_sum", chances, nodes.whole(1), keep_dims=True)
    sums = add("cum_sum", add("divide", chances, total), nodes.whole(1))
    passed = add(
        "less", add("unsqueeze", sums, nodes.whole(1)), add("unsqueeze", drawn, nodes.whole(2))
    )
    below = add("reduce_sum", add("convert", passed, "i64"), nodes.whole(2), keep_dims=False)
    classes = add("gather", sizes, nodes.whole(1), nodes.whole(0))
    last = add("subtract", classes, nodes.whole(1))  # where rounded sums end below 1
    return add("minimum", below, last)
