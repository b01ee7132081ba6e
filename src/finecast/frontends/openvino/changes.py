"""Notes and marks in an ``ov.Model``: what a conversion changed, and what a hint must leave.

IR drops notes on single ops and keeps those on the model (``rt_info``). So all are there, by
the names of ops, which IR keeps.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from finecast.devices.kv_cache import KV_CACHES, kv_cache_settings
from finecast.files.staging import staging
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.types import HINTED, TYPES
from finecast.numbers.formats import Format
from finecast.rules.policy import BY_HINT

if TYPE_CHECKING:
    import openvino


ROOT: Final = "finecast"
PLAN_KEY: Final = (ROOT, "plan")
POLICY_KEY: Final = (ROOT, "policy")
HINT_KEY: Final = (ROOT, "precision_hint")
_CHANGES_KEY: Final = (ROOT, "changes")
KV_CACHE_KEY: Final = (ROOT, "kv_cache")
_OPTIONS: Final = "runtime_options"
"""OpenVINO's own settings for this model, which stand unless a program states others."""
_ROUNDING: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
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
    coded = [fmt for fmt in formats if fmt.has_scales and not fmt.runs_on_codes]
    if coded:
        groups = max(fmt.dynamic_group or 0 for fmt in coded)
        model.set_rt_info(groups, [_OPTIONS, _ROUNDING])


def state_kv_cache(model: openvino.Model, kv_cache: Format) -> None:
    """Have programs that load the model keep keys and values of earlier calls in a format.

    By default OpenVINO keeps them in 8 bits.
    """
    model.set_rt_info(kv_cache.label, list(KV_CACHE_KEY))
    for name, value in kv_cache_settings(kv_cache).items():
        model.set_rt_info(value, [_OPTIONS, name])


def kv_cache_of(model: openvino.Model) -> Format | None:
    """The format of keys and values of earlier calls that a plan stated; None for none."""
    label = _read(model, KV_CACHE_KEY)
    return next((fmt for fmt in KV_CACHES if fmt.label == label), None)


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
    kept = kv_cache_of(model)
    stated = {_ROUNDING, *(() if kept is None else kv_cache_settings(kept))}
    notes: Any = model.get_rt_info()
    if ROOT in notes:
        del notes[ROOT]
    if any(model.has_rt_info([_OPTIONS, name]) for name in stated):
        others = {k: v for k, v in notes[_OPTIONS].items() if k not in stated}
        del notes[_OPTIONS]
        for option, value in others.items():
            model.set_rt_info(value, [_OPTIONS, option])


def _read(model: openvino.Model, path: tuple[str, str]) -> str:
    key = list(path)
    return str(model.get_rt_info(key).astype(str)) if model.has_rt_info(key) else ""


# ----------------------------- marks on ops that keep fp32 under OpenVINO's own precision hint
#
# Under the hint OpenVINO lowers ops by itself, in kernels that no model with types of its own
# gets: the cast of an input is one with its change of layout, and products of low operands
# give fp32 results. Ops with the attribute ``precise`` keep their type (on CPUs, since
# OpenVINO 2024.0: openvinotoolkit/openvino, pull request 21440). So a plan can be stated
# without casts: the model stays in fp32, the plan's fp32 ops are marked, and the hint is noted
# in the model.
#
# OpenVINO's passes replace ops, and marks of ops that are replaced may be lost. What a model
# was compiled to shows it.

_LOW: Final = frozenset(TYPES[fmt] for fmt in HINTED)
_ATTRIBUTE: Final = {"name": "precise", "version": "0"}
# OpenVINO writes and reads names with control characters, which XML does not permit. While the
# XML is edited, characters for private use stand for them.
_PRIVATE: Final = 0x10F700
_CONTROL: Final = {
    f"&#{code:02};": chr(_PRIVATE + code) for code in range(1, 32) if chr(code) not in "\t\n\r"
}
# What releases of OpenVINO call the attribute in memory: before 2026, and since.
_KEYS: Final = ("precise_0", "DisablePrecisionConversion_0")


def hint_of(model: openvino.Model) -> str:
    """OpenVINO's name of the low precision hint that the model is made for; empty for none."""
    key = list(HINT_KEY)
    found = str(model.get_rt_info(key).astype(str)) if model.has_rt_info(key) else ""
    return found if found in _LOW else ""


def state_hint(model: openvino.Model, hint: str) -> None:
    """Note in the model that it is made for the precision hint ``hint``; empty for none."""
    if not hint and not hint_of(model):
        return
    model.set_rt_info(hint, list(HINT_KEY))


def marked(model: openvino.Model) -> frozenset[str]:
    """Names of the ops that are marked."""
    return frozenset(op.get_friendly_name() for op in every_op(model) if _keys(op))


def with_every_mark(model: openvino.Model) -> openvino.Model:
    """A copy in which all ops are marked; ``unmark_ops`` takes marks away.

    Marks cannot be set from Python, only be read: so the copy is written and read again.
    """
    import openvino

    names = {op.get_friendly_name() for op in every_op(model)}
    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})  # the files are deleted
    with staging() as folder:
        path = folder / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        write_marks(path, names)
        return core.read_model(path)


def unmark_ops(model: openvino.Model, kept: Collection[str]) -> None:
    """Take the marks from all ops but those named in ``kept``."""
    for op in every_op(model):
        if op.get_friendly_name() not in kept:
            info: Any = op.get_rt_info()
            for key in _keys(op):
                del info[key]


def write_marks(path: Path, names: Collection[str]) -> None:
    """Mark the ops of these names in IR that was written to ``path``.

    OpenVINO before 2026 reads this spelling alone, and later releases read it, too.
    """
    text = path.read_text(encoding="utf-8")  # OpenVINO wrote it just now
    for written, stands in _CONTROL.items():
        text = text.replace(written, stands)
    root = ET.fromstring(text)
    for layer in root.iter("layer"):
        if _read_name(layer) not in names:
            continue
        info = layer.find("rt_info")
        if info is None:
            info = ET.SubElement(layer, "rt_info")
        ET.SubElement(info, "attribute", _ATTRIBUTE)
    text = ET.tostring(root, encoding="unicode")
    for written, stands in _CONTROL.items():
        text = text.replace(stands, written)
    path.write_text(f"<?xml version='1.0' encoding='utf-8'?>\n{text}", encoding="utf-8")


def _read_name(layer: ET.Element) -> str:
    """The name of a layer as OpenVINO reads it."""
    name = layer.get("name", "")
    for written, stands in _CONTROL.items():
        name = name.replace(stands, chr(int(written[2:-1])))
    return name


def _keys(op: openvino.Node) -> list[str]:
    info: Any = op.get_rt_info()
    return [key for key in _KEYS if key in info]
