"""AIMET's automatic mixed precision for ONNX: groups of quantizers in int8 or fp16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from benchmarks.peers.drivers import Job, main
from benchmarks.peers.task import Feed
from zoo.libraries import prepare

prepare()  # its torchvision need not match the PyTorch that is there

from aimet_onnx import mixed_precision  # noqa: E402 # pyright: ignore
from aimet_onnx.amp.mixed_precision_algo import (  # noqa: E402 # pyright: ignore
    EvalCallbackFactory,
)
from aimet_onnx.common.defs import CallbackFunc, QuantizationDataType  # noqa: E402 # pyright: ignore
from aimet_onnx.quantsim import QuantizationSimModel  # noqa: E402 # pyright: ignore

_QUICK_CALLS = 4


class _Loader:
    """Feeds as the library iterates them."""

    batch_size = 1

    def __init__(self, feeds: list[Feed]) -> None:
        self.feeds = feeds

    def __iter__(self) -> Iterator[Feed]:
        return iter(self.feeds)


def produce(job: Job) -> Path:
    """Search for the groups that bear int8, and write the model as QDQ."""
    feeds = job.task.feeds("calib")
    sim = QuantizationSimModel(onnx.load(job.task.model), providers=["CPUExecutionProvider"])

    def calibrate(session: Any, *_: Any) -> None:
        for feed in feeds:
            session.run(None, feed)

    def evaluate(session: Any, *_: Any) -> float:
        return job.score(lambda feed: session.run(None, feed))

    sim.compute_encodings(feeds)
    integers = ((8, QuantizationDataType.int), (8, QuantizationDataType.int))
    floats = ((16, QuantizationDataType.float), (16, QuantizationDataType.float))
    # The documented quick measure of single groups; the metric decides in the second phase.
    quick = EvalCallbackFactory(
        _Loader(feeds), lambda session, feed: session.run(None, feed)[0]
    )
    folder = job.output.with_suffix(".amp")
    folder.mkdir(exist_ok=True)
    mixed_precision.choose_mixed_precision(
        sim, [floats, integers], quick.sqnr(sim, _QUICK_CALLS), CallbackFunc(evaluate),
        allowed_accuracy_drop=job.task.tolerance, results_dir=str(folder), clean_start=True,
        forward_pass_callback=CallbackFunc(calibrate), use_all_amp_candidates=True,
    )  # fmt: skip
    output = job.output.with_suffix(".onnx")
    onnx.save(sim.to_onnx_qdq(), output)
    return output


if __name__ == "__main__":
    main(produce)
