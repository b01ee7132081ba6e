"""An op of OpenVINO whose result a Python function computes, as the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import openvino
from numpy.typing import NDArray

Computed: TypeAlias = Callable[..., NDArray[np.float32]]
"""A function of the arrays of an op's inputs."""


@final
class ComputedOp(openvino.Op):
    """An op in place of one with the same inputs; it cannot be written to a file.

    Args:
        read: The ports that it reads.
        function: Gives its result.
        like: The shape of its result, as far as that is known.
    """

    def __init__(
        self, read: Sequence[openvino.Output], function: Computed, like: openvino.PartialShape
    ) -> None:
        super().__init__(self)
        self.function, self.like = function, like  # before types are inferred
        self.set_arguments([*read])
        self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        """State the result."""
        self.set_output_type(0, openvino.Type.f32, self.like)

    def clone_with_new_inputs(self, new_inputs: Sequence[openvino.Output]) -> ComputedOp:
        """The same op of other ports, as in a copy of the model."""
        return ComputedOp(new_inputs, self.function, self.like)

    def has_evaluate(self) -> bool:
        """OpenVINO has no kernel for the op."""
        return True

    def evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - OpenVINO calls it so
        self, output_values: Sequence[Any], input_values: Sequence[Any]
    ) -> bool:
        """Compute the result."""
        arrays = (np.array(x.data) for x in input_values)
        result = np.asarray(self.function(*arrays), np.float32)
        output_values[0].shape = result.shape
        output_values[0].data[...] = result
        return True
