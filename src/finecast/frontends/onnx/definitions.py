"""Definitions of ops: the type of every port, and the types that each variable admits.

Sources: ``onnx.defs`` for the domains of ONNX; for ONNX Runtime's own ops ``contrib.json``,
which ``tests/frontends/contrib_schemas.py`` writes from ONNX Runtime itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import onnx

CONTRIB_DOMAIN: Final = "com.microsoft"

# Opsets of the default domain at which definitions changed.
CLIP_BOUNDS_ARE_INPUTS: Final = 11
AXES_ARE_INPUTS_SINCE: Final = {"ReduceSum": 13, "ReduceMax": 18, "ReduceMean": 18}
# Below, Softmax, LogSoftmax and Hardmax flatten what they read into a matrix: the dimensions
# from ``axis`` on, which is 1 where a node does not state it, become one.
SOFTMAX_FLATTENS_BELOW: Final = 13
FLATTENING_AXIS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedPorts:
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
    """The types in an op's schema; ``constraints`` has the types that each variable admits."""

    name: str
    inputs: TypedPorts
    outputs: TypedPorts
    constraints: Mapping[str, frozenset[str]]
    deprecated: bool = False


def normal_domain(domain: str) -> str:
    """``""`` for both spellings of the default domain."""
    return "" if domain == "ai.onnx" else domain


@lru_cache(maxsize=8192)
def definition(op_type: str, domain: str, version: int) -> Definition | None:
    """The definition that ``version`` of ``domain`` has; None if none is known."""
    import onnx

    domain = normal_domain(domain)
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return _contrib().get(f"{domain}::{op_type}")
    return Definition(
        name=op_type,
        inputs=_ports(schema.inputs, schema.min_input),
        outputs=_ports(schema.outputs, schema.min_output),
        constraints={
            c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints
        },
        deprecated=schema.deprecated,
    )


@lru_cache(maxsize=8192)
def attribute_types(op_type: str, domain: str, version: int) -> Mapping[str, int]:
    """Kinds of the op's attributes by name, as AttributeProto numbers them."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, version, normal_domain(domain))
    except onnx.defs.SchemaError:
        return {}
    number = onnx.AttributeProto.AttributeType.Value
    return {n: number(str(a.type).rpartition(".")[2]) for n, a in schema.attributes.items()}


def _ports(formal: Sequence[onnx.defs.OpSchema.FormalParameter], least: int) -> TypedPorts:
    variadic = bool(formal) and str(formal[-1].option).endswith("Variadic")
    return TypedPorts(
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


def _contrib_ports(row: Mapping[str, Any], side: int) -> TypedPorts:
    return TypedPorts(
        types=tuple(row[("inputs", "outputs")[side]]),
        least=row["least"][side],
        variadic=row["variadic"][side],
    )
