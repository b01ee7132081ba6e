"""Which ports share an op's type by its definition, and which formats that admits.

Law: a port *follows* its op if its type variable is one that the op computes in. All such
ports of a node change type together; every other float port keeps the type it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from finecast.frontends.onnx.definitions import (
    CONTRIB_DOMAIN,
    Definition,
    TypedPorts,
    definition,
    normal_domain,
)
from finecast.numbers.formats import Format

# The newest opset of the default domain that a model is raised to. A later one would be
# valid ONNX, but engines in use today would not load it.
MAX_OPSET: Final = 24

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

# Ops that are written as another one (``einsum.py``) in formats that only the other one's
# definition admits, and those formats.
_WRITTEN_AS: Final = {"Einsum": ("MatMul", frozenset({Format.BF16}))}

# The input of a conversion does not follow: it may have any format.
CAST_OPS: Final = frozenset({"Cast"})

_FORMAT_OF_TYPE: Final = {
    "tensor(float)": Format.FP32,
    "tensor(float16)": Format.FP16,
    "tensor(bfloat16)": Format.BF16,
    "tensor(float8e4m3fn)": Format.FP8_E4M3,
    "tensor(float8e5m2)": Format.FP8_E5M2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSignature:
    """Which formal ports of an op follow it, and the first opset that admits each format.

    Attributes:
        inputs: Whether each input follows.
        outputs: Whether each output follows.
        variadic_inputs: Whether the last flag holds for all further inputs.
        variadic_outputs: The same of outputs.
        since: The first opset that admits each format.
        least: How many inputs and outputs there must be.
        anchor: A port of the type that the op computes in. Where it holds no float, the op
            computes in no float (an integer power with an fp32 exponent). None if no port has
            a float type.
        anchor_is_output: Whether that is an output.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    variadic_inputs: bool
    variadic_outputs: bool
    since: tuple[tuple[Format, int], ...]
    least: tuple[int, int] = (0, 0)
    anchor: int | None = None
    anchor_is_output: bool = True

    def follows(self, index: int, *, output: bool = False) -> bool:
        """Whether port ``index`` follows the op."""
        flags = self.outputs if output else self.inputs
        variadic = self.variadic_outputs if output else self.variadic_inputs
        if index < len(flags):
            return flags[index]
        return variadic and bool(flags) and flags[-1]


@lru_cache(maxsize=4096)
def signature(op_type: str, domain: str, opset: int) -> OpSignature | None:
    """The op's signature at ``opset``; None if no definition is known.

    None, too, for domains other than ONNX's default and ONNX Runtime's: their ops keep their
    types.
    """
    domain = normal_domain(domain)
    if domain not in ("", CONTRIB_DOMAIN):
        return None
    found = definition(op_type, domain, opset)
    if found is None:
        return None
    following = _following_variables(found)
    main = _main_variable(found)
    anchor_is_output = main in found.outputs.types
    anchored = found.outputs.types if anchor_is_output else found.inputs.types
    return OpSignature(
        anchor=anchored.index(main) if main is not None else None,
        anchor_is_output=anchor_is_output,
        inputs=_flags(found.inputs, following) if op_type not in CAST_OPS else (False,),
        outputs=_flags(found.outputs, following),
        variadic_inputs=found.inputs.variadic,
        variadic_outputs=found.outputs.variadic,
        least=(found.inputs.least, found.outputs.least),
        since=_admitted_since(op_type, domain, opset),
    )


def _float_variables(found: Definition) -> dict[str, frozenset[Format]]:
    """Type variables that include fp32 tensors, with the formats they admit."""
    variables: dict[str, frozenset[Format]] = {}
    for name, types in found.constraints.items():
        formats = {_FORMAT_OF_TYPE.get(t) for t in types}
        if Format.FP32 in formats:
            variables[name] = frozenset(f for f in formats if f)
    return variables


def _main_variable(found: Definition) -> str | None:
    floats = _float_variables(found)
    ports = (*found.outputs.types, *found.inputs.types)
    return next((t for t in ports if t in floats), None)


def _following_variables(found: Definition) -> frozenset[str]:
    floats = _float_variables(found)
    main = _main_variable(found)
    if main is None:
        return frozenset()
    also = _ALSO_FOLLOWING.get(found.name, frozenset[str]())
    return frozenset({main}) | (also & floats.keys())


def _flags(ports: TypedPorts, following: frozenset[str]) -> tuple[bool, ...]:
    return tuple(t in following for t in ports.types)


def _admitted_since(op_type: str, domain: str, opset: int) -> tuple[tuple[Format, int], ...]:
    first: dict[Format, int] = {}
    last = max(opset, MAX_OPSET) if domain == "" else opset
    for version in range(opset, last + 1):
        found = definition(op_type, domain, version)
        if found is None or found.deprecated:
            break
        floats = _float_variables(found)
        following = _following_variables(found)
        if not following:
            break
        admitted = frozenset[Format].intersection(*(floats[v] for v in following))
        if op_type in _FP32_EXPANSION:
            admitted &= {Format.FP32}
        other, formats = _WRITTEN_AS.get(op_type, ("", frozenset[Format]()))
        if other:
            since = dict(_admitted_since(other, domain, version))
            admitted |= {f for f in formats if since.get(f, last + 1) <= version}
        for fmt in admitted:
            first.setdefault(fmt, version)
    return tuple(sorted(first.items(), key=lambda item: item[0].label))
