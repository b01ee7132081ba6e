"""All files that tools made of one model: scored on held data, and raced in one process.

    python -m benchmarks.peers.judge JOB.json

The same scorer, engine, threads and machine for all. A tool's own claims are not looked at.
Prints a line of JSON as it begins with each file, so that one whose model takes the engine
down is known, and last a line with the figures of all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import openvino

from benchmarks.peers.drivers import reason
from benchmarks.peers.results import keeps
from benchmarks.peers.task import Array, Feed, Task
from finecast.engines.openvino import config
from finecast.measure.racing import Effort, Race

Infer: TypeAlias = Callable[[Feed], list[Array]]
# What takes twice as long as fp32 needs no exact time.
_EFFORT: Final = Effort(
    min_time_s=2.0, settle_s=3.0, rounds=11, warmup=2, limit=2.0, known_to=0.02
)
# The page says which valid model is the fastest, or within 2% of it. Those that may be are
# timed anew: the fastest of twenty in a race of 2% precision is the fastest by chance.
_FINAL: Final = Effort(min_time_s=5.0, settle_s=25.0, rounds=21, warmup=2, known_to=0.005)
_MAY_BE_FASTEST: Final = 0.95


class NoModelError(Exception):
    """A file that the engine does not load or run; its text is the reason in one line."""


def compiled(model: Path, hint: str, stated: Mapping[str, Any] | None) -> Infer:
    """A function that runs a model.

    Settings other than the hint are OpenVINO's defaults, except of models that come with
    settings of their own and of the fp32 model, whose settings are finecast's for fp32.

    Raises:
        NoModelError: If OpenVINO does not load it.
    """
    core = openvino.Core()
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if hint != "f32" and {"bf16": "BF16", "f16": "FP16"}[hint] not in able:
        raise NoModelError(f"this CPU has no {hint} in OpenVINO")
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": "LATENCY",
        **(stated or {}),
    }
    try:
        loaded = core.compile_model(core.read_model(model), "CPU", settings)
    except RuntimeError as error:
        raise NoModelError(f"OpenVINO does not load it: {reason(error)}") from None
    request = loaded.create_infer_request()

    def run(feed: Feed) -> list[Array]:
        # The request's own buffers are written again by the next call.
        return [np.array(value) for value in request.infer(feed).values()]

    return run


def scored(task: Task, run: Infer, wanted: Array) -> float:
    """The metric on held data.

    Raises:
        NoModelError: If a call fails, or outputs have other shapes than the fp32 model's.
    """
    try:
        outputs = task.outputs(run, "held")
    except RuntimeError as error:
        raise NoModelError(f"OpenVINO does not run it: {reason(error)}") from None
    if outputs.shape != wanted.shape:
        raise NoModelError(f"its output has the shape {outputs.shape[1:]}")
    return task.judge(outputs, "held")


def judged(task: Task, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Scores and speeds by name; a reason where there are none."""
    try:
        exact = compiled(task.model, "f32", config(openvino.Core(), "CPU", "f32"))
    except NoModelError as why:
        failed = {"failed": f"of the fp32 model, too: {why}"}
        return {"fp32": {}, "files": {one["name"]: failed for one in files}}
    wanted = task.outputs(exact, "held")
    runs: dict[str, Infer] = {}
    found: dict[str, dict[str, Any]] = {}
    for one in files:
        name = one["name"]
        _line({"begins": name})
        try:
            run = compiled(Path(one["file"]), one["hint"], one.get("settings"))
            found[name] = {"score": round(scored(task, run, wanted), 5)}
            runs[name] = run
        except NoModelError as why:
            found[name] = {"failed": str(why)}
    _line({"begins": ""})
    feed = task.feeds("search")[0]
    race = Race.of(
        lambda: exact(feed), {name: _call(run, feed) for name, run in runs.items()}, _EFFORT
    )
    score = round(task.judge(wanted, "held"), 5)
    valid = [n for n in runs if keeps(score, found[n]["score"], task.tolerance)]
    best = max((race.speed(name).median for name in valid), default=0.0)
    finalists = [n for n in valid if race.speed(n).high >= _MAY_BE_FASTEST * best]
    final = Race.of(
        lambda: exact(feed), {name: _call(runs[name], feed) for name in finalists}, _FINAL
    )
    for name in runs:
        last = final if name in finalists else race
        speed = last.speed(name)
        found[name] |= {
            "speed": round(speed.median, 4),
            "low": round(speed.low, 4),
            "high": round(speed.high, 4),
            "ms": round(last.latency_s(name) * 1e3, 4),
        }
    fp32 = {
        "score": score,
        "ms": round(final.latency_s("fp32") * 1e3, 4) if runs else None,
        "denied": round(max(race.denied, final.denied), 3),
    }
    return {"fp32": fp32, "files": found}


def _call(run: Infer, feed: Feed) -> Callable[[], object]:
    return lambda: run(feed)


def _line(content: object) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Judge the files of the job that the command line names."""
    stated = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _line(judged(Task.read(Path(stated["task"])), stated["files"]))


if __name__ == "__main__":
    main()
