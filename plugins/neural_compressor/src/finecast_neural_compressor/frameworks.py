"""Which framework a model is of: taking it, reading it again, and what to do with others."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from finecast import api
from finecast.calls import checks
from finecast.errors import EngineError, UsageError
from finecast.naming import kind_of
from finecast_neural_compressor.config import (
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
)
from finecast_neural_compressor.given_model import GivenModel, Settings
from finecast_neural_compressor.op_dicts import names

_ONNX, _TORCH, _TENSORFLOW = "ONNX", "PyTorch", "TensorFlow"
# Models that ``fit`` does not take: what they are, and what to do instead.
_CHECKPOINT: Final = (
    "a checkpoint or an old format of TensorFlow's",
    "load it, and give the Keras model, or a SavedModel of it",
)
_TFLITE: Final = (
    "a TensorFlow Lite model",
    "use finecast.convert or finecast.tune, or give the SavedModel that it was made from",
)
_JAX: Final = ("a JAX model", "export it to ONNX (pip install jax2onnx), and give that file")
_OPENVINO: Final = (
    "an OpenVINO model",
    "use finecast.convert or finecast.tune, or give what it was made from (ONNX, nn.Module)",
)
_STATE: Final = (
    "a file of PyTorch's",
    "build the nn.Module, load the file, and give the module",
)
_PROGRAM: Final = (
    "an exported program",
    "convert it with: finecast convert model.pt2 -o low.pt2, or finecast tune",
)
_MXNET: Final = (
    "an MXNet model",
    (
        "give the ONNX file that scripts/mxnet_to_onnx.sh NAME-symbol.json NAME-0000.params"
        " SHAPE writes, in an environment of its own: MXNet's last release needs numpy 1.23.5"
    ),
)
_SUFFIXES: Final[Mapping[str, str | tuple[str, str]]] = {
    **dict.fromkeys((".pb", ".keras"), _TENSORFLOW),
    **dict.fromkeys((".h5", ".ckpt", ".meta"), _CHECKPOINT),
    ".tflite": _TFLITE,
    **dict.fromkeys((".pt", ".pth", ".bin", ".safetensors"), _STATE),
    ".pt2": _PROGRAM,
    ".xml": _OPENVINO,
    **dict.fromkeys((".params", ".json"), _MXNET),
}
_PACKAGES: Final[Mapping[str, str | tuple[str, str]]] = {
    **dict.fromkeys(("tensorflow", "keras", "tf_keras"), _TENSORFLOW),
    **dict.fromkeys(("jax", "flax"), _JAX),
    "openvino": _OPENVINO,
    "mxnet": _MXNET,
}


def framework_of(model: Any) -> str:
    """The framework of ``model``.

    Raises:
        UsageError: If ``fit`` does not take such models; says what to do next.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return _TORCH
    framework: str | tuple[str, str] | None = None
    shown = type(model).__name__
    if isinstance(model, str | Path):
        path, shown = Path(model), str(model)
        saved = (path / "saved_model.pb").is_file()
        framework = _TENSORFLOW if saved else _SUFFIXES.get(path.suffix.lower(), _ONNX)
    elif shown == "ModelProto":
        framework = _ONNX
    else:
        homes = (base.__module__.partition(".")[0] for base in type(model).__mro__)
        framework = next((_PACKAGES[home] for home in homes if home in _PACKAGES), None)
    if isinstance(framework, str):
        return framework
    if framework is not None:
        what, fix = framework
        raise UsageError(f"{what}, which fit does not take", where=shown, fix=fix)
    known = "an ONNX model or path"
    if importlib.util.find_spec("torch") is not None:
        known = f"an nn.Module, {known}"
    raise UsageError(f"cannot convert {kind_of(model)}", fix=f"give {known}")


def given(
    model: Any,
    settings: Settings,
    batches: Iterable[Any] | None,
) -> GivenModel:
    """The model as ``fit`` converts it, to int8 if the settings are those of quantization.

    Raises:
        UsageError: If ``fit`` does not take it, or a setting does not apply to it.
        ModelError: If it cannot be read.
        EngineError: If what reads or runs it is not installed.
    """
    framework = framework_of(model)
    if settings.backend == "itex":
        if framework != _TENSORFLOW:
            raise UsageError(
                "backend 'itex' is for TensorFlow models", fix='use backend="default"'
            )
        warnings.warn(_ITEX, stacklevel=3)
    if framework == _TORCH:
        from finecast_neural_compressor.torch_models import TorchGiven

        return TorchGiven.of(model, settings, batches)
    from finecast_neural_compressor.engine_models import (
        EngineModelGiven,
        OnnxResult,
        OpenVinoResult,
        TensorFlowResult,
    )

    if framework == _ONNX:
        path = Path(model) if isinstance(model, str) else model
        opened, engine = api.load(path), settings.engine
        given_model = EngineModelGiven(opened=opened, results=OnnxResult, engine=engine)
    elif settings.device != "cpu":
        raise UsageError(
            f"TensorFlow models run on the CPU here, and device is {settings.device!r}",
            fix='use device="cpu"',
        )
    elif isinstance(settings, PostTrainingQuantConfig):
        opened = api.load(model, output="model.xml")
        given_model = EngineModelGiven(opened=opened, results=OpenVinoResult)
    elif importlib.util.find_spec("tensorflow") is None:
        raise EngineError(
            "a model of TensorFlow needs TensorFlow", fix="pip install tensorflow"
        )
    else:
        is_frozen = Path(str(model)).suffix.lower() == ".pb"
        opened = api.load(_frozen(Path(model), settings) if is_frozen else model)
        given_model = EngineModelGiven(
            opened=opened, results=TensorFlowResult, names_ports=is_frozen
        )
    given_model.check_ports(settings.ports)
    return given_model


def _frozen(path: Path, settings: MixedPrecisionConfig) -> Any:
    """A frozen graph, which has no signature: the settings name its inputs and outputs."""
    tensorflow = importlib.import_module("finecast.tensorflow")
    return tensorflow.read_frozen(path, names(settings.inputs), names(settings.outputs))


_ITEX: Final = (
    "backend 'itex': Intel's extension for TensorFlow is archived, and the bf16 kernels it"
    ' had for CPUs are TensorFlow\'s own (oneDNN): converted as with backend="default"'
)


@checks
def load(checkpoint_dir: str | Path, model: Any = None, *, trust: bool = False) -> Any:
    """Read the result of ``fit`` that its ``save`` wrote.

    Nothing in the files is executed, unless they are trusted.

    Args:
        checkpoint_dir: The folder (for TensorFlow a SavedModel), or the file.
        model: The fp32 ``nn.Module``; needed if the module was converted module by module, of
            which only the state is saved.
        trust: Whether a module's program may import the packages that it names: a model of
            transformers gives a class of theirs.

    Raises:
        UsageError: If there is no such model, or ``model`` is missing.
        ModelError: If the files cannot be read, or are another module's, or would run code.
    """
    path = Path(checkpoint_dir)
    if any((path / name).is_file() for name in ("best_model.pt", "best_model.pt2")):
        from finecast_neural_compressor.torch_models import load_module

        return load_module(path, model, trust=trust)
    from finecast_neural_compressor.engine_models import load_model

    files = [path, path / "best_model.onnx", path / "best_model.xml"]
    saved_path = next((file for file in files if file.is_file()), path)
    if saved_path.is_file() or (path / "saved_model.pb").is_file():
        return load_model(saved_path)
    raise UsageError(
        "no model that fit(...).save wrote", where=str(path), fix="give the path given to save"
    )
