"""How each peer makes its model: one small program for each, run in the peer's environment.

    PYTHON -m benchmarks.peers.drivers.NAME JOB.json

The job names the task's folder, the output without its suffix, and options of the peer. The
last line printed is JSON: the file, seconds, processor seconds, evaluations of all of the
search data. Time is that of the tool: without the interpreter's start and imports of the
drivers, with loading and saving of the model. Needs NumPy and the peer, not finecast.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.peers.task import Part, Run, Task


@dataclass(slots=True, kw_only=True)
class Job:
    """What a driver is asked for.

    Attributes:
        task: The model with its data.
        output: The file to write, without suffix.
        options: Which of the peer's ways, by the peer's own names.
        evaluations: Evaluations of the search data so far.
        notes: What else is to be recorded: of finecast its verdict and plan.
    """

    task: Task
    output: Path
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluations: int = 0
    notes: dict[str, Any] = field(default_factory=dict[str, Any])

    def score(self, run: Run, part: Part = "search") -> float:
        """The metric of a function that runs feeds, on data that tools may see; counted."""
        self.evaluations += 1
        return self.task.score(run, part)


Produce: TypeAlias = Callable[[Job], Path]
"""Makes the model of a job and returns its file."""


class NotApplicableError(Exception):
    """A model that a tool is not made for; the text says why."""


def main(produce: Produce) -> None:
    """Run a driver's function on the job that the command line names."""
    stated = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    job = Job(
        task=Task.read(Path(stated["task"])),
        output=Path(stated["output"]),
        options=stated["options"],
    )
    start, used = time.perf_counter(), _processor_s()
    try:
        with redirect_stdout(sys.stderr):  # what tools print is no result
            made = produce(job)
        found: dict[str, Any] = {"file": str(made)}
    except NotApplicableError as why:
        found = {"not_applicable": str(why)}
    except Exception as error:
        said = reason(error).replace(f"{job.task.folder}/", "")
        found = {"failed": f"{type(error).__name__}: {said}"}
    found |= {
        "seconds": round(time.perf_counter() - start, 2),
        "processor_s": round(_processor_s() - used, 2),
        "evaluations": job.evaluations,
        **job.notes,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _processor_s() -> float:
    """Processor time of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def reason(error: Exception) -> str:
    """What an error says, in one line; where it was raised if it says nothing.

    OpenVINO's messages begin with lines of its own source files, which are left out.
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    told = [one for one in lines if one and not one.startswith(("Exception from", "Check '"))]
    if told:
        return " ".join(told)[:240]
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return " ".join(f"in {frame.name} of {Path(frame.filename).name}" for frame in frames)
