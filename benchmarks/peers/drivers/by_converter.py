"""onnxconverter-common: everything in fp16, or ops returned to fp32 until outputs agree.

The automatic conversion gets one call of the search data and the tolerances of its own
documentation: it knows outputs, not a metric of many calls.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnxconverter_common import auto_mixed_precision, float16  # pyright: ignore

from benchmarks.peers.drivers import Job, main


def produce(job: Job) -> Path:
    """Convert by the function that the options name."""
    model = onnx.load(job.task.model)
    if job.options["way"] == "all":
        made = float16.convert_float_to_float16(model, keep_io_types=True)
    else:
        ran = auto_mixed_precision.get_tensor_values_using_ort

        def counted(*given: object, **named: object) -> object:
            job.evaluations += 1
            return ran(*given, **named)

        auto_mixed_precision.get_tensor_values_using_ort = counted
        feed = job.task.feeds("search")[0]
        made = auto_mixed_precision.auto_convert_mixed_precision(
            model, feed, rtol=0.01, atol=0.001, keep_io_types=True
        )
    output = job.output.with_suffix(".onnx")
    onnx.save(made, output)
    return output


if __name__ == "__main__":
    main(produce)
