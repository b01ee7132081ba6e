"""Python's verb ``report``."""

from __future__ import annotations

from pathlib import Path

from finecast.api.comparison import diff as compared
from finecast.api.models import Model, file_in
from finecast.arguments import checked
from finecast.diagnosis.blaming import Blame
from finecast.diagnosis.difference import Difference
from finecast.diagnosis.recorded import is_plan, recorded
from finecast.errors import UsageError
from finecast.files import CommandFiles
from finecast.native.model import OpenedModel
from finecast.native.opening import opened
from finecast.planning.plan import Plan
from finecast.reports.content import Sources, content_of
from finecast.reports.plan_report import PlanReport, read_part, report_path


@checked()
def report(
    source: Plan | str | Path,
    output: str | Path | None = None,
    *,
    model: Model | None = None,
    study: str | Path | None = None,
    diff: Plan | Model | None = None,
    blame: Blame | str | Path | None = None,
    force: bool = False,
) -> PlanReport:
    """What is known of a plan, and why each op has its format, for people to look at.

    Nothing is searched or measured: ``tune`` keeps what a report needs in its study.

    Args:
        source: A plan, a study, or the data of a report; or their path. Of a study the last
            run counts.
        output: A page (``.html``) or its data (``.json``) that is written.
        model: The model that the plan was made for: without a study it tells which ops are
            around one another.
        study: The study in which the plan was found; by default the one beside the plan.
        diff: An earlier plan or another version of the model: what differs from it.
        blame: The ops to blame in a low model, or the file of ``finecast blame --json``.
        force: Whether an existing output may be replaced.

    Raises:
        UsageError: If there is no such plan or study, or the output may not be written.
        ModelError: If the plan was made for another model.
    """
    path = report_path(output)
    files = CommandFiles(force=force)
    files.read("the source", file_in(source))
    files.read("the study", study)
    files.read("the other side", file_in(diff))
    files.read("the blame", file_in(blame))
    files.write("the report", path)
    record = recorded(source, None if study is None else Path(study))
    plan = record if isinstance(record, Plan) else None
    given = None if model is None else opened(model, plan=plan)
    if isinstance(record, Plan):
        if given is not None:
            record, _ = given.placed(record)
        graph = None if given is None else given.graph_for(record)
        name = "model" if given is None else given.source.name
        record = PlanReport(content=content_of(Sources(model=name, plan=record, graph=graph)))
    elif given is not None:
        _check_same_model(given, record, source)
    blamed = blame.to_dict() if isinstance(blame, Blame) else None
    if isinstance(blame, str | Path):
        blamed = read_part(Path(blame))
    record = record.beside(
        diff=None if diff is None else _difference_from(diff, source).to_dict(),
        blame=blamed,
    )
    with files.locked():
        if path is not None:
            record.save(path, force=force)
    return record


def _difference_from(before: Plan | Model, source: Plan | str | Path) -> Difference:
    """What differs from ``before`` in the plan of a report.

    Raises:
        UsageError: If the report is of a study or of data, which have no plan to compare.
    """
    if isinstance(source, str | Path) and not is_plan(Path(source)):
        raise UsageError(
            "a study or a report's data has no plan that can be compared",
            where=str(source),
            fix="give the plan",
        )
    return compared(before, source)


def _check_same_model(
    given: OpenedModel, found: PlanReport, source: Plan | str | Path
) -> None:
    """Raise UsageError unless a report is of this model, be it from memory or another file."""
    stated = found.content["model"]
    if given.digest == stated["digest"]:
        return
    differs = ""
    if isinstance(source, Plan) or is_plan(Path(source)):
        placement = given.placement(
            source if isinstance(source, Plan) else Plan.load(Path(source))
        )
        if placement.same:
            return
        differs = f"; the plan is {placement.note}"
    raise UsageError(
        f"the report is of another model: {stated['name']}{differs}",
        where=str(given.source),
        fix="leave the model out: the report has all that it shows",
    )
