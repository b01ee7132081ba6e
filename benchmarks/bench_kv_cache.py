"""A step of a decoder whose cache OpenVINO keeps, by the cache's format and its length.

    python -m benchmarks.bench_kv_cache decoder.xml [--lengths 256 2048] [--texts 1]

The model is one of ``examples/decoder/make_stateful.py``, or of the same inputs. For each
length a call of so many tokens makes the cache, untimed; then one step is timed, in turns with
the other formats. The relative error of the step's outputs is against a cache in fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino

from benchmarks.common import report
from finecast.engines.base import Steps
from finecast.engines.openvino import OpenVinoEngine
from finecast.frontends.openvino.changes import state_kv_cache
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.measure.timing import pass_over
from finecast.numbers.formats import Format

_FORMATS: Final = (Format.FP32, Format.FP16, Format.INT8)
_EFFORT: Final = Effort(min_time_s=3.0, settle_s=6.0, known_to=0.02, order=False)


def loaded(path: Path, fmt: Format) -> Any:
    """The model with a cache in a format."""
    model = openvino.Core().read_model(path)
    state_kv_cache(model, fmt)
    return OpenVinoEngine().load(model)


def measure(path: Path, length: int, texts: int) -> None:
    """One line for each format of the cache."""
    tokens = np.random.default_rng(0).integers(0, 256, (texts, length + 1))

    def call(part: Any) -> dict[str, Any]:
        return {
            "input_ids": part.astype(np.int64),
            "beam_idx": np.arange(texts, dtype=np.int32),
        }

    step = Steps([call(tokens[:, :length]), call(tokens[:, length:])], untimed=1)
    sessions = {fmt: loaded(path, fmt) for fmt in _FORMATS}

    def outputs(session: Any) -> Any:
        session.begin(step)
        return session.step(step.calls[1])["logits"].astype(np.float64)

    exact = outputs(sessions[Format.FP32])
    passes = {fmt: pass_over(one, [step]) for fmt, one in sessions.items()}
    low = {fmt.label: made for fmt, made in passes.items() if fmt is not Format.FP32}
    race = Race.of(passes[Format.FP32], low, _EFFORT)
    for fmt in _FORMATS:
        name = ANCHOR if fmt is Format.FP32 else fmt.label
        off = np.linalg.norm(outputs(sessions[fmt]) - exact) / np.linalg.norm(exact)
        ms = 1e3 * (race.latency(ANCHOR).median_s if name == ANCHOR else race.latency_s(name))
        speed = 1.0 if name == ANCHOR else race.speed(name).median
        report(
            "kv_cache",
            f"a step of {texts} texts after {length} tokens, cache in {fmt.label}",
            round(ms, 3),
            "ms",
            speed=round(speed, 3),
            error=float(f"{off:.2g}"),
        )


def main() -> None:
    """Measure each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--texts", type=int, default=1)
    given = parser.parse_args()
    for length in given.lengths:
        measure(given.model, length, given.texts)


if __name__ == "__main__":
    main()
