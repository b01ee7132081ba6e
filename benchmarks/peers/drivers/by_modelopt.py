"""NVIDIA ModelOpt's AutoCast: rules by the ranges of weights, values and reductions decide.

It takes calibration data of one call and no accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from modelopt.onnx.autocast import convert_to_mixed_precision  # pyright: ignore

from benchmarks.peers.drivers import Job, main


def produce(job: Job) -> Path:
    """Convert to the type that the options name."""
    data = job.output.with_suffix(".npz")
    feed: dict[str, Any] = job.task.feeds("calib")[0]
    np.savez(data, **feed)
    made = convert_to_mixed_precision(
        str(job.task.model), low_precision_type=job.options["type"],
        calibration_data=str(data), keep_io_types=True,
    )  # fmt: skip
    output = job.output.with_suffix(".onnx")
    onnx.save(made, output)
    return output


if __name__ == "__main__":
    main(produce)
