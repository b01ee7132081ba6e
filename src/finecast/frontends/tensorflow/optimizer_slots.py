"""The state of an optimizer in a SavedModel, left out as it is read: no output depends on it.

Keras 2 saves compiled models with the slots of their optimizer (momentum and the like), one
for each variable. TensorFlow with Keras 3 has no class to load them into, and fails.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from finecast.frontends.tensorflow.library import saved_model_pb2


@contextmanager
def without_slots(folder: Path, graph_file: str) -> Generator[Path]:
    """The folder of the same SavedModel without slots; ``folder`` itself if it has none.

    The copy has links to the files of ``folder``, and lives as long as the context.
    """
    found = _with_slots_cleared(folder / graph_file)
    if found is None:
        yield folder
        return
    with TemporaryDirectory(prefix="finecast-") as made:
        copy = Path(made)
        (copy / graph_file).write_bytes(found)
        for entry in folder.resolve().iterdir():
            if entry.name != graph_file:
                os.symlink(entry, copy / entry.name)
        yield copy


def _with_slots_cleared(file: Path) -> bytes | None:
    """The file's content without slots; None if it has none, or is not readable."""
    from google.protobuf.message import DecodeError

    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(file.read_bytes())
    except (OSError, DecodeError):
        return None  # TensorFlow says what is wrong with it
    nodes: list[Any] = [n for meta in saved.meta_graphs for n in meta.object_graph_def.nodes]
    owners = [node for node in nodes if node.slot_variables]
    for node in owners:
        node.ClearField("slot_variables")
    content: bytes = saved.SerializeToString()
    return content if owners else None
