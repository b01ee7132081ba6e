"""Large ONNX files, parsed without being in memory twice."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

import onnx

from finecast.frontends.wire import fields

MODEL_GRAPH: Final = 7
GRAPH_INITIALIZER: Final = 5
# From here on reading twice shows beside the 200 MB that the libraries take.
WHOLE_BELOW_BYTES: Final = 16 << 20


def parse_model(path: Path, *, whole_below: int = WHOLE_BELOW_BYTES) -> onnx.ModelProto:
    """The message in a file; large tensors are read one by one, so that none is there twice.

    Args:
        path: The file.
        whole_below: Bytes of a file that is read at once, and of such a tensor.

    Raises:
        DecodeError, ValueError: If it is no whole message.
        OSError: If the file cannot be read.
    """
    if path.stat().st_size < whole_below:
        return onnx.ModelProto.FromString(path.read_bytes())
    model = onnx.ModelProto()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # unmapped with its last view; closing it here would fail while an error holds one
        data = memoryview(mapped)
        for field in fields(data, 0, len(data)):
            if field.number != MODEL_GRAPH:
                model.MergeFromString(bytes(data[field.start : field.end]))
                continue
            rest = field.content  # where what is not merged yet begins
            for part in fields(data, field.content, field.end):
                if part.number == GRAPH_INITIALIZER and part.end - part.start >= whole_below:
                    model.graph.MergeFromString(bytes(data[rest : part.start]))
                    file.seek(part.content)  # pages of the mapping would stay in memory
                    content = file.read(part.end - part.content)
                    model.graph.initializer.add().ParseFromString(content)
                    rest = part.end
            model.graph.MergeFromString(bytes(data[rest : field.end]))
    return model
