"""Ops whose parameters OpenVINO takes from constants alone, stated by ops that take any.

Where roundings are tried a parameter is no constant: an input of the model switches its
rounding on and off. The same holds for parameters of ops that OpenVINO makes by fusion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from finecast.frontends.openvino.bodies import Entry
from finecast.frontends.openvino.reader import OvBinding
from finecast.frontends.openvino.types import hand_over, port_key

# What each input of an op is read by, and the op that gives its result.
_Stated = tuple[tuple[tuple[Any, int], ...], Any]


def state_parameters(binding: OvBinding) -> None:
    """Replace such ops in place; in ``binding`` the new ones stand for them."""
    for number, op in enumerate(binding.nodes):
        if op is None or (state := _STATED.get(op.get_type_name())) is None:
            continue
        read, result = state(*op.input_values())
        old, key = op.output(0), port_key(op.output(0))
        binding.values = [
            result.output(0) if port_key(v) == key else v for v in binding.values
        ]
        hand_over(old, result.output(0))
        op.set_friendly_name(f"{key[0]}_before")
        result.set_friendly_name(key[0])
        region = binding.entries[number][0].region
        binding.entries[number] = tuple(
            Entry(op=made, index=index, region=region) for made, index in read
        )
        binding.nodes[number] = result


def _hard_sigmoid(x: Any, alpha: Any, beta: Any) -> _Stated:
    """max(0, min(1, alpha * x + beta))."""
    from openvino import opset13

    scaled = opset13.multiply(x, alpha)
    moved = opset13.add(scaled, beta)
    return ((scaled, 0), (scaled, 1), (moved, 1)), opset13.clamp(moved, 0.0, 1.0)


def _selu(x: Any, alpha: Any, scale: Any) -> _Stated:
    """Scale * (x where x > 0, else alpha * (exp(x) - 1))."""
    from openvino import opset13

    elu = opset13.elu(x, 1.0)
    low = opset13.multiply(opset13.minimum(elu, opset13.constant(np.float32(0))), alpha)
    result = opset13.multiply(opset13.add(opset13.relu(elu), low), scale)
    return ((elu, 0), (low, 1), (result, 1)), result


def _sigmoid(x: Any) -> _Stated:
    """A Sigmoid whose result OpenVINO does not see, as Relu changes nothing above 0.

    OpenVINO fuses x * sigmoid(x * beta) to a Swish, and does not load that if beta is no
    constant and has a rank: Keras's Swish behind a convolution has a beta of shape
    [1, 1, 1, 1].
    """
    from openvino import opset13

    result = opset13.sigmoid(x)
    return ((result, 0),), opset13.relu(result)


_STATED: Final[dict[str, Callable[..., _Stated]]] = {
    "HardSigmoid": _hard_sigmoid,
    "Selu": _selu,
    "Sigmoid": _sigmoid,
}
