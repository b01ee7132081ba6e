"""What is fuzzed: bytes are loaded, converted, checked, saved and loaded again."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from finecast.errors import FinecastError
from finecast.frontends import onnx as frontend
from tests.frontends.tools import convert_file

_POLICIES: Final = ("all:bf16", "all:fp16", "matmult:bf16")


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="finecast-fuzz-"))


def try_bytes(data: bytes) -> None:
    """A FinecastError is as good as a conversion; anything else is a bug."""
    source, target = _folder() / "fuzz.onnx", _folder() / "out.onnx"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    try:
        convert_file(source, target, _POLICIES[len(data) % len(_POLICIES)])
    except FinecastError:
        return
    frontend.load(target)
