"""Python's verb ``apply``, by which a result is saved, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model, file_in, plan_of
from finecast.api.outputs import declared
from finecast.api.requests import on_data
from finecast.arguments import checked, group_of
from finecast.data.options import Data, DataOptions
from finecast.files import CommandFiles
from finecast.native.artefact import Destination
from finecast.native.model import OpenedModel, ReadOptions, RunOptions
from finecast.planning.plan import Plan
from finecast.tuning.result import Result


@checked(Destination, RunOptions, DataOptions, ReadOptions)
def apply(
    plan: Plan | str | Path,
    model: Model,
    output: Destination | str | Path | None = None,
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    **options: Unpack[keywords.ApplyKeywords],
) -> Result:
    """Write the model that a plan gives; without ``output`` it is only the result's ``model``.

    The model may be another version of the one that the plan was made for: retrained, changed
    or exported anew. Ops that the plan does not know stay fp32, which a warning says.

    ``options`` are as for ``convert``.

    Raises:
        FinecastError: If the plan was made for another model, or as for ``convert``.
    """
    written = group_of(Destination, options, path=output)
    run = replace(group_of(RunOptions, options), engine=engine)
    run = on_data(run, group_of(DataOptions, options, data=data))
    return applied(plan, model, written, run, group_of(ReadOptions, options))


def applied(
    plan: Plan | str | Path,
    model: Model,
    written: Destination,
    run: RunOptions,
    how: ReadOptions,
    files: CommandFiles | None = None,
) -> Result:
    """``apply`` with its options as values; ``files`` are those of the call, if there are.

    Raises:
        FinecastError: As ``apply``.
    """
    files = files or CommandFiles(force=written.force)
    files.read("the plan", file_in(plan))
    given = declared(model, how, written, files, run.data)
    stated = plan_of(plan)
    assert stated is not None
    with files.locked() as removed:
        done = given().apply(written, stated, run)
    done = replace(done, warnings=(*removed, *done.warnings))
    return savable(Result.of(done), given)


def savable(result: Result, given: Callable[[], OpenedModel]) -> Result:
    """``result``, which ``save`` writes by its plan."""

    def write(output: Destination) -> object:
        return apply(result.plan, given(), output)

    return replace(result, writer=write)
