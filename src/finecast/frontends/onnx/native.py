"""Runs onnx's C++ passes in a process of their own, on models without their weights.

Hostile models make them crash, never end, or take all memory (onnx 1.23). Then only that
process dies, and here one clear error is raised. Messages are below 2 GiB, so large constants
are left out of them, and put back after the pass. onnx_ir's passes for shapes and the checker
call the same C++ code in the caller's process, and give constants another order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native_worker
from finecast.frontends.onnx.constants import shape_of
from finecast.processes.worker import Limits, Worker, WorkerDiedError

_TITLES: Final = {
    "infer": "shape inference",
    "convert": "version converter",
    "inline": "inliner",
    "check": "checker",
}
# onnx's passes read small constants (axes, scales, shapes); larger ones are left out.
KEEP_BELOW_BYTES: Final = 1024
_FIX: Final = "check the sizes and attributes that the model declares, and export it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most memory (bytes) and time that a pass may take, by the size of its input.

    A message of 100,000 nodes has 11.5 MB: the version converter, the most costly pass, takes
    504 MB and 2.5 s for it. Files are mostly weights: for 403 MB the checker takes 786 MB and
    0.6 s.
    """

    memory: int = 2 << 30
    memory_per_byte: int = 128
    seconds: float = 20.0
    seconds_per_byte: float = 10e-6

    def of(self, size: int) -> Limits:
        """The limits for an input of ``size`` bytes."""
        return {
            "memory": self.memory + self.memory_per_byte * size,
            "seconds": self.seconds + self.seconds_per_byte * size,
        }


OF_MESSAGES = Bounds()
OF_FILES = Bounds(memory_per_byte=16, seconds_per_byte=1e-6)


class PassError(Exception):
    """A pass refused the model; the text is the first line of its message."""


class PassDiedError(ModelError):
    """A pass crashed, ran out of memory or did not end in time."""


def transform(
    name: Literal["infer", "convert", "inline"], model: onnx.ModelProto, **options: int
) -> onnx.ModelProto:
    """``model`` after the pass.

    If no process can be started, the pass runs in this one, without limits.

    Raises:
        PassError: If the pass refuses the model.
        PassDiedError: If it crashes, takes too much memory or does not end in time.
    """
    message = model.SerializeToString()
    limits = OF_MESSAGES.of(len(message))
    return onnx.ModelProto.FromString(_run(name, message, options, limits))


def check(path: Path) -> None:
    """Run ``onnx.checker`` with strict shape inference over a file; see ``transform``.

    Raises:
        PassError, PassDiedError: As ``transform``.
        OSError: If there is no such file.
    """
    limits = OF_FILES.of(path.stat().st_size)
    _run("check", os.fsencode(path.absolute()), {}, limits)


def warm_up() -> None:
    """Start the process unless it runs, without waiting for it: that takes 0.2 s."""
    _worker.warm_up()


def _run(name: str, payload: bytes, options: Mapping[str, int], limits: Limits) -> bytes:
    try:
        header, result = _worker.call({"pass": name, "options": options}, payload, limits)
    except WorkerDiedError as error:
        raise PassDiedError(
            f"onnx's {_TITLES[name]} {error} on the model", fix=_FIX
        ) from error
    if header["status"] == "raised":
        raise PassError(next(iter(header["text"].strip().splitlines()), header["kind"]))
    return result


_worker = Worker(native_worker.__file__, instead=native_worker.answer)


Pass: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto]


def rewritten(model: ir.Model, function: Pass) -> ir.Model:
    """The model that ``function`` makes of ``model``, with weights and metadata put back."""
    return _restored(function(without_weights(model)), model)


def message_without_weights(message: onnx.ModelProto) -> onnx.ModelProto:
    """``message`` as ``without_weights`` gives the model that was read from it.

    Copying parts of a message takes a twentieth of the time of serializing the model.
    """
    graph, light = message.graph, onnx.ModelProto(ir_version=message.ir_version)
    light.opset_import.extend(message.opset_import)
    light.functions.extend(message.functions)
    copy = light.graph
    copy.name = graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(copy, field).extend(getattr(graph, field))
    inputs = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if size_bytes(tensor) <= KEEP_BELOW_BYTES:
            copy.initializer.append(tensor)
        elif tensor.name not in inputs:
            copy.input.append(
                onnx.helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, list(tensor.dims)
                )
            )
    return light


def size_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements as raw data; 0 for strings, which have no such form."""
    if tensor.data_type == ir.DataType.STRING:
        return 0
    return math.ceil(math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth / 8)


def _large(model: ir.Model) -> dict[str, ir.Value]:
    """Initializers of the main graph that are left out of such messages, by name."""
    return {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > KEEP_BELOW_BYTES
    }


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """``model`` as a message whose large initializers are plain inputs; it is unchanged."""
    graph = model.graph
    inputs, initializers = list(graph.inputs), list(graph.initializers.items())
    for name, value in _large(model).items():
        tensor = value.const_value
        assert tensor is not None
        value.shape = value.shape or shape_of(tensor)
        value.type = value.type or ir.TensorType(tensor.dtype)
        graph.initializers.pop(name)
        if not value.is_graph_input():
            graph.inputs.append(value)
    try:
        return ir.to_proto(model)
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.initializers.clear()
        graph.initializers.update(initializers)  # all of them, to restore their order


def _restored(proto: onnx.ModelProto, original: ir.Model) -> ir.Model:
    """The model of ``proto``, with the weights and metadata of ``original`` put back."""
    weights = _large(original)
    model = ir.from_proto(proto)
    graph = model.graph
    inputs = [*graph.inputs]
    graph.inputs.clear()
    for value in inputs:
        twin = weights.get(value.name or "")
        if twin is None or twin.is_graph_input():
            graph.inputs.append(value)
        if twin is not None:
            value.const_value = twin.const_value
            graph.register_initializer(value)
    by_name = {n.name: n for n in original.graph.all_nodes()}
    for node in graph.all_nodes():
        before = by_name.get(node.name)
        if before is not None and before.op_type == node.op_type:
            node.metadata_props.update(before.metadata_props)
            node.doc_string = node.doc_string or before.doc_string
    model.metadata_props.update(original.metadata_props)
    return model
