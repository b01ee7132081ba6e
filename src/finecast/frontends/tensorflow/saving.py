"""Writes a model as a SavedModel, with the signatures that the original had."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, Final

from finecast.frontends.saved_models import NOTES_FILE, SERVING
from finecast.frontends.tensorflow.functions import with_own_names
from finecast.frontends.tensorflow.library import DTYPES, tf
from finecast.frontends.tensorflow.model import (
    FrozenModel,
    SignaturePort,
    check_size,
    import_graph,
)

_OF_FILES: Final = (
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.OutOfRangeError,
    tf.errors.UnknownError,
)
"""What TensorFlow makes of a file system's errors, among which that the disk is full."""


def save(model: FrozenModel, folder: Path) -> None:
    """Write to ``folder``, which must not exist yet.

    Raises:
        ModelError: If its weights are too large for a SavedModel without variables.
        OSError: If it cannot be written, as the disk is full.
    """
    check_size(model.size_bytes, "")
    module = tf.Module()
    pruned = callable_of(model)
    served = _function(model, pruned)
    signatures = dict.fromkeys(model.signatures, served.get_concrete_function())
    method = _function(model, pruned, listed=True) if model.listed else served
    for name in model.signatures:
        if name != SERVING:
            setattr(module, name, method)  # as model.export does for each signature
    # Custom gradients are of functions that were inlined; nothing is trained here.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except _OF_FILES as error:
        raise OSError(errno.EIO, str(error.message).rpartition("; ")[2]) from error
    (folder / NOTES_FILE).parent.mkdir()
    (folder / NOTES_FILE).write_text(json.dumps(dict(model.notes)), encoding="utf-8")


def callable_of(model: FrozenModel) -> Any:
    """The model as a TensorFlow function from its inputs to its outputs, both in order."""
    graph = with_own_names(model.graph)
    wrapped = tf.compat.v1.wrap_function(lambda: import_graph(graph), [])
    feeds = [wrapped.graph.as_graph_element(p.tensor) for p in model.inputs]
    fetches = [wrapped.graph.as_graph_element(p.tensor) for p in model.outputs]
    return wrapped.prune(feeds, fetches)


def _function(model: FrozenModel, pruned: Any, *, listed: bool = False) -> Any:
    """``pruned`` as a function that returns its outputs in a dict, or in a list."""
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
