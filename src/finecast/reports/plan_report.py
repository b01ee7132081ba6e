"""The report of a plan: its content, as a page, as data, and as files for Model Explorer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from finecast.errors import UsageError
from finecast.files import check_writable, read_text, write_text
from finecast.reports.base import Report
from finecast.reports.model_explorer import write_model_explorer
from finecast.reports.page import page_of
from finecast.reports.schema import check_content

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
        given = {name: dict(part) for name, part in parts.items() if part is not None}
        content = {**self.content, **given}
        check_content(content, where=", ".join(f"--{name}" for name in given))
        return replace(self, content=content)

    @property
    def lines(self) -> Sequence[str]:
        """The verdict, what limits precision, and the next faster plan, in sentences."""
        said, diff, blame = (self.content.get(part) for part in ("summary", "diff", "blame"))
        assert said is not None
        limits = [one["text"] for one in said["limits"]]
        found = [said["verdict"], said["heading"], *limits, said["next_faster"]]
        found += [f"From {diff['before']}: {'; '.join(diff['summary'])}."] if diff else []
        found += [f"{blame['low']}: {blame['verdict']}."] if blame else []
        return [line for line in found if line]

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
        write_text(file, page_of(self.content) if is_page else self.to_json() + "\n")

    def model_explorer(self, folder: str | Path, *, force: bool = False) -> tuple[Path, ...]:
        """Write the graph and its node data for Model Explorer; returns the files.

        Raises:
            UsageError: If a file exists without ``force``, or the graph is not known.
        """
        return write_model_explorer(self.content, Path(folder), force=force)


def read_part(path: Path) -> dict[str, Any]:
    """What another verb printed with ``--json``, for ``PlanReport.beside``, which checks it.

    Raises:
        UsageError: If the file is no JSON object.
    """
    fix = "give what finecast prints with --json"
    text = read_text(path, what="file", most_bytes=_LARGEST_BYTES, fix=fix)
    found = _parsed(text, str(path), fix)
    if not isinstance(found, dict):
        raise UsageError("it is no JSON object", where=str(path), fix=fix)
    return cast("dict[str, Any]", found)


def _parsed(text: str, where: str, fix: str) -> Any:
    """The JSON content of a file that may come from anybody."""
    if len(text) > _LARGEST_BYTES:
        what = f"a file of {len(text)} characters: {_LARGEST_BYTES} are the most"
        raise UsageError(what, where=where, fix=fix)
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise UsageError("it is no JSON", where=where, fix=fix) from error


def report_path(given: str | Path | None) -> Path | None:
    """The path of a report; None stays None.

    Raises:
        UsageError: If its suffix is neither ``.html`` nor ``.json``.
    """
    path = None if given is None else Path(given)
    if path is not None and path.suffix.lower() not in (".html", ".json"):
        raise UsageError(
            "a report is written as .html or .json",
            where=str(path),
            fix="give the file one of these suffixes",
        )
    return path
