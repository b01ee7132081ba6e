"""Notes in an ``ov.Model`` of what a conversion changed, so that the next can take it back.

IR drops notes on single ops and keeps those on the model (``rt_info``). So all are there, by
the names of ops, which IR keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from finecast.numbers.formats import Format
from finecast.rules.policy import BY_HINT

if TYPE_CHECKING:
    import openvino

ROOT: Final = "finecast"
PLAN_KEY: Final = (ROOT, "plan")
POLICY_KEY: Final = (ROOT, "policy")
HINT_KEY: Final = (ROOT, "precision_hint")
_CHANGES_KEY: Final = (ROOT, "changes")
_ROUNDING_KEY: Final = ("runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
"""OpenVINO's own setting for this model, which stands unless a program states another."""
WAS: Final = "was"
"""The key, in the note of an adjustment that added numbers, of the constant's bytes before."""
STORED: Final = np.dtype("<f4")
"""The type of those bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """An op that a conversion inserted.

    Attributes:
        rounds: The label of the format that its results are rounded to, though their type is
            fp32; empty for a Convert, whose type says it.
        constant: The name of the constant that it replaced; empty if it reads a value.
        scales: Whether it multiplies channels in front of an op; no plan decides its format.
    """

    rounds: str = ""
    constant: str = ""
    scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """The inverse that an op multiplied with before it became a quotient.

    Attributes:
        name: The name of the op that computed the inverse.
        first: Whether it was the first operand.
    """

    name: str
    first: bool


@dataclass(slots=True, kw_only=True)
class Changes:
    """What conversions changed, by the names of ops.

    Attributes:
        added: The ops that were inserted.
        types: OpenVINO's names of the types that inputs and Converts had before.
        adjusted: Adjustments of constants, oldest first: that of a plan, or the bytes before.
        inverses: The products that became quotients.
        marked: The ops that were marked, to keep fp32 under a precision hint.
        faults: The ops that stand as they do because of an engine's fault, with its name.
    """

    added: dict[str, Added] = field(default_factory=dict[str, Added])
    types: dict[str, str] = field(default_factory=dict[str, str])
    adjusted: dict[str, list[dict[str, str | int]]] = field(
        default_factory=dict[str, "list[dict[str, str | int]]"]
    )
    inverses: dict[str, Inverse] = field(default_factory=dict[str, Inverse])
    marked: tuple[str, ...] = ()
    faults: dict[str, str] = field(default_factory=dict[str, str])


def converted_to(model: openvino.Model) -> str:
    """The label of the policy of an earlier conversion; empty if there was none."""
    label = _read(model, POLICY_KEY).removesuffix(BY_HINT)
    return f"{label}{BY_HINT}" if label and _read(model, HINT_KEY) else label


def changes_of(model: openvino.Model) -> Changes | None:
    """What earlier conversions changed; None if the model has no notes that can be read."""
    text = _read(model, _CHANGES_KEY)
    try:
        content: Any = json.loads(text) if text else None
        if content is None:
            return None
        added = cast("dict[str, list[str]]", content["added"])
        scales = set(map(str, content.get("scales", ())))
        adjusted = cast("dict[str, list[Any]]", content.get("adjusted", {}))
        inverses = cast("dict[str, list[Any]]", content.get("inverses", {}))
        return Changes(
            added={
                n: Added(rounds=str(r), constant=str(c), scales=n in scales)
                for n, (r, c) in added.items()
            },
            types={str(n): str(t) for n, t in content["types"].items()},
            adjusted={str(n): [dict(a) for a in made] for n, made in adjusted.items()},
            marked=tuple(map(str, content.get("marked", ()))),
            faults={str(n): str(f) for n, f in content.get("faults", {}).items()},
            inverses={
                str(n): Inverse(name=str(of), first=bool(first))
                for n, (of, first) in inverses.items()
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # another tool wrote under this key


def mark(model: openvino.Model, plan_digest: str, policy: str) -> None:
    """Note the plan and the policy by which ``model`` was converted."""
    model.set_rt_info(plan_digest, list(PLAN_KEY))
    model.set_rt_info(policy, list(POLICY_KEY))


def rounded_to(model: openvino.Model) -> frozenset[str]:
    """Labels of the formats that earlier conversions rounded numbers of the model to."""
    changes = changes_of(model)
    return frozenset(a.rounds for a in changes.added.values()) if changes else frozenset()


def state_rounding(model: openvino.Model, formats: Iterable[Format]) -> None:
    """Have programs that load the model round the values that a plan in ``formats`` rounds.

    By default OpenVINO rounds all values that meet weights in codes. Without such weights the
    model says nothing.
    """
    coded = [fmt for fmt in formats if fmt.has_scales and not fmt.encodes_values]
    if coded:
        groups = max(fmt.dynamic_group or 0 for fmt in coded)
        model.set_rt_info(groups, list(_ROUNDING_KEY))


def keep(model: openvino.Model, changes: Changes) -> None:
    """Write ``changes`` into the notes of ``model``."""
    added = {name: [a.rounds, a.constant] for name, a in changes.added.items()}
    content: dict[str, Any] = {"added": added, "types": changes.types}
    scales = [name for name, a in changes.added.items() if a.scales]
    content |= {"scales": scales} if scales else {}
    content |= {"adjusted": changes.adjusted} if changes.adjusted else {}
    inverses = {name: [i.name, int(i.first)] for name, i in changes.inverses.items()}
    content |= {"inverses": inverses} if inverses else {}
    content |= {"marked": changes.marked} if changes.marked else {}
    content |= {"faults": changes.faults} if changes.faults else {}
    model.set_rt_info(json.dumps(content, separators=(",", ":")), list(_CHANGES_KEY))


def unmark(model: openvino.Model) -> None:
    """Remove all notes of conversions."""
    notes: Any = model.get_rt_info()
    if ROOT in notes:
        del notes[ROOT]
    section, name = _ROUNDING_KEY
    if model.has_rt_info([section, name]):
        others = {k: v for k, v in notes[section].items() if k != name}
        del notes[section]
        for option, value in others.items():
            model.set_rt_info(value, [section, option])


def _read(model: openvino.Model, path: tuple[str, str]) -> str:
    key = list(path)
    return str(model.get_rt_info(key).astype(str)) if model.has_rt_info(key) else ""
