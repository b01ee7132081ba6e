"""NNCF's compression of weights, in an environment of its own.

    PYTHON -m benchmarks.peer_nncf_weights MODEL CALIB.npz FOLDER

Runs with nncf, openvino and numpy alone. Writes ``nncf-default.xml``, by the defaults of
``compress_weights`` (8 bits), and two with 4 bits by groups of 128 in four fifths of the
parameters: ``nncf-int4.xml`` by AWQ and scale estimation on CALIB, as its guide for accuracy
has it, and ``nncf-awq.xml`` by AWQ alone. Prints one JSON line: the seconds of each.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Compress, and print the seconds."""
    # nncf is no requirement of finecast's: this file runs in another environment.
    import nncf  # pyright: ignore
    import openvino

    model, calib, folder = sys.argv[1], dict(np.load(sys.argv[2])), Path(sys.argv[3])
    count = len(next(iter(calib.values())))
    feeds = [{name: a[i : i + 1] for name, a in calib.items()} for i in range(count)]
    int4: dict[str, Any] = {
        "mode": nncf.CompressWeightsMode.INT4_SYM, "ratio": 0.8, "group_size": 128,
        "dataset": nncf.Dataset(feeds), "awq": True,
    }  # fmt: skip
    ways = {"default": {}, "awq": int4, "int4": {**int4, "scale_estimation": True}}
    took: dict[str, float] = {}
    for name, options in ways.items():
        start = time.perf_counter()
        made: Any = nncf.compress_weights(openvino.Core().read_model(model), **options)
        openvino.save_model(made, folder / f"nncf-{name}.xml", compress_to_fp16=False)
        took[name] = round(time.perf_counter() - start, 1)
    sys.stdout.write(json.dumps(took) + "\n")


if __name__ == "__main__":
    main()
