"""NNCF on OpenVINO's model: quantization, with or without accuracy control, or of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nncf  # pyright: ignore
import openvino

from benchmarks.peers.drivers import Job, main


def produce(job: Job) -> Path:
    """Quantize by the function that the options name."""
    model: Any = openvino.Core().read_model(job.task.model)
    calls = job.task.feeds("calib")
    # The documented default is for convolutional nets; of transformers the library asks for
    # its model type, which moves scales before the products that follow a normalisation.
    kind = nncf.ModelType.TRANSFORMER if job.options.get("transformer") else None
    common: dict[str, Any] = {"model_type": kind, "subset_size": len(calls)}
    match job.options["way"]:
        case "quantize":
            made = nncf.quantize(model, nncf.Dataset(calls), **common)
        case "weights":
            made = nncf.compress_weights(model)
        case _:
            made = _with_accuracy_control(job, model, calls, common)
    output = job.output.with_suffix(".xml")
    openvino.save_model(made, output, compress_to_fp16=False)
    return output


def _with_accuracy_control(job: Job, model: Any, calls: Any, common: Any) -> Any:
    searched = job.task.feeds("search")

    def validate(compiled: Any, items: Any) -> tuple[float, None]:
        del items  # the metric is of all calls together

        def run(feed: Any) -> list[Any]:
            return list(compiled(feed).values())

        return job.score(run), None

    return nncf.quantize_with_accuracy_control(
        model, nncf.Dataset(calls), nncf.Dataset(searched), validate,
        max_drop=job.task.tolerance, drop_type=nncf.DropType.ABSOLUTE, **common,
    )  # fmt: skip


if __name__ == "__main__":
    main(produce)
