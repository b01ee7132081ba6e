"""finecast's ``tune``, for OpenVINO, with its defaults; without prices of earlier runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.drivers import Job, main
from finecast import api
from finecast.engines.numerics import openvino_settings


def produce(job: Job) -> Path:
    """The tuned model; a copy of the fp32 one where nothing is gained."""
    task, output = job.task, job.output.with_suffix(".onnx")
    feeds = task.feeds("calib")

    def evaluate(run: Any) -> float:
        return task.score(lambda feed: list(run(feed).values()), "search")

    found = api.tune(
        task.model, output, evaluate=evaluate, calib=lambda: feeds, engine="openvino",
        criterion="absolute", tolerance=task.tolerance, price_book=False, progress=False,
        force=True,
    )  # fmt: skip
    job.evaluations = found.evaluations
    counts = {str(fmt): n for fmt, n in found.plan.counts.items()}
    job.notes = {
        "verdict": found.verdict.value,
        "why": found.why,
        "ops": counts,
        "settings": openvino_settings("f32", counts),
        "phases_s": {name: round(s, 1) for name, s in found.phases.items()},
    }
    if not found.improved:
        output.write_bytes(task.model.read_bytes())
    return output


if __name__ == "__main__":
    main(produce)
