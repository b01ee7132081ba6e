"""ONNX Runtime's ``quantize_static``, preceded by its own preparation, as documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxruntime import quantization  # pyright: ignore
from onnxruntime.quantization.shape_inference import quant_pre_process  # pyright: ignore

from benchmarks.peers.drivers import Job, main


class Reader(quantization.CalibrationDataReader):
    """Calibration feeds, one for each call."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._left: Iterator[dict[str, Any]] = iter(feeds)

    def get_next(self) -> Any:
        """The next feed; None after the last."""
        return next(self._left, None)


def produce(job: Job) -> Path:
    """Quantize to QDQ with weights by channel: what OpenVINO reads as integers."""
    prepared, output = job.output.with_suffix(".pre.onnx"), job.output.with_suffix(".onnx")
    quant_pre_process(str(job.task.model), str(prepared))
    quantization.quantize_static(
        str(prepared), str(output), Reader(job.task.feeds("calib")),
        quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    prepared.unlink()
    return output


if __name__ == "__main__":
    main(produce)
