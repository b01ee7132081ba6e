"""What ``tune`` kept of a run for reports, found by a plan, a study or the report's data."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from finecast.errors import UsageError
from finecast.files.saved import DATABASE
from finecast.measure.study import Study
from finecast.native.opening import PLAN, STUDY
from finecast.planning.plan import Plan
from finecast.reports.plan_report import PlanReport

# A report's data starts with its kind.
_REPORT: Final = '{"kind":"finecast.report"'


def recorded(source: Plan | str | Path, study: Path | None) -> PlanReport | Plan:
    """The report of the run behind ``source``, or its plan where no run with it is known.

    Args:
        source: A plan, a study or a report's data, or their path.
        study: A study with the plan; by default the one that ``tune`` puts beside it.

    Raises:
        UsageError: If it is none of these, or the study has no run with the plan.
    """
    if isinstance(source, Plan):
        return _of_plan(source, study)
    path = Path(source)
    head = _head(path)
    if path.suffix.lower() == Path(STUDY).suffix and not head.startswith(DATABASE):
        raise UsageError(
            "not a study: it is " + ("no database" if head else "empty"),
            where=str(path),
            fix="give a study or a plan that `finecast tune` wrote",
        )
    if not _starts_plan(head):
        if study is not None:
            raise UsageError(
                "a study is given beside something that is no plan",
                where=str(path),
                fix="leave one of them out",
            )
        if head.startswith(DATABASE):
            return _of_study(path, None)
        return PlanReport.load(path)
    beside = path.with_name(path.name.removesuffix(PLAN) + STUDY)
    return _of_plan(Plan.load(path), study, beside=beside)


def is_plan(path: Path) -> bool:
    """Whether a file is neither a study nor a report's data.

    Raises:
        UsageError: If it cannot be read.
    """
    return _starts_plan(_head(path))


def _starts_plan(head: bytes) -> bool:
    return not head.startswith((DATABASE, _REPORT.encode()))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(_REPORT))
    except OSError as error:
        raise UsageError(
            f"cannot read it: {error.strerror}",
            where=str(path),
            fix="give a plan or a study that `finecast tune` wrote",
        ) from error


def _of_plan(
    plan: Plan, study: Path | None, *, beside: Path | None = None
) -> PlanReport | Plan:
    if study is not None:
        return _of_study(study, plan)
    if beside is None or not beside.is_file():
        return plan
    record = Study(beside).record(plan.digest)
    return plan if record is None else PlanReport.from_json(record, where=str(beside))


def _of_study(path: Path, plan: Plan | None) -> PlanReport:
    """The report of the last run in a study, or of its last run that ended with ``plan``."""
    if not path.is_file():
        raise UsageError(
            "there is no such study",
            where=str(path),
            fix="give what tune wrote: OUTPUT.study.db",
        )
    record = Study(path).record(None if plan is None else plan.digest)
    if record is None:
        of = "" if plan is None else " that ended with this plan"
        raise UsageError(
            f"the study has no finished run{of}",
            where=str(path),
            fix="run tune again with --resume, or give the plan alone",
        )
    return PlanReport.from_json(record, where=str(path))
