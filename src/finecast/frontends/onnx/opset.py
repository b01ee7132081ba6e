"""Raises a model's opset, only as far as a format needs it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Final

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.aside import bring_back, set_aside
from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.redefined import read_by_engines, restate
from finecast.frontends.onnx.schema import signature
from finecast.frontends.onnx.skeleton import restored, run_without_weights
from finecast.frontends.onnx.statements import stated_since
from finecast.frontends.onnx.types import every_node
from finecast.numbers.formats import Format
from finecast.ops import OpKind, Tier, lookup

# The first IR version in which an initializer need not be an input.
FREE_INITIALIZERS: Final = 4


def opset_of(model: ir.Model) -> int:
    """The version of the default domain, whose name a model spells ``""`` or ``ai.onnx``."""
    versions = [v for d, v in model.opset_imports.items() if normal_domain(d) == ""]
    return max(versions, default=1)


def needed_opsets(
    model: ir.Model, fmt: Format, ops: frozenset[str] | None = None
) -> frozenset[int]:
    """Opsets above the model's own at which further ops admit ``fmt``.

    At the highest of them all ops admit it that do so in any opset.

    Args:
        model: The model.
        fmt: The low format.
        ops: Op types that the policy may lower; None for all.
    """
    current = opset_of(model)
    needed: set[int] = set()
    for node in every_node(model.graph):
        # The ops of other domains have versions of their own.
        if node.domain and fmt.encodes_results:
            continue
        if ops is not None and node.op_type not in ops:
            continue
        since = _lowered_since(node.op_type, node.domain, fmt, current)
        if since > current and since not in needed and _carries_fp32(node):
            needed.add(since)
    return frozenset(needed)


@lru_cache(maxsize=4096)
def _lowered_since(op_type: str, domain: str, fmt: Format, current: int) -> int:
    """The first opset at which the op, and a cast beside it, admit ``fmt``; 0 for never."""
    info = lookup(f"{domain or 'onnx'}::{op_type}")
    if info.tier is Tier.NEVER and info.kind is not OpKind.CONTROL:
        return 0
    found = signature(op_type, domain, current)
    if found is not None and not fmt.encodes_results:
        return stated_since(fmt, current)
    since = dict(found.since).get(fmt) if found else None
    return 0 if since is None else max(since, stated_since(fmt, current))


def _carries_fp32(node: ir.Node) -> bool:
    values = (*node.inputs, *node.outputs)
    return any(v is not None and v.dtype in (None, ir.DataType.FLOAT) for v in values)


def raise_opset(model: ir.Model, version: int) -> ir.Model:
    """The same model at opset ``version`` of the default domain, weights shared.

    Raises:
        ModelError: If onnx has no conversion for one of the ops, its converter crashes, or
            the opset's definition of an op cannot state what the model's own does.
    """
    if version <= opset_of(model):
        return model
    imports, own = model.graph.opset_imports, opset_of(model)
    if "ai.onnx" in imports:  # the converter knows the default domain as "" only
        imports[""] = own
        del imports["ai.onnx"]
    try:
        with set_aside(model, own):
            proto = run_without_weights(
                model, partial(native.transform, "convert", version=version)
            )
    except native.PassError as error:
        first = str(error)[:200]
        raise ModelError(
            f"the opset cannot be raised to {version}, which the format needs: {first}",
            fix="export the model at a newer opset, or use fp16",
        ) from error
    raised = restored(proto, model)
    bring_back(raised)
    restate(raised, own, version)
    least = onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", version]
    before = model.ir_version or 0
    raised.ir_version = max(raised.ir_version or 0, least)
    if before < FREE_INITIALIZERS <= raised.ir_version:
        # Initializers had to be inputs. From this IR version on, a caller could replace them.
        constants = set(raised.graph.initializers.values())
        inputs = [v for v in raised.graph.inputs if v not in constants]
        raised.graph.inputs.clear()
        raised.graph.inputs.extend(inputs)
    return raised


def raise_as_far(model: ir.Model, versions: Iterable[int]) -> ir.Model:
    """The model at the highest of ``versions`` that onnx can raise it to.

    A version at which an engine misreads one of its ops is not among them: the next one above
    that all engines read takes its place.

    Raises:
        ModelError: If it can be raised to none: the error of the highest. Or if onnx's
            converter crashes.
    """
    first: ModelError | None = None
    readable = {read_by_engines(model, version) for version in versions}
    for version in sorted(readable, reverse=True):
        try:
            return raise_opset(model, version)
        except native.PassDiedError:  # each further try could take as long to die
            raise
        except ModelError as error:
            first = first or error
    if first is not None:
        raise first
    return model
