"""External data: which of a model's tensors stay on disk, and reading the others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import onnx

from finecast.frontends.onnx.skeleton import KEEP_BELOW_BYTES, size_bytes
from finecast.frontends.onnx.verify import inner_tensors


def bring_in(model: onnx.ModelProto, folder: Path) -> None:
    """Read external tensors into the message, all but large initializers of the main graph.

    Those alone are left out of messages to onnx's passes, and written anew when a model is
    saved. Any other reference would then be read relative to another folder.

    Args:
        model: A message that ``check_tensors`` passed; changed in place.
        folder: The folder of its file.
    """
    for tensor in chain(_small(model), inner_tensors(model)):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        with (folder / entries["location"]).open("rb") as file:
            file.seek(max(int(entries.get("offset") or 0), 0))
            tensor.raw_data = file.read(size_bytes(tensor))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _small(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return (t for t in model.graph.initializer if size_bytes(t) <= KEEP_BELOW_BYTES)
