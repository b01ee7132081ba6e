"""Loading and saving ONNX files; large tensors stay on disk until they are needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError
from onnx_ir.external_data import set_base_dir

from finecast.errors import ModelError, UsageError, first_line, naming
from finecast.files import DATA_SUFFIX, check_writable, digest, writing
from finecast.files.staging import Stage, staging
from finecast.frontends.collection import paused_collection
from finecast.frontends.onnx import native, stream
from finecast.frontends.onnx.constants import origin
from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.editor import FREE_INITIALIZERS
from finecast.frontends.onnx.native import KEEP_BELOW_BYTES, size_bytes
from finecast.frontends.onnx.verify import (
    check_calls,
    check_dense,
    check_ports,
    check_tensors,
    check_text,
    inner_tensors,
    name_graphs,
    sort_nodes,
)
from finecast.naming import kind_of
from finecast.numbers.encodings import Scaled
from finecast.planning.provenance import Provenance

NOTES: Final = "finecast."
"""What the keys of a model's notes on its conversion begin with."""

# A protobuf message has less than 2 GiB; with this many bytes of tensors, well below, they go
# to a second file.
EXTERNAL_ABOVE_BYTES: Final = 1_800_000_000
_LARGEST_MESSAGE_BYTES: Final = 1 << 31
_MOST_OPSETS: Final = 1000
"""Versions of ONNX's own operators that are read: it has had 28 in nine years."""
_LARGEST_VERSION: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """A model as it was read, with the digest that identifies it in plans and studies.

    Attributes:
        path: Where engines load it from: absolute.
        model: The model.
        digest: The digest of the file and its external data.
        size_bytes: The size of both.
        name: What messages call it: the path as it was given.
        external: Files beside it that hold some of its tensors.
        stage: The temporary folder of ``path``, if the model was given in memory or converted.
        message: The message that the file was parsed to, if ``model`` has its nodes in the
            same order.
        from_type: The type whose ops were converted to fp32; empty if none.
        original: The model before that conversion.
        told: What the user is told of that conversion.
        came_as: How values and constants were encoded before that conversion, by name.
        frozen: Whether the user had weights that are inputs, too, made constants, or kept.
    """

    path: Path
    model: ir.Model
    digest: str
    size_bytes: int
    name: str
    external: tuple[Path, ...] = ()
    stage: Stage | None = None
    message: onnx.ModelProto | None = None
    from_type: str = ""
    original: OnnxFile | None = None
    told: tuple[str, ...] = ()
    came_as: Mapping[str, Scaled] = field(default_factory=dict[str, Scaled])
    frozen: bool | None = None

    @property
    def converted(self) -> Provenance | None:
        """The conversion that made it; None if finecast did not."""
        stated = self.model.metadata_props.items()
        own = {k.removeprefix(NOTES): t for k, t in stated if k.startswith(NOTES)}
        return Provenance.read(own)

    @property
    def truth(self) -> OnnxFile | None:
        """The model before it was converted to fp32, where that lost accuracy: from fp64."""
        return self.original if self.from_type == "fp64" else None


def from_model(model: object) -> OnnxFile:
    """An onnx.ModelProto or an onnx_ir.Model as if ``load`` had read it from a file.

    ``model`` is not changed. A copy for engines is kept in a temporary folder as long as the
    result lives.

    Raises:
        UsageError: If ``model`` is neither.
        ModelError: As ``load``; or if a ModelProto refers to external data, which lies beside
            a file that only the caller knows, or is over 2 GB.
    """
    if not isinstance(model, onnx.ModelProto | ir.Model):
        raise UsageError(
            f"{kind_of(model)} is not an ONNX model",
            fix="give a path, an onnx.ModelProto or an onnx_ir.Model",
        )
    stage = Stage()
    path = stage.folder / "model.onnx"
    kind = "ModelProto" if isinstance(model, onnx.ModelProto) else "ir.Model"
    name = f"the {kind} that was given"
    with naming(path, name):
        if isinstance(model, onnx.ModelProto):
            path.write_bytes(_message(model, name))
        else:
            save(model, path)
        return replace(load(path), name=name, stage=stage)


def _message(model: onnx.ModelProto, name: str) -> bytes:
    everything = chain(model.graph.initializer, inner_tensors(model))
    apart = next((t for t in everything if t.data_location == onnx.TensorProto.EXTERNAL), None)
    if apart is not None:
        raise ModelError(
            f"the elements of {apart.name!r} are in another file",
            where=name,
            fix="give the model's path, or load it with its external data",
        )
    try:
        return model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "the model is over 2 GB, more than a protobuf message can hold",
            where=name,
            fix="give the path of a file with external data, or an onnx_ir.Model",
        ) from error


def _shape_as_stored(model: ir.Model) -> None:
    """Give initializers the shapes of their tensors, whatever a ``value_info`` says.

    Tools that cut a table leave the old shape there, and the model that is written would be
    refused for it.
    """
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.shape = ir.Shape(value.const_value.shape.numpy())


def load(path: Path) -> OnnxFile:
    """Read an ONNX file; external data stays on disk until it is needed.

    Nodes are sorted if they are not in topological order.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is not an ONNX model, is truncated, declares sizes that its data does
            not have, has a cycle, or its external data is missing or outside of its folder.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"model file {what}", where=str(path), fix="check the path")
    native.warm_up()  # starts on another core while the file is read on this one
    size = path.stat().st_size
    if size >= _LARGEST_MESSAGE_BYTES:
        raise _unreadable(path, f"it has {size} bytes, and protobuf messages end at 2 GiB")
    with paused_collection():
        proto = _parse(path)
        check_text(proto, path)
        _check_opsets(proto, path)
        check_ports(proto, path)
        check_dense(proto, path)
        data = check_tensors(proto, path)
        try:
            bring_in(proto, path.parent)
            free_negative_sizes(proto)
            name_graphs(proto)
            model = ir.from_proto(proto)
            set_base_dir(model.graph, path.parent.absolute())
            _shape_as_stored(model)
        except Exception as error:  # onnx_ir raises what Python raises on malformed messages
            raise _unreadable(path, first_line(_first_cause(error))) from error
        if not model.opset_imports or not (len(model.graph) or model.graph.outputs):
            raise _unreadable(path, "no opset import or no graph")
        untyped = next((v.name for v in model.graph.inputs if v.type is None), None)
        if untyped is not None:
            raise _unreadable(path, f"its input {untyped!r} has no type")
        check_calls(model, path)
        ordered = sort_nodes(model, path)
    return OnnxFile(
        path=path.absolute(),
        model=model,
        digest=digest(path, *data),
        size_bytes=size + sum(f.stat().st_size for f in data),
        name=str(path),
        external=data,
        message=proto if ordered else None,
        told=_on_inputs(model),
    )


def with_inputs(file: OnnxFile, *, frozen: bool) -> OnnxFile:
    """``file`` with the weights that are inputs, too, as constants if ``frozen``; else inputs.

    The result has the digest of ``file``, and engines run the same file: they need no such
    input. A later version of ONNX's IR says that a caller may replace such weights.
    """
    told = _on_inputs(file.model)
    if file.frozen is frozen or not told:
        return file
    model = file.model.clone()
    if frozen:
        kept = [v for v in model.graph.inputs if not v.is_initializer()]
        model.graph.inputs.clear()
        model.graph.inputs.extend(kept)
    model.ir_version = max(model.ir_version or 0, FREE_INITIALIZERS)
    others = tuple(text for text in file.told if text not in told)
    notes = () if frozen else _on_inputs(model)
    return replace(file, model=model, frozen=frozen, message=None, told=(*others, *notes))


def weights_on_inputs(model: ir.Model) -> str:
    """How many weights are inputs, too, in words; empty if there are none."""
    count = sum(v.is_initializer() for v in model.graph.inputs)
    weights = "1 weight is an input" if count == 1 else f"{count} weights are inputs"
    return f"{weights}, too" if count else ""


def _on_inputs(model: ir.Model) -> tuple[str, ...]:
    """What the user is told of weights that are inputs, too; empty if there are none."""
    weights = weights_on_inputs(model)
    if not weights:
        return ()
    if (model.ir_version or 0) < FREE_INITIALIZERS:
        text = (
            "as IR version 3 asks of all: in the converted model they are constants, which a"
            " caller cannot feed (--no-freeze-inputs keeps them inputs)"
        )
    else:
        text = (
            "which a caller may replace: they stay fp32 inputs, and ops that read them keep"
            " fp32 or cast them in each call (--freeze-inputs makes them constants)"
        )
    return (f"{weights}, {text}",)


def _parse(path: Path) -> onnx.ModelProto:
    try:
        return stream.parse_model(path)
    except (DecodeError, ValueError, OSError) as error:
        raise _unreadable(path, first_line(error)) from error


def _check_opsets(proto: onnx.ModelProto, path: Path) -> None:
    """Raise ModelError for a version of operators that no ONNX has.

    All versions of the default domain up to the stated one are looked at, and the library
    takes versions of 32 bits.
    """
    for stated in chain(proto.opset_import, *(f.opset_import for f in proto.functions)):
        most = _MOST_OPSETS if normal_domain(stated.domain) == "" else _LARGEST_VERSION
        if abs(stated.version) > most:
            domain = stated.domain or "ai.onnx"
            raise _unreadable(path, f"there is no opset {stated.version} of {domain!r}")


def _first_cause(error: BaseException) -> BaseException:
    """What onnx_ir found: its own error names the function in which it did."""
    while isinstance(error, ir.serde.SerdeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _unreadable(path: Path, what: str) -> ModelError:
    return ModelError(
        f"not a readable ONNX model: {what}",
        where=str(path),
        fix="check that the file is complete and was exported as ONNX",
    )


def save(
    model: ir.Model,
    path: Path,
    *,
    force: bool = False,
    external_data: bool | None = None,
    linking: bool = False,
) -> int:
    """Write the model to ``path``; returns the bytes on disk.

    The file appears complete or not at all.

    Args:
        model: The model; it is unchanged when this returns.
        path: The file to write.
        force: Whether an existing file may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside it. None: only if there are
            more than 1.8 GB of them, or the model was loaded from such a pair of files.
        linking: Whether external tensors that are unchanged may stay in the file that they
            are in, to which a link is made beside ``path``; for a temporary model.

    Raises:
        UsageError: If ``path`` exists and ``force`` is not set, or cannot be written.
        ModelError: If the model is malformed, or does not fit one file and ``external_data``
            is False.
    """
    path = Path(path)
    check_writable(path, force=force)
    fits = fits_one_message(model)
    if external_data is False and not fits:
        raise ModelError(
            "the model is over 2 GB and does not fit one file",
            where=str(path),
            fix="let its tensors be written to a second file, as external data",
        )
    external = (not fits or came_external(model)) if external_data is None else external_data
    data_name = path.name + DATA_SUFFIX
    try:
        with (
            writing(path),
            paused_collection(keeps=False),
            staging(path.parent) as folder,
        ):
            if external:
                links = path.parent if linking else None
                size = stream.write_external(model, folder, path.name, data_name, links)
            else:
                size = stream.write_whole(model, folder / path.name)
            if (folder / data_name).exists():
                (folder / data_name).replace(path.parent / data_name)
            (folder / path.name).replace(path)
    except UsageError:
        raise
    except Exception as error:  # onnx_ir raises what Python raises on malformed models
        raise ModelError(
            f"the model cannot be written: {first_line(error.__cause__ or error)}",
            where=str(path),
            fix="run onnx.checker on the model that was given, and export it again",
        ) from error
    return size


def fits_one_message(model: ir.Model, most_bytes: int | None = None) -> bool:
    """Whether the model, with all its tensors, can be one protobuf message of that size.

    By default it is the size above which tensors are stored outside of the message.
    """
    return _tensor_bytes(model) <= (EXTERNAL_ABOVE_BYTES if most_bytes is None else most_bytes)


def to_bytes(model: ir.Model) -> bytes:
    """The model as one serialized message.

    Raises:
        ModelError: If it is too large for one message.
    """
    if _tensor_bytes(model) > EXTERNAL_ABOVE_BYTES:
        raise ModelError("model is over 2 GB", fix="load it from a file with external data")
    return stream.to_bytes(model)


def staged(file: OnnxFile, model: ir.Model, name: str) -> OnnxFile:
    """``model``, made of that of ``file``, in a temporary folder; else it has all of ``file``.

    ``name`` is what messages call it while it is written and read.
    """
    stage = Stage()
    path = stage.folder / "model.onnx"
    with naming(path, name):
        save(model, path, external_data=came_external(file.model) or None)
        staged_file = load(path)
    return replace(
        staged_file,
        digest=file.digest,
        size_bytes=file.size_bytes,
        name=file.name,
        external=file.external,
        stage=stage,
    )


def came_external(model: ir.Model) -> bool:
    """Whether the model was loaded from a file with external data."""
    tensors = (v.const_value for v in model.graph.initializers.values())
    return any(isinstance(origin(t), ir.ExternalTensor) for t in tensors)


def _tensor_bytes(model: ir.Model) -> int:
    tensors = (v.const_value for v in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None)


# External data: which of a model's tensors stay on disk, and reading the others.


def bring_in(model: onnx.ModelProto, folder: Path) -> None:
    """Read external tensors into the message, all but large initializers of the main graph.

    Those alone are left out of messages to onnx's passes, and written anew when a model is
    saved. Any other reference would then be read relative to another folder.

    Args:
        model: A message that ``check_tensors`` passed; changed in place.
        folder: The folder of its file.
    """
    small = (t for t in model.graph.initializer if size_bytes(t) <= KEEP_BELOW_BYTES)
    for tensor in chain(small, inner_tensors(model)):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        with (folder / entries["location"]).open("rb") as file:
            file.seek(max(int(entries.get("offset") or 0), 0))
            tensor.raw_data = file.read(size_bytes(tensor))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


# Declared sizes that are negative, as exports of PaddlePaddle write free dimensions.


def free_negative_sizes(proto: onnx.ModelProto) -> None:
    """Leave out sizes below 0 of the model's values, in place: engines take such for free."""
    graph = proto.graph
    for value in chain(graph.input, graph.output, graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


# Models that are symbolic links, for engines that do not follow these.


@contextmanager
def without_links(model: Path | bytes) -> Generator[Path | bytes]:
    """``model``, or if it is a link, a copy with data that are no links, inside the block.

    In the caches of Hugging Face's hub a model and its data are links to files beside each
    other, and OpenVINO refuses data outside of the model's folder. The copies are hard links,
    which take no space, or files where hard links are impossible (another file system).
    """
    names = [] if isinstance(model, bytes) or not model.is_symlink() else _names(model)
    if isinstance(model, bytes) or not any((model.parent / n).is_symlink() for n in names):
        yield model
        return
    with staging() as folder:
        place_files(model.parent, (Path(model.name), *names), folder)
        yield folder / model.name


def _names(model: Path) -> list[Path]:
    """External data that the model may read, relative to its folder and below it."""
    try:
        files = load(model).external
    except ModelError:  # the engine will say what is wrong
        return []
    names = [f.relative_to(model.parent) for f in files]
    return [n for n in names if ".." not in n.parts]


def place_files(source: Path, names: Iterable[str | Path], folder: Path) -> None:
    """Link files of these names into ``folder``; to another file system they are copied."""
    for name in names:
        file, there = (source / name).resolve(), folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, there)
        except OSError:
            shutil.copyfile(file, there)
