"""Inlines local functions: every call gets its own copy of the body.

Engines inline functions when they load a model, so one body for all calls saves nothing at
run time, while one decision for all calls would cost accuracy or speed at some of them.

onnx's inliner does it and not onnx_ir's ``InlinePass``, which refuses bodies of another opset
than the model's; and saved plans name nodes as onnx's inliner does
(``tests/frontends/test_functions.py``).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final, TypeAlias

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.files.staging import staging
from finecast.frontends.onnx import native
from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.editor import name_nodes
from finecast.frontends.onnx.model import load, save
from finecast.frontends.onnx.types import bodies_in
from finecast.frontends.wire import fields, mapped

# A limit, as a few functions that call one another twice would expand without end.
_MOST_NODES: Final = 2_000_000
# onnx's inliner is recursive.
_MOST_DEPTH: Final = 256

_Id: TypeAlias = tuple[str, str, str]


_FUNCTIONS: Final = 25
"""The number of ModelProto's field ``functions``."""


def inline_functions(model: ir.Model) -> ir.Model:
    """The model without local functions; weights are shared, bodies get the model's opset.

    Its nodes have unique names.

    Raises:
        ModelError: If their calls are too deep or too many.
    """
    if not model.functions:
        return model
    _check_expansion(model)
    try:
        inlined = native.rewritten(model, _inlined)
    except (native.PassError, ValueError) as error:
        first = str(error)[:200]
        raise ModelError(
            f"the model's local functions cannot be inlined: {first}",
            fix="export the model without local functions",
        ) from error
    name_nodes(inlined)
    return inlined


@contextmanager
def without_functions(model: Path | bytes) -> Generator[Path | bytes]:
    """``model``, or inside the block a copy whose local functions are inlined.

    Engines that read no local functions read that.

    Raises:
        ModelError: If the model cannot be read, or its functions cannot be inlined.
    """
    if not _has_functions(model):
        yield model
        return
    if isinstance(model, Path):
        whole = load(model).model
    else:
        whole = ir.serde.deserialize_model(onnx.ModelProto.FromString(model))
    name_nodes(whole)  # inlined nodes are named by those that call
    with staging() as folder:
        place = folder / "model.onnx"
        save(inline_functions(whole), place, linking=True)
        yield place


def _has_functions(model: Path | bytes) -> bool:
    """Whether a model has local functions, told without reading its graph."""
    try:
        with memoryview(model) if isinstance(model, bytes) else mapped(model) as data:
            return any(field.number == _FUNCTIONS for field in fields(data, 0, len(data)))
    except (OSError, ValueError):  # the engine says what is wrong
        return False


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` after onnx's inliner, which converts bodies of other opsets than the model's.

    Conversion can fail. ONNX asks that ops of a function have the same definition at both
    opsets. Where that is so, the body is given the model's opset, and is not converted.
    """
    own = _default_opset(proto)
    for function in proto.functions:
        other = _default_opset(function)
        if own != other and all(_same(n, own, other) for n in function.node):
            for entry in function.opset_import:
                if not normal_domain(entry.domain):
                    entry.version = own
    return native.transform("inline", proto)


def _default_opset(holder: onnx.ModelProto | onnx.FunctionProto) -> int:
    versions = [i.version for i in holder.opset_import if not normal_domain(i.domain)]
    return max(versions, default=1)


def _same(node: onnx.NodeProto, own: int, other: int) -> bool:
    """Whether the op, and those of its bodies, have the same definition at both opsets."""
    if normal_domain(node.domain):
        return True
    try:
        schemas = [onnx.defs.get_schema(node.op_type, v, "") for v in (own, other)]
    except onnx.defs.SchemaError:
        return False
    return schemas[0].since_version == schemas[1].since_version and all(
        _same(n, own, other) for body in bodies_in(node) for n in body.node
    )


def _check_expansion(model: ir.Model) -> None:
    """Raise ModelError if functions, none of which calls itself, expand beyond the limits."""
    calls: dict[_Id, dict[_Id, int]] = {}
    own: dict[_Id, int] = {}
    for name, function in model.functions.items():
        calls[name], own[name] = _count(function, model.functions)
    sizes: dict[_Id, int] = {}
    depths: dict[_Id, int] = {}
    for name in TopologicalSorter(calls).static_order():  # what is called comes first
        sizes[name] = own[name] + sum(n * sizes[c] for c, n in calls[name].items())
        depths[name] = 1 + max((depths[c] for c in calls[name]), default=0)
    used, _ = _count(model.graph, model.functions)
    total = sum(n * sizes[c] for c, n in used.items())
    if total > _MOST_NODES or max(depths.values(), default=0) > _MOST_DEPTH:
        raise ModelError(
            f"local functions expand to {total} nodes, {max(depths.values())} calls deep",
            fix="export the model without local functions, or with fewer calls: at most"
            f" {_MOST_NODES} nodes and {_MOST_DEPTH} calls deep are converted",
        )


def _count(
    body: ir.Graph | ir.Function, functions: Mapping[_Id, ir.Function]
) -> tuple[dict[_Id, int], int]:
    """How often ``body`` calls each function, and how many nodes it has."""
    calls: dict[_Id, int] = {}
    nodes = 0
    for node in body.all_nodes():
        nodes += 1
        name = node.op_identifier()
        if name in functions:
            calls[name] = calls.get(name, 0) + 1
    return calls, nodes
