"""Pads by a number that the model computes: OpenVINO pads by what its buffer has, mostly 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from finecast.devices.faults import is_here

FAULT: Final = "openvino-computed-padding"

_VALUE: Final = 3
"""The input of a Pad that is the number to pad by."""


def computed_padding(ops: Iterable[Any]) -> str:
    """Which Pad among a model's ops pads by a number that is computed; empty if none does.

    What follows from constants alone OpenVINO computes as it compiles a model, and pads by it.
    Where the fault is mended, none is named.
    """
    if not is_here(FAULT):
        return ""
    for op in ops:
        if op.get_type_name() == "Pad" and op.get_input_size() > _VALUE and _is_computed(op):
            return (
                f"{op.get_friendly_name()!r} pads by a number that the model computes, and"
                f" OpenVINO pads by another one, a known fault ({FAULT})"
            )
    return ""


def _is_computed(pad: Any) -> bool:
    """Whether the number to pad by follows from other values than constants."""
    if pad.get_attributes()["pad_mode"] != "constant":
        return False
    waiting, seen = [pad.input_value(_VALUE).get_node()], set[str]()
    while waiting:
        op = waiting.pop()
        if op.get_friendly_name() in seen or op.get_type_name() == "Constant":
            continue
        seen.add(op.get_friendly_name())
        if not op.get_input_size() or op.get_type_name() in _NOT_FOLDED:
            return True
        waiting += [source.get_node() for source in op.input_values()]
    return False


_NOT_FOLDED: Final = frozenset({"ReadValue", "RandomUniform", "Multinomial"})
"""Ops that OpenVINO does not compute beforehand, whatever they read."""
