"""``op_name_dict`` and ``op_type_dict``, which list the types that ops may have, as a rule.

For example ``{"Conv": {"weight": {"dtype": ["int8"]}, "activation": {"dtype": ["uint8"]}}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from finecast import Format
from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.rules import NodeView

OpDict = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
Permitted = Mapping[str, frozenset[Format]]
"""Formats that ops may have, by name; those that are not named may have any."""

# How finecast quantizes values and weights, by INC's names for the settings of an op.
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


def check_op_dicts(by_name: OpDict | None, by_type: OpDict | None, *, quantizes: bool) -> None:
    """Refuse settings of ops that cannot be followed.

    Args:
        by_name: Settings by an op's name.
        by_type: Settings by an op's type.
        quantizes: Whether ops may have int8 and settings of its quantization.

    Raises:
        UsageError: If a part, a key or a value is unknown, or not how finecast quantizes.
    """
    for which, entries in (("op_name_dict", by_name), ("op_type_dict", by_type)):
        for name, setting in (entries or {}).items():
            where = f"{which}[{name!r}]"
            for part, choice in setting.items():
                if part not in _QUANTIZED:
                    raise unknown_name(
                        part, tuple(_QUANTIZED), what="part of an op", where=where
                    )
                for kind, given in choice.items():
                    _check_choice(part, kind, names(given), where, quantizes=quantizes)


def _check_choice(
    part: str, kind: str, given: tuple[str, ...], where: str, *, quantizes: bool
) -> None:
    if kind == "dtype":
        known = [name for name, fmt in DTYPES.items() if quantizes or not fmt.has_scales]
        for dtype in given:
            if dtype not in known:
                raise unknown_name(dtype, known, what="dtype", where=where)
        return
    if not quantizes:
        raise UsageError(
            f"{kind!r} is a setting of quantization, and this is mixed precision",
            where=where,
            fix='give "dtype" alone, or int8 among the precisions',
        )
    ours = _QUANTIZED[part].get(kind)
    if ours is None:
        raise unknown_name(kind, ("dtype", *_QUANTIZED[part]), what="setting", where=where)
    if ours not in given:
        raise UsageError(
            f"{part} {kind} {', '.join(given)!r}: ops have {ours!r} here",
            where=where,
            fix=f"leave {kind!r} out, or put {ours!r} in{_ELSEWHERE.get((part, kind), '')}",
        )


def permitted(
    ops: Mapping[str, str], by_name: OpDict | None, by_type: OpDict | None
) -> dict[str, frozenset[Format]]:
    """The formats that op dicts leave to the ops that they restrict, fp32 always.

    An entry's key is a regular expression that must match all of a name, or the name itself.

    Args:
        ops: The type of each op, by its name.
        by_name: Settings by an op's name.
        by_type: Settings by an op's type.

    Raises:
        UsageError: If an entry matches no op.
    """
    named = _restrictions(by_name, tuple(ops), "op_name_dict")
    typed = _restrictions(by_type, tuple(dict.fromkeys(ops.values())), "op_type_dict")
    every = frozenset(DTYPES.values())
    return {
        name: named.get(name, every) & typed.get(kind, every)
        for name, kind in ops.items()
        if name in named or kind in typed
    }


def _restrictions(
    entries: OpDict | None, known: Sequence[str], where: str
) -> dict[str, frozenset[Format]]:
    formats_by_op: dict[str, frozenset[Format]] = {}
    for pattern, setting in (entries or {}).items():
        fitting = _fitting(pattern, known)
        if not fitting:
            raise unknown_name(pattern, known, what="op", where=where)
        listed = [names(part["dtype"]) for part in setting.values() if part.get("dtype")]
        for name in fitting:
            for dtypes in listed:
                types = frozenset(DTYPES[dtype] for dtype in dtypes) | {Format.FP32}
                formats_by_op[name] = formats_by_op.get(name, types) & types
    return formats_by_op


def _fitting(pattern: str, known: Sequence[str]) -> list[str]:
    try:
        matched = [name for name in known if re.fullmatch(pattern, name)]
    except re.error:
        matched = []
    return matched or [name for name in known if name == pattern]


@dataclass(frozen=True, slots=True)
class OpRule:
    """A rule that permits an op what its name is, or the names of the modules that it is in.

    PyTorch's ops have names of their own; users know those of the modules around them.
    """

    permitted: Permitted
    modules: bool = False

    def __call__(self, view: NodeView) -> list[str] | None:
        """Labels of the formats that the op may have; None for no opinion."""
        called = (view.name,)
        if self.modules:
            path = view.node.scope.split(".")
            called = tuple(".".join(path[:count]) for count in range(len(path) + 1))
        format_sets = [self.permitted[name] for name in called if name in self.permitted]
        return (
            sorted(f.label for f in frozenset.intersection(*format_sets))
            if format_sets
            else None
        )
