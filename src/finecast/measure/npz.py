"""Arrays of an .npz without loading what is not used: stored members are memory-mapped."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from finecast.engines.base import Array
from finecast.errors import UsageError

_LOCAL_HEADER = struct.Struct("<26xHH")
_LOCAL_HEADER_BYTES = 30


def open_npz(path: Path) -> dict[str, Array]:
    """The arrays by name; uncompressed ones as read-only maps of the file.

    Raises:
        UsageError: If the file is missing, not an npz, or holds pickled objects.
    """
    where = str(path)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return {
                info.filename.removesuffix(".npy"): _array(archive, info, file.fileno(), path)
                for info in archive.infolist()
            }
    except OSError as error:
        raise UsageError(
            f"cannot read the data: {error.strerror or error}",
            where=where,
            fix="check the path",
        ) from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise UsageError(
            "not an .npz file, or a truncated one", where=where, fix="save it with numpy.savez"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"an array cannot be read: {error}",
            where=where,
            fix="save plain arrays, no objects, with numpy.savez",
        ) from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, handle: int, path: Path) -> Array:
    with archive.open(info) as member:
        if info.compress_type != zipfile.ZIP_STORED:
            return npy.read_array(member, allow_pickle=False)
        version = npy.read_magic(member)
        read_header = (
            npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        )
        shape, fortran, dtype = read_header(member)
        skip = member.tell()
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        if 0 in shape:
            return np.zeros(shape, dtype)
    import os

    header = os.pread(handle, _LOCAL_HEADER_BYTES, info.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes + skip
    order = "F" if fortran else "C"
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order)
