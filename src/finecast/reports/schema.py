"""Checks the content of a report by ``schema.json``, a JSON Schema of draft 2020-12.

Law: content that passes has all that a page and Model Explorer's files read, of the stated
types, and numbers of ops, values and reasons that exist. The schema uses few words of the
standard, which ``_KEYWORDS`` lists, so that no library is needed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, cast

from finecast.errors import UsageError

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_KEYWORDS: Final = frozenset(
    {
        *("$schema", "$id", "$defs", "$ref", "title", "description"),
        *("type", "const", "required", "properties", "additionalProperties", "items"),
        *("minimum", "maximum", "maxItems"),
    }
)


@cache
def schema() -> dict[str, Any]:
    """The schema of a report's content."""
    text = (files("finecast.reports") / "schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def check_content(content: Any, *, where: str) -> None:
    """Check what may come from anybody.

    Raises:
        UsageError: If it is not the content of a report that this release reads.
    """
    newer = isinstance(content, dict) and _is_newer(content.get("version"))
    wrong = next(_wrong(content, schema(), "report"), None) or next(_dangling(content), None)
    if wrong is not None:
        raise UsageError(
            f"not a report that is read here: {wrong}",
            where=where,
            fix="upgrade finecast" if newer else "give one that finecast wrote, unchanged",
        )


def _is_newer(version: Any) -> bool:
    return isinstance(version, int) and version > schema()["properties"]["version"]["const"]


def _wrong(value: Any, rule: Mapping[str, Any], at: str) -> Iterator[str]:
    """What breaks ``rule``, and where."""
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    kinds = rule.get("type", [*_TYPES])
    named = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in named):
        yield f"{at} is {type(value).__name__}, expected {' or '.join(named)}"
        return
    if "const" in rule and value != rule["const"]:
        yield f"{at} is {str(value)[:40]!r}, expected {rule['const']!r}"
    if isinstance(value, dict):
        yield from _wrong_object(cast("dict[str, Any]", value), rule, at)
    elif isinstance(value, list):
        listed = cast("list[Any]", value)
        if len(listed) > rule.get("maxItems", len(listed)):
            yield f"{at} has {len(listed)} items, at most {rule['maxItems']} are expected"
        for number, item in enumerate(listed if "items" in rule else ()):
            yield from _wrong(item, rule["items"], f"{at}[{number}]")
    elif _is(value, "number"):
        low, high = rule.get("minimum", value), rule.get("maximum", value)
        if not low <= value <= high:
            yield f"{at} is {value}, expected {low} to {high}"


def _wrong_object(value: Mapping[str, Any], rule: Mapping[str, Any], at: str) -> Iterator[str]:
    known = rule.get("properties", {})
    yield from (
        f"{at} has no {name!r}" for name in rule.get("required", ()) if name not in value
    )
    for name, item in value.items():
        inner = known.get(name, rule.get("additionalProperties"))
        if isinstance(inner, dict):
            yield from _wrong(item, cast("dict[str, Any]", inner), f"{at}.{name[:40]}")


def _is(value: Any, kind: str) -> bool:
    # In Python True is an int, in JSON it is no number.
    return isinstance(value, _TYPES[kind]) and (
        kind == "boolean" or not isinstance(value, bool)
    )


def _dangling(content: Any) -> Iterator[str]:
    """Numbers in the content that name nothing."""
    ops = len(content["ops"])
    for place, count, numbers in _references(content):
        if any(not 0 <= n < count for n in numbers):
            yield f"{place} names one of {count} that is not there"
    made = [v["from"] for v in content["values"] if _is(v["from"], "integer")]
    if any(not 0 <= n < ops for n in made):
        yield f"a value comes from one of {ops} ops that is not there"


def _references(content: Any) -> Iterator[tuple[str, int, Sequence[int]]]:
    ops, reasons = len(content["ops"]), len(content["reasons"])
    for number, op in enumerate(content["ops"]):
        at = f"op {number}"
        yield at, len(content["values"]), [*op.get("inputs", ()), *op.get("outputs", ())]
        yield at, reasons, [*op.get("reasons", ()), *op.get("deciding", ())]
        yield at, len(content["lines"]), [op["line"]] if "line" in op else []
    for unit in content["units"]:
        yield "a unit", ops, unit["ops"]
        yield "a unit", reasons, [unit["reason"]]
    for kernels in content["kernels"].values():
        for kernel in kernels:
            yield "a kernel", ops, kernel["ops"]
    for repair in content.get("repairs", ()):
        yield "a repair", ops, [repair["op"]]
        yield "a repair", reasons, repair["reasons"]
    yield "the summary", ops, [one["op"] for one in content["summary"]["limits"]]
