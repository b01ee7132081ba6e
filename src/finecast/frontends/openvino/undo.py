"""Takes back an earlier conversion, so that another policy starts from the original.

Digits that a constant lost do not come back: a weight in fp16 or in codes becomes the fp32
number that it stands for. If some op still reads the original in fp32, all read that again.
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
from finecast.frontends.openvino.marks import marked, unmark_ops
from finecast.frontends.openvino.quantization import decoded_numbers
from finecast.frontends.openvino.restating import take_back
from finecast.frontends.openvino.types import hand_over, new_constant, numbers_of
from finecast.numbers.formats import Format
from finecast.rules.policy import conversion_stays

if TYPE_CHECKING:
    import openvino

# Kinds of ops that conversions insert behind a value. An op of another kind by a noted name is
# another tool's, and stays.
_INSERTED: Final = frozenset(
    {"Convert", "FakeQuantize", "Multiply", "Add", "Unsqueeze", "Squeeze"}
)


def original(model: openvino.Model, policy: str) -> openvino.Model:
    """A copy of ``model`` as it was before its conversion by another policy than ``policy``.

    Without such a conversion, or without notes of what it changed, it is ``model`` itself.
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
            hand_over(ops[name].output(0), kept)
    take_back_constants(changes, ops)
    for name, kind in changes.types.items():
        if name in ops:
            _restate(ops[name], kind)
    model.validate_nodes_and_infer_types()  # what is taken back next reads these types
    take_back(changes, ops)
    unmark_ops(model, marked(model).difference(changes.marked))
    unmark(model)
    model.validate_nodes_and_infer_types()


def _before(op: Any, added: Added, ops: dict[str, Any]) -> openvino.Output | None:
    """The port that readers of ``op`` read before it was inserted.

    None if another tool has replaced the op.
    """
    if not added.constant:
        return op.input_value(0) if op.get_type_name() in _INSERTED else None
    if added.constant not in ops:
        array = _numbers(op)
        if array is None:
            return None
        found: Any = new_constant(array, Format.FP32)
        found.set_friendly_name(added.constant)
        ops[added.constant] = found
    return ops[added.constant].output(0)


def _numbers(op: Any) -> NDArray[np.float32] | None:
    """The numbers of a Constant, or of the op that decodes a constant's codes."""
    if op.get_type_name() == "Constant":
        return numbers_of(op).astype(np.float32)
    return decoded_numbers(op)


def _restate(op: Any, kind: str) -> None:
    """Give an input or Convert the element type that OpenVINO calls ``kind``."""
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
        hand_over(op.output(0), new.output(0))
