"""Keras models whose outputs are nested, made flat: a signature has one level of names."""

from __future__ import annotations

from typing import Any


def with_flat_outputs(keras: Any, model: Any) -> Any:
    """The model with its outputs in one dict; a nested output is called ``KEY/KEY``.

    Laws: outputs are the same tensors, layers the same objects; a model without nested
    outputs is returned as it is.

    Args:
        keras: The Keras module.
        model: A Keras model.
    """
    nested = getattr(model, "_outputs_struct", None)  # Keras has no public name for it
    paths = [] if nested is None else keras.tree.flatten_with_path(nested)
    if all(len(path) <= 1 for path, _ in paths):
        return model
    named = {"/".join(map(str, path)): tensor for path, tensor in paths}
    return keras.Model(model.inputs, named, name=model.name)
