"""OpenVINO's element types, as the graph names them and as numpy stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format

if TYPE_CHECKING:
    import openvino

LABELS: Final = {
    "f32": "fp32",
    "f64": "fp64",
    "f16": "fp16",
    "f8e4m3": "fp8_e4m3",
    "f8e5m2": "fp8_e5m2",
    "boolean": "bool",
    **{
        f"{k}{n}": f"{name}{n}"
        for k, name in (("i", "int"), ("u", "uint"))
        for n in (4, 8, 16, 32, 64)
    },
}
"""finecast's labels of the element types that OpenVINO names otherwise."""

TYPES: Final = {
    Format.FP32: "f32",
    Format.BF16: "bf16",
    Format.FP16: "f16",
    Format.FP8_E4M3: "f8e4m3",
    Format.FP8_E5M2: "f8e5m2",
}
"""OpenVINO's name of each format's element type."""

HINTED: Final = (Format.BF16, Format.FP16)
"""Formats that OpenVINO has a precision hint for, by the name of its type."""

STATED: Final = (*TYPES, *(f for f in Format if f.has_scales))
"""Formats that models can state: element types, and codes with scales."""

FORMATS: Final = {LABELS.get(name, name): fmt for fmt, name in TYPES.items()}
"""The formats that values can have, by label."""


def label_of(kind: openvino.Type) -> str:
    """``fp32``, ``int64``, ``bool``: an element type as the graph names it."""
    name: str = kind.get_type_name()
    return LABELS.get(name, name)


def element_type(fmt: Format) -> openvino.Type:
    """The element type that states ``fmt``."""
    import openvino

    kind: openvino.Type = getattr(openvino.Type, TYPES[fmt])
    return kind


def numbers_of(constant: Any) -> NDArray[np.generic]:
    """The numbers of a constant, as a view of the constant's own memory.

    numpy has no type for OpenVINO's small floats; they are viewed as those of ml_dtypes.
    """
    raw: NDArray[np.generic] = constant.data
    fmt = FORMATS.get(label_of(constant.get_element_type()))
    return raw if fmt is None or raw.dtype == fmt.dtype else raw.view(fmt.dtype)


def new_constant(array: NDArray[np.generic], fmt: Format) -> openvino.Node:
    """A constant of ``array``, whose numbers ``fmt`` holds exactly; the array is copied."""
    import openvino

    tensor = openvino.Tensor(element_type(fmt), openvino.Shape(array.shape))
    bits = f"u{fmt.dtype.itemsize}"
    tensor.data.view(bits)[...] = np.require(array, requirements="C").view(bits)
    return openvino.op.Constant(tensor)


def take_names(source: openvino.Output, port: openvino.Output) -> None:
    """Move the tensor names of ``source``, by which users know it, to ``port``."""
    names = source.get_names()
    source.set_names(set())
    port.set_names(names)


def hand_over(source: openvino.Output, port: openvino.Output) -> None:
    """Have all readers of ``source`` read ``port``, which takes its names.

    A port of an input keeps its own names.
    """
    if source.get_names() and port.get_node().get_type_name() != "Parameter":
        take_names(source, port)
    for target in source.get_target_inputs():
        target.replace_source_output(port)


def port_key(port: openvino.Output) -> tuple[str, int]:
    """The name of the port's op, and which of its results: OpenVINO's ports do not hash."""
    return port.get_node().get_friendly_name(), port.get_index()
