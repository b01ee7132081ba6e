"""Keras models as every frontend takes them: loaded, with flat outputs, and their errors."""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Final

from finecast.errors import ModelError, UsageError, not_imported
from finecast.files import suffix_in_lower_case
from finecast.files.staging import staging

KERAS_SUFFIX: Final = ".keras"
_MOST: Final = 240
"""Characters of Keras's message that an error has."""
_SCOPE: Final = re.compile(r"[A-Za-z0-9_.\\/>-]*")
_COLOUR: Final = re.compile(r"\x1b\[\d*m")
_BEFORE: Final = "Exception encountered: "
_AFTER: Final = re.compile(r"Full object config:|Arguments received by ")
"""What Keras writes before and behind the reason, and may be many lines."""
_TRACED: Final = "in user code:"
_RAISED: Final = re.compile(r"^    \w+: ", re.MULTILINE)
"""TensorFlow lists the lines of code that it traced, then the exception's name and text."""


def load_keras(keras: Any, path: Path, *, trust: bool) -> Any:
    """The model in a ``.keras`` file; code in it is loaded only with ``trust``.

    Args:
        keras: The Keras module.
        path: The file.
        trust: Whether code in it may run.

    Raises:
        UsageError: If there is no such file.
        ModelError: If Keras cannot read it, or it brings code and is not trusted.
        MemoryError: If it is too large.
    """
    if not path.is_file():
        raise UsageError("no such file", where=str(path), fix="check the path")
    if not zipfile.is_zipfile(path):
        raise ModelError(
            f"not a {KERAS_SUFFIX} file, or a truncated one",
            where=str(path),
            fix="save it again: model.save('NAME.keras')",
        )
    try:
        with suffix_in_lower_case(path) as named:
            return keras.models.load_model(named, compile=False, safe_mode=not trust)
    except MemoryError:
        raise
    except Exception as error:  # classes of the user's own raise what they like
        if "safe_mode" in str(error) or "unsafe" in str(error).lower():
            raise ModelError(
                "the file brings code of its own, which was not run",
                where=str(path),
                fix="pass --trust if you know who made it; what model.export(FOLDER) writes"
                " needs none",
            ) from error
        raise ModelError(
            f"Keras cannot read the model: {reason(error)}",
            where=str(path),
            fix="in Python, import its classes, load it with keras.saving.load_model, and give"
            " finecast.convert or tune the model",
        ) from error


def import_keras(where: str) -> Any:
    """The Keras module.

    Raises:
        EngineError: If it is not installed; ``where`` is the file that needs it.
    """
    try:
        return importlib.import_module("keras")
    except ImportError as error:
        raise not_imported(
            "Keras, which reads its own files,",
            error,
            where=where,
            install="pip install keras tensorflow-cpu; or write a SavedModel where they are:"
            " model.export(FOLDER)",
        ) from error


@contextmanager
def exported(keras: Any, model: Any, path: Path) -> Generator[Path]:
    """A temporary SavedModel of a Keras model; errors name ``path``."""
    check_names(model, str(path))
    with staging() as folder:
        try:
            flat = with_flat_outputs(keras, _for_inference(keras, model))
            flat.export(str(folder), verbose=False)
        except MemoryError:
            raise
        except Exception as error:  # layers of the user's own raise what they like
            raise ModelError(
                f"Keras cannot export the model: {reason(error)}",
                where=str(path),
                fix="see that model.predict(...) runs in Keras, and model.export(FOLDER) does",
            ) from error
        yield folder


def _for_inference(keras: Any, model: Any) -> Any:
    """The model with layers of random preprocessing switched off, as ``predict`` calls them.

    They draw wherever they are not told otherwise, also in what ``model.export`` writes.
    A model without such layers is returned as it is, and so is one of the user's own class,
    which has no inputs by itself.
    """
    inputs = getattr(model, "_inputs_struct", None)
    inputs = getattr(model, "inputs", None) if inputs is None else inputs
    if inputs is None or not any(map(_trains_by_default, _with_layers(model))):
        return model
    return keras.Model(inputs, model(inputs, training=False), name=model.name)


def _trains_by_default(layer: Any) -> bool:
    """Whether a layer computes as in training where its caller does not say."""
    training = signature(layer.call).parameters.get("training")
    return training is not None and training.default is True


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


def check_names(model: Any, where: str) -> None:
    """Raise ModelError if a model or a layer has a name that TensorFlow cannot have.

    Keras raises on it, too, and then puts all models that are made later into that scope.
    """
    for layer in _with_layers(model):
        if not _SCOPE.fullmatch(layer.name):
            raise ModelError(
                f"TensorFlow cannot trace the Keras model: {layer.name!r} is not a valid name",
                where=where,
                fix="rename the model or layer: letters, digits, and any of _ . - >",
            )


def _with_layers(layer: Any) -> Iterator[Any]:
    """A model and its layers but those of its inputs, which are no scopes."""
    if type(layer).__name__ != "InputLayer":
        yield layer
    for inner in getattr(layer, "layers", ()):
        yield from _with_layers(inner)


def reason(error: Exception) -> str:
    """Of what Keras raised the reason alone, in one line."""
    text = _COLOUR.sub("", str(error))
    text = text.rpartition(_BEFORE)[2]
    if text.startswith(_TRACED):
        text = _RAISED.split(text, maxsplit=1)[-1]
    text = " ".join(_AFTER.split(text)[0].split())
    short = text if len(text) <= _MOST else f"{text[:_MOST]} ..."
    return short or type(error).__name__
