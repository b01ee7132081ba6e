"""States a model by versions of ONNX that engines read, and read right.

``onnx.helper.make_model`` writes the newest versions that onnx knows, whatever a model needs
of them, and ONNX Runtime reads those of some releases before. And some ops OpenVINO misreads
at some opsets, without a word: its fp32 would be another model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.aside import over_last_axis
from finecast.frontends.onnx.model import OnnxFile, staged
from finecast.frontends.onnx.opset import opset_of, raise_opset
from finecast.frontends.onnx.redefined import misread
from finecast.frontends.onnx.skeleton import restored, run_without_weights
from finecast.frontends.onnx.widen import every_value

# Those of ONNX 1.21, which ONNX Runtime 1.31 reads: 1.23 writes IR 14 and opset 28.
NEWEST_IR: Final = 13
NEWEST_OPSET: Final = 26
# The last element type that this IR version has: later ones have types of 6 bits.
_LAST_TYPE: Final = ir.DataType.INT2


def stated_for_engines(file: OnnxFile) -> OnnxFile:
    """``file`` by versions that engines read, in a temporary folder; itself if it is so.

    It is itself, too, where a newer version is needed. The result has the digest of ``file``.
    """
    stated = _stated(file.model)
    if stated is not None:
        told = (*file.told, _note(file.model, stated))
        return replace(staged(file, stated, file.name), told=told)
    opset = opset_of(file.model)
    wrong, version = misread(file.model, opset)
    over_last = over_last_axis(file.model, opset) if wrong else []
    kinds = sorted({node.op_type for node in wrong if node not in over_last})
    if not kinds:
        return file
    text = f"OpenVINO misreads {' and '.join(kinds)} at opset {opset}"
    try:
        raised = raise_opset(file.model.clone(), version)
    except ModelError:
        said = f"{text}: its numbers are not the model's; use --engine onnxruntime"
        return replace(file, told=(*file.told, said))
    told = (*file.told, f"{text}: the model is taken at opset {version}")
    return replace(staged(file, raised, file.name), told=told)


def _stated(model: ir.Model) -> ir.Model | None:
    """The model by older versions; None if it needs none, or they cannot state it."""
    opset, version = opset_of(model), model.ir_version or 0
    if opset <= NEWEST_OPSET and version <= NEWEST_IR:
        return None
    values = (*every_value(model), *model.graph.initializers.values())
    if any(v.dtype is not None and v.dtype > _LAST_TYPE for v in values):
        return None
    older = model.clone()
    if opset > NEWEST_OPSET:
        convert = partial(native.transform, "convert", version=NEWEST_OPSET)
        if model.functions:  # they have opsets of their own
            return None
        try:
            older = restored(run_without_weights(older, convert), older)
        except native.PassError:  # an op of it is new
            return None
    older.ir_version = min(version, NEWEST_IR)
    return older


def _note(model: ir.Model, stated: ir.Model) -> str:
    return (
        f"it states IR version {model.ir_version} and opset {opset_of(model)}, and is taken by"
        f" {stated.ir_version} and {opset_of(stated)}, which ONNX Runtime reads"
    )
