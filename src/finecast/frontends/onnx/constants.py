"""Tensors of constants: read only when asked for, in pieces, and not kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.numbers.encodings import Encoding, stored_bytes
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled
from finecast.planning.adjustments import Adjustment

# Elements that are converted at a time, to bound the memory that conversion takes.
PIECE: Final = 1 << 22

# Metadata of every node whose format an edit changed: the format before. Of every node that an
# edit inserted: empty. A second conversion tells them from what the model's author wrote.
MARK: Final = "finecast.was"
# Further metadata of the nodes that round one value by other ops than casts: the format's
# label, a space, and a name that no other rounding has.
ROUNDING: Final = f"{MARK}.rounding"

DATA_TYPES: Final = {
    Format.FP32: ir.DataType.FLOAT,
    Format.FP16: ir.DataType.FLOAT16,
    Format.BF16: ir.DataType.BFLOAT16,
    Format.FP8_E4M3: ir.DataType.FLOAT8E4M3FN,
    Format.FP8_E5M2: ir.DataType.FLOAT8E5M2,
}


def data_type(encoding: Encoding) -> ir.DataType:
    """The type of a constant that is stored in ``encoding``."""
    if isinstance(encoding, Scaled):
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


def constant_value(name: str, array: NDArray[np.generic]) -> ir.Value:
    """A value of the numbers of ``array``, to be registered as an initializer."""
    return ir.val(name, const_value=ir.tensor(array, name=name))


def shape_of(tensor: ir.TensorProtocol) -> ir.Shape:
    """A new shape object for a value that holds ``tensor``."""
    return ir.Shape(tensor.shape.numpy())


def constant_reader(tensor: ir.TensorProtocol) -> Callable[[], NDArray[np.generic]]:
    """A function that reads the tensor's array and keeps nothing of it.

    onnx_ir keeps a file mapped once it was read, and pages that were read stay in memory. So
    arrays in files get a mapping of their own here, which is closed with the array.
    """
    if isinstance(tensor, ir.ExternalTensor):
        return lambda: _mapped(tensor)
    return tensor.numpy


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


def _mapped(tensor: ir.ExternalTensor) -> NDArray[np.generic]:
    dtype = tensor.dtype.numpy()
    shape = tensor.shape.numpy()
    if not int(np.prod(shape, dtype=np.int64)):
        return np.empty(shape, dtype)
    if tensor.dtype.bitwidth < 8:  # several elements in a byte
        raw = b"".join(pieces(tensor))
        proto = onnx.TensorProto(data_type=tensor.dtype, dims=shape, raw_data=raw)
        return ir.from_proto(proto).numpy()
    return np.memmap(tensor.path, dtype, "r", tensor.offset or 0, shape)


@final
class ConvertedTensor(ir.LazyTensor):
    """A constant in another encoding, converted when it is written and never held."""

    def __init__(self, source: ir.TensorProtocol, encoding: Encoding, name: str) -> None:
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
class DecodedTensor(ir.LazyTensor):
    """The fp32 numbers that a constant's codes stand for, computed when they are read."""

    def __init__(self, source: ir.TensorProtocol, encoding: Scaled, name: str) -> None:
        self.source = source
        self.encoding = encoding
        dtype = ir.DataType.FLOAT
        super().__init__(self._whole, dtype=dtype, shape=shape_of(source), name=name)

    def _whole(self) -> ir.TensorProtocol:
        array: NDArray[Any] = self.encoding.decode(constant_reader(self.source)())
        return ir.Tensor(array, dtype=self.dtype, name=self.name)


@final
class AdjustedTensor(ir.LazyTensor):
    """A constant with an adjustment, computed when it is read and never held."""

    def __init__(self, source: ir.TensorProtocol, what: Adjustment, name: str) -> None:
        self.source = source
        self.what = what
        dtype, shape = ir.DataType.FLOAT, shape_of(source)
        super().__init__(self._whole, dtype=dtype, shape=shape, name=name)

    def _whole(self) -> ir.TensorProtocol:
        array = constant_reader(self.source)().astype(np.float32, copy=False)
        return ir.Tensor(self.what.of(array), name=self.name)


# Tensors that are computed from another one, their ``source``.
MadeTensor: TypeAlias = ConvertedTensor | DecodedTensor | AdjustedTensor
