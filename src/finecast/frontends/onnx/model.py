"""Loading and saving ONNX files; big tensors stay on disk until they are needed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from finecast.errors import ModelError, UsageError

# A protobuf message ends at 2 GiB; tensors go to a second file a safe distance before.
EXTERNAL_ABOVE_BYTES: Final = 1_800_000_000
# Digests read tensors in pieces, so that a digest never holds a large tensor twice.
_DIGEST_SAMPLE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """A model as it was read, with the digest that identifies it in plans and studies."""

    path: Path
    model: ir.Model
    digest: str
    size_bytes: int


def load(path: Path) -> OnnxFile:
    """Read an ONNX file; external data is memory-mapped, not read.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is not an ONNX model, is truncated, or its external data is missing.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"model file {what}", where=str(path), fix="give the path of an .onnx file")
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, TypeError, KeyError, OSError, AttributeError) as error:
        raise ModelError(
            f"not a readable ONNX model: {_first_line(error)}",
            where=str(path),
            fix="check that the file is complete and was exported as ONNX",
        ) from error
    if not model.opset_imports or len(list(model.graph)) + len(model.graph.outputs) == 0:
        raise ModelError(
            "not an ONNX model: no opset import or no graph",
            where=str(path),
            fix="check that the file is complete and was exported as ONNX",
        )
    size = _check_external_data(model, path)
    return OnnxFile(path=path, model=model, digest=digest(path), size_bytes=size)


def digest(path: Path) -> str:
    """Sha256 of the model file (its external data is identified by name, size and ends)."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_DIGEST_SAMPLE_BYTES):
            total.update(piece)
    return total.hexdigest()[:16]


def save(model: ir.Model, path: Path, *, force: bool = False) -> int:
    """Write the model to ``path`` in one step; returns the bytes on disk.

    The file appears complete or not at all. Above 1.8 GB tensors go to ``NAME.data``.

    Raises:
        UsageError: If ``path`` exists and ``force`` is not set, or cannot be written.
    """
    path = Path(path)
    check_writable(path, force=force)
    external = _tensor_bytes(model) > EXTERNAL_ABOVE_BYTES
    data_name = path.name + ".data"
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
            staged = Path(folder) / path.name
            ir.save(model, staged, external_data=data_name if external else None)
            if external:
                (Path(folder) / data_name).replace(path.parent / data_name)
            size = staged.stat().st_size
            staged.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write the output: {error.strerror or error}",
            where=str(path),
            fix="choose a folder that exists, is writable and has room",
        ) from error
    return size + ((path.parent / data_name).stat().st_size if external else 0)


def check_writable(path: Path, *, force: bool) -> None:
    """Raise UsageError unless a file may be put at ``path``."""
    if path.is_dir():
        raise UsageError("output is a directory", where=str(path), fix="give a file name")
    if path.exists() and not force:
        raise UsageError(
            "output exists", where=str(path), fix="choose another name or pass --force"
        )
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            "output folder does not exist or is not writable",
            where=str(folder),
            fix="create it or choose another",
        )


def to_bytes(model: ir.Model) -> bytes:
    """The model as one serialized message.

    Raises:
        ModelError: If it is too large for one message.
    """
    if _tensor_bytes(model) > EXTERNAL_ABOVE_BYTES:
        raise ModelError("model is over 2 GB", fix="load it from a file with external data")
    return ir.to_proto(model).SerializeToString()


def check(path: Path) -> None:
    """Run ``onnx.checker`` with strict shape inference over a written file.

    Raises:
        ModelError: If the model is not valid ONNX.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(
            f"the model is not valid ONNX: {_first_line(error)}", where=str(path)
        ) from error


def _check_external_data(model: ir.Model, path: Path) -> int:
    """Check that external data stays beside the model and is complete; total bytes."""
    folder = path.parent.resolve()
    files: set[Path] = set()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = Path(tensor.path)
        real = file.resolve()
        end = (tensor.offset or 0) + (tensor.length or 0)
        problem = ""
        if not real.is_relative_to(folder):
            problem = "leaves the model's folder"
        elif not real.is_file():
            problem = "does not exist"
        elif end > real.stat().st_size:
            problem = f"is shorter than the {end} bytes the model declares"
        if problem:
            raise ModelError(
                f"external data of {value.name!r} {problem}",
                where=str(file),
                fix="put the data file beside the model, unchanged",
            )
        files.add(real)
    return path.stat().st_size + sum(f.stat().st_size for f in files)


def _tensor_bytes(model: ir.Model) -> int:
    tensors = (v.const_value for v in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
