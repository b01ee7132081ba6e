"""Tensors of constants: read only when asked for, in pieces, and not kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.numbers.encodings import Encoding, stored_bytes
from finecast.numbers.formats import Format

# Elements that are converted at a time, to bound the memory that conversion takes.
PIECE: Final = 1 << 22

DATA_TYPES: Final = {
    Format.FP32: ir.DataType.FLOAT,
    Format.FP16: ir.DataType.FLOAT16,
    Format.BF16: ir.DataType.BFLOAT16,
    Format.FP8_E4M3: ir.DataType.FLOAT8E4M3FN,
    Format.FP8_E5M2: ir.DataType.FLOAT8E5M2,
}


def data_type(encoding: Encoding) -> ir.DataType:
    """The type of a constant that is stored in ``encoding``."""
    if not isinstance(encoding, Format):
        return ir.DataType.from_numpy(encoding.dtype)
    return DATA_TYPES[encoding.storage]


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a ``Constant`` node's output; None otherwise."""
    if value.const_value is not None and value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain:
        return None
    return ir.convenience.get_const_tensor(value)


def shape_of(tensor: ir.TensorProtocol) -> ir.Shape:
    """A new shape object for a value that holds ``tensor``."""
    return ir.Shape(tensor.shape.numpy())


def constant_reader(tensor: ir.TensorProtocol) -> Callable[[], NDArray[np.generic]]:
    """A function that reads the tensor's array and keeps nothing of it.

    onnx_ir keeps a file mapped once it was read, and pages that were read stay in memory. So
    arrays in files get a mapping of their own here, which is closed with the array.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.numpy

    def mapped() -> NDArray[np.generic]:
        # Without a folder, in which onnx_ir refuses links that ``verify`` allows.
        location, name = tensor.path, tensor.name or ""
        again = ir.ExternalTensor(
            location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=name
        )
        return again.numpy()

    return mapped


def pieces(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """The tensor's bytes as external data stores them, a few MB at a time.

    What lies in a file is read piece by piece.
    """
    if isinstance(tensor, ConvertedTensor):
        yield from tensor.pieces()
    elif isinstance(tensor, ir.ExternalTensor):
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset or 0)
            left = tensor.nbytes
            while left:
                piece = file.read(min(left, 4 * PIECE))
                if not piece:
                    raise ValueError(f"{tensor.path} is shorter than when it was loaded")
                left -= len(piece)
                yield piece
    else:
        yield tensor.tobytes()


@final
class ConvertedTensor(ir.LazyTensor):
    """A constant in another encoding, converted when it is written and never held."""

    def __init__(self, source: ir.TensorProtocol, encoding: Encoding, name: str = "") -> None:
        self.source = source
        self.encoding = encoding
        dtype = data_type(encoding)
        super().__init__(self._whole, dtype=dtype, shape=shape_of(source), name=name)

    def _whole(self) -> ir.TensorProtocol:
        array: NDArray[Any] = self.encoding.encode(constant_reader(self.source)())
        return ir.Tensor(array, dtype=self.dtype, name=self.name)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The converted bytes, a few MB at a time."""
        array = constant_reader(self.source)()
        return stored_bytes(array, self.encoding, piece=PIECE)


@final
class ComputedTensor(ir.LazyTensor):
    """Numbers that are computed from another constant when they are read, never held.

    By default they are as many as those of ``source``, in fp32.
    """

    def __init__(
        self,
        source: ir.TensorProtocol,
        compute: Callable[[NDArray[Any]], NDArray[Any]],
        name: str = "",
        dtype: ir.DataType = ir.DataType.FLOAT,
        shape: ir.Shape | None = None,
    ) -> None:
        self.source = source
        self._compute = compute
        shape = shape_of(source) if shape is None else shape
        super().__init__(self._whole, dtype=dtype, shape=shape, name=name)

    def _whole(self) -> ir.TensorProtocol:
        array = np.asarray(self._compute(constant_reader(self.source)()), self.dtype.numpy())
        return ir.Tensor(array, dtype=self.dtype, name=self.name)


def unrounded(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The numbers of a constant before an edit converted them."""
    return tensor.source if isinstance(tensor, ConvertedTensor) else tensor


def origin(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """The tensor of the file that ``tensor`` was computed from, perhaps in several steps."""
    while isinstance(tensor, ConvertedTensor | ComputedTensor):
        tensor = tensor.source
    return tensor


def set_constant(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace the numbers of the constant ``value`` by ``tensor``."""
    tensor.name = value.name
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
