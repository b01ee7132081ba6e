"""Reads OpenVINO models from files of several kinds, writes them as IR, explains failures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finecast.errors import FinecastError, ModelError, UsageError
from finecast.files import digest, suffix_in_lower_case
from finecast.files.staging import staging
from finecast.frontends.dry_run import MOST_BYTES, DryRun
from finecast.frontends.keras_models import (
    KERAS_SUFFIX,
    exported,
    import_keras,
    load_keras,
)
from finecast.frontends.onnx import model as onnx_model
from finecast.frontends.onnx.functions import without_functions
from finecast.frontends.onnx.miscomputed import miscomputed
from finecast.frontends.onnx.model import weights_on_inputs, without_links
from finecast.frontends.openvino.changes import converted, marked, with_every_mark, write_marks
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.reader import name_ops, renumber_ops
from finecast.frontends.openvino.types import (
    FORMATS,
    label_of,
    new_constant,
    numbers_of,
    replace_op,
)
from finecast.frontends.saved_models import check_saved_state, notes_in, taken_signature
from finecast.planning.provenance import Provenance

if TYPE_CHECKING:
    import openvino

IR_SUFFIX: Final = ".xml"
ONNX_SUFFIX: Final = ".onnx"
WEIGHTS_SUFFIX: Final = ".bin"
_SHOWN_AROUND: Final = 20
"""Bytes that a message shows before and behind those that are no UTF-8."""
_IN_MEMORY: Final = Path("<openvino.Model>.xml")
"""What messages call a model that came from no file."""
_BESIDE: Final = {IR_SUFFIX: WEIGHTS_SUFFIX, ".pdmodel": ".pdiparams"}
"""The suffix of the file with a model's weights, for the kinds that have one beside it."""

_BY_TENSORFLOW: Final = (
    "name the output as a folder, which TensorFlow reads and writes, without OpenVINO"
)
# By suffix ("" for a folder): what messages call the kind, and what to do if OpenVINO cannot
# read it.
_KINDS: Final = {
    ".xml": ("an OpenVINO IR", "write it again with openvino.save_model"),
    ONNX_SUFFIX: (
        "an ONNX model",
        "name the output NAME.onnx, which is written without OpenVINO's reading",
    ),
    ".pb": (
        "a frozen GraphDef",
        "freeze the graph's variables, or give the folder of a SavedModel",
    ),
    ".tflite": ("a TensorFlow Lite model", "convert the model that it was made from"),
    ".pdmodel": ("a PaddlePaddle model", "save it again with paddle.jit.save"),
    KERAS_SUFFIX: ("a Keras model", _BY_TENSORFLOW),
    "": (
        "a SavedModel",
        f"{_BY_TENSORFLOW}; or save it with dense tensors and no custom ops",
    ),
}


@dataclass(slots=True, kw_only=True)
class OvFile:
    """A model as it was read; ``model`` is never changed.

    Attributes:
        path: Its file or folder; for a model in memory a name that no file has.
        model: The model; no two of its ops have the same name.
        digest: The digest of all its files.
        external: Its files other than ``path``: constants beside it, or what is in the folder.
        told: What to tell the user about reading it, such as which signature was taken.
    """

    path: Path
    model: openvino.Model
    digest: str
    external: tuple[Path, ...] = ()
    told: tuple[str, ...] = ()
    _size_bytes: int | None = None
    _all_marked: openvino.Model | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        """Bytes of the model as IR, the form in which conversions are written.

        Files of other kinds would not compare: Keras's, for one, hold all variables twice.
        """
        if self._size_bytes is None:
            self._size_bytes = size_bytes(self.model)
        return self._size_bytes

    def with_every_mark(self, model: openvino.Model) -> openvino.Model:
        """A copy with all ops marked of ``model``, which is this or has adjusted operands."""
        if model is not self.model:
            return with_every_mark(model)
        if self._all_marked is None:
            self._all_marked = with_every_mark(model)
        return self._all_marked.clone()

    @property
    def converted(self) -> Provenance | None:
        """The conversion that made it; None if finecast did not."""
        return converted(self.model) or Provenance.read(notes_in(self.path))


def reads(path: Path) -> bool:
    """Whether a path is of a kind that ``load`` alone reads: a folder, or by its suffix."""
    return path.is_dir() or _suffix(path) in _KINDS.keys() - {"", ONNX_SUFFIX}


def load(path: Path, *, trust: bool = False) -> OvFile:
    """Read a model; the constants of IR are mapped from disk.

    Code that a ``.keras`` file brings runs only with ``trust``.

    Raises:
        UsageError: If there is no such file, or it may not be read.
        ModelError: If OpenVINO cannot read it; says what it was taken for and what to do.
    """
    if not path.exists():
        raise UsageError("no such file", where=str(path), fix="check the path")
    parts, notice = _onnx_parts(path) if _suffix(path) == ONNX_SUFFIX else (_parts(path), "")
    try:
        for part in parts:
            with part.open("rb"):
                pass
    except OSError as error:
        raise UsageError(
            f"cannot read the model: {error.strerror}",
            where=str(path),
            fix="check who may read its files",
        ) from error
    kind, fix = _KINDS[_suffix(path)]
    if _suffix(path) == IR_SUFFIX:
        _check_text(path, fix)
    beside = _BESIDE.get(_suffix(path))
    if beside is not None and parts == [path]:
        fix = f"put {path.with_suffix(beside).name} beside it, which has its weights, or {fix}"
    external = tuple(p for p in parts if p != path)
    told = (taken_signature(path) if path.is_dir() else "", notice)
    with guarded(path, f"cannot be read as {kind}", fix), _readable(path, trust) as readable:
        if readable.is_dir():
            check_saved_state(readable)
        DryRun(
            library="openvino",
            settings={"compile": {}},
            model=readable,
            where=str(path),
            fix=fix,
            data=[os.path.relpath(p, path.parent) for p in external],
        ).load()
        model = _core().read_model(readable)
    _check(model, path, kind, fix)
    fold_reshapes(model)
    own = _suffix(path) == IR_SUFFIX
    if not own:  # IR has the names in the file
        renumber_ops(model)
    name_ops(model)
    return OvFile(
        path=path,
        model=model,
        digest=digest(*parts),
        external=external,
        told=tuple(filter(None, told)),
        _size_bytes=sum(p.stat().st_size for p in parts) if own else None,
    )


def _check_text(path: Path, fix: str) -> None:
    """Refuse IR whose text is no UTF-8: OpenVINO reads it, but cannot name what is in it.

    Raises:
        ModelError: If it is not; says where and shows its bytes.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                shown = line[max(error.start - _SHOWN_AROUND, 0) : error.end + _SHOWN_AROUND]
                raise ModelError(
                    f"line {number} is no UTF-8, at {shown!r}", where=str(path), fix=fix
                ) from error


def from_model(model: openvino.Model) -> OvFile:
    """A model in memory, of which a copy is taken."""
    copy = model.clone()
    fold_reshapes(copy)
    name_ops(copy)
    with staging() as folder:
        path = folder / f"model{IR_SUFFIX}"
        save(copy, path)
        parts = _parts(path)
        content_digest, size = digest(*parts), sum(p.stat().st_size for p in parts)
    return OvFile(
        path=_IN_MEMORY,
        model=copy,
        digest=content_digest,
        _size_bytes=size,
    )


def fold_reshapes(model: openvino.Model) -> None:
    """Put constants in the place of those that are only reshaped, in place.

    Of an ONNX model OpenVINO gives a bias its shape by the rank of the convolution's result.
    So it is not computed from constants alone, which ``ConstantFolding`` would find, and
    OpenVINO folds it only as it compiles.
    """
    for op in model.get_ordered_ops():
        shape = op.get_output_partial_shape(0) if op.get_type_name() == "Reshape" else None
        if shape is None or not shape.is_static:
            continue
        source: Any = op.input_value(0).get_node()
        fmt = FORMATS.get(label_of(source.get_output_element_type(0)))
        if source.get_type_name() == "Constant" and fmt is not None:
            array = numbers_of(source).reshape(shape.to_shape())
            replace_op(op, new_constant(array, fmt))


def from_keras(model: Any) -> OvFile:
    """A Keras model in memory, read through a SavedModel that is exported for it.

    Raises:
        ModelError: If Keras cannot export it, or OpenVINO cannot read the export.
    """
    path = Path(f"{model.name}{KERAS_SUFFIX}")
    kind, fix = _KINDS[KERAS_SUFFIX]
    with (
        guarded(path, f"cannot be read as {kind}", fix),
        exported(import_keras(str(path)), model, path) as folder,
    ):
        check_saved_state(folder)
        ov_model = _core().read_model(folder)
    _check(ov_model, path, kind, fix)
    renumber_ops(ov_model)
    return from_model(ov_model)


def save(model: openvino.Model, path: Path) -> int:
    """Write IR with constants in their own types; returns its size in bytes.

    Raises:
        UsageError: If it cannot be written, as the disk is full.
    """
    import openvino

    try:
        openvino.save_model(model, path, compress_to_fp16=False)
        if names := marked(model):
            write_marks(path, names)
    except RuntimeError as error:  # its text is that of C++'s streams, without a reason
        free = shutil.disk_usage(path.parent).free
        raise UsageError(
            f"cannot write the model: {free / 1e6:.1f} MB are free there ({explain(error)})",
            where=str(path),
            fix="free space, or choose another folder",
        ) from error
    return sum(p.stat().st_size for p in _parts(path))


@contextmanager
def sent(model: openvino.Model) -> Generator[tuple[Path | bytes | None, int]]:
    """The model as IR for another process, and how many bytes are not its weights.

    IR of more than ``MOST_BYTES`` is a file inside the block; if less, its description with
    the weights behind it. None where the disk is full.
    """
    with staging() as folder:
        path = folder / f"model{IR_SUFFIX}"
        try:
            size = save(model, path)
        except UsageError:
            yield None, 0
            return
        if size > MOST_BYTES:
            yield path, path.stat().st_size
            return
        described, weights = path.read_bytes(), path.with_suffix(WEIGHTS_SUFFIX).read_bytes()
    yield described + weights, len(described)


def size_bytes(model: openvino.Model) -> int:
    """Bytes of the files that ``save`` would write."""
    with staging() as folder:
        return save(model, folder / f"model{IR_SUFFIX}")


@contextmanager
def guarded(path: Path, what: str, fix: str) -> Generator[None]:
    """Raise a ModelError in place of what OpenVINO raises inside."""
    try:
        yield
    except FinecastError:
        raise
    except RuntimeError as error:
        raise ModelError(f"{what}: {explain(error)}", where=str(path), fix=fix) from error


def _core() -> openvino.Core:
    import openvino

    return openvino.Core()


def _suffix(path: Path) -> str:
    """The suffix by which a file's kind is known, in lower case; empty for a folder."""
    return "" if path.is_dir() else path.suffix.lower()


def _parts(path: Path) -> list[Path]:
    """The files of a model: itself and its weights, or all in its folder, sorted."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    beside = _BESIDE.get(_suffix(path))
    weights = None if beside is None else path.with_suffix(beside)
    return [path] if weights is None or not weights.is_file() else [path, weights]


def _onnx_parts(path: Path) -> tuple[list[Path], str]:
    """The files of an ONNX model, and a notice of weights that callers could feed.

    Raises:
        ModelError: If it is malformed, or its weights are outside of its folder; or if
            OpenVINO computes an op of it wrongly.
    """
    file = onnx_model.load(path)
    if wrong := miscomputed(file.model, lambda: file.model):
        fix = _KINDS[ONNX_SUFFIX][1]
        raise ModelError(f"not given to OpenVINO: {wrong}", where=str(path), fix=fix)
    weights = weights_on_inputs(file.model)
    notice = weights and (
        f"{weights}: OpenVINO reads them as constants, which a caller cannot feed (an ONNX"
        " output can keep them inputs)"
    )
    return [path, *file.external], notice


@contextmanager
def _readable(path: Path, trust: bool) -> Generator[Path]:
    """The path for OpenVINO to read: for a ``.keras`` file a temporary SavedModel of it.

    Of other single files it is one whose suffix is in lower case, as OpenVINO needs it.
    """
    if _suffix(path) == ONNX_SUFFIX:
        with without_links(path) as place, without_functions(place) as readable:
            assert isinstance(readable, Path)
            yield readable
        return
    if _suffix(path) != KERAS_SUFFIX:
        alone = _parts(path) == [path]
        with suffix_in_lower_case(path) if alone else nullcontext(path) as named:
            yield named
        return
    keras = import_keras(str(path))
    with exported(keras, load_keras(keras, path, trust=trust), path) as folder:
        yield folder


def _check(model: openvino.Model, path: Path, kind: str, fix: str) -> None:
    """Raise ModelError for a model that cannot be planned: no outputs, or text as input."""
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
