"""Loads SavedModels, GraphDefs, Keras models as frozen graphs, and writes SavedModels."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from finecast.calls import checks
from finecast.errors import ModelError, UsageError
from finecast.files import staging
from finecast.frontends import (
    CHOOSE,
    MAKE_ONE,
    NONE,
    NOTES_FILE,
    SERVING,
    check_names,
    check_state,
    notes_in,
    reason,
    with_flat_outputs,
)
from finecast_tensorflow.frontend.canonical import canonical
from finecast_tensorflow.frontend.functions import (
    bodies,
    every_node,
    reference,
    with_own_names,
)
from finecast_tensorflow.frontend.library import (
    DTYPES,
    dtype_label,
    freezing,
    saved_model_pb2,
    tf,
    without_warnings,
)
from finecast_tensorflow.frontend.model import (
    FrozenModel,
    SignaturePort,
    base_name,
    check_size,
    import_graph,
    imported_graph,
    unreadable,
)

GRAPH_FILE: Final = "saved_model.pb"
_LISTED: Final = "output_"
"""Signatures name the elements of a list of outputs by this and their number."""
_LOOPS_OF_TF1: Final = frozenset({"Enter", "NextIteration", "LoopCond"})
_PYTHON: Final = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


def load(folder: Path) -> FrozenModel:
    """The function that a SavedModel serves.

    Raises:
        UsageError: If there is no SavedModel there.
        ModelError: If it cannot be read, serves several functions, or has inputs or outputs
            that are not plain tensors of numbers.
    """
    where = str(folder)
    if not (folder / GRAPH_FILE).is_file():
        raise UsageError(
            f"not a SavedModel: the folder has no {GRAPH_FILE}",
            where=where,
            fix="give the folder that model.export or tf.saved_model.save wrote",
        )
    try:
        with without_slots(folder, GRAPH_FILE) as readable, without_warnings():
            loaded = tf.saved_model.load(str(readable))
    except (OSError, ValueError, RuntimeError, tf.errors.OpError) as error:
        raise unreadable(error, where) from error
    served = dict(loaded.signatures)
    if not served:
        raise ModelError(NONE, where=where, fix=MAKE_ONE)
    frozen = {name: _frozen(function, where) for name, function in served.items()}
    model = _the_one(frozen, where)
    listed = any(_gives_list(getattr(loaded, name, None), model.outputs) for name in served)
    outputs = sorted(model.outputs, key=_list_index) if listed else model.outputs
    return replace(
        model,
        outputs=tuple(outputs),
        signatures=tuple(served),
        listed=listed,
        notes=notes_in(folder),
    )


def of_keras(model: Any, where: str = "") -> FrozenModel:
    """A built Keras model, called for inference; nested outputs are named by their paths.

    Raises:
        ModelError: If it has inputs or outputs that are not plain tensors of numbers, or
            cannot be traced.
        UsageError: If the shapes of its inputs are not known: it was never built, or is a
            subclass, of which Keras keeps no shapes.
    """
    if not model.built or not getattr(model, "inputs", None):
        why = "is a subclass, whose inputs have no shapes" if model.built else "is not built"
        raise UsageError(
            f"the Keras model {model.name!r} {why}",
            fix="give it a keras.Input, or call it once on a batch, model.export(FOLDER), and"
            " give the folder",
        )
    model = with_flat_outputs(tf.keras, model)
    specs = [
        tf.TensorSpec(x.shape, x.dtype, name=x.name or f"input_{i}")
        for i, x in enumerate(model.inputs)
    ]
    nested = getattr(model, "_inputs_struct", None)  # Keras has no public name for it

    def call(*tensors: Any) -> Any:
        if nested is None:
            return model(tensors[0] if len(tensors) == 1 else list(tensors), training=False)
        return model(tf.keras.tree.pack_sequence_as(nested, tensors), training=False)

    where = where or model.name
    check_names(model, where)
    try:
        function = tf.function(call, input_signature=specs).get_concrete_function()
    except MemoryError:
        raise
    except Exception as error:  # layers of the user's own raise what they like
        raise ModelError(
            f"TensorFlow cannot trace the Keras model: {reason(error)}",
            where=where,
            fix="see that model.predict(...) runs in Keras first",
        ) from error
    return _of_function(function, [s.name for s in specs], where)


def of_graph_def(
    graph_def: Any, inputs: Sequence[str], outputs: Sequence[str], where: str = ""
) -> FrozenModel:
    """The part of a frozen GraphDef between the named nodes or tensors.

    Without ``inputs`` they are all placeholders, and without ``outputs`` the first tensor of
    each op that no op reads.

    Raises:
        UsageError: If a name is not of the graph, or there are no outputs.
        ModelError: If it is not a valid graph.
    """
    graph = imported_graph(graph_def)
    operations = graph.get_operations()
    given = list(inputs) or [op.name for op in operations if op.type == "Placeholder"]
    ends = list(outputs) or [o.name for o in operations if _is_end(o)]
    read, made = ([_named(graph, name, where) for name in names] for names in (given, ends))
    model = FrozenModel(
        graph=graph_def,
        inputs=tuple(map(_given, _port_names(read), read)),
        outputs=tuple(map(_port, _port_names(made), made)),
    )
    return _checked(canonical(model), where)


@checks
def read_frozen(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> FrozenModel:
    """The frozen graph in a ``.pb`` file.

    Raises:
        UsageError: If there is no such file, or a name is not of the graph.
        ModelError: If it is no GraphDef.
    """
    from google.protobuf.message import DecodeError

    graph_def = tf.compat.v1.GraphDef()
    try:
        graph_def.ParseFromString(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"cannot read the model: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    except DecodeError as error:
        raise ModelError(
            "not a frozen GraphDef, or a truncated one", where=str(path), fix="freeze it again"
        ) from error
    return of_graph_def(graph_def, inputs, outputs, str(path))


def _port_names(tensors: Sequence[Any]) -> Iterator[str]:
    """Names of nodes, with the index of the tensor where several are of one node."""
    count = Counter(base_name(t.name) for t in tensors)
    for tensor in tensors:
        node = base_name(tensor.name)
        yield node if count[node] == 1 else reference(tensor.name)


def _is_end(op: Any) -> bool:
    """Whether no op reads what ``op`` gives."""
    return bool(op.outputs) and not any(t.consumers() for t in op.outputs)


def _named(graph: Any, name: str, where: str) -> Any:
    try:
        return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the graph has no tensor {name!r}", where=where, fix="give names of its nodes"
        ) from error


def _frozen(function: Any, where: str) -> FrozenModel:
    """One signature as a graph without variables.

    Raises:
        ModelError: If its ports are no plain tensors, or its variables cannot be frozen.
    """
    names = list(function.structured_input_signature[1])
    # In the function's own order: structured_input_signature has them sorted by name.
    ordered = [n for n in getattr(function, "_arg_keywords", None) or names if n in names]
    return _of_function(function, ordered, where)


def _of_function(function: Any, names: Sequence[str], where: str) -> FrozenModel:
    _check_ports(function, where)
    nodes = every_node(function.graph.as_graph_def())
    check_state(((node.op, node.name) for node in nodes), where)
    sizes = ((v.shape.num_elements() or 0) * v.dtype.size for v in function.variables)
    check_size(sum(sizes), where)
    try:
        with without_warnings():
            frozen = freezing.convert_variables_to_constants_v2(
                function, lower_control_flow=False, aggressive_inlining=True
            )
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise unreadable(error, where) from error
    tensors = [t for t in frozen.inputs if t.dtype not in (tf.resource, tf.variant)]
    if len(tensors) != len(names) or len(tensors) != len(frozen.inputs):
        raise ModelError(
            "the model reads a table or another resource that cannot be made a constant",
            where=where,
            fix="export the part of it behind the look-up, which takes numbers",
        )
    model = FrozenModel(
        graph=frozen.graph.as_graph_def(),
        inputs=tuple(map(_given, names, tensors)),
        outputs=tuple(_outputs(function, frozen.outputs)),
        listed=isinstance(function.structured_outputs, list | tuple),
    )
    return _checked(canonical(model), where)


def _outputs(function: Any, tensors: Sequence[Any]) -> Iterator[SignaturePort]:
    structure = function.structured_outputs
    if isinstance(structure, Mapping):
        names = sorted(structure)
    else:
        names = [f"{_LISTED}{i}" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        yield _port(name, tensor)


def _gives_list(method: Any, outputs: Sequence[SignaturePort]) -> bool:
    """Whether a method of a SavedModel returns as a list what its signature names."""
    made = [f.structured_outputs for f in getattr(method, "concrete_functions", ())]
    lists = any(isinstance(m, list | tuple) and len(m) == len(outputs) for m in made)
    return lists and all(_list_index(port) >= 0 for port in outputs)


def _list_index(port: SignaturePort) -> int:
    """The number in the name of an output that is a list's element; -1 for other names."""
    number = port.name.removeprefix(_LISTED)
    return int(number) if number.isdecimal() and port.name.startswith(_LISTED) else -1


def _given(name: str, tensor: Any) -> SignaturePort:
    """An input, whose open dimensions are called ``NAME.AXIS``."""
    port = _port(name, tensor)
    if port.shape is None:
        return port
    named = tuple(f"{name}.{i}" if d is None else d for i, d in enumerate(port.shape))
    return replace(port, shape=named)


def _port(name: str, tensor: Any) -> SignaturePort:
    shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    dtype = dtype_label(tensor.dtype)
    return SignaturePort(name=name, tensor=tensor.name, dtype=dtype, shape=shape)


def _check_ports(function: Any, where: str) -> None:
    given = function.structured_input_signature
    for name, spec in {**dict(enumerate(given[0])), **given[1]}.items():
        _check_port("input", getattr(spec, "name", None) or name, spec, where)
    made = function.structured_outputs
    for name, spec in made.items() if isinstance(made, Mapping) else ():
        _check_port("output", name, spec, where)


def _check_port(kind: str, name: object, spec: Any, where: str) -> None:
    plain = isinstance(spec, tf.TensorSpec) or tf.is_tensor(spec)
    what: str = spec.dtype.name if plain else type(spec).__name__
    if plain and what not in ("string", "resource", "variant"):
        return
    what = {"string": "text", "RaggedTensorSpec": "a ragged tensor"}.get(what, f"a {what}")
    raise ModelError(
        f"{kind} {str(name)!r} is {what}: finecast runs models on plain arrays of numbers",
        where=where,
        fix="export the part of the model that takes and gives numbers, as the layers behind"
        " the text's vectorization",
    )


def _checked(model: FrozenModel, where: str) -> FrozenModel:
    kinds = {node.op for node in model.graph.node}
    if kinds & _LOOPS_OF_TF1:
        raise ModelError(
            "the model has loops of TensorFlow 1 (Enter, NextIteration)",
            where=where,
            fix="export it again under tf.compat.v1.enable_control_flow_v2()",
        )
    if kinds & _PYTHON:
        raise ModelError(
            f"the model calls Python ({', '.join(sorted(kinds & _PYTHON))}), which is not"
            " saved with it",
            where=where,
            fix="write it in TensorFlow's ops, without tf.py_function and tf.numpy_function",
        )
    for port in (*model.inputs, *model.outputs):
        if port.dtype in ("string", "resource", "variant"):
            raise ModelError(
                f"{port.name!r} is of type {port.dtype}, and no plain array of numbers",
                where=where,
                fix="export the part of the model that takes and gives numbers",
            )
    return model


def _the_one(frozen: Mapping[str, FrozenModel], where: str) -> FrozenModel:
    """The function that all signatures name.

    Raises:
        ModelError: If signatures name different functions.
    """
    known = list(frozen.values())
    if any(_content(one) != _content(known[0]) for one in known[1:]):
        listed = ", ".join(f"{n!r}" for n in frozen)
        raise ModelError(
            f"the SavedModel has several signatures that differ: {listed}",
            where=where,
            fix=CHOOSE,
        )
    return frozen.get(SERVING, known[0])


def _content(model: FrozenModel) -> tuple[Any, ...]:
    """What two signatures of one function share: names of ports, digests of unnamed nodes."""
    ports = tuple(sorted(p.name for p in (*model.inputs, *model.outputs)))
    nodes = (
        (n.op, len(n.input), *(n.attr[k].SerializeToString() for k in sorted(n.attr)))
        for n in every_node(model.graph)
        if n.op != "Placeholder" and not bodies(n)
    )
    return ports, tuple(sorted(hashlib.sha256(repr(n).encode()).hexdigest() for n in nodes))


# The state of an optimizer in a SavedModel, left out as it is read: no output depends on it.
#
# Keras 2 saves compiled models with the slots of their optimizer (momentum and the like),
# one for each variable. TensorFlow with Keras 3 has no class to load them into, and fails.


@contextmanager
def without_slots(folder: Path, graph_file: str) -> Generator[Path]:
    """The folder of the same SavedModel without slots; ``folder`` itself if it has none.

    The copy has links to the files of ``folder``, and lives as long as the context.
    """
    graph_bytes = _with_slots_cleared(folder / graph_file)
    if graph_bytes is None:
        yield folder
        return
    with staging() as copy:
        (copy / graph_file).write_bytes(graph_bytes)
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


# ----------------------------- writing a SavedModel, with the signatures that the original had

_OF_FILES: Final = (
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.OutOfRangeError,
    tf.errors.UnknownError,
)
"""What TensorFlow makes of a file system's errors, among which that the disk is full."""


def save(model: FrozenModel, folder: Path) -> None:
    """Write to ``folder``, which must not exist yet.

    Raises:
        ModelError: If its weights are too large for a SavedModel without variables.
        OSError: If it cannot be written, as the disk is full.
    """
    check_size(model.size_bytes, "")
    module = tf.Module()
    pruned = callable_of(model)
    served = _function(model, pruned)
    signatures = dict.fromkeys(model.signatures, served.get_concrete_function())
    method = _function(model, pruned, listed=True) if model.listed else served
    for name in model.signatures:
        if name != SERVING:
            setattr(module, name, method)  # as model.export does for each signature
    # Custom gradients are of functions that were inlined; nothing is trained here.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except _OF_FILES as error:
        raise OSError(errno.EIO, str(error.message).rpartition("; ")[2]) from error
    (folder / NOTES_FILE).parent.mkdir()
    (folder / NOTES_FILE).write_text(json.dumps(dict(model.notes)), encoding="utf-8")


def callable_of(model: FrozenModel) -> Any:
    """The model as a TensorFlow function from its inputs to its outputs, both in order."""
    graph = with_own_names(model.graph)
    wrapped = tf.compat.v1.wrap_function(lambda: import_graph(graph), [])
    feeds = [wrapped.graph.as_graph_element(p.tensor) for p in model.inputs]
    fetches = [wrapped.graph.as_graph_element(p.tensor) for p in model.outputs]
    return wrapped.prune(feeds, fetches)


def _function(model: FrozenModel, pruned: Any, *, listed: bool = False) -> Any:
    """``pruned`` as a function that returns its outputs in a dict, or in a list."""
    names = [p.name for p in model.outputs]

    def call(*tensors: Any) -> dict[str, Any] | list[Any]:
        made = pruned(*tensors)
        return list(made) if listed else dict(zip(names, made, strict=True))

    specs = [_tensor_spec(p) for p in model.inputs]
    return tf.function(call, input_signature=specs)


def _tensor_spec(port: SignaturePort) -> Any:
    labels = {f.label: dtype for f, dtype in DTYPES.items()} | {"fp64": tf.float64}
    dtype = labels.get(port.dtype) or tf.as_dtype(port.dtype)
    sizes = port.shape
    free = None if sizes is None else [d if isinstance(d, int) else None for d in sizes]
    return tf.TensorSpec(free, dtype, name=port.name)
