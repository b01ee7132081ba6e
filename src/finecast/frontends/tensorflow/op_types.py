"""Finds the attribute that states an op's precision, by TensorFlow's definition of the op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from finecast.frontends.tensorflow.functions import count_of
from finecast.frontends.tensorflow.library import FLOATS, Operation, definitions
from finecast.numbers.formats import Format

# Ops whose type attributes are no precision: they convert, or pass on values of any type.
_NO_PRECISION: Final = frozenset(
    {"Cast", "Bitcast", "Print", "Assert", "FakeParam", "If", "StatelessIf"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeAttribute:
    """The attribute that names the float type an op computes in, and which ports have it.

    ``attribute`` is empty, and ``format`` None, for an op whose type cannot change.
    """

    attribute: str
    format: Format | None
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    admits: frozenset[Format]


def op_types(op: Operation) -> TypeAttribute:
    """The precision of ``op`` by its definition.

    Law: TensorFlow accepts ``op`` with ``attribute`` set to another of ``admits``, if the
    marked ports are of that type. Where several attributes name floats, as those of a batch
    norm's values and statistics do, it is the one of the first input.
    """
    ports_in = list(port_attributes(op, op.op_def.input_arg))
    ports_out = list(port_attributes(op, op.op_def.output_arg))
    names = (n for n in (*ports_in, *ports_out) if n)
    main = next((n for n in names if op.node_def.attr[n].type in FLOATS), "")
    if op.type in _NO_PRECISION or not main:
        return fixed_types(len(ports_in), len(ports_out))
    return TypeAttribute(
        attribute=main,
        format=FLOATS[op.node_def.attr[main].type],
        inputs=tuple(name == main for name in ports_in),
        outputs=tuple(name == main for name in ports_out),
        admits=_admitted(op, main),
    )


def fixed_types(inputs: int, outputs: int) -> TypeAttribute:
    """The types of an op with so many ports, none of which can change its type."""
    return TypeAttribute(
        attribute="",
        format=None,
        inputs=(False,) * inputs,
        outputs=(False,) * outputs,
        admits=frozenset(),
    )


def precision_attribute(op: str) -> str:
    """The attribute of an op's first float port, by the registry; empty if there is none."""
    definition = definitions.get(op)
    if definition is None or op in _NO_PRECISION:
        return ""
    allowed = {a.name: set(a.allowed_values.list.type) for a in definition.attr}
    ports = (a.type_attr for a in (*definition.input_arg, *definition.output_arg))
    float_ports = (n for n in ports if n and (not allowed[n] or allowed[n] & set(FLOATS)))
    return next(float_ports, "")


def port_attributes(op: Operation, arguments: Any) -> Iterator[str]:
    """For each tensor of the arguments, the attribute that is its type; empty without one."""
    for argument in arguments:
        yield from [argument.type_attr] * count_of(argument, op.node_def)


def _admitted(op: Operation, name: str) -> frozenset[Format]:
    """Formats that the attribute allows; without a restriction in the definition, all."""
    (definition,) = (a for a in op.op_def.attr if a.name == name)
    allowed = definition.allowed_values.list.type
    return frozenset(FLOATS[n] for n in allowed if n in FLOATS) or frozenset(FLOATS.values())
