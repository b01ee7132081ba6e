"""Takes back an earlier conversion, so that another policy starts from the original.

What the conversion noted (``changes.py``) is restored by the names of ops. Another tool may
have changed the model since: an op that is no longer of the kind that a conversion made stays
as it is. Adjusted constants are restored bit for bit: multiplications by powers of two are
exact, and before an addition the constant's bytes were noted. Other digits that a constant
lost do not come back: a weight in fp16 or in codes becomes the fp32 number that it stands for.
If some op still reads the original in fp32, all read that again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.faults import is_mended
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.changes import (
    STORED,
    WAS,
    Added,
    Changes,
    changes_of,
    converted_to,
    keep,
    marked,
    unmark,
    unmark_ops,
)
from finecast.frontends.openvino.native import decoded_numbers
from finecast.frontends.openvino.restating import tie_again
from finecast.frontends.openvino.types import (
    hand_over,
    multiply_attribute,
    new_constant,
    numbers_of,
    replace_op,
)
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.rules.policy import conversion_stays

if TYPE_CHECKING:
    import openvino

# Kinds of ops that conversions insert behind a value. An op of another kind by a noted name is
# another tool's, and stays.
_INSERTED: Final = frozenset(
    {
        "Convert",
        "FakeQuantize",
        "Maximum",
        "Power",
        "Multiply",
        "Add",
        "Unsqueeze",
        "Squeeze",
    }
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


def take_out_mended(model: openvino.Model) -> None:
    """Take out, in place, what is there because of faults that the engine no longer has."""
    changes = changes_of(model)
    noted = {} if changes is None else changes.faults
    mended = [name for name, fault in noted.items() if is_mended(fault)]
    if changes is None or not mended:
        return
    ops: dict[str, Any] = {op.get_friendly_name(): op for op in every_op(model)}
    for name in mended:
        del changes.faults[name]
        added = changes.added.pop(name, None)
        if name not in ops:
            continue
        if added is None:
            tie_again(model, ops[name])
        elif (kept := _before(ops[name], added, ops)) is not None:
            hand_over(ops[name].output(0), kept)
    keep(model, changes)
    model.validate_nodes_and_infer_types()


def _undo(model: openvino.Model, changes: Changes) -> None:
    ops: dict[str, Any] = {op.get_friendly_name(): op for op in every_op(model)}
    for name, added in changes.added.items():
        if name in ops and (kept := _before(ops[name], added, ops)) is not None:
            hand_over(ops[name].output(0), kept)
    for name, notes in changes.adjusted.items():
        if name in ops:
            _restore_constant(ops[name], notes)
    for name, kind in changes.types.items():
        if name in ops:
            _restore_type(ops[name], kind)
    model.validate_nodes_and_infer_types()  # what is taken back next reads these types
    _restore_products(changes, ops)
    unmark_ops(model, marked(model).difference(changes.marked))
    unmark(model)
    faults = {n: f for n, f in changes.faults.items() if n not in changes.added}
    if faults:  # what was restated when the model was read stays, whatever the policy is
        keep(model, Changes(faults=faults))
    model.validate_nodes_and_infer_types()


def _before(op: Any, added: Added, ops: dict[str, Any]) -> openvino.Output | None:
    """The port that readers of ``op`` read before it was inserted; None if it stays."""
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


def _restore_constant(op: Any, notes: list[dict[str, str | int]]) -> None:
    """Give an adjusted constant, or attribute, its numbers back, if the notes fit it."""
    if op.get_type_name() != "Constant":
        _restore_attributes(op, notes)
        return
    array: NDArray[np.float32] | None = numbers_of(op).astype(np.float32)
    for note in reversed(notes):
        array = None if array is None else _unadjusted(array, note)
    if array is not None:
        replace_op(op, new_constant(array, Format.FP32))


def _restore_attributes(op: Any, notes: list[dict[str, str | int]]) -> None:
    for note in notes:
        try:
            what = Adjustment.from_dict(dict(note))
        except (ValueError, TypeError, KeyError):
            continue
        if what.attribute:
            multiply_attribute(op, what.undone)


def _unadjusted(
    array: NDArray[np.float32], note: Mapping[str, str | int]
) -> NDArray[np.float32] | None:
    """``array`` before the adjustment in ``note``; None if that is damaged or does not fit."""
    try:
        if WAS in note:
            stored = base64.b64decode(str(note[WAS]), validate=True)
            return np.frombuffer(stored, STORED).astype(np.float32).reshape(array.shape)
        what = Adjustment.from_dict(dict(note))
    except (binascii.Error, ValueError, TypeError, KeyError):
        return None
    return what.undone.of(array) if what.fits(array.shape) else None


def _restore_type(op: Any, kind: str) -> None:
    """Give an input or Convert the element type that OpenVINO calls ``kind``."""
    import openvino
    from openvino import opset13

    if op.get_type_name() == "Parameter":
        op.set_element_type(getattr(openvino.Type, kind))
        op.validate_and_infer_types()
    elif op.get_type_name() == "Convert":
        replace_op(op, opset13.convert(op.input_value(0), kind))


def _restore_products(changes: Changes, ops: Mapping[str, Any]) -> None:
    """Turn the quotients that ``restating.py`` made into products with inverses again."""
    from openvino import opset13

    inverses: dict[str, Any] = {}
    for name, noted in changes.inverses.items():
        quotient = ops.get(name)
        if quotient is None or quotient.get_type_name() != "Divide":
            continue
        x, root = quotient.input_value(0), quotient.input_value(1)
        if noted.name not in inverses:
            inverses[noted.name] = opset13.divide(opset13.constant(np.float32(1)), root)
            inverses[noted.name].set_friendly_name(noted.name)
        inverse = inverses[noted.name].output(0)
        operands = (inverse, x) if noted.first else (x, inverse)
        replace_op(quotient, opset13.multiply(*operands))
