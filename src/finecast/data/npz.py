"""Reading the arrays of an .npz; those that are not compressed are memory-mapped.

Law: the memory taken is bounded, whatever the file declares. Compressed arrays are held in
memory, and a small file can hold compressed arrays a thousand times its size.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.lib import format as npy

from finecast.engines.base import Array
from finecast.errors import UsageError

# The most bytes of all compressed arrays of a file: what a desktop computer can spare.
_COMPRESSED_MOST: Final = 4 << 30
_PIECE_BYTES: Final = 1 << 20
_ONE_FILE: Final = (
    "save all samples in one file, named as the inputs: numpy.savez(FILE, **{NAME: ARRAY});"
    " a function of yours reads other files: --calib FILE.py:FUNCTION, and --eval in tune"
)
# The zip format's local file header, which ends with the lengths of the name and extra field.
_LOCAL_HEADER = struct.Struct("<26xHH")


def open_npz(path: Path) -> dict[str, Array]:
    """The arrays by name; uncompressed ones as read-only maps of the file.

    Raises:
        UsageError: If the file is missing, not an npz, holds pickled objects, or compressed
            arrays of more than 4 GiB.
    """
    where = str(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise UsageError("the data is no ordinary file", where=where, fix=_ONE_FILE)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            _check(members, where)
            return {
                info.filename.removesuffix(".npy"): _array(archive, info, file.fileno(), path)
                for info in members
            }
    except OSError as error:
        raise UsageError(
            f"cannot read the data: {error.strerror or error}",
            where=where,
            fix=_ONE_FILE if path.is_dir() else "check the path",
        ) from error
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise UsageError(
            "not an .npz file, or a truncated one", where=where, fix=_ONE_FILE
        ) from error
    # zipfile raises RuntimeError for an encrypted member, and NotImplementedError, which is a
    # RuntimeError, for an unknown compression.
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"an array cannot be read: {str(error) or type(error).__name__}",
            where=where,
            fix="save plain arrays, no objects, with numpy.savez",
        ) from error


def _check(members: list[zipfile.ZipInfo], where: str) -> None:
    """Raise UsageError for too many compressed bytes, or two arrays of one name."""
    packed = [m for m in members if m.compress_type != zipfile.ZIP_STORED]
    size = sum(m.file_size for m in packed)
    if size > _COMPRESSED_MOST:
        largest = max(packed, key=lambda m: m.file_size)
        raise UsageError(
            f"compressed arrays of {size / 2**30:.1f} GiB, {largest.filename!r} the largest:"
            f" {_COMPRESSED_MOST / 2**30:g} GiB are the most that are held in memory",
            where=where,
            fix="save with numpy.savez: what is not compressed is read piece by piece",
        )
    names = [m.filename.removesuffix(".npy") for m in members]
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in names[:i])
        raise UsageError(
            f"two arrays are called {twice!r}", where=where, fix="save it with numpy.savez"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, handle: int, path: Path) -> Array:
    with archive.open(info) as member:
        shape, fortran, dtype = _header(member)
        skip = member.tell()
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        size = math.prod(shape) * dtype.itemsize
        if any(n < 0 for n in shape) or skip + size != info.file_size:
            raise ValueError(f"{info.filename} declares {size} bytes and does not have them")
        if size == 0:
            return np.zeros(shape, dtype)
        order = "F" if fortran else "C"
        if info.compress_type != zipfile.ZIP_STORED:
            flat = np.empty(math.prod(shape), dtype)
            _fill(flat, member)
            return flat.reshape(shape, order=order)
    header = os.pread(handle, _LOCAL_HEADER.size, info.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes + skip
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        return read(member)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile):
        raise
    except Exception as error:
        # A header is a Python literal. NumPy does not catch what Python's tokenizer and parser
        # raise for a malformed one: TokenError, RecursionError, MemoryError.
        raise ValueError(f"its header: {type(error).__name__}") from error


def _fill(array: Array, member: IO[bytes]) -> None:
    """Read ``member`` into ``array``, piece by piece."""
    left = array.view(np.uint8)
    while len(left):
        piece = member.read(min(len(left), _PIECE_BYTES))
        if not piece:
            raise EOFError
        left[: len(piece)] = np.frombuffer(piece, np.uint8)
        left = left[len(piece) :]
