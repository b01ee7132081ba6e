"""OpenVINO's own precision hint: the fp32 model as it is; the hint is given when it is run."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.peers.drivers import Job, main


def produce(job: Job) -> Path:
    """A copy of the model."""
    return Path(shutil.copy(job.task.model, job.output.with_suffix(".onnx")))


if __name__ == "__main__":
    main(produce)
