"""Adjusted operands of an ``ov.Model``, and how adjustments are taken back.

Law: an adjusted constant can be restored bit for bit. Multiplications by powers of two are
exact, and their inverses undo them. Additions are not, so the constant's bytes before one are
stored. Exponents and bytes are in the model's notes, as is all that conversions change
(``changes.py``).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends.openvino.changes import Added, Changes, changes_of, keep
from finecast.frontends.openvino.names import FreshOpNames
from finecast.frontends.openvino.reader import OvBinding
from finecast.frontends.openvino.types import hand_over, new_constant, numbers_of
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, AdjustOperand

if TYPE_CHECKING:
    import openvino

_STORED: Final = np.dtype("<f4")
_WAS: Final = "was"
"""The key, in the note of an adjustment that added numbers, of the constant's bytes before."""


def adjust(binding: OvBinding, edits: Iterable[AdjustOperand]) -> None:
    """Make ``edits`` in ``binding.model``; ``binding`` is stale then, so read it again."""
    adjuster = _Adjuster(binding)
    for edit in edits:
        if edit.value in binding.constants:
            adjuster.change(edit)
        else:
            adjuster.multiply(edit)
    keep(binding.model, adjuster.changes)


class _Adjuster:
    def __init__(self, binding: OvBinding) -> None:
        self.binding = binding
        self.changes = changes_of(binding.model) or Changes()
        self.fresh = FreshOpNames(binding.model)
        self.scaled: dict[tuple[int, int, tuple[int, ...]], openvino.Output] = {}

    def change(self, edit: AdjustOperand) -> None:
        """Give the constant other numbers; a compressed constant becomes fp32."""
        what = edit.what
        port = self.binding.entries[edit.node][what.port].port
        # It is one that this method made if the constant was adjusted along another axis, too.
        before = port.get_source_output().get_node()
        own = before.get_type_name() == "Constant"
        array = numbers_of(before if own else self.binding.constants[edit.value])
        array = array.astype(np.float32)
        name = before.get_friendly_name()
        before.set_friendly_name(self.fresh(f"{name}_before"))
        after = new_constant(what.of(array), Format.FP32)
        after.set_friendly_name(name)
        port.replace_source_output(after.output(0))
        self.changes.adjusted.setdefault(name, []).append(_noted(what, array))

    def multiply(self, edit: AdjustOperand) -> None:
        """Multiply the value in front of the op; ops with equal factors share the product."""
        from openvino import opset13

        what = edit.what
        key = (edit.value, what.axis, what.exponents)
        if key not in self.scaled:
            port = self.binding.values[edit.value]
            ones = np.ones((what.channels, *(1,) * (-what.axis - 1)), np.float32)
            made = opset13.multiply(port, opset13.constant(what.of(ones)))
            name = self.fresh(f"{port.get_node().get_friendly_name()}/scaled")
            made.set_friendly_name(name)
            self.changes.added[name] = Added(scales=True)
            self.scaled[key] = made.output(0)
        entry = self.binding.entries[edit.node][what.port]
        entry.port.replace_source_output(self.scaled[key])


def _noted(what: Adjustment, array: NDArray[np.float32]) -> dict[str, str | int]:
    """The note by which ``_before`` undoes ``what``; ``array`` is the constant before it."""
    if not what.add:
        return what.to_dict()
    return {_WAS: base64.b64encode(array.astype(_STORED).tobytes()).decode()}


def take_back_constants(changes: Changes, ops: Mapping[str, Any]) -> None:
    """Restore the adjusted constants among ``ops``, which are keyed by name.

    One that another tool replaced, or whose notes do not fit it, stays as it is.
    """
    for name, made in changes.adjusted.items():
        op = ops.get(name)
        if op is None or op.get_type_name() != "Constant":
            continue
        array: NDArray[np.float32] | None = numbers_of(op).astype(np.float32)
        for note in reversed(made):
            array = None if array is None else _before(array, note)
        if array is None:
            continue
        new: Any = new_constant(array, Format.FP32)
        op.set_friendly_name(f"{name}_adjusted")
        new.set_friendly_name(name)
        hand_over(op.output(0), new.output(0))


def _before(
    array: NDArray[np.float32], note: Mapping[str, str | int]
) -> NDArray[np.float32] | None:
    """``array`` before the adjustment in ``note``; None if that is damaged or does not fit."""
    try:
        if _WAS in note:
            stored = base64.b64decode(str(note[_WAS]), validate=True)
            return np.frombuffer(stored, _STORED).astype(np.float32).reshape(array.shape)
        what = Adjustment.from_dict(dict(note))
    except (binascii.Error, ValueError, TypeError, KeyError):
        return None
    fits = array.ndim >= -what.axis and array.shape[what.axis] == what.channels
    back = replace(what, exponents=tuple(-e for e in what.exponents))
    return back.of(array) if fits else None
