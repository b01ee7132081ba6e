"""finecast's ``tune``, for OpenVINO, with its defaults; without prices of earlier runs.

It writes OpenVINO's IR, as NNCF does: this can state that the engine's hint lowers ops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.drivers import Job, main
from finecast import api
from finecast.engines.numerics import HINTS, openvino_settings
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan


def _hint(plan: Plan) -> str:
    """The precision hint that the model is made for."""
    return HINTS[plan.low_floats[0] if plan.by_hint else Format.FP32]


def produce(job: Job) -> Path:
    """The tuned model; a copy of the fp32 one where nothing is gained."""
    task, output = job.task, job.output.with_suffix(".xml")
    feeds = task.feeds("calib")

    def evaluate(run: Any) -> float:
        return task.score(lambda feed: list(run(feed).values()), "search")

    found = api.tune(
        task.model, output, evaluate=evaluate, calib=lambda: feeds, engine="openvino",
        criterion="absolute", tolerance=task.tolerance, timing_cache=False, progress=False,
        force=True,
    )  # fmt: skip
    job.evaluations = found.evaluations
    counts = {str(fmt): n for fmt, n in found.plan.counts.items()}
    job.notes = {
        "verdict": found.verdict.value,
        "why": found.why,
        "ops": counts,
        "settings": openvino_settings(_hint(found.plan), counts),
        "phases_s": {name: round(s, 1) for name, s in found.phases.items()},
    }
    if found.improved:
        return output
    kept = job.output.with_suffix(".onnx")
    kept.write_bytes(task.model.read_bytes())
    return kept


if __name__ == "__main__":
    main(produce)
