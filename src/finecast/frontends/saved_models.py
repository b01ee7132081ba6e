"""SavedModels, read without TensorFlow: their signatures, and the notes of a conversion.

OpenVINO reads the signature ``serving_default``, which servers call. Where there is none it
makes one model of all signatures, with the inputs and outputs of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from finecast.errors import ModelError
from finecast.frontends.wire import Span, inside, mapped, texts
from finecast.graph.worklist import Worklist
from finecast.naming import listed

NOTES_FILE: Final = Path("assets.extra") / "finecast.json"


def notes_in(folder: Path) -> dict[str, str]:
    """The notes in a SavedModel; empty if there are none, or they cannot be read."""
    try:
        content: Any = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    notes = cast("dict[str, object]", content)
    return {key: str(value) for key, value in notes.items()}


_WRITES: Final = re.compile(
    r"(Assign\w*Variable|ResourceScatter\w*|ResourceApply\w*)(Op)?|Rng(ReadAnd)?Skip"
)
"""Names of ops that change a variable."""
_DRAWS: Final = re.compile(r"Stateless(Random|Truncated)\w+V2")
"""Names of ops that draw random numbers by a seed that they read."""
_NAMED: Final = 3
"""Layers that a message names."""
SERVING: Final = "serving_default"
"""The signature that servers, and TensorFlow's own tools, call where none is named."""
NONE: Final = "the SavedModel has no signatures"
MAKE_ONE: Final = (
    "save it with one: tf.saved_model.save(model, FOLDER,"
    " signatures=function.get_concrete_function(...)), or model.export(FOLDER)"
)
CHOOSE: Final = (
    "save one alone: m = tf.saved_model.load(FOLDER); tf.saved_model.save(m, NEW,"
    ' signatures=m.signatures["NAME"])'
)
_FILE: Final = "saved_model.pb"
_HIDDEN: Final = "__"
"""The first characters of the names of signatures that TensorFlow adds for itself."""
# Paths of protobuf field numbers, each from a message to one inside it.
_META_GRAPH: Final = (2,)
_SIGNATURE, _KEY, _OUTPUT, _OUTPUT_TENSOR = (5,), (1,), (2, 2), (2, 1)
_NODE, _FUNCTION = (2, 1), (2, 2, 1)
_NODE_NAME, _NODE_OP, _CALLED = (1,), (2,), (5, 2, 10, 1)
_FUNCTION_NAME, _FUNCTION_NODE = (1, 1), (3,)


def taken_signature(folder: Path) -> str:
    """A notice of which signature OpenVINO reads; empty if it is the only one.

    Keras writes one function under several names; those count as one signature.

    Raises:
        ModelError: If there is none, or OpenVINO would make one model of several.
    """
    file = folder / _FILE
    try:
        signatures = _signatures(file) if file.is_file() and file.stat().st_size else None
    except (OSError, ValueError):
        return ""  # OpenVINO says what is wrong with it
    if signatures is None:
        return ""
    if not signatures:
        raise ModelError(NONE, where=str(folder), fix=MAKE_ONE)
    if len(signatures) > 1 and SERVING not in signatures:
        raise ModelError(
            f"the SavedModel has several signatures, and none is {SERVING!r}:"
            f" {', '.join(map(repr, signatures))}",
            where=str(folder),
            fix=CHOOSE,
        )
    served = signatures.get(SERVING, next(iter(signatures.values())))
    others = ", ".join(repr(name) for name, calls in signatures.items() if calls != served)
    if not others:
        return ""
    return (
        f"of the SavedModel's signatures {SERVING!r} was taken, not {others};"
        f" for another {CHOOSE}"
    )


def _signatures(file: Path) -> dict[str, tuple[str, ...]]:
    """For each signature's name, its outputs and the functions or tensors they come from."""
    with mapped(file) as data:
        return {
            name: content
            for graph in inside(data, (0, len(data)), _META_GRAPH)
            for name, content in sorted(_of_graph(data, graph))
            if not name.startswith(_HIDDEN)
        }


def check_saved_state(folder: Path) -> None:
    """Raise ModelError if the model changes its variables as it runs.

    OpenVINO reads variables as constants, and leaves out what changes them: its outputs would
    be other numbers, without an error.
    """
    file = folder / _FILE
    try:
        with mapped(file) as data:
            graphs = inside(data, (0, len(data)), _META_GRAPH)
            served = [op for graph in graphs for op in _served_ops(data, graph)]
    except (OSError, ValueError):
        return  # OpenVINO says what is wrong with it
    check_state(served, str(folder))


def check_state(ops: Iterable[tuple[str, str]], where: str) -> None:
    """Raise ModelError if some of a model's ops, each a type and a name, change variables.

    Keras's layers of random preprocessing are such: they keep the seed of their next draw in
    a variable, and draw in what ``model.export`` writes, too.
    """
    known = list(ops)
    writes = sorted({kind for kind, _ in known if _WRITES.fullmatch(kind)})
    if not writes:
        return
    what = f"the model changes its variables as it runs ({', '.join(writes)})"
    drawing = [name.rpartition("/")[0] or name for kind, name in known if _DRAWS.match(kind)]
    if not drawing:
        raise ModelError(
            what,
            where=where,
            fix="save a function whose outputs depend on its inputs alone, and which takes"
            " state as an input and gives it as an output",
        )
    raise ModelError(
        f"{what}, for the random numbers of {listed(list(dict.fromkeys(drawing)), _NAMED)}",
        where=where,
        fix="save it for inference, where Keras's random layers do nothing:"
        " keras.Model(model.inputs, model(model.inputs, training=False)).export(FOLDER); or"
        " take the random numbers as an input",
    )


def _served_ops(data: memoryview, graph: Span) -> Iterator[tuple[str, str]]:
    """Types and names of the ops in the functions that served outputs are computed by."""
    nodes = {_text(data, n, _NODE_NAME): n for n in inside(data, graph, _NODE)}
    functions = {_text(data, f, _FUNCTION_NAME): f for f in inside(data, graph, _FUNCTION)}
    served = {
        _text(data, output, _OUTPUT_TENSOR).partition(":")[0]
        for entry in inside(data, graph, _SIGNATURE)
        if not _text(data, entry, _KEY).startswith(_HIDDEN)
        for output in inside(data, entry, _OUTPUT)
    }
    calls = [c for name in served for c in texts(data, nodes.get(name, (0, 0)), _CALLED)]
    for function in _reached(data, functions, calls):
        for node in inside(data, function, _FUNCTION_NODE):
            yield _text(data, node, _NODE_OP), _text(data, node, _NODE_NAME)


def _reached(
    data: memoryview, functions: Mapping[str, Span], calls: list[str]
) -> Iterator[Span]:
    """The functions that ``calls`` name, and those that they call."""
    names = Worklist(calls)
    for name in names:
        if name in functions:
            yield functions[name]
            for node in inside(data, functions[name], _FUNCTION_NODE):
                names.add(texts(data, node, _CALLED))


def _of_graph(data: memoryview, graph: Span) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The signatures in a MetaGraphDef, as ``_signatures`` has them.

    An output's tensor is that of a node which calls a wrapper of the signature; the functions
    that the wrapper calls are the same for all names of one function.
    """
    nodes = {_text(data, n, _NODE_NAME): n for n in inside(data, graph, _NODE)}
    functions = {_text(data, f, _FUNCTION_NAME): f for f in inside(data, graph, _FUNCTION)}
    for entry in inside(data, graph, _SIGNATURE):
        content: set[str] = set()
        for output in inside(data, entry, _OUTPUT):
            tensor = _text(data, output, _OUTPUT_TENSOR)
            wrappers = texts(data, nodes.get(tensor.partition(":")[0], (0, 0)), _CALLED)
            bodies = [functions[w] for w in wrappers if w in functions]
            calls = [n for body in bodies for n in inside(data, body, _FUNCTION_NODE)]
            called = [name for node in calls for name in texts(data, node, _CALLED)]
            content |= {f"{_text(data, output, _KEY)} {c}" for c in called or [tensor]}
        yield _text(data, entry, _KEY), tuple(sorted(content))


def _text(data: memoryview, span: Span, path: tuple[int, ...]) -> str:
    return next(iter(texts(data, span, path)), "")
