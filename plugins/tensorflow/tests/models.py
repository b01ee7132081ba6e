"""Small models of TensorFlow's, saved, and what serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

tf: Any = pytest.importorskip("tensorflow")

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A SavedModel."""

    path: Path

    def serve(self, feeds: Arrays, signature: str = "serving_default") -> dict[str, Any]:
        """What a user of TensorFlow's gets of it."""
        return served(self.path, feeds, signature)


def served(
    path: Path, feeds: Arrays, signature: str = "serving_default"
) -> dict[str, NDArray[Any]]:
    """What ``tf.saved_model.load`` serves."""
    function = tf.saved_model.load(str(path)).signatures[signature]
    given = {name: tf.constant(array) for name, array in feeds.items()}
    return {name: value.numpy() for name, value in function(**given).items()}


def top1(path: Path, data: Path) -> float:
    """Of a SavedModel as it is served, on the one input and the labels of an npz."""
    with np.load(data) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    label = feeds.pop("label")
    (scores,) = served(path, feeds).values()
    return float((scores.argmax(axis=1) == label).mean())


def of_function(
    path: Path,
    call: Callable[..., Any],
    specs: Sequence[Any],
    variables: Sequence[Any] = (),
) -> Model:
    """Save a function under the usual signature."""
    module = tf.Module()
    module.kept = list(variables)
    module.call = tf.function(call, input_signature=specs)
    tf.saved_model.save(module, str(path), signatures=module.call.get_concrete_function())
    return Model(path=path)


def nodes_of(path: Path) -> dict[str, Any]:
    """The nodes that a SavedModel of finecast's computes with, by name."""
    from finecast_tensorflow.frontend.loading import load

    return {n.name: n for n in load(path).graph.node}


def types_of(path: Path) -> dict[str, str]:
    """The type that each op with an attribute ``T`` computes in, by name."""
    found = nodes_of(path)
    plain = {n: d.attr["T"].type for n, d in found.items() if "T" in d.attr}
    return {n: tf.as_dtype(number).name for n, number in plain.items() if number}
