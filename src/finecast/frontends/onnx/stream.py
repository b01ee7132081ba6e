"""Writing models: tensors go to a second file piece by piece, and are never held."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import onnx_ir as ir

from finecast.frontends.onnx.constants import pieces, shape_of
from finecast.frontends.onnx.skeleton import KEEP_BELOW_BYTES

# So that engines can map a tensor without copying it.
_ALIGNMENT: Final = 4096


def write_external(model: ir.Model, folder: Path, name: str, data_name: str) -> int:
    """Write ``folder / name`` with its tensors in ``folder / data_name``; bytes on disk.

    Small tensors stay in the model, and where all are small there is no second file.
    ``model`` is as before when this returns.
    """
    values = [
        v
        for v in model.graph.initializers.values()
        if v.const_value is not None
        and v.const_value.nbytes > KEEP_BELOW_BYTES
        and v.const_value.dtype is not ir.DataType.STRING
    ]
    with (folder / data_name).open("wb") as file:
        external = [_write(v, file, folder, data_name) for v in values]
        size = file.tell()
    if not external:
        (folder / data_name).unlink()
    with _replaced(values, external):
        ir.save(model, folder / name)
    return size + (folder / name).stat().st_size


def _write(value: ir.Value, file: BinaryIO, folder: Path, data_name: str) -> ir.ExternalTensor:
    tensor = value.const_value
    assert tensor is not None
    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    file.seek(offset)
    for piece in pieces(tensor):
        file.write(piece)
    return ir.ExternalTensor(
        data_name,
        offset,
        file.tell() - offset,
        tensor.dtype,
        shape=shape_of(tensor),
        name=value.name or "",
        base_dir=folder,
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
