"""OpenVINO models: read from files of several kinds, written as IR."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finecast.errors import EngineError, FinecastError, ModelError, UsageError
from finecast.files import digest, suffix_in_lower_case
from finecast.frontends.keras_outputs import with_flat_outputs
from finecast.frontends.openvino.changes import converted_to
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.reader import name_ops, renumber_ops
from finecast.frontends.openvino.saved_model import taken_signature
from finecast.frontends.saved_notes import stays_low

if TYPE_CHECKING:
    import openvino

IR_SUFFIX: Final = ".xml"
WEIGHTS_SUFFIX: Final = ".bin"
KERAS_SUFFIX: Final = ".keras"
_IN_MEMORY: Final = Path("<openvino.Model>.xml")
"""What messages call a model that came from no file."""

# What a file of each kind is called, and what to do where OpenVINO cannot read it.
_KINDS: Final = {
    ".xml": ("an OpenVINO IR", "write it again with openvino.save_model"),
    ".pb": (
        "a frozen GraphDef",
        "freeze the graph's variables, or give the folder of a SavedModel",
    ),
    ".tflite": ("a TensorFlow Lite model", "convert the model that it was made from"),
    ".pdmodel": ("a PaddlePaddle model", "save it again with paddle.jit.save"),
    KERAS_SUFFIX: ("a Keras model", "write a SavedModel by model.export(FOLDER)"),
    "": (
        "a SavedModel",
        "save it with dense tensors and no custom ops: tf.saved_model.save(..., signatures=F)",
    ),
}


@dataclass(slots=True, kw_only=True)
class OvFile:
    """A model as it was read: ``model`` is never changed.

    Attributes:
        path: Its file or folder; of a model in memory a name that no file has.
        model: The model; its ops have names of their own.
        digest: Of all its files.
        external: Its files other than ``path``: constants beside it, or what is in the folder.
        told: What was chosen of it as it was read.
    """

    path: Path
    model: openvino.Model
    digest: str
    external: tuple[Path, ...] = ()
    told: tuple[str, ...] = ()
    _size_bytes: int | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        """Of the model as IR, which is what converted models are written as.

        Other files have more in them than the model: Keras's its variables twice.
        """
        if self._size_bytes is None:
            self._size_bytes = size_bytes(self.model)
        return self._size_bytes

    @property
    def converted(self) -> str:
        """The policy of an earlier conversion; empty if there was none."""
        return converted_to(self.model)


def reads(path: Path) -> bool:
    """Whether a path is, by its name, of a model that ``load`` is for."""
    return path.is_dir() or path.suffix.lower() in _KINDS.keys() - {""}


def load(path: Path) -> OvFile:
    """Read a model; IR's constants stay on disk, mapped.

    Raises:
        UsageError: If there is no such file.
        ModelError: If OpenVINO cannot read it; says what it was taken for and what to do.
    """
    if not path.exists():
        raise UsageError("no such file", where=str(path), fix="check the path")
    parts = _parts(path)
    try:
        for part in parts:
            with part.open("rb"):
                pass
    except OSError as error:
        raise UsageError(
            f"cannot read the model: {error.strerror}", where=str(path)
        ) from error
    kind, fix = _KINDS[path.suffix.lower() if path.is_file() else ""]
    told = (taken_signature(path), stays_low(path)) if path.is_dir() else ()
    with guarded(path, f"cannot be read as {kind}", fix), _readable(path) as readable:
        model = _core().read_model(readable)
    _check(model, path, kind, fix)
    own = path.suffix.lower() == IR_SUFFIX
    if not own:  # names in IR are the file's own
        renumber_ops(model)
    name_ops(model)
    return OvFile(
        path=path,
        model=model,
        digest=digest(*parts),
        external=tuple(p for p in parts if p != path),
        told=tuple(filter(None, told)),
        _size_bytes=sum(p.stat().st_size for p in parts) if own else None,
    )


def from_model(model: openvino.Model) -> OvFile:
    """A model in memory; it is left as it is, names of its ops among it."""
    copy = model.clone()
    name_ops(copy)
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        path = Path(folder) / f"model{IR_SUFFIX}"
        save(copy, path)
        parts = _parts(path)
        found, size = digest(*parts), sum(p.stat().st_size for p in parts)
    return OvFile(path=_IN_MEMORY, model=copy, digest=found, _size_bytes=size)


def from_keras(model: Any) -> OvFile:
    """A Keras model in memory; it is left as it is.

    Raises:
        ModelError: If Keras cannot export it, or OpenVINO cannot read that.
    """
    path = Path(f"{model.name}{KERAS_SUFFIX}")
    kind, fix = _KINDS[KERAS_SUFFIX]
    with (
        guarded(path, f"cannot be read as {kind}", fix),
        _exported(lambda: model, path) as folder,
    ):
        found = _core().read_model(folder)
    _check(found, path, kind, fix)
    renumber_ops(found)
    return from_model(found)


def save(model: openvino.Model, path: Path) -> int:
    """Write IR, constants in the types that they have; returns bytes on disk."""
    import openvino

    openvino.save_model(model, path, compress_to_fp16=False)
    return sum(p.stat().st_size for p in _parts(path))


def size_bytes(model: openvino.Model) -> int:
    """Bytes of the files that ``save`` writes, to stand beside those of the model's own."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        return save(model, Path(folder) / f"model{IR_SUFFIX}")


@contextmanager
def guarded(path: Path, what: str, fix: str) -> Generator[None]:
    """What OpenVINO raises becomes one clear error."""
    try:
        yield
    except FinecastError:
        raise
    except RuntimeError as error:
        raise ModelError(f"{what}: {explain(error)}", where=str(path), fix=fix) from error


def _core() -> openvino.Core:
    import openvino

    return openvino.Core()


def _parts(path: Path) -> list[Path]:
    """The files that a model is in; of a folder all, in the order of their names."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    weights = [path.with_suffix(WEIGHTS_SUFFIX)] if path.suffix.lower() == IR_SUFFIX else []
    if path.suffix.lower() == ".pdmodel":
        weights = [path.with_suffix(".pdiparams")]
    return [path, *(w for w in weights if w.is_file())]


@contextmanager
def _readable(path: Path) -> Generator[Path]:
    """What OpenVINO reads of ``path``: Keras's own files go through a SavedModel."""
    if path.suffix.lower() != KERAS_SUFFIX:
        alone = _parts(path) == [path]
        with suffix_in_lower_case(path) if alone else nullcontext(path) as named:
            yield named
        return
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        raise EngineError(
            "Keras's own files are read by Keras, which is not installed",
            where=str(path),
            fix="pip install keras tensorflow-cpu; or write a SavedModel where they are:"
            " model.export(FOLDER)",
        ) from error

    def loaded() -> Any:
        with suffix_in_lower_case(path) as named:
            return keras.saving.load_model(named, compile=False)

    with _exported(loaded, path) as folder:
        yield folder


@contextmanager
def _exported(made: Callable[[], Any], path: Path) -> Generator[Path]:
    """A SavedModel of the Keras model that ``made`` gives."""
    keras: Any = importlib.import_module("keras")
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        try:
            with_flat_outputs(keras, made()).export(folder, verbose=False)
        except (ValueError, TypeError, OSError, AttributeError, ImportError) as error:
            what = (str(error).strip() or type(error).__name__).removeprefix("in user code:")
            raise ModelError(
                f"Keras cannot export the model: {' '.join(what.split())[:200]}",
                where=str(path),
                fix="load it in Python with its custom objects, and write a SavedModel:"
                " model.export(FOLDER)",
            ) from error
        yield Path(folder)


def _check(model: openvino.Model, path: Path, kind: str, fix: str) -> None:
    """Refuse what cannot be planned: no outputs, inputs of text."""
    if not model.outputs:
        raise ModelError(f"{kind} without outputs", where=str(path), fix=fix)
    for port in model.inputs:
        if port.get_element_type().get_type_name() == "string":
            raise ModelError(
                f"input {port.get_node().get_friendly_name()!r} is text, which has to become"
                " numbers before the model",
                where=str(path),
                fix="export the part of the model behind its tokenizer or look-up",
            )
