"""Notes and marks in an ``ov.Model``: what a conversion changed, and what a hint must leave.

IR drops notes on single ops and keeps those on the model (``rt_info``). So all are there, by
the names of ops, which IR keeps.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from finecast.devices.kv_cache import KV_CACHES, kv_cache_settings
from finecast.files.staging import staging
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.types import HINTED, TYPES
from finecast.numbers.formats import Format
from finecast.planning.provenance import Provenance

if TYPE_CHECKING:
    import openvino


ROOT: Final = "finecast"
_OF_ONNX: Final = "framework"
"""Where OpenVINO puts the notes of an ONNX model that it reads."""
HINT_KEY: Final = (ROOT, "precision_hint")
_CHANGES_KEY: Final = (ROOT, "changes")
KV_CACHE_KEY: Final = (ROOT, "kv_cache")
_OPTIONS: Final = "runtime_options"
"""OpenVINO's own settings for this model, which stand unless a program states others."""
_ROUNDING: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"


def converted(model: openvino.Model) -> Provenance | None:
    """The conversion that made ``model``, or the ONNX model that it was; None without one."""
    names = Provenance.__slots__
    return Provenance.read({n: _read(model, (ROOT, n)) for n in names}) or Provenance.read(
        {n: _read(model, (_OF_ONNX, f"{ROOT}.{n}")) for n in names}
    )


def mark(model: openvino.Model, made_by: Provenance) -> None:
    """Note the conversion that ``model`` is the result of."""
    for name, text in made_by.notes.items():
        model.set_rt_info(text, [ROOT, name])


def inserted(model: openvino.Model) -> dict[str, str]:
    """The ops that a conversion inserted, by name; empty without notes that can be read.

    Each has the label of the format that its results are rounded to, though their type is
    fp32. It is empty for an op that rounds nothing, or whose type says it.
    """
    text = _read(model, _CHANGES_KEY)
    try:
        content: Any = json.loads(text) if text else {"added": {}}
        added = cast("dict[str, list[str]]", content["added"])
        return {str(name): str(rounds) for name, (rounds, *_) in added.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}  # another tool wrote under this key


def note_inserted(model: openvino.Model, ops: Mapping[str, str]) -> None:
    """Note ``ops`` in ``model``, as ``inserted`` reads them."""
    content = {"added": {name: [rounds] for name, rounds in ops.items()}}
    model.set_rt_info(json.dumps(content, separators=(",", ":")), list(_CHANGES_KEY))


def rounded_to(model: openvino.Model) -> frozenset[str]:
    """Labels of the formats that earlier conversions rounded numbers of the model to."""
    return frozenset(inserted(model).values())


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
_AS_READ: Final = str.maketrans(
    {stands: chr(int(written[2:-1])) for written, stands in _CONTROL.items()}
)
"""From a name while it is edited to the name as OpenVINO reads it."""
# What releases of OpenVINO call the attribute in memory: before 2026, and since.
_KEYS: Final = ("precise_0", "DisablePrecisionConversion_0")


def hint_of(model: openvino.Model) -> str:
    """OpenVINO's name of the low precision hint that the model is made for; empty for none."""
    hint = _read(model, HINT_KEY)
    return hint if hint in _LOW else ""


def state_hint(model: openvino.Model, hint: str) -> None:
    """Note in the model that it is made for the precision hint ``hint``; empty for none."""
    if hint or hint_of(model):
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
        if layer.get("name", "").translate(_AS_READ) not in names:
            continue
        info = layer.find("rt_info")
        if info is None:
            info = ET.SubElement(layer, "rt_info")
        ET.SubElement(info, "attribute", _ATTRIBUTE)
    text = ET.tostring(root, encoding="unicode")
    for written, stands in _CONTROL.items():
        text = text.replace(stands, written)
    path.write_text(f"<?xml version='1.0' encoding='utf-8'?>\n{text}", encoding="utf-8")


def _keys(op: openvino.Node) -> list[str]:
    info: Any = op.get_rt_info()
    return [key for key in _KEYS if key in info]
