"""NNCF's quantization with accuracy control, in an environment of its own.

    PYTHON -m benchmarks.peer_nncf MODEL CALIB.npz DATA.npz DROP OUT.xml

Runs with nncf, openvino and numpy alone. DATA has the inputs, and ``decision``, what the fp32
model decides on each; the metric is the share of equal decisions. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np


def main() -> None:
    """Quantize, and print the time and the number of evaluations that it took."""
    # nncf is no requirement of finecast's: this file runs in another environment.
    import nncf  # pyright: ignore
    import openvino

    model, calib, data, drop, out = sys.argv[1:]
    given, truth = dict(np.load(calib)), dict(np.load(data))
    decisions, batch = (
        truth.pop("decision"),
        25,
    )  # divides the data, so that the mean of means is the mean
    calls = {"full": 0, "part": 0}

    def feeds(arrays: dict[str, Any], size: int) -> list[dict[str, Any]]:
        count = len(next(iter(arrays.values())))
        return [{k: a[i : i + size] for k, a in arrays.items()} for i in range(0, count, size)]

    def validate(compiled: Any, items: Any) -> tuple[float, list[float]]:
        equal: list[float] = []  # by batch: NNCF ranks ops by some of these
        for feed, decided in items:
            scores = next(iter(compiled(feed).values()))
            equal.append(float((scores.argmax(axis=1) == decided).mean()))
        calls["full" if len(equal) == len(parts) else "part"] += 1
        return float(np.mean(equal)), equal

    parts = [decisions[i : i + batch] for i in range(0, len(decisions), batch)]
    pairs = list(zip(feeds(truth, batch), parts, strict=True))
    start, busy = time.perf_counter(), time.process_time()
    made: Any = nncf.quantize_with_accuracy_control(
        openvino.Core().read_model(model),
        calibration_dataset=nncf.Dataset(feeds(given, 1), lambda f: f),
        validation_dataset=nncf.Dataset(pairs, lambda pair: pair[0]),
        validation_fn=validate,
        max_drop=float(drop),
        drop_type=nncf.DropType.ABSOLUTE,
    )
    openvino.save_model(made, out, compress_to_fp16=False)
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - busy}
    rounded = {name: round(seconds, 1) for name, seconds in took.items()}
    sys.stdout.write(json.dumps({**rounded, **calls}) + "\n")


if __name__ == "__main__":
    main()
