"""The opset of a model: raised as far as a format needs it, and such that engines read it.

Before opset 13 Softmax, LogSoftmax and Hardmax flatten what they read into a matrix, and
onnx's converter writes that out: Flatten, the op, Reshape. Over the last axis both definitions
give the same numbers, and engines recognise an attention only by a Softmax directly between
its two products. So these ops are kept from the converter, and so is a batch norm in its old
training form, which it refuses; such ops, which a later opset defines anew, are stated below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.definitions import (
    FLATTENING_AXIS,
    opset_of,
    signature,
)
from finecast.frontends.onnx.draws import FIXED_FROM, draws
from finecast.frontends.onnx.editor import FREE_INITIALIZERS, Editor, every_value, is_read
from finecast.frontends.onnx.miscomputed import FLATTENING, over_last_axis, read_from
from finecast.frontends.onnx.model import OnnxFile, staged
from finecast.frontends.onnx.statements import stated_since
from finecast.frontends.onnx.types import ASIDE, ranks_of
from finecast.numbers.formats import Format
from finecast.ops import OpKind, Tier, lookup

# Those of ONNX 1.21, which ONNX Runtime 1.31 reads: 1.23 writes IR 14 and opset 28.
NEWEST_IR: Final = 13
NEWEST_OPSET: Final = 26
_OLDEST_OPSET: Final = 7
PROBED_FROM: Final = 9
"""The first opset with Where, by which a model is probed: its roundings are switched by it."""
# The last element type that this IR version has: later ones have types of 6 bits.
_LAST_TYPE: Final = ir.DataType.INT2


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
    op_signature = signature(op_type, domain, current)
    if op_signature is not None and not fmt.encodes_results:
        return stated_since(fmt, current)
    since = op_signature.since.get(fmt.storage) if op_signature else None
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
    # From the first step on the converter knows the shapes of all values.
    steps = dict.fromkeys(sorted((min(_BY_SHAPES_FROM, version), version)))
    for step in steps:
        model = _raised(model, step, version) if opset_of(model) < step else model
    return model


def _raised(model: ir.Model, version: int, wanted: int) -> ir.Model:
    """``model`` at opset ``version``, on the way to the one that is ``wanted``."""
    own = opset_of(model)
    if own < _BY_SHAPES_FROM <= version:
        model = _broadcasting_by_shapes(model)
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:  # the converter knows the default domain as "" only
        imports[""] = own
        del imports["ai.onnx"]
    try:
        raised = _converted(model, version)
    except native.PassError as error:
        first = str(error)[:200]
        raise ModelError(
            f"the opset cannot be raised to {wanted}, which the format needs: {first}",
            fix="export the model at a newer opset, or use fp16",
        ) from error
    restate(raised, own, version)
    least = onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", version]
    raised.ir_version = max(raised.ir_version or 0, least)
    if (model.ir_version or 0) < FREE_INITIALIZERS <= raised.ir_version:
        # Initializers had to be inputs. From this IR version on, a caller could replace them.
        RemoveInitializersFromInputsPass()(raised)
    return raised


_BY_SHAPES_FROM: Final = 7
"""The opset from which on operands broadcast by their shapes; before, attributes said how."""
_BROADCAST: Final = frozenset(
    {"Add", "And", "Div", "Equal", "Gemm", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor"}
)
"""Ops that changed so."""
_OLD_ATTRIBUTES: Final = ("axis", "broadcast", "consumed_inputs")


def _loses_axis(node: ir.Node) -> bool:
    """Whether onnx states other shapes behind it than engines compute (``types``)."""
    sized = node.op_type == "SplitToSequence" and len(node.inputs) > 1
    return sized and not node.domain and not node.attributes.get_int("keepdims", 1)


def _broadcasts(node: ir.Node) -> bool:
    return node.op_type in _BROADCAST and not node.domain


def _broadcasting_by_shapes(model: ir.Model) -> ir.Model:
    """A copy whose operands broadcast as from opset 7 on.

    onnx's converter compares the sizes of operands for that: it refuses free sizes, and a
    vector that is added along the axis of channels.

    Raises:
        ModelError: If the number of axes that decides it is not known.
    """
    copy = model.clone()
    if any("axis" in node.attributes for node in filter(_broadcasts, copy.graph.all_nodes())):
        ranks, editor = ranks_of(copy), Editor(copy)
        for node in filter(_broadcasts, list(copy.graph.all_nodes())):
            _align(node, ranks, editor)
    for node in filter(_broadcasts, copy.graph.all_nodes()):
        for name in _OLD_ATTRIBUTES:
            node.attributes.pop(name, None)
    return copy


def _align(node: ir.Node, ranks: Mapping[str, int], editor: Editor) -> None:
    """Append axes of size 1 to the second operand, whose first one is the attribute's."""
    axis, operand = node.attributes.get_int("axis", -1), node.inputs[1]
    if axis == -1 or operand is None:
        return
    known = [ranks.get(v.name or "") if v is not None else None for v in node.inputs[:2]]
    if known[0] is None or known[1] is None:
        raise _cannot(node, "the number of axes of what it reads is not known")
    axes = tuple(range(known[1], known[0] - axis % max(known[0], 1)))
    if not axes:
        return
    name, tensor = f"{operand.name}_at_{axis}", constant_tensor(operand)
    if tensor is not None:
        aligned = editor.constant(name, np.expand_dims(tensor.numpy(), axes))
    else:
        given = editor.fresh(name)
        aligned = editor.op(
            "Unsqueeze", [operand], {"axes": axes}, name=given, dtype=operand.dtype
        )
        node.prepend(editor.take())
    node.replace_input_with(1, aligned)


def _converted(model: ir.Model, version: int) -> ir.Model:
    """The model after onnx's converter, which some ops are hidden from by another domain."""
    own = opset_of(model)
    hidden = list(over_last_axis(model, own))
    if own < TRAINING_STATED_FROM:
        hidden += filter(trains, model.graph.all_nodes())
    hidden += filter(_loses_axis, model.graph.all_nodes())
    if own < _BY_SHAPES_FROM:
        hidden += filter(_broadcasts, model.graph.all_nodes())
    domains = [node.domain for node in hidden]
    for node in hidden:
        node.domain = ASIDE
    if hidden:
        model.opset_imports[ASIDE] = 1
    stated = model.ir_version
    # Of older versions the converter refuses initializers that are no inputs; engines do not.
    model.ir_version = max(stated or 0, FREE_INITIALIZERS)
    try:
        raised = native.rewritten(model, _to(version))
    finally:
        model.ir_version = stated
        model.opset_imports.pop(ASIDE, None)
        for node, domain in zip(hidden, domains, strict=True):
            node.domain = domain
    if raised.opset_imports.pop(ASIDE, None) is not None:
        for node in raised.graph.all_nodes():
            if node.domain == ASIDE:
                node.domain = ""
                if node.op_type in FLATTENING:  # by both definitions over the last axis
                    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    return raised


def _to(version: int) -> native.Pass:
    return partial(native.transform, "convert", version=version)


def raise_as_far(model: ir.Model, versions: Iterable[int]) -> ir.Model:
    """The model at the highest of ``versions`` that onnx can raise it to.

    A version at which an engine misreads one of its ops is not among them: the next one above
    that all engines read right takes its place.

    Raises:
        ModelError: If it can be raised to none: the error of the highest. Or if onnx's
            converter crashes.
    """
    first: ModelError | None = None
    readable = {read_from(model, version) for version in versions}
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


def probed(model: ir.Model) -> ir.Model:
    """The model at an opset in which it can be probed; as it is if onnx cannot raise it."""
    if opset_of(model) >= PROBED_FROM:
        return model
    try:
        return raise_opset(model, read_from(model, PROBED_FROM))
    except ModelError:
        return model


# Versions that engines read.


def stated_for_engines(file: OnnxFile) -> OnnxFile:
    """``file`` in a form that engines read, in a temporary folder.

    ``onnx.helper.make_model`` writes the newest versions that onnx knows, whatever a model
    needs of them, and ONNX Runtime reads those of some releases before. The result has the
    digest of ``file``. It is ``file`` itself where that is read as it is, and where a newer
    version is needed. Ops that OpenVINO misreads stay: the model is not given to OpenVINO then
    (``miscomputed``).
    """
    model, told = file.model, list[str]()
    for change in (_by_older_versions, _with_fixed_draws, _that_is_read):
        model, text = change(model)
        told += filter(None, [text])
    if not told:
        return file
    stated = file if model is file.model else staged(file, model, file.name)
    return replace(stated, told=(*file.told, *told))


def _with_fixed_draws(model: ir.Model) -> tuple[ir.Model, str]:
    """The model at an opset in which draws can be fixed, and a note of it.

    It stays as it is where it has no random op, or cannot be raised.
    """
    opset = opset_of(model)
    kinds = sorted({n.op_type for n in model.graph.all_nodes() if _draws(n)})
    if opset >= FIXED_FROM or not kinds:
        return model, ""
    text = f"draws of {' and '.join(kinds)} are other numbers in each run at opset {opset}"
    return _taken_at(model, read_from(model, FIXED_FROM), text)


def _draws(node: ir.Node) -> bool:
    switch = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    constant = None if switch is None else constant_tensor(switch)
    training = constant is not None and bool(constant.numpy().all())
    return draws(node.op_type, node.domain, training=training)


def _that_is_read(model: ir.Model) -> tuple[ir.Model, str]:
    """The model at an opset that ONNX Runtime reads, and a note of it."""
    if opset_of(model) >= _OLDEST_OPSET:
        return model, ""
    text = f"ONNX Runtime reads no opset before {_OLDEST_OPSET}"
    return _taken_at(model, _OLDEST_OPSET, text)


def _taken_at(model: ir.Model, opset: int, why: str) -> tuple[ir.Model, str]:
    """The model at a later opset, and a note of it; as it is where it cannot be raised."""
    try:
        raised = raise_opset(model.clone(), opset)
    except ModelError:
        return model, ""
    return raised, f"{why}: the model is taken at opset {opset_of(raised)}"


def _by_older_versions(model: ir.Model) -> tuple[ir.Model, str]:
    """The model by versions that ONNX Runtime reads, and a note of them.

    It stays as it is where it needs none, or they cannot state it.
    """
    opset, version = opset_of(model), model.ir_version or 0
    if opset <= NEWEST_OPSET and version <= NEWEST_IR:
        return model, ""
    values = every_value(model)
    if any(v.dtype is not None and v.dtype > _LAST_TYPE for v in values):
        return model, ""
    older = model.clone()
    if opset > NEWEST_OPSET:
        if model.functions:  # they have opsets of their own
            return model, ""
        try:
            older = native.rewritten(older, _to(NEWEST_OPSET))
        except native.PassError:  # an op of it is new
            return model, ""
    older.ir_version = min(version, NEWEST_IR)
    return older, (
        f"it has IR version {model.ir_version} and opset {opset}, and is taken by"
        f" {older.ir_version} and {opset_of(older)}, which ONNX Runtime reads"
    )


# --------------------------------------------------------- ops that a later opset defines anew
#
# Law: after ``restate`` the ops of a raised model compute what they did in its own opset. As
# of onnx 1.23 the converter renames Upsample to Resize and adds inputs, but does not state the
# coordinates that the old definition takes; and it knows nothing of Hardmax,
# GroupNormalization and norms that train. Without this the numbers would be others, and no
# error would tell.

TRAINING_STATED_FROM: Final = 14
"""The opset from which on an attribute says that a BatchNormalization trains."""


def trains(node: ir.Node) -> bool:
    """Whether ``node`` is a BatchNormalization that takes its statistics from its own input.

    Before opset 14 having more than one output says so, from then on the attribute
    ``training_mode``.
    """
    if node.op_type != "BatchNormalization" or node.domain:
        return False
    stated = node.attributes.get("training_mode")
    return len(node.outputs) > 1 if stated is None else bool(stated.as_int())


def restate(model: ir.Model, before: int, version: int) -> None:
    """State the ops of ``model`` by the definitions of ``version``, in place.

    Args:
        model: The model as onnx's converter raised it.
        before: The opset that it was raised from.
        version: The opset that it was raised to.

    Raises:
        ModelError: If the later definition cannot state an op.
    """
    editor = Editor(model)
    for since, op, change in _REDEFINED:
        if before < since <= version:
            for node in list(model.graph.all_nodes()):
                if not node.domain and node.op_type == op:
                    change(node, editor)


def _has_many_slopes(node: ir.Node) -> bool:
    """Whether a PRelu reads a vector of more than one slope."""
    slope = node.inputs[1]
    shape = None if slope is None else slope.shape
    return shape is not None and len(shape) == 1 and shape[0] != 1


def _prelu(node: ir.Node, editor: Editor) -> None:
    """Before opset 7 a PRelu has one slope, or one for each channel, along axis 1."""
    x, slope = node.inputs[:2]
    if slope is None or not _has_many_slopes(node):
        return
    if x is None or x.shape is None:
        raise _cannot(node, "the number of axes of what it reads is not known")
    by_channel = [-1, *[1] * (len(x.shape) - 2)]
    tensor, name = constant_tensor(slope), f"{slope.name}_by_channel"
    if tensor is not None:
        slopes = editor.constant(name, tensor.numpy().reshape(by_channel))
    else:
        shape = editor.constant(f"{name}_shape", np.array(by_channel, np.int64))
        given = editor.fresh(name)
        slopes = editor.op("Reshape", [slope, shape], name=given, dtype=slope.dtype)
        node.prepend(editor.take())
    node.replace_input_with(1, slopes)


def _resize(node: ir.Node, editor: Editor) -> None:
    """Before opset 11 coordinates are divided by the scale alone, from the first pixel on.

    The nearest pixel is the one before, and where the size becomes smaller the one after: so
    engines have it, as the definition leaves it open.
    """
    node.attributes["coordinate_transformation_mode"] = ir.AttrString(
        "coordinate_transformation_mode", "asymmetric"
    )
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return
    given = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if given is None else constant_tensor(given)
    if tensor is None:
        raise _cannot(
            node, "its scales are computed, and which pixel is nearest hinges on them"
        )
    scales = np.asarray(tensor.numpy(), np.float32)
    smaller, larger = bool((scales < 1).any()), bool((scales > 1).any())
    if smaller and larger:
        raise _cannot(node, "it makes one axis larger and another one smaller")
    mode = "ceil" if smaller else "floor"
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", mode)


def _hardmax(node: ir.Node, editor: Editor) -> None:
    """Before opset 13 Hardmax is of a matrix: the axes from ``axis`` on are its columns."""
    x, out = node.inputs[0], node.outputs[0]
    if x is None or node.graph is None:
        return
    axis = node.attributes.get_int("axis", FLATTENING_AXIS)
    if axis == -1:  # over the last axis both definitions say the same
        return

    def op(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        name = editor.fresh(f"{out.name}_{kind.lower()}")
        return editor.op(kind, inputs, attributes, name=name, dtype=None)

    shape, flat = op("Shape", x), op("Flatten", x, axis=axis)
    node.prepend(editor.take())
    node.replace_input_with(0, flat)
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    final = op("Reshape", out, shape)
    final.type = out.type
    editor.replace_result(out, final)
    out.name, final.name = final.name, out.name


def _batch_normalization(node: ir.Node, editor: Editor) -> None:
    """Before opset 14 a norm with five outputs trains; the last two no longer exist."""
    if not trains(node):
        return
    saved = node.outputs[3:]
    if any(map(is_read, saved)):
        raise _cannot(node, "its saved mean or variance is read, which no later opset gives")
    node.resize_outputs(3)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


def _dropout(node: ir.Node, editor: Editor) -> None:
    """Opset 10 makes numbers of the mask booleans, opset 12 an unstated mask one of True."""
    if any(map(is_read, node.outputs[1:])):
        raise _cannot(node, "its mask is read, which later opsets define otherwise")


def _group_normalization(node: ir.Node, editor: Editor) -> None:
    """Before opset 21 scale and bias have a number for each group, then for each channel."""
    x, groups = node.inputs[0], node.attributes.get_int("num_groups", 1)
    channels = x.shape[1] if x is not None and x.shape is not None else None
    for index in (1, 2):
        value = node.inputs[index]
        tensor = None if value is None else constant_tensor(value)
        if value is None or tensor is None or not isinstance(channels, int):
            raise _cannot(node, "its channels, its scale or its bias are not constant")
        numbers = np.repeat(tensor.numpy(), channels // groups)
        by_channel = editor.constant(f"{value.name}_by_channel", numbers)
        node.replace_input_with(index, by_channel)


def _cannot(node: ir.Node, why: str) -> ModelError:
    return ModelError(
        f"a later opset, which the format needs, has no equal of {node.op_type} {node.name!r}:"
        f" {why}",
        fix="export the model at a newer opset, or use fp16",
    )


# The first opset of a new definition, the op, and what restates a node of the old one.
_REDEFINED: Final[Sequence[tuple[int, str, Callable[[ir.Node, Editor], None]]]] = (
    (7, "PRelu", _prelu),
    (10, "Dropout", _dropout),
    (11, "Resize", _resize),
    (12, "Dropout", _dropout),
    (13, "Hardmax", _hardmax),
    (TRAINING_STATED_FROM, "BatchNormalization", _batch_normalization),
    (21, "GroupNormalization", _group_normalization),
)
