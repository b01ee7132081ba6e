"""Reads and writes models tensor by tensor, so that no large tensor is in memory twice.

onnx_ir's ``save`` holds all tensors of one file in memory, and each one of external data.

Law: a written model refers to no file but its own data file, wherever its tensors come from.
A temporary one may share data with the file that it was made of, by a hard link.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from finecast.frontends.onnx.constants import pieces, shape_of
from finecast.frontends.onnx.native import KEEP_BELOW_BYTES
from finecast.frontends.wire import fields, prefix

# Offsets of tensors in data files, so that engines can map a tensor without copying it.
_ALIGNMENT: Final = 4096
# Numbers of fields: ModelProto's graph, GraphProto's initializer, TensorProto's raw_data.
MODEL_GRAPH: Final = 7
GRAPH_INITIALIZER: Final = 5
_TENSOR_RAW: Final = 9
# Smaller files take little memory beside the 200 MB of the libraries, even twice.
_WHOLE_BELOW_BYTES: Final = 16 << 20


def parse_model(path: Path, *, whole_below: int = _WHOLE_BELOW_BYTES) -> onnx.ModelProto:
    """The message in a file; at most one of its large tensors is in memory twice.

    Args:
        path: The file.
        whole_below: Files of fewer bytes are read at once, and so are tensors.

    Raises:
        DecodeError, ValueError: If it is not a complete message.
        OSError: If the file cannot be read.
    """
    if path.stat().st_size < whole_below:
        return onnx.ModelProto.FromString(path.read_bytes())
    model = onnx.ModelProto()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Python unmaps it with its last view. Closing it here would fail while the traceback
        # of an error holds a view.
        data = memoryview(mapped)
        for field in fields(data, 0, len(data)):
            if field.number != MODEL_GRAPH:
                model.MergeFromString(bytes(data[field.start : field.end]))
                continue
            rest = field.content  # the start of what is not merged yet
            for part in fields(data, field.content, field.end):
                if part.number == GRAPH_INITIALIZER and part.end - part.start >= whole_below:
                    model.graph.MergeFromString(bytes(data[rest : part.start]))
                    # Not by the mapping, whose pages would stay in memory.
                    file.seek(part.content)
                    content = file.read(part.end - part.content)
                    model.graph.initializer.add().ParseFromString(content)
                    rest = part.end
            model.graph.MergeFromString(bytes(data[rest : field.end]))
    return model


def write_external(
    model: ir.Model, folder: Path, name: str, data_name: str, links: Path | None = None
) -> int:
    """Write ``folder / name`` with its tensors in ``folder / data_name``.

    Small tensors stay in the model file; if all are small there is no data file. ``model`` is
    unchanged when this returns. Returns the bytes on disk.

    Tensors that are still those of another file are not written again where ``links`` is
    given, the folder that the model will be in: it gets a link to that file.
    """
    values = _large(model)
    kept = {} if links is None else _linked(values, links)
    with (folder / data_name).open("wb") as file:
        external = [
            kept.get(v.name or "") or _write(v, file, folder, data_name) for v in values
        ]
        size = file.tell()
    if len(kept) == len(values):
        (folder / data_name).unlink()
    with _replaced(values, external):
        ir.save(model, folder / name)
    return size + (folder / name).stat().st_size


def _linked(values: list[ir.Value], folder: Path) -> dict[str, ir.ExternalTensor]:
    """Where tensors are in data files that they came from, by name; ``folder`` has the links.

    A file of which less than half is used is not linked, as engines take all of it for the
    size of the model; nor one on another file system.
    """
    tensors: dict[str, ir.ExternalTensor] = {}
    files: dict[Path, list[tuple[ir.Value, ir.ExternalTensor]]] = {}
    for value in values:
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            files.setdefault(Path(tensor.path).resolve(), []).append((value, tensor))
    for number, (path, kept) in enumerate(files.items()):
        if 2 * sum(tensor.nbytes for _, tensor in kept) < path.stat().st_size:
            continue
        there = folder / f"linked{number}.data"
        try:
            os.link(path, there)
        except OSError:  # another file system, or one without hard links
            continue
        for value, tensor in kept:
            declared = _declared(value, there.name, tensor.offset or 0, tensor.nbytes)
            declared.base_dir = folder
            tensors[declared.name or ""] = declared
    return tensors


def write_whole(model: ir.Model, path: Path) -> int:
    """Write the model with all its tensors to one file; returns the bytes on disk."""
    with path.open("wb") as file:
        _stream(model, file)
    return path.stat().st_size


def to_bytes(model: ir.Model) -> bytes:
    """The model with all its tensors as one serialized message."""
    file = io.BytesIO()
    _stream(model, file)
    return file.getvalue()


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model with all its tensors as a protobuf object, of any size."""
    proto = _without_large(model)
    for tensor, source in _with_sources(model, proto.graph):
        if source is not None:
            tensor.raw_data = b"".join(pieces(source))
    return proto


def size_bytes(model: ir.Model) -> int:
    """Bytes of the serialized model with its tensors, none of which is read for it."""
    tensors = (v.const_value for v in _large(model))
    return _without_large(model).ByteSize() + sum(t.nbytes for t in tensors if t is not None)


def _large(model: ir.Model) -> list[ir.Value]:
    """Initializers that are written piece by piece, or to a data file."""
    return [
        v
        for v in model.graph.initializers.values()
        if v.const_value is not None
        and v.const_value.nbytes > KEEP_BELOW_BYTES
        and v.const_value.dtype is not ir.DataType.STRING
    ]


def _without_large(model: ir.Model) -> onnx.ModelProto:
    """The model as a message in which large initializers have no elements."""
    values = _large(model)
    with _replaced(values, [_declared(v, "", 0, 0) for v in values]):
        proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return proto


def _with_sources(
    model: ir.Model, graph: onnx.GraphProto
) -> Iterator[tuple[onnx.TensorProto, ir.TensorProtocol | None]]:
    """The message's initializers, each with the tensor of the elements that it is without."""
    sources = {v.name: v.const_value for v in _large(model)}
    return ((tensor, sources.get(tensor.name)) for tensor in graph.initializer)


def _stream(model: ir.Model, file: BinaryIO) -> None:
    """Write the whole model as one message, its fields in the order of their numbers."""
    proto = _without_large(model)
    graph, sources = proto.graph, [s for _, s in _with_sources(model, proto.graph)]
    heads = [
        _head(t.SerializeToString(), s)
        for t, s in zip(graph.initializer, sources, strict=True)
    ]
    graph.ClearField("initializer")
    graph_first, graph_last = _split(graph, GRAPH_INITIALIZER)
    proto.ClearField("graph")
    first, last = _split(proto, MODEL_GRAPH)
    size = len(graph_first) + len(graph_last) + sum(map(len, heads))
    size += sum(s.nbytes for s in sources if s is not None)
    file.write(first + prefix(MODEL_GRAPH, size) + graph_first)
    for head, source in zip(heads, sources, strict=True):
        file.write(head)
        for piece in pieces(source) if source is not None else ():
            file.write(piece)
    file.write(graph_last + last)


def _split(message: Message, at: int) -> tuple[bytes, bytes]:
    """Serialized: the fields before number ``at``, and the others. Clears those before it."""
    whole = message.SerializeToString()
    for field, _ in message.ListFields():
        if field.number < at:
            message.ClearField(field.name)
    last = message.SerializeToString()
    return whole[: len(whole) - len(last)], last


def _head(content: bytes, source: ir.TensorProtocol | None) -> bytes:
    """The bytes of an initializer's field; up to its elements if they are those of ``source``.

    ``content`` is the serialized tensor, without elements if ``source`` has them.
    """
    if source is None:
        return prefix(GRAPH_INITIALIZER, len(content)) + content
    raw = prefix(_TENSOR_RAW, source.nbytes)
    size = len(content) + len(raw) + source.nbytes
    return prefix(GRAPH_INITIALIZER, size) + content + raw


def _write(value: ir.Value, file: BinaryIO, folder: Path, data_name: str) -> ir.ExternalTensor:
    tensor = value.const_value
    assert tensor is not None
    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    file.seek(offset)
    for piece in pieces(tensor):
        file.write(piece)
    declared = _declared(value, data_name, offset, file.tell() - offset)
    declared.base_dir = folder
    return declared


def _declared(value: ir.Value, location: str, offset: int, length: int) -> ir.ExternalTensor:
    tensor = value.const_value
    assert tensor is not None
    return ir.ExternalTensor(
        location,
        offset,
        length,
        tensor.dtype,
        shape=shape_of(tensor),
        name=value.name or "",
    )


@contextmanager
def _replaced(values: list[ir.Value], tensors: list[ir.ExternalTensor]) -> Generator[None]:
    before = [v.const_value for v in values]
    try:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor
        yield
    finally:
        for value, old in zip(values, before, strict=True):
            value.const_value = old
