"""What an op's ONNX definition says: which ports share its type, and which formats it admits.

Law: a port *follows* its op if its type variable is one that the op computes in; all such
ports of a node change together, every other float port keeps the type it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from finecast.formats import Format

if TYPE_CHECKING:
    import onnx

# The newest opset of the default domain that a model is raised to. A later one would be
# valid ONNX, but engines in use today would not load it.
MAX_OPSET: Final = 24

# Type variables that an op computes in besides that of its first float output: parameters
# and operands that engines want in the same type as the data.
_ALSO_FOLLOWING: Final[dict[str, frozenset[str]]] = {
    "BatchNormalization": frozenset({"T", "T1", "T2", "U"}),
    "Pow": frozenset({"T", "T1"}),
    "Attention": frozenset({"T1", "T2", "U"}),
    "RMSNormalization": frozenset({"T", "V"}),
}
# Contrib ops have no schema here; ONNX Runtime defines all their float ports with one type.
_CONTRIB_DOMAINS: Final = frozenset({"com.microsoft"})
_CONTRIB_FORMATS: Final = frozenset({Format.FP32, Format.FP16, Format.BF16})

# Float to float conversions have no type of their own: they are read in any format.
CAST_OPS: Final = frozenset({"Cast"})

_FORMAT_OF_TYPE: Final = {
    "tensor(float)": Format.FP32,
    "tensor(float16)": Format.FP16,
    "tensor(bfloat16)": Format.BF16,
    "tensor(float8e4m3fn)": Format.FP8_E4M3,
    "tensor(float8e5m2)": Format.FP8_E5M2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Following flags of an op's formal ports and the first opset that admits each format.

    The last flag of a variadic op repeats for all further ports.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    variadic_inputs: bool
    variadic_outputs: bool
    since: tuple[tuple[Format, int], ...]

    def follows(self, index: int, *, output: bool = False) -> bool:
        """Whether port ``index`` follows the op."""
        flags = self.outputs if output else self.inputs
        variadic = self.variadic_outputs if output else self.variadic_inputs
        if index < len(flags):
            return flags[index]
        return variadic and bool(flags) and flags[-1]


_EVERYTHING: Final = Signature(
    inputs=(True,),
    outputs=(True,),
    variadic_inputs=True,
    variadic_outputs=True,
    since=tuple((f, 1) for f in sorted(_CONTRIB_FORMATS, key=lambda f: f.label)),
)


@lru_cache(maxsize=4096)
def signature(op_type: str, domain: str, opset: int) -> Signature | None:
    """The op's signature at ``opset``; None if no definition is known."""
    if domain in _CONTRIB_DOMAINS:
        return _EVERYTHING
    if domain not in ("", "ai.onnx"):
        return None
    schema = _schema(op_type, opset)
    if schema is None:
        return None
    following = _following_variables(schema)
    variadic = _is_variadic
    return Signature(
        inputs=_flags(schema.inputs, following) if op_type not in CAST_OPS else (False,),
        outputs=_flags(schema.outputs, following),
        variadic_inputs=bool(schema.inputs) and variadic(schema.inputs[-1]),
        variadic_outputs=bool(schema.outputs) and variadic(schema.outputs[-1]),
        since=_admitted_since(op_type, opset),
    )


def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    import onnx

    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _is_variadic(port: onnx.defs.OpSchema.FormalParameter) -> bool:
    return port.option.name == "Variadic"


def _float_variables(schema: onnx.defs.OpSchema) -> dict[str, frozenset[Format]]:
    """Type variables that include fp32 tensors, with the formats they admit."""
    found: dict[str, frozenset[Format]] = {}
    for constraint in schema.type_constraints:
        formats = {_FORMAT_OF_TYPE.get(t) for t in constraint.allowed_type_strs}
        if Format.FP32 in formats:
            found[constraint.type_param_str] = frozenset(f for f in formats if f)
    return found


def _following_variables(schema: onnx.defs.OpSchema) -> frozenset[str]:
    floats = _float_variables(schema)
    ports = [*schema.outputs, *schema.inputs]
    main = next((p.type_str for p in ports if p.type_str in floats), None)
    if main is None:
        return frozenset()
    also = _ALSO_FOLLOWING.get(schema.name, frozenset[str]())
    return frozenset({main}) | (also & floats.keys())


def _flags(
    ports: object, following: frozenset[str]
) -> tuple[bool, ...]:
    return tuple(p.type_str in following for p in ports)  # type: ignore[attr-defined]


def _admitted_since(op_type: str, opset: int) -> tuple[tuple[Format, int], ...]:
    first: dict[Format, int] = {}
    for version in range(opset, max(opset, MAX_OPSET) + 1):
        schema = _schema(op_type, version)
        if schema is None or schema.deprecated:
            break
        floats = _float_variables(schema)
        following = _following_variables(schema)
        if not following:
            break
        for fmt in frozenset[Format].intersection(*(floats[v] for v in following)):
            first.setdefault(fmt, version)
    return tuple(sorted(first.items(), key=lambda item: item[0].label))
