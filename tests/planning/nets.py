"""Prepares nets that are written as text, with random constants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from finecast.frontends import onnx as frontend
from finecast.rules.policy import Policy, Scope
from tests.frontends.tools import parse

Constants = Mapping[str, NDArray[np.float32]]


def prepared(text: str, constants: Constants, *, opset: int = 17) -> frontend.Prepared:
    """The net, named and with types, ready to be planned."""
    made = parse(text, opset=opset)
    for name, array in constants.items():
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return frontend.prepare(frontend.from_model(made), Policy(scope=Scope.NONE))


def drawn(seed: int, **shapes: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    """Constants of normally distributed numbers, by name and shape."""
    draw = np.random.default_rng(seed)
    return {n: draw.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
