"""The opset of a model: raised as far as a format needs it, and such that engines read it.

Before opset 13 Softmax, LogSoftmax and Hardmax flatten what they read into a matrix, and
onnx's converter writes that out: Flatten, the op, Reshape. Over the last axis both definitions
give the same numbers, and engines recognise an attention only by a Softmax directly between
its two products. So these ops are kept from the converter, and so is a batch norm in its old
training form, which it refuses and ``redefined`` states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.definitions import (
    FLATTENING_AXIS,
    SOFTMAX_FLATTENS_BELOW,
    opset_of,
    signature,
)
from finecast.frontends.onnx.editor import FREE_INITIALIZERS, every_value
from finecast.frontends.onnx.model import OnnxFile, staged
from finecast.frontends.onnx.redefined import (
    TRAINING_STATED_FROM,
    misread,
    restate,
    trains,
)
from finecast.frontends.onnx.statements import stated_since
from finecast.frontends.onnx.tied_weights import confused_weights, untied
from finecast.frontends.onnx.types import ranks_of
from finecast.numbers.formats import Format
from finecast.ops import OpKind, Tier, lookup

# Those of ONNX 1.21, which ONNX Runtime 1.31 reads: 1.23 writes IR 14 and opset 28.
NEWEST_IR: Final = 13
NEWEST_OPSET: Final = 26
# The last element type that this IR version has: later ones have types of 6 bits.
_LAST_TYPE: Final = ir.DataType.INT2
_FLATTENING: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
# A domain that onnx's converter does not know: it leaves its ops alone.
_ASIDE: Final = "finecast.aside"


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
    for node in model.graph.all_nodes():
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
    since = found.since.get(fmt) if found else None
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
    own = opset_of(model)
    if version <= own:
        return model
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:  # the converter knows the default domain as "" only
        imports[""] = own
        del imports["ai.onnx"]
    try:
        raised = _converted(model, version)
    except native.PassError as error:
        first = str(error)[:200]
        raise ModelError(
            f"the opset cannot be raised to {version}, which the format needs: {first}",
            fix="export the model at a newer opset, or use fp16",
        ) from error
    restate(raised, own, version)
    least = onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", version]
    raised.ir_version = max(raised.ir_version or 0, least)
    if (model.ir_version or 0) < FREE_INITIALIZERS <= raised.ir_version:
        # Initializers had to be inputs. From this IR version on, a caller could replace them.
        RemoveInitializersFromInputsPass()(raised)
    return raised


def _converted(model: ir.Model, version: int) -> ir.Model:
    """The model after onnx's converter, which some ops are hidden from by another domain."""
    own = opset_of(model)
    hidden = list(_over_last_axis(model, own))
    if own < TRAINING_STATED_FROM:
        hidden += filter(trains, model.graph.all_nodes())
    domains = [node.domain for node in hidden]
    for node in hidden:
        node.domain = _ASIDE
    if hidden:
        model.opset_imports[_ASIDE] = 1
    try:
        raised = native.rewritten(model, _to(version))
    finally:
        model.opset_imports.pop(_ASIDE, None)
        for node, domain in zip(hidden, domains, strict=True):
            node.domain = domain
    if raised.opset_imports.pop(_ASIDE, None) is not None:
        for node in raised.graph.all_nodes():
            if node.domain == _ASIDE:
                node.domain = ""
                if node.op_type in _FLATTENING:  # by both definitions over the last axis
                    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    return raised


def _to(version: int) -> native.Pass:
    return partial(native.transform, "convert", version=version)


def _over_last_axis(model: ir.Model, opset: int) -> list[ir.Node]:
    """Softmax and its like, before opset 13, over the last axis: by both definitions."""
    if opset >= SOFTMAX_FLATTENS_BELOW:
        return []
    nodes = (n for n in model.graph.all_nodes() if not n.domain)
    found = {n: _axis(n) for n in nodes if n.op_type in _FLATTENING}
    ranks: Mapping[str, int] = {}
    if any(axis != -1 for axis in found.values()):
        ranks = ranks_of(model)
    return [n for n, axis in found.items() if axis == -1 or axis + 1 == ranks.get(_source(n))]


def _axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", FLATTENING_AXIS)


def _source(node: ir.Node) -> str:
    return (node.inputs[0].name or "") if node.inputs and node.inputs[0] else ""


def raise_as_far(model: ir.Model, versions: Iterable[int]) -> ir.Model:
    """The model at the highest of ``versions`` that onnx can raise it to.

    A version at which an engine misreads one of its ops is not among them: the next one above
    that all engines read takes its place.

    Raises:
        ModelError: If it can be raised to none: the error of the highest. Or if onnx's
            converter crashes.
    """
    first: ModelError | None = None
    readable = {misread(model, version)[1] for version in versions}
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


# Versions that engines read, and read right.


def stated_for_engines(file: OnnxFile) -> OnnxFile:
    """``file`` in a form that engines read, and compute right, in a temporary folder.

    ``onnx.helper.make_model`` writes the newest versions that onnx knows, whatever a model
    needs of them, and ONNX Runtime reads those of some releases before. And some ops OpenVINO
    misreads at some opsets, or computes wrongly, without a word: its fp32 would be another
    model. The result has the digest of ``file``. It is ``file`` itself where that is read as
    it is, and where a newer version is needed.
    """
    model, told = file.model, list[str]()
    for change in (_by_older_versions, _at_an_opset_that_is_read, _with_weights_apart):
        model, text = change(model)
        told += filter(None, [text])
    if not told:
        return file
    stated = file if model is file.model else staged(file, model, file.name)
    return replace(stated, told=(*file.told, *told))


def _by_older_versions(model: ir.Model) -> tuple[ir.Model, str]:
    """The model by versions that ONNX Runtime reads, and a note of them."""
    stated = _stated(model)
    return (model, "") if stated is None else (stated, _note(model, stated))


def _at_an_opset_that_is_read(model: ir.Model) -> tuple[ir.Model, str]:
    """The model at an opset at which OpenVINO misreads none of its ops, and a note of them."""
    opset = opset_of(model)
    wrong, version = misread(model, opset)
    over_last = _over_last_axis(model, opset) if wrong else []
    kinds = sorted({node.op_type for node in wrong if node not in over_last})
    if not kinds:
        return model, ""
    text = f"OpenVINO misreads {' and '.join(kinds)} at opset {opset}"
    try:
        raised = raise_opset(model.clone(), version)
    except ModelError:
        return model, f"{text}: its numbers are not the model's; use --engine onnxruntime"
    return raised, f"{text}: the model is taken at opset {version}"


def _with_weights_apart(model: ir.Model) -> tuple[ir.Model, str]:
    """The model without weights that OpenVINO confuses, and a note of them."""
    apart, names = untied(model)
    return apart, confused_weights(names)


def _stated(model: ir.Model) -> ir.Model | None:
    """The model by older versions; None if it needs none, or they cannot state it."""
    opset, version = opset_of(model), model.ir_version or 0
    if opset <= NEWEST_OPSET and version <= NEWEST_IR:
        return None
    values = every_value(model)
    if any(v.dtype is not None and v.dtype > _LAST_TYPE for v in values):
        return None
    older = model.clone()
    if opset > NEWEST_OPSET:
        if model.functions:  # they have opsets of their own
            return None
        try:
            older = native.rewritten(older, _to(NEWEST_OPSET))
        except native.PassError:  # an op of it is new
            return None
    older.ir_version = min(version, NEWEST_IR)
    return older


def _note(model: ir.Model, stated: ir.Model) -> str:
    return (
        f"it states IR version {model.ir_version} and opset {opset_of(model)}, and is taken by"
        f" {stated.ir_version} and {opset_of(stated)}, which ONNX Runtime reads"
    )
