"""Writes a model as a SavedModel, which TensorFlow serves under the names of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finecast.frontends.saved_notes import NOTES_FILE
from finecast.frontends.signatures import SERVING
from finecast.frontends.tensorflow.functions import every_node, with_own_names
from finecast.frontends.tensorflow.library import DTYPES, tf
from finecast.frontends.tensorflow.model import (
    FrozenModel,
    SignaturePort,
    check_size,
    import_graph,
)
from finecast.numbers.formats import Format


def save(model: FrozenModel, folder: Path) -> None:
    """Write to ``folder``, which must not be there yet.

    Raises:
        ModelError: If its weights are more than a SavedModel without variables holds.
    """
    check_size(model.size_bytes, "")
    module = tf.Module()
    pruned = callable_of(model)
    served = _function(model, pruned)
    signatures = dict.fromkeys(model.signatures, served.get_concrete_function())
    method = _function(model, pruned, listed=True) if model.listed else served
    for name in model.signatures:
        if name != SERVING:
            setattr(module, name, method)  # model.export gives each endpoint a method
    # Gradients of the ops that were inlined are not of this function, which has no variables.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    (folder / NOTES_FILE).parent.mkdir()
    (folder / NOTES_FILE).write_text(json.dumps(dict(model.notes)), encoding="utf-8")


def callable_of(model: FrozenModel) -> Any:
    """The model as a function of TensorFlow: tensors by keyword in, a dict of tensors out."""
    graph = with_own_names(model.graph)
    wrapped = tf.compat.v1.wrap_function(lambda: import_graph(graph), [])
    feeds = [wrapped.graph.as_graph_element(p.tensor) for p in model.inputs]
    fetches = [wrapped.graph.as_graph_element(p.tensor) for p in model.outputs]
    return wrapped.prune(feeds, fetches)


def _function(model: FrozenModel, pruned: Any, *, listed: bool = False) -> Any:
    names = [p.name for p in model.outputs]

    def call(*tensors: Any) -> dict[str, Any] | list[Any]:
        made = pruned(*tensors)
        return list(made) if listed else dict(zip(names, made, strict=True))

    specs = [_tensor_spec(p) for p in model.inputs]
    return tf.function(call, input_signature=specs)


def _tensor_spec(port: SignaturePort) -> Any:
    labels = {f.label: dtype for f, dtype in DTYPES.items()} | {"fp64": tf.float64}
    dtype = labels.get(port.dtype) or tf.as_dtype(port.dtype)
    sizes = port.shape
    free = None if sizes is None else [d if isinstance(d, int) else None for d in sizes]
    return tf.TensorSpec(free, dtype, name=port.name)


def low_weights(model: FrozenModel) -> Format | None:
    """The lowest format that constants rest in; None where all floats are fp32."""
    stored = {n.attr["dtype"].type for n in every_node(model.graph) if n.op == "Const"}
    low = (f for f in DTYPES if f is not Format.FP32)
    return next((f for f in low if DTYPES[f].as_datatype_enum in stored), None)
