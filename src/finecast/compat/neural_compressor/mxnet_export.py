"""Exporting MXNet models (``-symbol.json``, ``.params``) to ONNX by MXNet's own exporter."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from finecast.errors import EngineError, ModelError, UsageError
from finecast.files.staging import staging

_SYMBOL: Final = "-symbol.json"
_OTHER_ENVIRONMENT: Final = (
    "MXNet's last release needs numpy 1.23.5, and finecast numpy 2: scripts/mxnet_to_onnx.sh"
    " NAME-symbol.json NAME-0000.params SHAPE writes the ONNX file in an environment of its"
    " own; give that file"
)


def exported(model: Any, example_inputs: Any) -> onnx.ModelProto:
    """Export an MXNet model to ONNX.

    Args:
        model: The path of ``NAME-symbol.json`` or of the ``.params`` beside it.
        example_inputs: An array, or a list of them, with the shapes of the model's inputs.

    Raises:
        UsageError: If ``model`` is no such path, a file is missing, or no inputs are given.
        EngineError: If MXNet cannot be imported here.
        ModelError: If MXNet cannot export the model.
    """
    if not isinstance(model, str | Path):
        raise UsageError(
            f"an MXNet {type(model).__name__} in memory",
            fix="save it by its export(NAME), and give NAME-symbol.json",
        )
    symbol, parameters = _files(Path(model))
    mxnet = _library()
    if example_inputs is None:
        raise UsageError(
            "an MXNet model does not say what shapes it takes",
            where=str(symbol),
            fix="give MixedPrecisionConfig(example_inputs=array)",
        )
    given = example_inputs if isinstance(example_inputs, Sequence) else [example_inputs]
    shapes = [np.asarray(one).shape for one in given]
    with staging() as folder:
        target = folder / "model.onnx"
        try:
            mxnet.onnx.export_model(
                str(symbol), str(parameters), shapes, np.float32, str(target)
            )
        except Exception as error:  # its errors share no base, and the exporter asserts
            raise ModelError(
                f"MXNet cannot export the model: {' '.join(str(error).split())[:240]}",
                where=str(symbol),
                fix="export it in Python (mxnet.onnx.export_model), and give the ONNX file",
            ) from error
        return onnx.load(target)


def _files(path: Path) -> tuple[Path, Path]:
    """The paths of the network and of its parameters; UsageError if one is missing."""
    folder = path.parent
    if path.name.endswith(_SYMBOL):
        symbol, stem = path, path.name.removesuffix(_SYMBOL)
        beside = sorted(folder.glob(f"{stem}-*.params"))
        parameters = beside[-1] if beside else folder / f"{stem}-0000.params"
    elif path.suffix == ".params":
        parameters, symbol = path, folder / f"{path.stem.rpartition('-')[0]}{_SYMBOL}"
    else:
        raise UsageError(
            "no MXNet model", where=str(path), fix=f"give NAME{_SYMBOL}, or an ONNX file"
        )
    for one in (symbol, parameters):
        if not one.is_file():
            raise UsageError(
                "an MXNet model is two files, and one is missing",
                where=str(one),
                fix=f"put NAME{_SYMBOL} and NAME-0000.params into one folder",
            )
    return symbol, parameters


def _library() -> Any:
    if importlib.util.find_spec("mxnet") is None:
        raise EngineError("MXNet is not installed here", fix=_OTHER_ENVIRONMENT)
    try:
        return importlib.import_module("mxnet")
    except (ImportError, AttributeError) as error:  # numpy 2 lacks names that it imports
        raise EngineError(
            f"MXNet cannot be imported here: {error}", fix=_OTHER_ENVIRONMENT
        ) from error
