"""Checks of files: before anything else reads one, in linear time, and after one was written.

onnx's checker alone would not do for what is read: it crashes on hostile models, and refuses
some that engines run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import onnx
import onnx_ir as ir

from finecast.errors import ModelError, first_line
from finecast.frontends.onnx import native
from finecast.frontends.onnx.native import size_bytes
from finecast.frontends.onnx.types import bodies, bodies_in
from finecast.frontends.wire import undecodable

G = TypeVar("G", onnx.GraphProto, onnx.FunctionProto)

_DOMAIN: Final = "finecast.ports"
"""The domain of ops that the checker does not know: it checks nothing of their results."""
_AGAIN: Final = "check that the file is complete and was exported as ONNX"
_BESIDE: Final = "put the data file beside the model, unchanged"

# By element type: the field that holds elements not in raw_data, and entries per element.
_FIELDS: Final[Mapping[int, tuple[str, int]]] = {
    onnx.TensorProto.FLOAT: ("float_data", 1),
    onnx.TensorProto.COMPLEX64: ("float_data", 2),
    onnx.TensorProto.DOUBLE: ("double_data", 1),
    onnx.TensorProto.COMPLEX128: ("double_data", 2),
    onnx.TensorProto.INT64: ("int64_data", 1),
    onnx.TensorProto.UINT64: ("uint64_data", 1),
    onnx.TensorProto.UINT32: ("uint64_data", 1),
    onnx.TensorProto.STRING: ("string_data", 1),
}


def check_tensors(model: onnx.ModelProto, path: Path) -> tuple[Path, ...]:
    """Check every tensor's declared size against the bytes that it has.

    Returns:
        The external data files, by the paths that the model states, which may be links.

    Raises:
        ModelError: If a size is wrong, or external data is missing or outside of the folder.
    """
    files: dict[Path, None] = {}
    for tensor in chain(model.graph.initializer, inner_tensors(model)):
        count = _count(tensor, path)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            files[_external(tensor, path)] = None
        else:
            _check_inline(tensor, count, path)
    return tuple(files)


def check_ports(model: onnx.ModelProto, path: Path) -> None:
    """Refuse inputs and outputs that are dictionaries, which onnx_ir does not read.

    Raises:
        ModelError: If there is one; names it.
    """
    for role, ports in (("input", model.graph.input), ("output", model.graph.output)):
        for port in ports:
            if _is_map(port.type):
                raise ModelError(
                    f"{role} {port.name!r} is a dictionary, and finecast reads tensors,"
                    " and sequences of them",
                    where=str(path),
                    fix="export a tensor in its place: in skl2onnx by options={'zipmap':"
                    " False}, in onnxmltools by zipmap=False",
                )


def check_text(model: onnx.ModelProto, path: Path) -> None:
    """Refuse names and other text that is no UTF-8: it cannot be written again.

    Raises:
        ModelError: If there is any; says where and shows its bytes.
    """
    place = undecodable(model)
    if place:
        raise ModelError(
            f"{place} is no UTF-8, as text in ONNX has to be",
            where=str(path),
            fix="name it otherwise where the model is exported",
        )


def check_calls(model: ir.Model, path: Path) -> None:
    """Refuse local functions that call themselves, at which engines end or never do.

    Raises:
        ModelError: If there is one; names it.
    """
    known = model.functions
    calls = {
        name: {n.op_identifier() for n in function.all_nodes()} & known.keys()
        for name, function in known.items()
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        domain, name, _ = error.args[1][0]
        raise ModelError(
            f"local function {domain}::{name} calls itself",
            where=str(path),
            fix="export the model again; ONNX functions may not be recursive",
        ) from error


def name_graphs(model: onnx.ModelProto) -> None:
    """Name graphs without a name, in place: onnx's checker refuses what is written of them."""
    for graph in _graphs(model.graph):
        graph.name = graph.name or "graph"


def check_dense(model: onnx.ModelProto, path: Path) -> None:
    """Refuse sparse initializers, which onnx_ir leaves out: what reads one lacks an input.

    Raises:
        ModelError: If there is one; names it.
    """
    for graph in _graphs(model.graph):
        for sparse in graph.sparse_initializer:
            raise ModelError(
                f"initializer {sparse.values.name!r} is sparse, and finecast reads dense ones",
                where=str(path),
                fix="write it as a dense initializer: onnx.numpy_helper.from_array(ARRAY,"
                " NAME) in graph.initializer",
            )


def _graphs(graph: G) -> Iterator[G | onnx.GraphProto]:
    """The graph and all bodies of control flow in it."""
    yield graph
    for body in (body for node in graph.node for body in bodies_in(node)):
        yield from _graphs(body)


def _is_map(kind: onnx.TypeProto) -> bool:
    for inner in ("sequence_type", "optional_type"):
        if kind.HasField(inner):
            return _is_map(getattr(kind, inner).elem_type)
    return kind.HasField("map_type")


def sort_nodes(model: ir.Model, path: Path) -> bool:
    """Sort nodes that are not in topological order; returns whether all of them were.

    Raises:
        ModelError: If nodes form a cycle, or read a value that is not defined.
    """
    ordered = True
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        if not _in_order(graph, set(), path):
            ordered = False
            try:
                graph.sort()
            except ValueError as error:
                raise ModelError(
                    "the graph has a cycle", where=str(path), fix="export the model again"
                ) from error
    return ordered


def _in_order(graph: ir.Graph, defined: set[ir.Value], path: Path) -> bool:
    defined.update(graph.inputs)
    defined.update(graph.initializers.values())
    ordered = True
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in defined:
                _check_made(value, node.name or node.op_type, path)
                ordered = False
        for body in bodies(node):
            ordered &= _in_order(body, defined, path)
        defined.update(node.outputs)
    for value in graph.outputs:
        if value not in defined:
            _check_made(value, "the graph's outputs", path)
            ordered = False
    return ordered


def _check_made(value: ir.Value, reader: str, path: Path) -> None:
    if value.producer() is None:
        raise ModelError(
            f"value {value.name!r}, read by {reader}, is made by no node",
            where=str(path),
            fix=_AGAIN,
        )


def inner_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors but the initializers of the main graph."""
    functions = (_graphs(f) for f in model.functions)
    for graph in chain(_graphs(model.graph), *functions):
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer if graph is not model.graph else ()
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _count(tensor: onnx.TensorProto, path: Path) -> int:
    if any(d < 0 for d in tensor.dims):
        raise _declares(tensor, "a negative dimension", path)
    # An empty tensor may have huge dimensions, but numpy limits the product of the others.
    if math.prod(max(d, 1) for d in tensor.dims) >= _ADDRESSABLE:
        raise _declares(tensor, f"the shape {list(tensor.dims)}, beyond any memory", path)
    if tensor.data_type not in _KNOWN:
        raise _declares(tensor, f"the unknown type {tensor.data_type}", path)
    return math.prod(tensor.dims)


_DATA_FIELDS: Final = (
    "float_data",
    "int32_data",
    "string_data",
    "int64_data",
    "double_data",
    "uint64_data",
)
_ADDRESSABLE: Final = 1 << 59
_KNOWN: Final = frozenset(int(d) for d in ir.DataType if d is not ir.DataType.UNDEFINED)


def _checked_size(tensor: onnx.TensorProto, path: Path) -> int:
    if tensor.data_type == ir.DataType.STRING:
        raise _declares(
            tensor, "strings as raw bytes, which ONNX has only as string_data", path
        )
    return size_bytes(tensor)


def _check_inline(tensor: onnx.TensorProto, count: int, path: Path) -> None:
    raw = tensor.HasField("raw_data")
    field, per_element = _FIELDS.get(tensor.data_type, ("int32_data", 1))
    for other in _DATA_FIELDS:
        if (raw or other != field) and len(getattr(tensor, other)):
            own = "raw_data" if raw else field
            raise _declares(tensor, f"its numbers in {own} and has some in {other}", path)
    if raw:
        got, expected = len(tensor.raw_data), _checked_size(tensor, path)
        unit = "bytes"
    else:
        got, expected = len(getattr(tensor, field)), count * per_element
        bits = ir.DataType(tensor.data_type).bitwidth if field == "int32_data" else 8
        expected = math.ceil(expected * min(bits, 8) / 8)
        unit = "elements"
    if got != expected:
        raise _declares(tensor, f"{expected} {unit} and has {got}", path)


def _external(tensor: onnx.TensorProto, path: Path) -> Path:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    try:
        file = path.parent / location
        real = file.resolve()
        offset, length = (int(entries.get(k) or -1) for k in ("offset", "length"))
        is_file = real.is_file()
    except (ValueError, OSError) as error:
        raise _declares(
            tensor, f"external data that cannot be found ({error})", path
        ) from error
    expected = _checked_size(tensor, path)
    offset = max(offset, 0)
    problem = ""
    if not location or Path(location).is_absolute() or not _may_read(file, path):
        problem = "leaves the model's folder"
    elif not is_file:
        problem = "does not exist"
    elif length not in (-1, expected):
        problem = f"is declared {length} bytes long, but its shape takes {expected}"
    elif offset + expected > real.stat().st_size:
        problem = f"is shorter than the {offset + expected} bytes the model declares"
    if problem:
        raise ModelError(
            f"external data of {tensor.name!r} {problem}", where=str(file), fix=_BESIDE
        )
    return file


def _may_read(file: Path, path: Path) -> bool:
    """Whether ``file`` lies in the folder of the model at ``path``, links followed.

    In the caches of Hugging Face's hub both are links in one folder, to files in another one.
    That is allowed, as the model may read files of the folder that it really lies in.
    """
    folder, real = path.parent.resolve(), file.resolve()
    if real.is_relative_to(folder):
        return True
    links = path.is_symlink() and file.is_symlink()
    below = ".." not in file.relative_to(path.parent).parts
    beside = file.parent.resolve().is_relative_to(folder)
    return links and below and beside and real.parent == path.resolve().parent


def _declares(tensor: onnx.TensorProto, what: str, path: Path) -> ModelError:
    return ModelError(f"tensor {tensor.name!r} declares {what}", where=str(path), fix=_AGAIN)


# Written files.


def check(path: Path, *, shapeless: Collection[str] = ()) -> None:
    """Run ``onnx.checker`` with strict shape inference over a written file.

    The inputs and outputs in ``shapeless`` need not have a shape, which ONNX asks for.

    Raises:
        ModelError: If the model is not valid ONNX.
    """
    try:
        with _checkable(path, shapeless) as checked:
            native.check(checked)
    except native.PassDiedError as error:
        raise native.PassDiedError(error.what, where=str(path), fix=error.fix) from error
    except (native.PassError, OSError) as error:
        subject, what = _named(first_line(error))
        fix = "run onnx.checker on the model that was given, and export it again"
        if what.startswith("Field 'shape' of 'type'"):
            fix = "give every input and output a shape, with a name for each dynamic dimension"
        raise ModelError(
            f"{subject} is not valid ONNX: {what}", where=str(path), fix=fix
        ) from error


# How onnx's checker and its shape inference name a node.
_NODES: Final = (
    re.compile(r"op_type: ?(?P<op>[^,()]+), node name: (?P<name>[^()]*)\):? ?(?P<what>.+)"),
    re.compile(r"Node ?\(?(?P<name>[^()]*)\)? with schema\(:*(?P<op>\w+).*?\) (?P<what>.+)"),
)


def _named(text: str) -> tuple[str, str]:
    """What a message of onnx's checker is about, a node if it names one, and what is wrong."""
    for pattern in _NODES:
        if match := pattern.search(text):
            name, op = match["name"].strip(), match["op"].strip()
            node = f"node {name!r} ({op})" if name else f"a node {op} without a name"
            return node, match["what"].replace("[ShapeInferenceError] ", "")
    return "the model", text.replace("[ShapeInferenceError] ", "")


def shapeless_ports(model: ir.Model) -> frozenset[str]:
    """Names of inputs and outputs that are declared without a shape."""
    ports = (*model.graph.inputs, *model.graph.outputs)
    return frozenset(v.name for v in ports if v.name and v.shape is None)


@contextmanager
def _checkable(path: Path, ports: Collection[str]) -> Generator[Path]:
    """The model at ``path``, or a copy beside it in which no port lacks a shape.

    ONNX asks for a shape. Engines run models without, and none can be made up, as not even
    the number of dimensions is known.

    In the copy, those of ``ports`` that lack a shape are no ports any more: inputs are results
    of ops in ``_DOMAIN``, and outputs are left out. It is deleted afterwards.
    """
    proto = onnx.load(path, load_external_data=False) if ports else None
    if proto is None or not _take_out(proto, ports):
        yield path
        return
    beside = path.with_name(f"{path.name}.checked")
    try:
        beside.write_bytes(proto.SerializeToString())
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def _take_out(proto: onnx.ModelProto, ports: Collection[str]) -> bool:
    graph = proto.graph
    inputs, outputs = (
        [v for v in values if v.name in ports and _lacks_shape(v)]
        for values in (graph.input, graph.output)
    )
    for value in inputs:
        graph.value_info.append(value)
        graph.input.remove(value)
        node = onnx.helper.make_node("Given", [], [value.name], domain=_DOMAIN)
        graph.node.insert(0, node)
    for value in outputs:
        graph.output.remove(value)
    if inputs:
        proto.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return bool(inputs or outputs)


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
