"""OpenVINO's element types: their names, constants of them, and which ops admit which.

Law: an op admits a format if, with all inputs that follow the op's format in that type, it
validates and gives results of that type, by OpenVINO's own type inference. There is no list of
types by op, which a release of OpenVINO could make wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import CODED, Format

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

STATED: Final = (*TYPES, *CODED)
"""Formats that models can state: element types, and codes with scales."""

FORMATS: Final = {LABELS.get(name, name): fmt for fmt, name in TYPES.items()}
"""The formats that values can have, by label."""


SCALAR_NAMES: Final = {"Clamp": ("min", "max")}
"""Attributes whose numbers are operands, and so are rounded with the op."""


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


def replace_op(old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``old``, an op with one result, with its name."""
    name = old.get_friendly_name()
    old.set_friendly_name(f"{name}_before")
    new.set_friendly_name(name)
    source, port = old.output(0), new.output(0)
    if source.get_names():
        take_names(source, port)
    for target in source.get_target_inputs():
        target.replace_source_output(port)


def port_key(port: openvino.Output) -> tuple[str, int]:
    """The name of the port's op, and which of its results: OpenVINO's ports do not hash."""
    return port.get_node().get_friendly_name(), port.get_index()


# Float inputs, by index, that do not follow the op's format: sizes and thresholds.
_OWN_TYPE: Final = {
    "Interpolate": frozenset({1, 2}),
    "NonMaxSuppression": frozenset({3, 4, 5}),
    "OneHot": frozenset({1}),
}
# An attribute states the type of the result, whatever type is read.
_STATED: Final = frozenset({"Convert"})
# Ops of which no port can change its type: results do not have that of the inputs, variables
# and bodies have types of their own, or the op itself rounds.
_FIXED: Final = frozenset(
    {
        "Assign",
        "FakeConvert",
        "FakeQuantize",
        "ReadValue",
        "If",
        "Loop",
        "TensorIterator",
        "RandomUniform",
        "Range",
        "ShapeOf",
    }
)
_LOW: Final = (Format.BF16, Format.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTypes:
    """The format of an op, which of its ports have it, and the formats that it admits.

    ``format`` is None if no port can change its type.
    """

    follows_in: tuple[bool, ...]
    follows_out: tuple[bool, ...]
    format: Format | None
    admits: frozenset[Format]


class OpTypes:
    """Finds ``PortTypes``; asks OpenVINO once for each kind of op, input types and ranks."""

    def __init__(self) -> None:
        self._known: dict[object, frozenset[Format]] = {}

    def fixed(self, op: openvino.Node) -> PortTypes:
        """Those of an op none of whose ports can change its type."""
        return PortTypes(
            follows_in=(False,) * op.get_input_size(),
            follows_out=(False,) * op.get_output_size(),
            format=None,
            admits=frozenset(),
        )

    def of(self, op: openvino.Node, kind: str) -> PortTypes:
        """Those of ``op``; they are fixed if its following ports differ in type."""
        read = [label_of(v.get_element_type()) for v in op.input_values()]
        written = [label_of(p.get_element_type()) for p in op.outputs()]
        if kind in _FIXED:
            return self.fixed(op)
        if kind in _STATED:
            return self._stated(op, read[0], written[0])
        own = _OWN_TYPE.get(kind, frozenset())
        follows_in = tuple(f in FORMATS and i not in own for i, f in enumerate(read))
        follows_out = tuple(f in FORMATS for f in written)
        labels = {
            f
            for f, follows in zip((*read, *written), (*follows_in, *follows_out), strict=True)
            if follows
        }
        if len(labels) != 1 or not any(follows_in):
            return self.fixed(op)
        key = (kind, op.get_type_info().version_id, tuple(read), _ranks(op))
        if key not in self._known:
            self._known[key] = frozenset(
                {Format.FP32, *(f for f in _LOW if _validates(op, follows_in, follows_out, f))}
            )
        return PortTypes(
            follows_in=follows_in,
            follows_out=follows_out,
            format=FORMATS[labels.pop()],
            admits=self._known[key],
        )

    def _stated(self, op: openvino.Node, read: str, made: str) -> PortTypes:
        if made not in FORMATS:
            return self.fixed(op)
        return PortTypes(
            follows_in=(False,),
            follows_out=(True,),
            format=FORMATS[made],
            admits=frozenset({Format.FP32, *_LOW}),
        )


def _ranks(op: openvino.Node) -> tuple[int | None, ...]:
    ranks = (v.get_partial_shape().rank for v in op.input_values())
    return tuple(r.get_length() if r.is_static else None for r in ranks)


def _validates(
    op: openvino.Node, follows_in: tuple[bool, ...], follows_out: tuple[bool, ...], fmt: Format
) -> bool:
    """Whether type inference accepts ``op`` in ``fmt``; its inputs are restored after."""
    from openvino import opset13

    before = op.input_values()
    try:
        for index, follows in enumerate(follows_in):
            if follows:
                shape = before[index].get_partial_shape()
                parameter = opset13.parameter(shape, element_type(fmt))
                op.set_argument(index, parameter.output(0))
        op.validate_and_infer_types()
        written = [label_of(p.get_element_type()) for p in op.outputs()]
        return all(m == fmt.label for m, f in zip(written, follows_out, strict=True) if f)
    except RuntimeError:
        return False
    finally:
        for index, source in enumerate(before):
            op.set_argument(index, source)
        op.validate_and_infer_types()
