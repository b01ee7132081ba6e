"""MiniLM by ``convert all:bf16``: its wall time, and its speed against OpenVINO's own bf16.

Three models at 16 x 64, timed in turns in OpenVINO: fp32 with the hint f32, fp32 with
OpenVINO's own hint bf16, and finecast's with the hint f32.

    python -m benchmarks.bench_minilm
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from benchmarks.common import median_s, report, run_cli, shared_case, skip
from finecast.measure.racing import ANCHOR, Effort, Race

BATCH, LENGTH = 16, 64


def feeds(case: Any) -> dict[str, np.ndarray]:
    """Real words, each sentence repeated to the full length."""
    ids = np.load(Path(case.model()).with_name("data.npz"))["calib"][:BATCH]
    rows = np.stack([np.resize(row[row > 0], LENGTH) for row in ids]).astype(np.int64)
    return {
        "input_ids": rows,
        "attention_mask": np.ones_like(rows),
        "token_type_ids": np.zeros_like(rows),
    }


def runner(model: Path, hint: str, given: dict[str, np.ndarray]) -> Callable[[], object]:
    """A call that runs ``model`` once."""
    config = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(str(model), "CPU", config).create_infer_request()
    return lambda: request.infer(given)


def main() -> None:
    """Convert, then time."""
    case = shared_case("sts_minilm_l6")
    if case is None:
        skip("minilm", "shared/models is absent")
        return
    source = Path(case.model())
    with tempfile.TemporaryDirectory() as folder:
        low = Path(folder) / "low.onnx"
        args = ("convert", str(source), "-o", str(low), "--auto-cast", "all")
        wall_s = median_s(
            lambda: run_cli(*args, "--auto-cast-type", "bf16", "--force", "--json"), 5
        )
        report("minilm", "finecast convert, whole process", round(wall_s, 3), "s", bar=3.0)
        given = feeds(case)
        seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
        race = Race.of(
            runner(source, "f32", given),
            {"hint": runner(source, "bf16", given), "finecast": runner(low, "f32", given)},
            Effort(min_time_s=seconds),
        )
    names = (ANCHOR, *race.names)
    ms = {f"{name}_ms": round(1e3 * race.latency_s(name), 2) for name in names}
    for name, bar in (("hint", 1.0), (ANCHOR, 1.8)):
        won = race.between(name, "finecast")
        what = {"hint": "speed against OpenVINO's bf16 hint", ANCHOR: "speed against fp32"}[
            name
        ]
        report(
            "minilm", what, round(won.median, 3), "x", bar=bar, at_least=True,
            interval=json.dumps([round(won.low, 3), round(won.high, 3)]), **ms,
        )  # fmt: skip


if __name__ == "__main__":
    main()
