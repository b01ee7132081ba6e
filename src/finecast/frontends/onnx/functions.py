"""Local functions are specialised: every call gets its own copy of the body.

Engines inline functions when they load a model, so one body for all calls saves nothing at
run time, while one decision for all calls would cost accuracy or speed at some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.skeleton import restored, run_without_weights

# What a hostile model could make of a few functions that call each other twice.
_MOST_NODES: Final = 2_000_000
# onnx's inliner recurses.
_MOST_DEPTH: Final = 256

_Id: TypeAlias = tuple[str, str, str]


def inline_functions(model: ir.Model) -> ir.Model:
    """The model without local functions, weights shared; bodies take the model's opset.

    Raises:
        ModelError: If functions call each other in a circle, too deep, or too often.
    """
    if not model.functions:
        return model
    _check_expansion(model)
    try:
        proto = run_without_weights(model, _inlined)
    except (native.PassError, ValueError) as error:
        first = str(error)[:200]
        raise ModelError(
            f"the model's local functions cannot be inlined: {first}",
            fix="export the model without local functions",
        ) from error
    return restored(proto, model)


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Bodies whose ops mean the same at the model's opset need no conversion to it.

    ONNX asks that of every function; conversion is tried where a model does not keep to it.
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
    if normal_domain(node.domain):
        return True
    try:
        schemas = [onnx.defs.get_schema(node.op_type, v, "") for v in (own, other)]
    except onnx.defs.SchemaError:
        return False
    bodies = [g for a in node.attribute for g in (a.g, *a.graphs)]
    return schemas[0].since_version == schemas[1].since_version and all(
        _same(n, own, other) for g in bodies for n in g.node
    )


def _check_expansion(model: ir.Model) -> None:
    calls: dict[_Id, dict[_Id, int]] = {}
    own: dict[_Id, int] = {}
    for name, function in model.functions.items():
        calls[name], own[name] = _count(function, model.functions)
    sizes: dict[_Id, int] = {}
    depths: dict[_Id, int] = {}
    open_now: set[_Id] = set()
    for root in calls:
        stack = [root]
        while stack:
            name = stack[-1]
            waiting = [c for c in calls[name] if c not in sizes]
            if name in sizes or not waiting:
                stack.pop()
                open_now.discard(name)
                sizes[name] = own[name] + sum(n * sizes[c] for c, n in calls[name].items())
                depths[name] = 1 + max((depths[c] for c in calls[name]), default=0)
                continue
            open_now.add(name)
            if any(c in open_now for c in waiting):
                raise ModelError(
                    f"local function {'::'.join(name[:2])} calls itself",
                    fix="export the model again; ONNX functions may not be recursive",
                )
            stack.extend(waiting)
    used, _ = _count(model.graph, model.functions)
    total = sum(n * sizes[c] for c, n in used.items())
    if total > _MOST_NODES or max(depths.values(), default=0) > _MOST_DEPTH:
        raise ModelError(
            f"local functions expand to {total} nodes, {max(depths.values())} calls deep",
            fix=f"at most {_MOST_NODES} nodes and {_MOST_DEPTH} calls are converted",
        )


def _count(
    body: ir.Graph | ir.Function, functions: Mapping[_Id, ir.Function]
) -> tuple[dict[_Id, int], int]:
    calls: dict[_Id, int] = {}
    nodes = 0
    for node in body.all_nodes():
        nodes += 1
        name = node.op_identifier()
        if name in functions:
            calls[name] = calls.get(name, 0) + 1
    return calls, nodes
