"""Whether inputs of some sizes fit an OpenVINO model, asked of its shape inference.

OpenVINO's kernels for open shapes do not check this. A window that is larger than what it
moves over, or a concatenation of parts that do not match, reads beyond the end of its memory:
that gives numbers of nothing, or ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import openvino

_READ_MOST: Final = 64
"""Constants of more elements are no axes, pads or shapes, and their numbers are not kept."""

_BODIES: Final = frozenset({"If", "Loop", "TensorIterator"})
"""Ops with bodies. A branch that is not taken may refuse sizes that the model takes."""


@final
class SizeCheck:
    """Asks a copy of a model, without its weights and bodies, if sizes fit.

    Where all inputs have fixed shapes there is nothing to ask, and no copy.
    """

    def __init__(self, model: openvino.Model) -> None:
        self._model = _without_weights(model) if model.is_dynamic() else None
        self._count = len(model.inputs)
        self._fit: set[tuple[tuple[int, ...], ...]] = set()

    def check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse inputs of ``shapes``, in order, that an op cannot take.

        Raises:
            RuntimeError: As OpenVINO states it.
        """
        if self._model is None or (key := tuple(shapes)) in self._fit:
            return
        import openvino

        ports = self._model.inputs[: self._count]
        sizes = zip(ports, shapes, strict=True)
        self._model.reshape({port: openvino.PartialShape(list(dims)) for port, dims in sizes})
        self._fit.add(key)


def _without_weights(model: openvino.Model) -> openvino.Model:
    """A copy whose large constants and ops with bodies are further inputs."""
    from openvino import PartialShape
    from openvino import opset13 as opset

    copy = model.clone()
    added: list[openvino.Node] = []
    for node in copy.get_ordered_ops():
        kind = node.get_type_name()
        large = kind == "Constant" and math.prod(node.get_output_shape(0)) > _READ_MOST
        for output in node.outputs() if large or kind in _BODIES else ():
            shape = output.get_partial_shape() if large else PartialShape.dynamic()
            stand_in = opset.parameter(shape, output.get_element_type())
            output.replace(stand_in.output(0))
            added.append(stand_in)
    copy.add_parameters(added)
    return copy
