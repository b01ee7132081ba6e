"""Reading ``op_name_dict`` and ``op_type_dict``, which list the types that ops may have.

For example ``{"Conv": {"weight": {"dtype": ["int8"]}, "activation": {"dtype": ["uint8"]}}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.numbers.formats import Format

OpSetting = Mapping[str, Mapping[str, Sequence[str]]]
OpDict = Mapping[str, OpSetting]

# How finecast quantizes values and weights, by INC's names for the settings of an op. Other
# algorithms for ranges can be chosen only for a whole model, outside of INC's interface.
_QUANTIZED: Final[Mapping[str, Mapping[str, str]]] = {
    "weight": {"scheme": "sym", "granularity": "per_channel", "algorithm": "minmax"},
    "activation": {"scheme": "asym", "granularity": "per_tensor", "algorithm": "minmax"},
}
# Advice on settings that finecast has outside of INC's interface.
_ELSEWHERE: Final[Mapping[tuple[str, str], str]] = {
    ("activation", "algorithm"): "; finecast's own convert and tune have minmax, percentile"
    " and mse (Policy.calibration), of all values alike",
}
DTYPES: Final[Mapping[str, Format]] = {
    "fp32": Format.FP32,
    "bf16": Format.BF16,
    "fp16": Format.FP16,
    "int8": Format.INT8,
    "uint8": Format.INT8,
}


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names as INC takes them: a list, or one string with commas."""
    listed = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip() for name in listed if name.strip())


def check_op_dicts(
    op_name_dict: OpDict | None, op_type_dict: OpDict | None, *, quantizes: bool
) -> None:
    """Refuse settings of ops that cannot be followed.

    Args:
        op_name_dict: Settings by an op's name.
        op_type_dict: Settings by an op's type.
        quantizes: Whether ops may have int8 and settings of its quantization.

    Raises:
        UsageError: If a part, a key or a value is unknown, or not how finecast quantizes.
    """
    dicts = {"op_name_dict": op_name_dict, "op_type_dict": op_type_dict}
    for where, entries in dicts.items():
        for name, setting in (entries or {}).items():
            _check_setting(setting, f"{where}[{name!r}]", quantizes=quantizes)


def _check_setting(setting: OpSetting, where: str, *, quantizes: bool) -> None:
    known = [name for name, fmt in DTYPES.items() if quantizes or not fmt.has_scales]
    for part, choice in setting.items():
        if part not in _QUANTIZED:
            raise unknown_name(part, tuple(_QUANTIZED), what="part of an op", where=where)
        for kind, given in choice.items():
            if kind == "dtype":
                for dtype in names(given):
                    if dtype not in known:
                        raise unknown_name(dtype, known, what="dtype", where=where)
            elif not quantizes:
                raise UsageError(
                    f"{kind!r} is a setting of quantization, and this is mixed precision",
                    where=where,
                    fix='give "dtype" alone, or int8 among the precisions',
                )
            else:
                _check_recipe(part, kind, names(given), where)


def _check_recipe(part: str, kind: str, given: tuple[str, ...], where: str) -> None:
    ours = _QUANTIZED[part].get(kind)
    if ours is None:
        raise unknown_name(kind, ("dtype", *_QUANTIZED[part]), what="setting", where=where)
    if ours not in given:
        raise UsageError(
            f"{part} {kind} {', '.join(given)!r}: ops have {ours!r} here",
            where=where,
            fix=f"leave {kind!r} out, or put {ours!r} in{_ELSEWHERE.get((part, kind), '')}",
        )


def _allowed(setting: OpSetting) -> frozenset[Format] | None:
    """The types that an op may have, always with fp32; None if no part lists types."""
    listed = [names(part["dtype"]) for part in setting.values() if part.get("dtype")]
    if not listed:
        return None
    found = (frozenset(DTYPES[name] for name in types) for types in listed)
    return frozenset.intersection(*found) | {Format.FP32}


def restrictions(
    entries: OpDict | None, known: Sequence[str], where: str
) -> dict[str, frozenset[Format]]:
    """The types that entries permit, by name; names that no entry restricts are left out.

    An entry's key is a regular expression that must match all of a name, or the name itself.

    Raises:
        UsageError: If an entry matches none of the ``known`` names.
    """
    found: dict[str, frozenset[Format]] = {}
    for pattern, setting in (entries or {}).items():
        fitting = _fitting(pattern, known)
        if not fitting:
            raise unknown_name(pattern, known, what="op", where=where)
        types = _allowed(setting)
        if types is not None:
            found |= {name: found.get(name, types) & types for name in fitting}
    return found


def _fitting(pattern: str, known: Sequence[str]) -> list[str]:
    try:
        matched = [name for name in known if re.fullmatch(pattern, name)]
    except re.error:
        matched = []
    return matched or [name for name in known if name == pattern]
