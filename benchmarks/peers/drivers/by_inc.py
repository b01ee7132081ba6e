"""Intel Neural Compressor 2.6: ``quantization.fit`` with an accuracy to keep.

Its strategy tries configurations until one keeps the accuracy, 100 of them at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from neural_compressor import quantization  # pyright: ignore
from neural_compressor.config import (  # pyright: ignore
    AccuracyCriterion,
    PostTrainingQuantConfig,
    Torch2ONNXConfig,
)

from benchmarks.peers.drivers import Job, NotApplicableError, main
from benchmarks.peers.task import Feed


class Loader:
    """Calibration data as the library takes it: pairs of inputs and a label."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds, self.batch_size = feeds, 1

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return iter((feed, 0) for feed in self.feeds)


class _Errors(logging.Handler):
    """The first error that the library logs: it goes on and gives no model."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what an error says."""
        if record.levelno >= logging.ERROR and not self.first:
            self.first = record.getMessage()


def produce(job: Job) -> Path:
    """Tune by the framework that the options name."""
    logging.getLogger("neural_compressor").addHandler(said := _Errors())
    criterion = AccuracyCriterion(criterion="absolute", tolerable_loss=job.task.tolerance)
    if job.options["way"] == "torch":
        return _of_module(job, criterion, said)
    conf = PostTrainingQuantConfig(quant_format="QDQ", accuracy_criterion=criterion)
    # One input is given as an array, several as a list in the model's order.
    feeds = [list(feed.values()) for feed in job.task.feeds("calib")]
    loader = Loader([arrays[0] if len(arrays) == 1 else tuple(arrays) for arrays in feeds])

    def evaluate(model: Any) -> float:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return job.score(lambda feed: [np.asarray(a) for a in session.run(None, feed)])

    made = quantization.fit(
        str(job.task.model), conf, calib_dataloader=loader, eval_func=evaluate
    )
    if made is None:
        raise RuntimeError(said.first or "no configuration keeps the accuracy")
    output = job.output.with_suffix(".onnx")
    made.save(str(output))
    return output


def _of_module(job: Job, criterion: Any, said: _Errors) -> Path:
    if not job.task.module:
        raise NotApplicableError("there is no PyTorch module of this model")
    import torch

    from benchmarks.peers import zoo

    module = zoo.load(job.task.module, job.task.folder / "module.pt")
    feeds = [torch.from_numpy(feed["x"]) for feed in job.task.feeds("calib")]

    def evaluate(model: Any) -> float:
        def run(feed: Feed) -> list[Any]:
            with torch.no_grad():
                return [model(torch.from_numpy(feed["x"])).numpy()]

        return job.score(run)

    # The library is written for the exporter that was PyTorch's default then.
    torch.onnx.export = partial(torch.onnx.export, dynamo=False)
    conf = PostTrainingQuantConfig(accuracy_criterion=criterion)
    made = quantization.fit(module, conf, calib_dataloader=Loader(feeds), eval_func=evaluate)
    if made is None:
        raise RuntimeError(said.first or "no configuration keeps the accuracy")
    output = job.output.with_suffix(".onnx")
    made.export(
        str(output),
        Torch2ONNXConfig(
            quant_format="QDQ", example_inputs=feeds[0], input_names=["x"],
            output_names=["scores"], dynamic_axes={"x": {0: "N"}, "scores": {0: "N"}},
        ),
    )  # fmt: skip
    return output


if __name__ == "__main__":
    main(produce)
