"""Taking back an earlier conversion, so that another policy starts from the original.

Digits that constants lost do not come back: a weight in fp16 or in codes becomes the fp32
number that it stands for. One that an op still reads in fp32 is read by all again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends.openvino.adjusting import take_back_constants
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.changes import (
    Added,
    Changes,
    changes_of,
    converted_to,
    unmark,
)
from finecast.frontends.openvino.types import new_constant, numbers_of, take_names
from finecast.numbers.formats import Format
from finecast.rules.policy import conversion_stays

if TYPE_CHECKING:
    import openvino

# The ops that edits put in; what another tool put in their place stays.
_READS: Final = frozenset(
    {"Convert", "FakeQuantize", "Multiply", "Add", "Unsqueeze", "Squeeze"}
)


def original(model: openvino.Model, policy: str) -> openvino.Model:
    """``model`` as it was before a conversion to another policy than ``policy``.

    It is left as it is; one that was never converted, or that stays, is given back itself.
    """
    was, changes = converted_to(model), changes_of(model)
    if not was or changes is None or conversion_stays(was, policy):
        return model
    copy = model.clone()
    _undo(copy, changes)
    return copy


def _undo(model: openvino.Model, changes: Changes) -> None:
    ops: dict[str, Any] = {op.get_friendly_name(): op for op in every_op(model)}
    for name, added in changes.added.items():
        if name in ops and (kept := _before(ops[name], added, ops)) is not None:
            _hand_over(ops[name].output(0), kept)
    take_back_constants(changes, ops)
    for name, kind in changes.types.items():
        if name in ops:
            _restate(ops[name], kind)
    unmark(model)
    model.validate_nodes_and_infer_types()


def _before(op: Any, added: Added, ops: dict[str, Any]) -> openvino.Output | None:
    """What readers of ``op`` read before it was there; None if it is another op by now."""
    if not added.constant:
        return op.input_value(0) if op.get_type_name() in _READS else None
    if added.constant not in ops:
        array = _numbers(op)
        if array is None:
            return None
        found: Any = new_constant(array, Format.FP32)
        found.set_friendly_name(added.constant)
        ops[added.constant] = found
    return ops[added.constant].output(0)


def _numbers(op: Any) -> NDArray[np.float32] | None:
    """The numbers that a constant, or one of codes times its scale, stands for."""
    if op.get_type_name() == "Constant":
        return numbers_of(op).astype(np.float32)
    if op.get_type_name() != "Multiply":
        return None
    wide, scale = (value.get_node() for value in op.input_values())
    codes = wide.input_value(0).get_node() if wide.get_type_name() == "Convert" else None
    if codes is None or {codes.get_type_name(), scale.get_type_name()} != {"Constant"}:
        return None
    return numbers_of(codes).astype(np.float32) * numbers_of(scale).astype(np.float32)


def _hand_over(port: Any, kept: openvino.Output) -> None:
    """Let all that read ``port`` read ``kept``, which takes the names that users know."""
    if port.get_names() and kept.get_node().get_type_name() != "Parameter":
        take_names(port, kept)
    for target in list(port.get_target_inputs()):
        target.replace_source_output(kept)


def _restate(op: Any, kind: str) -> None:
    """Let ``op`` state the type called ``kind`` in OpenVINO."""
    import openvino
    from openvino import opset13

    if op.get_type_name() == "Parameter":
        op.set_element_type(getattr(openvino.Type, kind))
        op.validate_and_infer_types()
    elif op.get_type_name() == "Convert":
        name = op.get_friendly_name()
        new = opset13.convert(op.input_value(0), kind)
        op.set_friendly_name(f"{name}_before")
        new.set_friendly_name(name)
        _hand_over(op.output(0), new.output(0))
