"""``load``: a model that ``save`` wrote, as ``fit`` returned it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finecast.errors import UsageError


def load(checkpoint_dir: str | Path, model: Any = None, *, trust: bool = False) -> Any:
    """Read the result of ``fit`` that its ``save`` wrote.

    Nothing in the files is executed, unless they are trusted.

    Args:
        checkpoint_dir: The folder (for TensorFlow a SavedModel), or the ONNX file.
        model: The fp32 ``nn.Module``; needed if the module was converted module by module, of
            which only the state is saved.
        trust: Whether a module's program may import the packages that it names: a model of
            transformers gives a class of theirs.

    Raises:
        UsageError: If there is no such model, or ``model`` is missing.
        ModelError: If the files cannot be read, or are another module's, or would run code.
    """
    path = Path(checkpoint_dir)
    stored = path / "best_model.onnx" if path.is_dir() else path
    if stored.is_file():
        from finecast.compat.neural_compressor.onnx_result import load_model

        return load_model(stored)
    if any((path / name).is_file() for name in ("best_model.pt", "best_model.pt2")):
        from finecast.compat.neural_compressor.torch_result import load_module

        return load_module(path, model, trust=trust)
    if (path / "saved_model.pb").is_file():
        from finecast.compat.neural_compressor.tensorflow_fit import load_saved_model

        return load_saved_model(path)
    raise UsageError(
        "no model that fit(...).save wrote", where=str(path), fix="give the path given to save"
    )
