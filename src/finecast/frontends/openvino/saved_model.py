"""The signatures of a SavedModel, read without TensorFlow.

OpenVINO reads the one that servers call, ``serving_default``. Where there is none it makes one
model of all of them, with the inputs and outputs of each.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from finecast.errors import ModelError
from finecast.frontends.wire import Field, fields

_FILE: Final = "saved_model.pb"
_SERVED: Final = "serving_default"
_HIDDEN: Final = "__"
"""What names of signatures begin with that TensorFlow adds for itself."""
# Numbers of fields: a SavedModel's meta graphs, the signatures of one, and the name of one.
_META_GRAPH, _SIGNATURE, _NAME = 2, 5, 1


def check_signatures(folder: Path) -> None:
    """Return if OpenVINO reads one of the signatures of the SavedModel in ``folder``.

    Raises:
        ModelError: If it would make one model of several.
    """
    file = folder / _FILE
    try:
        names = _signatures(file) if file.is_file() and file.stat().st_size else []
    except (OSError, ValueError):
        return  # OpenVINO says what is wrong with it
    if len(names) > 1 and _SERVED not in names:
        raise ModelError(
            f"the SavedModel has several signatures, and none is {_SERVED!r}:"
            f" {', '.join(map(repr, names))}",
            where=str(folder),
            fix="save one alone: m = tf.saved_model.load(FOLDER); tf.saved_model.save(m, NEW,"
            ' signatures=m.signatures["NAME"])',
        )


def _signatures(file: Path) -> list[str]:
    with file.open("rb") as opened, mmap.mmap(
        opened.fileno(), 0, access=mmap.ACCESS_READ
    ) as mapped, memoryview(mapped) as data:  # fmt: skip
        names = [
            bytes(data[name.content : name.end]).decode("utf-8", "replace")
            for graph in _numbered(data, 0, len(data), _META_GRAPH)
            for entry in _numbered(data, graph.content, graph.end, _SIGNATURE)
            for name in _numbered(data, entry.content, entry.end, _NAME)
        ]
    return sorted({name for name in names if not name.startswith(_HIDDEN)})


def _numbered(data: memoryview, start: int, end: int, number: int) -> Iterator[Field]:
    return (field for field in fields(data, start, end) if field.number == number)
