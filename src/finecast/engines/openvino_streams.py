"""OpenVINO with several requests at a time, and tensors that share memory with arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from finecast.engines.base import Array, Feeds, TensorSpec
from finecast.engines.ports import ordered_feeds
from finecast.errors import EngineError
from finecast.frontends.openvino.messages import explain

if TYPE_CHECKING:
    import openvino


def shareable(array: Array) -> Array:
    """The array, or a copy that OpenVINO can share: contiguous and writable."""
    return np.require(array, requirements=("C", "W")).reshape(array.shape)


def tensor_of(data: Array, kind: Any) -> openvino.Tensor:
    """A tensor of type ``kind`` in the memory of ``data``, which has to outlive it."""
    import openvino

    if data.dtype.kind == "V" or data.dtype.name.startswith(("bfloat", "float8")):
        raw = data.view(np.dtype(f"u{data.dtype.itemsize}"))
        return openvino.Tensor(raw, list(data.shape), kind)
    return openvino.Tensor(data, shared_memory=data.dtype.kind != "O")


@final
class OpenVinoStreams:
    """A model compiled for throughput, with as many requests as OpenVINO calls optimal."""

    def __init__(
        self, compiled: openvino.CompiledModel, inputs: Sequence[TensorSpec], where: str
    ) -> None:
        import openvino

        if compiled.create_infer_request().query_state():
            raise EngineError(
                "the model keeps a state from one request to the next",
                where=where,
                fix="use --objective latency",
            )
        self._inputs = inputs
        self._types = [port.get_element_type() for port in compiled.inputs]
        self._where = where
        self._queue = openvino.AsyncInferQueue(compiled)

    @property
    def requests(self) -> int:
        """How many requests run at a time, by OpenVINO's choice."""
        return len(self._queue)

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Run the model on each of ``feeds``, as soon as a request is free.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If OpenVINO fails.
        """
        shared: list[list[Array]] = []  # requests read them until they are done
        try:
            for arrays in [ordered_feeds(one, self._inputs) for one in feeds]:
                shared.append([shareable(array) for array in arrays])
                tensors = map(tensor_of, shared[-1], self._types)
                self._queue.start_async(dict(enumerate(tensors)), share_inputs=True)
            self._queue.wait_all()
        except RuntimeError as error:
            raise EngineError(
                f"OpenVINO cannot run the model: {explain(error)}",
                where=self._where,
                fix="check the feeds' sizes, or use --objective latency",
            ) from error
