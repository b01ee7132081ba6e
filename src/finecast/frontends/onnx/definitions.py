"""Definitions of ops: the types of ports, which of them follow the op, the formats it admits.

Laws: a port *follows* its op if its type variable is one that the op computes in. All such
ports of a node have one format, and change together; every other float port keeps the type it
has. No port follows in a node where one that could has a value of unknown type.

Sources: ``onnx.defs`` for the domains of ONNX; for ONNX Runtime's own ops ``contrib.json``,
which ``tests/frontends/contrib_schemas.py`` writes from ONNX Runtime itself. onnx_ir's
``OpSignature`` fails on the definition of Split, which has two parameters of one name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Final

import onnx
import onnx_ir as ir

from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.numbers.formats import Format

CONTRIB_DOMAIN: Final = "com.microsoft"

# The newest opset of the default domain that a model is raised to. A later one would be
# valid ONNX, but engines in use today would not load it.
_MAX_OPSET: Final = 24
# Opsets of the default domain at which definitions changed.
CLIP_BOUNDS_ARE_INPUTS: Final = 11
AXES_ARE_INPUTS_SINCE: Final = {"ReduceSum": 13, "ReduceMax": 18, "ReduceMean": 18}
# Below, Softmax, LogSoftmax and Hardmax flatten what they read into a matrix: the dimensions
# from ``axis`` on, which is 1 where a node does not state it, become one.
SOFTMAX_FLATTENS_BELOW: Final = 13
FLATTENING_AXIS: Final = 1

# Type variables that follow besides that of the op's first float output: of parameters and
# operands that engines want in the same type as the data.
_ALSO_FOLLOWING: Final[dict[str, frozenset[str]]] = {
    "BatchNormalization": frozenset({"T", "T1", "T2", "U"}),
    "Pow": frozenset({"T", "T1"}),
    "Attention": frozenset({"T1", "T2", "U"}),
    "RMSNormalization": frozenset({"T", "V"}),
    # onnx's inference gives the state the query's type, whatever its own variable says.
    "LinearAttention": frozenset({"T", "S"}),
}
# Ops that ONNX defines by a function with fp32 constants beside the input: the lower types
# that the definition lists are not valid there.
_FP32_EXPANSION: Final = frozenset({"MeanVarianceNormalization"})
# Ops that are written as another one (``restating``) in formats that only the other one's
# definition admits, and those formats.
_WRITTEN_AS: Final = {"Einsum": ("MatMul", frozenset({Format.BF16}))}
# The input of a conversion does not follow: it may have any format.
_CAST: Final = "Cast"

_FORMAT_OF_TYPE: Final = {f"tensor({t.name.lower()})": fmt for fmt, t in DATA_TYPES.items()}
FORMATS: Final = {fmt.label: fmt for fmt in DATA_TYPES}
"""The formats that a port can follow its op in, by the label of its type."""
_DTYPE_LABELS: Final = (
    {d: d.name.lower() for d in ir.DataType}
    | {dtype: fmt.label for fmt, dtype in DATA_TYPES.items()}
    | {ir.DataType.DOUBLE: "fp64"}
)
_ABSENT: Final = ""
_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Formal inputs or outputs of an op.

    Attributes:
        types: Type variables, or types such as ``tensor(float)``.
        least: How many there must be.
        variadic: Whether the last one repeats.
        mixed: Whether the repeats of a variadic port may differ in type.
    """

    types: tuple[str, ...]
    least: int = 0
    variadic: bool = False
    mixed: bool = False

    def type_of(self, index: int) -> str | None:
        """Variable or type of port ``index``; None if the definition has no such port."""
        if index < len(self.types):
            return self.types[index]
        return self.types[-1] if self.variadic and self.types else None

    def binds(self, index: int) -> bool:
        """Whether the type variable of port ``index`` is one type for the whole node."""
        return not (self.mixed and index >= len(self.types) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The types in an op's schema.

    Attributes:
        name: The op's type.
        inputs: Its inputs.
        outputs: Its outputs.
        constraints: The types that each type variable admits.
        attributes: Kinds of its attributes by name, as AttributeProto numbers them.
        deprecated: Whether this version of the op set no longer has it.
    """

    name: str
    inputs: Ports
    outputs: Ports
    constraints: Mapping[str, frozenset[str]]
    attributes: Mapping[str, int] = field(default_factory=dict[str, int])
    deprecated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSignature:
    """Which ports of an op follow it, and the first opset that admits each format.

    Attributes:
        definition: The op's definition.
        main: The type variable that the op computes in: that of its first output, or else
            input, that may be a float. Where such a port holds no float, the op computes in no
            float (an integer power with an fp32 exponent). None if no port has a float type.
        following: All type variables that follow.
        since: The first opset that admits each format.
        admits: The formats that it admits at its own opset.
    """

    definition: Definition
    main: str | None
    following: frozenset[str]
    since: Mapping[Format, int]
    admits: frozenset[Format]

    def follows(self, index: int, *, output: bool = False) -> bool:
        """Whether port ``index`` follows the op."""
        if self.definition.name == _CAST and not output:
            return False
        ports = self.definition.outputs if output else self.definition.inputs
        return ports.type_of(index) in self.following

    def computes_in_float(self, inputs: Sequence[str], outputs: Sequence[str]) -> bool:
        """Whether an op of such types of ports computes in a float, or may do so."""
        if self.main is None:
            return False
        ports, labels = self.definition.outputs, outputs
        if self.main not in ports.types:
            ports, labels = self.definition.inputs, inputs
        anchor = ports.types.index(self.main)
        return anchor >= len(labels) or labels[anchor] in {*FORMATS, _ABSENT, _UNKNOWN}


def opset_of(model: ir.Model) -> int:
    """The version of the default domain, whose name a model spells ``""`` or ``ai.onnx``."""
    versions = [v for d, v in model.opset_imports.items() if normal_domain(d) == ""]
    return max(versions, default=1)


def normal_domain(domain: str) -> str:
    """``""`` for both spellings of the default domain."""
    return "" if domain == "ai.onnx" else domain


@lru_cache(maxsize=8192)
def definition(op_type: str, domain: str, version: int) -> Definition | None:
    """The definition that ``version`` of ``domain`` has; None if none is known."""
    domain = normal_domain(domain)
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return _contrib().get(f"{domain}::{op_type}")
    number = onnx.AttributeProto.AttributeType.Value
    return Definition(
        name=op_type,
        inputs=_ports(schema.inputs, schema.min_input),
        outputs=_ports(schema.outputs, schema.min_output),
        constraints={
            c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints
        },
        attributes={
            name: number(str(attribute.type).rpartition(".")[2])
            for name, attribute in schema.attributes.items()
        },
        deprecated=schema.deprecated,
    )


def _ports(formal: Sequence[onnx.defs.OpSchema.FormalParameter], least: int) -> Ports:
    variadic = bool(formal) and str(formal[-1].option).endswith("Variadic")
    return Ports(
        types=tuple(p.type_str for p in formal),
        least=least,
        variadic=variadic,
        mixed=variadic and not formal[-1].is_homogeneous,
    )


@lru_cache(maxsize=1)
def _contrib() -> dict[str, Definition]:
    text = (
        resources.files("finecast.frontends.onnx")
        .joinpath("contrib.json")
        .read_text(encoding="utf-8")
    )
    rows: dict[str, Any] = json.loads(text)
    return {
        key: Definition(
            name=key.rpartition("::")[2],
            inputs=_contrib_ports(row, 0),
            outputs=_contrib_ports(row, 1),
            constraints={v: frozenset(types) for v, types in row["constraints"].items()},
        )
        for key, row in rows.items()
    }


def _contrib_ports(row: Mapping[str, Any], side: int) -> Ports:
    return Ports(
        types=tuple(row[("inputs", "outputs")[side]]),
        least=row["least"][side],
        variadic=row["variadic"][side],
    )


@lru_cache(maxsize=4096)
def signature(op_type: str, domain: str, opset: int) -> OpSignature | None:
    """The op's signature at ``opset``; None if no definition is known.

    None, too, for domains other than ONNX's default and ONNX Runtime's: their ops keep their
    types.
    """
    domain = normal_domain(domain)
    schema = definition(op_type, domain, opset) if domain in ("", CONTRIB_DOMAIN) else None
    if schema is None:
        return None
    since = _admitted_since(op_type, domain, opset)
    return OpSignature(
        definition=schema,
        main=_main_variable(schema),
        following=_following_variables(schema),
        since=since,
        admits=frozenset(fmt for fmt, first in since.items() if first <= opset),
    )


def _float_variables(found: Definition) -> dict[str, frozenset[Format]]:
    """Type variables that include fp32 tensors, with the formats they admit."""
    variables: dict[str, frozenset[Format]] = {}
    for name, types in found.constraints.items():
        formats = frozenset(f for t in types if (f := _FORMAT_OF_TYPE.get(t)))
        if Format.FP32 in formats:
            variables[name] = formats
    return variables


def _main_variable(found: Definition) -> str | None:
    floats = _float_variables(found)
    ports = (*found.outputs.types, *found.inputs.types)
    return next((t for t in ports if t in floats), None)


def _following_variables(found: Definition) -> frozenset[str]:
    main = _main_variable(found)
    if main is None:
        return frozenset()
    also = _ALSO_FOLLOWING.get(found.name, frozenset[str]())
    return frozenset({main}) | (also & _float_variables(found).keys())


def _admitted_since(op_type: str, domain: str, opset: int) -> dict[Format, int]:
    first: dict[Format, int] = {}
    last = max(opset, _MAX_OPSET) if domain == "" else opset
    for version in range(opset, last + 1):
        schema = definition(op_type, domain, version)
        following = _following_variables(schema) if schema else ()
        if schema is None or schema.deprecated or not following:
            break
        floats = _float_variables(schema)
        admitted = frozenset[Format].intersection(*(floats[v] for v in following))
        if op_type in _FP32_EXPANSION:
            admitted &= {Format.FP32}
        other, formats = _WRITTEN_AS.get(op_type, ("", frozenset[Format]()))
        if other:
            since = _admitted_since(other, domain, version)
            admitted |= {f for f in formats if since.get(f, last + 1) <= version}
        for fmt in admitted:
            first.setdefault(fmt, version)
    return first


def dtype_label(kind: ir.TypeProtocol | None) -> str:
    """A value's type as the graph names it: ``fp32``, ``int64``, ``sequence(fp32)``."""
    if kind is None:
        return _UNKNOWN
    if isinstance(kind, ir.TensorType):
        return _DTYPE_LABELS[kind.dtype]
    inner = getattr(kind, "elem_type", None)
    label = inner.name if isinstance(inner, ir.DataType) else dtype_label(inner)
    return f"{type(kind).__name__.removesuffix('Type').lower()}({label})"


def labels_of(values: Sequence[ir.Value | None]) -> tuple[str, ...]:
    """The type of each port's value; empty for an optional port that is left out."""
    return tuple(
        _ABSENT if v is None or (v.type is None and not v.name) else dtype_label(v.type)
        for v in values
    )


@lru_cache(maxsize=8192)  # a model has many nodes and few kinds of them
def following(
    op_type: str, domain: str, opset: int, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...], Format | None]:
    """Which inputs and outputs of these types follow the op, and the format they have.

    None follows if one that could has an unknown type. There is no format if they differ.
    """
    op_signature = signature(op_type, domain, opset)
    assert op_signature is not None
    could = {
        output: [op_signature.follows(i, output=output) for i in range(len(labels))]
        for labels, output in ((inputs, False), (outputs, True))
    }
    types = {
        label
        for labels, flags in ((inputs, could[False]), (outputs, could[True]))
        for label, follows in zip(labels, flags, strict=True)
        if follows and label in {*FORMATS, _UNKNOWN}
    }
    if _UNKNOWN in types or not op_signature.computes_in_float(inputs, outputs):
        return (False,) * len(inputs), (False,) * len(outputs), None
    flags_in, flags_out = (
        tuple(f and label in FORMATS for f, label in zip(could[output], labels, strict=True))
        for labels, output in ((inputs, False), (outputs, True))
    )
    return flags_in, flags_out, FORMATS[types.pop()] if len(types) == 1 else None
