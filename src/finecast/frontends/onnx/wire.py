"""Parses large ONNX files without having them in memory twice."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

import onnx

from finecast.frontends.wire import fields

MODEL_GRAPH: Final = 7
GRAPH_INITIALIZER: Final = 5
# Smaller files take little memory beside the 200 MB of the libraries, even twice.
WHOLE_BELOW_BYTES: Final = 16 << 20


def parse_model(path: Path, *, whole_below: int = WHOLE_BELOW_BYTES) -> onnx.ModelProto:
    """The message in a file; large tensors are read one by one, so that only one is twice.

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
