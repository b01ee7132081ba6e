"""Ports and node names of an ONNX file, read without its weights."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from finecast.engines.base import ONNX_LABELS, TensorSpec
from finecast.errors import EngineError, UsageError
from finecast.files.staging import Stage
from finecast.frontends.onnx.draws import fix_draws, may_draw
from finecast.frontends.onnx.editor import ROUNDING
from finecast.frontends.onnx.miscomputed import miscomputed
from finecast.frontends.onnx.model import EXTERNAL_ABOVE_BYTES, place_files
from finecast.frontends.onnx.stream import GRAPH_INITIALIZER, MODEL_GRAPH
from finecast.frontends.onnx.types import bodies_in
from finecast.frontends.wire import fields, inside, prefix, texts, undecodable
from finecast.numbers.formats import Format

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """One node of the main graph; ``inputs`` include the values that its bodies capture.

    ``attributes`` are those that are integers other than 0, as text.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Ports and nodes of an ONNX model; nodes in file order, which ONNX has topological.

    ``depth`` is how many levels bodies of control flow are nested, ``opset`` the version of
    ONNX's own operation set; ``miscomputed`` says what OpenVINO computes wrongly in the model;
    ``rounded`` are labels of the formats that finecast noted at nodes which round;
    ``kv_cache`` is the format that it noted for the keys and values of earlier calls.
    ``data`` are the names of files in the model's folder that hold weights of it. ``draws``
    says that it may have random ops. ``stage`` keeps the folder of a model that was written to
    be run.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[ModelStep, ...]
    depth: int = 0
    opset: int = 0
    miscomputed: str = ""
    rounded: frozenset[str] = frozenset()
    kv_cache: Format | None = None
    data: frozenset[str] = frozenset()
    draws: bool = False
    stage: Stage | None = None

    @property
    def producers(self) -> dict[str, str]:
        """The name of each value's producer, by the name of the value."""
        return {value: step.name for step in self.steps for value in step.outputs}


def read_source(model: Path | bytes) -> ModelSource:
    """Read ports and names of nodes; weights are not read.

    Raises:
        UsageError: If the file cannot be read.
        EngineError: If it is not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    where = str(model) if isinstance(model, Path) else ""
    proto = onnx.ModelProto()
    try:
        light, initialized, data = _light(model)
        proto.ParseFromString(light)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot read the model: {reason}", where=where, fix="check the path"
        ) from error
    except (DecodeError, ValueError) as error:
        raise EngineError(
            "not an ONNX model, or a truncated one", where=where, fix="export the model again"
        ) from error
    if place := undecodable(proto):
        raise EngineError(
            f"not an ONNX model: {place} is no UTF-8",
            where=where,
            fix="export the model again",
        )
    if not proto.graph.node and not proto.graph.output:
        raise EngineError(
            "not an ONNX model: it has no graph", where=where, fix="export the model again"
        )
    return ModelSource(
        inputs=tuple(_spec(v, where) for v in proto.graph.input if v.name not in initialized),
        outputs=tuple(_spec(v, where) for v in proto.graph.output),
        steps=tuple(_step(node) for node in proto.graph.node),
        depth=_depth(proto.graph),
        opset=next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0),
        miscomputed=miscomputed(proto, partial(_whole, model)),
        rounded=frozenset(_rounded(proto.graph)),
        data=data,
        draws=may_draw(proto),
    )


def _whole(model: Path | bytes) -> ir.Model:
    """The model with its weights, or the places of those that lie in other files."""
    import onnx
    import onnx_ir as ir

    if isinstance(model, Path):
        return ir.load(model)
    return ir.serde.deserialize_model(onnx.ModelProto.FromString(model))


def to_run(model: Path | bytes) -> tuple[Path | bytes, ModelSource]:
    """The model as engines run it, with fixed draws in place of random ops, and its source.

    Weights that lie in files are not read: such a model is written beside links to these. So
    is one that is larger than a protobuf message.

    Raises:
        UsageError, EngineError: As ``read_source``.
    """
    import onnx

    source = read_source(model)
    if not source.draws:
        return model, source
    folder = model.parent if isinstance(model, Path) else Path()
    content = model.read_bytes() if isinstance(model, Path) else model
    proto = onnx.ModelProto.FromString(content)
    del content
    if not fix_draws(proto, str(folder)):
        return model, source
    large = proto.ByteSize() > EXTERNAL_ABOVE_BYTES
    if not large and not (source.data and isinstance(model, Path)):
        fixed = proto.SerializeToString()
        return fixed, read_source(fixed)
    stage = Stage()
    place = stage.folder / _TO_RUN
    onnx.save(proto, place, save_as_external_data=large, location=f"{_TO_RUN}.data")
    within = [name for name in source.data if (folder / name).is_file() and ".." not in name]
    place_files(folder, within, stage.folder)
    return place, replace(read_source(place), stage=stage)


_TO_RUN: Final = "finecast-run.onnx"


def _depth(graph: onnx.GraphProto) -> int:
    inner = (body for node in graph.node for body in bodies_in(node))
    return max((1 + _depth(body) for body in inner), default=0)


def _rounded(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        notes = (p for p in node.metadata_props if p.key == ROUNDING)
        yield from (note.value.partition(" ")[0] for note in notes)
        for body in bodies_in(node):
            yield from _rounded(body)


def _light(model: Path | bytes) -> tuple[bytes, frozenset[str], frozenset[str]]:
    if isinstance(model, bytes):
        return without_weights(memoryview(model))
    with model.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # The file is unmapped with its last view. Closing it here would fail if an exception's
    # traceback still held a view.
    return without_weights(memoryview(mapped))


def _spec(info: onnx.ValueInfoProto, where: str) -> TensorSpec:
    import onnx

    tensor, known = info.type.tensor_type, onnx.TensorProto.DataType
    if tensor.elem_type not in known.values():
        raise EngineError(
            f"not an ONNX model: {info.name!r} has the unknown element type"
            f" {tensor.elem_type}",
            where=where,
            fix="export the model again",
        )
    name = known.Name(tensor.elem_type).lower()
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(_dim(dim) for dim in tensor.shape.dim)
    return TensorSpec(name=info.name, dtype=ONNX_LABELS.get(name, name), shape=shape)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None  # PaddlePaddle's free ones are -1
    return dim.dim_param or None


def _step(node: onnx.NodeProto) -> ModelStep:
    outputs = tuple(value for value in node.output if value)
    domain = f"{node.domain}." if node.domain else ""
    return ModelStep(
        name=node.name or (outputs[0] if outputs else ""),
        op=domain + node.op_type,
        inputs=tuple(value for value in _reads(node) if value),
        outputs=outputs,
        attributes=" ".join(sorted(f"{a.name}={a.i}" for a in node.attribute if a.i)),
    )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for body in bodies_in(node):
        inner = {value for step in body.node for value in step.output}
        inner.update(value.name for value in body.input)
        for step in body.node:
            yield from (value for value in _reads(step) if value not in inner)


# An encoded ONNX model without its weights, cut from the protobuf message.
#
# Names and ports take a few kilobytes, weights up to gigabytes. Parsing the weights would
# count as memory that the engine used.

_GRAPH_SPARSE_INITIALIZER = 15
_TENSOR_NAME, _TENSOR_EXTERNAL = (8,), (13,)
_ENTRY_KEY, _ENTRY_VALUE = (1,), (2,)


def without_weights(data: memoryview) -> tuple[bytes, frozenset[str], frozenset[str]]:
    """The encoded model without initializers, their names, and those of files that hold them.

    Raises:
        ValueError: If ``data`` is not a whole protobuf message.
    """
    kept: list[bytes | memoryview] = []
    names: set[str] = set()
    files: set[str] = set()
    for field in fields(data, 0, len(data)):
        if field.number != MODEL_GRAPH:
            kept.append(data[field.start : field.end])
            continue
        graph: list[memoryview] = []
        for part in fields(data, field.content, field.end):
            if part.number == GRAPH_INITIALIZER:
                span = part.content, part.end
                names.update(texts(data, span, _TENSOR_NAME))
                for entry in inside(data, span, _TENSOR_EXTERNAL):
                    if "location" in texts(data, entry, _ENTRY_KEY):
                        files.update(texts(data, entry, _ENTRY_VALUE))
            elif part.number != _GRAPH_SPARSE_INITIALIZER:
                graph.append(data[part.start : part.end])
        body = b"".join(graph)
        kept.append(prefix(MODEL_GRAPH, len(body)) + body)
    return b"".join(kept), frozenset(names), frozenset(files)
