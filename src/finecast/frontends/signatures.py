"""Texts of errors about a SavedModel's signatures, for all libraries that read one."""

from __future__ import annotations

from typing import Final

SERVING: Final = "serving_default"
"""The signature that servers, and TensorFlow's own tools, call where none is named."""
NONE: Final = "the SavedModel has no signatures"
MAKE_ONE: Final = (
    "save it with one: tf.saved_model.save(model, FOLDER,"
    " signatures=function.get_concrete_function(...)), or model.export(FOLDER)"
)
CHOOSE: Final = (
    "save one alone: m = tf.saved_model.load(FOLDER); tf.saved_model.save(m, NEW,"
    ' signatures=m.signatures["NAME"])'
)
