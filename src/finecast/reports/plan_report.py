"""The report of a plan: its content, as a page, as data, and as files for Model Explorer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from finecast.errors import UsageError
from finecast.files import check_writable, read_text, write_text
from finecast.reports import drawn
from finecast.reports.base import Report

_LARGEST_BYTES: Final = 1 << 28
"""A report of 100,000 ops takes half of this."""
_FIX: Final = "give a report, a plan or a study that finecast wrote"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Report):
    """What is known of a plan; printed it is a few sentences.

    Attributes:
        content: The data, of the schema in ``schema.json``.
    """

    content: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> PlanReport:
        """Read the data that ``save`` wrote; raises as ``from_json``, or if it is no text."""
        text = read_text(path, what="report", most_bytes=_LARGEST_BYTES, fix=_FIX)
        return cls.from_json(text, where=str(path))

    @classmethod
    def from_json(cls, text: str, *, where: str) -> PlanReport:
        """Read the data of a report, which may come from anybody.

        Raises:
            UsageError: If it is no report of a version that is read here.
        """
        content = _parsed(text, where, _FIX)
        check_content(content, where=where)
        return cls(content=content)

    def beside(self, **parts: Mapping[str, Any] | None) -> PlanReport:
        """This report with parts of other verbs' results: ``diff`` and ``blame``.

        Raises:
            UsageError: If a part is not what that verb gives.
        """
        given_parts = {name: dict(part) for name, part in parts.items() if part is not None}
        content = {**self.content, **given_parts}
        check_content(content, where=", ".join(f"--{name}" for name in given_parts))
        return replace(self, content=content)

    @property
    def lines(self) -> Sequence[str]:
        """How fast it is, what it loses, which ops cost that, and what is next, in words."""
        said, diff, blame = (self.content.get(part) for part in ("summary", "diff", "blame"))
        assert said is not None
        lines = [*(said.get("answers") or [said["verdict"]])]
        lines += [said["heading"], *_texts(said["limits"])]
        lines += [said.get("kept_heading", ""), *_texts(said.get("kept", ()))]
        lines += [*said.get("decisions", ()), said["next_faster"]]
        lines += [f"From {diff['before']}: {'; '.join(diff['summary'])}."] if diff else []
        lines += [f"{blame['low']}: {blame['verdict']}."] if blame else []
        return [line for line in lines if line]

    def _content(self) -> dict[str, Any]:
        return dict(self.content)

    def to_json(self) -> str:
        """The content as text that ``from_json`` reads."""
        return json.dumps(self.content, separators=(",", ":"), allow_nan=False)

    def save(self, output: str | Path, *, force: bool = False) -> None:
        """Write a page (``.html``) that opens without network, or the data (``.json``).

        Raises:
            UsageError: If the suffix is another one, or the file exists without ``force``.
        """
        file = report_path(output)
        assert file is not None
        check_writable(file, force=force)
        is_page = file.suffix.lower() == ".html"
        write_text(file, drawn("page_of")(self.content) if is_page else self.to_json() + "\n")

    def model_explorer(self, folder: str | Path, *, force: bool = False) -> tuple[Path, ...]:
        """Write the graph and its node data for Model Explorer; returns the files.

        Raises:
            UsageError: If a file exists without ``force``, or the graph is not known.
        """
        written: tuple[Path, ...] = drawn("write_model_explorer")(
            self.content, Path(folder), force=force
        )
        return written


def _texts(named: Sequence[Mapping[str, Any]]) -> list[str]:
    return [one["text"] for one in named]


def read_part(path: Path) -> dict[str, Any]:
    """What another verb printed with ``--json``, for ``PlanReport.beside``, which checks it.

    Raises:
        UsageError: If the file is no JSON object.
    """
    fix = "give what finecast prints with --json"
    text = read_text(path, what="file", most_bytes=_LARGEST_BYTES, fix=fix)
    part = _parsed(text, str(path), fix)
    if not isinstance(part, dict):
        raise UsageError("it is no JSON object", where=str(path), fix=fix)
    return cast("dict[str, Any]", part)


def _parsed(text: str, where: str, fix: str) -> Any:
    """The JSON content of a file that may come from anybody."""
    if len(text) > _LARGEST_BYTES:
        what = f"a file of {len(text)} characters: {_LARGEST_BYTES} are the most"
        raise UsageError(what, where=where, fix=fix)
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise UsageError("it is no JSON", where=where, fix=fix) from error


def report_path(given: str | Path | None, *, drawn: bool = False) -> Path | None:
    """The path of a report, or with ``drawn`` of its picture; None stays None.

    Raises:
        UsageError: If its suffix is none of ``.html``, ``.json`` and, if drawn, ``.svg``.
    """
    path = None if given is None else Path(given)
    suffixes = (".html", *([".svg"] if drawn else []), ".json")
    if path is not None and path.suffix.lower() not in suffixes:
        raise UsageError(
            f"a report is written as {', '.join(suffixes[:-1])} or {suffixes[-1]}",
            where=str(path),
            fix="give the file one of these suffixes",
        )
    return path


# ------------- checks of a report's content by ``schema.json``, a JSON Schema of draft 2020-12
#
# Law: content that passes has all that a page and Model Explorer's files read, of the stated
# types, and numbers of ops, values and reasons that exist. The schema uses few words of the
# standard, which ``_KEYWORDS`` lists, so that no library is needed here.

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
    version = content.get("version") if isinstance(content, dict) else None
    known = schema()["properties"]["version"]["const"]
    newer = isinstance(version, int) and version > known
    wrong = next(_wrong(content, schema(), "report"), None) or next(_dangling(content), None)
    if wrong is not None:
        raise UsageError(
            f"not a report that is read here: {wrong}",
            where=where,
            fix="upgrade finecast" if newer else "give one that finecast wrote, unchanged",
        )


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
    producers = [v["from"] for v in content["values"] if _is(v["from"], "integer")]
    if any(not 0 <= n < ops for n in producers):
        yield f"a value comes from one of {ops} ops that is not there"


def _references(content: Any) -> Iterator[tuple[str, int, Sequence[int]]]:
    ops, reasons = len(content["ops"]), len(content["reasons"])
    for number, op in enumerate(content["ops"]):
        at = f"op {number}"
        yield at, len(content["values"]), [*op.get("inputs", ()), *op.get("outputs", ())]
        yield at, reasons, [*op.get("reasons", ()), *op.get("deciding", ())]
        yield at, len(content["lines"]), [op["line"]] if "line" in op else []
    for unit in content["units"]:
        yield "a precision group", ops, unit["ops"]
        yield "a precision group", reasons, [unit["reason"]]
    for kernels in content["kernels"].values():
        for kernel in kernels:
            yield "a kernel", ops, kernel["ops"]
    for repair in content.get("repairs", ()):
        yield "a repair", ops, [repair["op"]]
        yield "a repair", reasons, repair["reasons"]
    said = content["summary"]
    yield "the summary", ops, [one["op"] for one in (*said["limits"], *said.get("kept", ()))]
