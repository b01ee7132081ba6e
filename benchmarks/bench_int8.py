"""int8, bf16 and fp32 in OpenVINO: by ``tune``, all in one format, by hint, and by NNCF.

    python -m benchmarks.bench_int8 [--isa ISA] [--nncf PYTHON] [--cpu-time] [CASE ...]

All models of a case are timed in turns in one process. Without ``--isa`` the benchmark runs
twice, each time in a new process: on the CPU as it is, and limited to VNNI
(``ONEDNN_MAX_CPU_ISA``). NNCF's accuracy control runs in another interpreter, which has nncf;
without ``--nncf`` it is left out. ``--cpu-time`` counts processor time on one core, for a
machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import openvino
from numpy.typing import NDArray

from benchmarks.common import count_processor_time, report, shared_case, skip
from benchmarks.int8_nets import resnet50
from finecast import api
from finecast.engines.base import Array, Feeds
from finecast.engines.openvino import config
from finecast.measure.racing import Effort, Race
from finecast.tuning.result import Result

Run: TypeAlias = Callable[[Feeds], dict[str, Array]]

NATIVE: Final = "native"
VNNI: Final = "AVX512_CORE_VNNI"
_EFFORT: Final = Effort(min_time_s=6.0, settle_s=20.0)
# A model that takes so many times fp32's time (bf16 without kernels) is not run on all data.
_TOO_SLOW: Final = 3.0
_ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and the bars by ISA.

    Attributes:
        model: Its file.
        feeds: The feeds that it is timed on.
        calib: Arrays for calibration.
        options: Options of ``tune``: data or an evaluation, metric and tolerance.
        score: The metric of a function that runs feeds.
        bars: The least speeds, by ISA and by the model that is compared with.
        most: The most evaluations that the search may take.
        nncf: Data and drop of NNCF's accuracy control; None where NNCF is not compared.
    """

    model: Path
    feeds: Feeds
    calib: Mapping[str, Array]
    options: Mapping[str, Any]
    score: Callable[[Run], float]
    bars: Mapping[str, Mapping[str, float]]
    most: int
    nncf: tuple[Mapping[str, Array], float] | None = None


def resnet20(_: Path) -> Case | None:
    """ResNet-20 by the share of decisions equal to fp32's, at batch 32."""
    case = shared_case("cifar10_resnet20")
    if case is None:
        return None
    model = Path(case.model())
    stored = np.load(model.with_name("data.npz"))
    images, batch = case._n(stored["test_x"]), 32
    exact = _runner(str(model), "f32")
    decided = _decisions(exact, images, batch)

    def score(run: Run) -> float:
        return float((_decisions(run, images, batch) == decided).mean())

    calib = {"input": case._n(stored["calib_x"][:128])}
    return Case(
        model=model,
        feeds={"input": images[:batch]},
        calib=calib,
        options={
            "data": {"input": images}, "metric": "agreement", "batch": batch,
            "criterion": "absolute", "tolerance": 0.01,
        },
        score=score,
        bars={NATIVE: {"all:bf16": 1.0, "nncf": 1.0}, VNNI: {"fp32": 1.8, "nncf": 1.0}},
        most=5,
        nncf=({"input": images, "decision": decided}, 0.01),
    )  # fmt: skip


def minilm(_: Path) -> Case | None:
    """MiniLM by rank correlation on pairs of sentences, at 16 x 64."""
    case = shared_case("sts_minilm_l6")
    if case is None:
        return None
    length, batch = 64, 16
    parts = [_padded(f, length) for f in case.calib(32)]
    calib = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    def score(run: Run) -> float:
        def outputs(given: Feeds) -> list[Array]:
            count = len(given["input_ids"])
            rows = {k: np.pad(a, ((0, -count % batch), (0, 0))) for k, a in given.items()}
            made = next(iter(run(_padded(rows, length)).values()))
            return [made[:count]]

        return float(case.metric(outputs, limit=1200, batch=batch)["spearman"])

    return Case(
        model=Path(case.model()),
        feeds={k: a[:batch] for k, a in calib.items()},
        calib=calib,
        options={
            "evaluate": score,
            "criterion": "absolute",
            "tolerance": 0.005,
            "batch": batch,
        },
        score=score,
        bars={NATIVE: {"all:bf16": 1.07}, VNNI: {"fp32": 2.3}},
        most=6,
    )


def _padded(feeds: Feeds, length: int) -> dict[str, Array]:
    more = length - next(iter(feeds.values())).shape[1]
    return {k: np.pad(a, ((0, 0), (0, max(more, 0))))[:, :length] for k, a in feeds.items()}


def resnet50_topology(folder: Path) -> Case:
    """ResNet-50 with random weights, by the cosine of the outputs."""
    model = folder / "resnet50.onnx"
    resnet50(model)
    draw = np.random.default_rng(1)
    images = draw.standard_normal((16, 3, 224, 224)).astype(np.float32)
    run = _runner(str(model), "f32")
    wanted = _outputs(run, images, 1)

    def score(run: Run) -> float:
        made = _outputs(run, images, 1)
        norms = np.linalg.norm(made, axis=1) * np.linalg.norm(wanted, axis=1)
        return float(np.mean((made * wanted).sum(axis=1) / norms))

    return Case(
        model=model,
        feeds={"x": images[:1]},
        calib={"x": images[:8]},
        options={"data": {"x": images}, "metric": "cosine", "batch": 1, "tolerance": 0.01},
        score=score,
        bars={NATIVE: {"all:bf16": 1.4}, VNNI: {"fp32": 2.8}},
        most=5,
    )


def _outputs(run: Run, images: Array, batch: int) -> NDArray[np.float64]:
    name = "input" if images.shape[2] == 32 else "x"
    parts = (images[i : i + batch] for i in range(0, len(images), batch))
    made = [next(iter(run({name: p}).values())) for p in parts]
    return np.concatenate(made).astype(np.float64)


def _decisions(run: Run, images: Array, batch: int) -> Array:
    return _outputs(run, images, batch).argmax(axis=1)


CASES: Final = {
    "resnet20": resnet20,
    "minilm": minilm,
    "resnet50": resnet50_topology,
}


def _runner(model: str, hint: str) -> Run:
    """A call that runs ``model`` once."""
    core = openvino.Core()
    request = core.compile_model(
        model, "CPU", config(core, "CPU", hint)
    ).create_infer_request()

    def run(feeds: Feeds) -> dict[str, Array]:
        return {str(k): v for k, v in enumerate(request.infer(dict(feeds)).values())}

    return run


@dataclass(kw_only=True)
class _Bench:
    name: str
    case: Case
    isa: str
    folder: Path
    nncf: str | None
    took: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def title(self) -> str:
        return f"int8 {self.name}, {self.isa}"

    def run(self) -> None:
        outcome, seconds = self.tuned()
        models = {**self.ends(), "hint bf16": (str(self.case.model), "bf16")}
        if outcome.improved:
            models["tuned"] = (str(self.folder / "tuned.onnx"), "f32")
        peer = self.peer()
        if peer is not None:
            models["nncf"] = (str(peer), "f32")
        runs = {what: _runner(*where) for what, where in models.items()}
        race = self.race(runs)
        scores = {
            what: self.case.score(run)
            for what, run in runs.items()
            if race.slowdown(what).low < _TOO_SLOW
        }
        for what in sorted(runs, key=lambda w: race.slowdown(w).median, reverse=True):
            self.figure(what, race, scores.get(what))
        if outcome.improved:
            self.against(race)
        else:
            report(self.title, "tuned against fp32", 1.0, "x", why=outcome.why)
        report(
            self.title, "evaluations on all data", outcome.evaluations, "",
            bar=self.case.most, ops=outcome.plan.counts, probes=outcome.probes,
            predicted_error=round(outcome.predicted_error, 4),
            measured_error=round(outcome.measured_error, 4),
        )  # fmt: skip
        limit = {"bar": self.took["cpu"]} if self.took else {}
        what = "tune, all of it, the processor's time"
        report(self.title, what, round(seconds, 1), "s", **limit, nncf=self.took)

    def tuned(self) -> tuple[Result, float]:
        start = time.process_time()
        outcome = api.tune(
            str(self.case.model), self.folder / "tuned.onnx",
            calib=self.case.calib, engine="openvino", **self.case.options,
        )  # fmt: skip
        return outcome, time.process_time() - start

    def ends(self) -> dict[str, tuple[str, str]]:
        """Models with everything in one format: file and hint, by name."""
        made = {"fp32": (str(self.case.model), "f32")}
        for policy in ("all:bf16", "all:int8"):
            out = self.folder / f"{policy.replace(':', '-')}.onnx"
            api.convert(
                str(self.case.model), out, policy, data=self.case.calib, engine="openvino",
                verify=False,
            )  # fmt: skip
            made[policy] = (str(out), "f32")
        return made

    def peer(self) -> Path | None:
        if self.case.nncf is None:
            return None
        if self.nncf is None:
            skip(self.title, "NNCF: name an interpreter that has it by --nncf")
            return None
        data, drop = self.case.nncf
        files = [self.folder / "calib.npz", self.folder / "data.npz"]
        for path, arrays in zip(files, (self.case.calib, data), strict=True):
            np.savez(path, **dict[str, Any](arrays))
        out = self.folder / "nncf.xml"
        command = [self.nncf, "-m", "benchmarks.peer_nncf", str(self.case.model)]
        command += [*map(str, files), str(drop), str(out)]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            skip(self.title, f"NNCF: {done.stderr.strip().splitlines()[-1]}")
            return None
        self.took.update(json.loads(done.stdout.splitlines()[-1]))
        return out

    def race(self, runs: Mapping[str, Run]) -> Race:
        def call(run: Run) -> Callable[[], object]:
            return lambda: run(self.case.feeds)

        calls = {what: call(run) for what, run in runs.items()}
        return Race.of(calls.pop("fp32"), calls, _EFFORT)

    def figure(self, what: str, race: Race, score: float | None) -> None:
        speed = race.speed(what)
        metric: dict[str, Any] = {} if score is None else {"metric": round(score, 5)}
        report(
            self.title, f"{what} against fp32", round(speed.median, 3), "x",
            ms=round(1e3 * race.latency_s(what), 3), **metric,
            interval=[round(speed.low, 3), round(speed.high, 3)],
        )  # fmt: skip

    def against(self, race: Race) -> None:
        for other, bar in self.case.bars[self.isa].items():
            if other in race.calls:
                won = race.slowdown(other).median / race.slowdown("tuned").median
                what = f"tuned against {other}"
                report(self.title, what, round(won, 3), "x", bar=bar, at_least=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=[*CASES])
    parser.add_argument("--isa", choices=(NATIVE, VNNI))
    parser.add_argument("--nncf", metavar="PYTHON")
    parser.add_argument("--cpu-time", action="store_true")
    return parser.parse_args()


def _each_isa(arguments: Sequence[str]) -> Iterator[int]:
    """Run this file in new processes: on the CPU as it is, and limited to VNNI."""
    for isa in (NATIVE, VNNI):
        held = {} if isa == NATIVE else {"ONEDNN_MAX_CPU_ISA": isa}
        command = [sys.executable, "-m", "benchmarks.bench_int8", "--isa", isa, *arguments]
        yield subprocess.run(command, env={**os.environ, **held}, check=False).returncode


def main() -> int:
    """Run the cases asked for, or all."""
    given = _arguments()
    if given.isa is None:
        return max(_each_isa(sys.argv[1:]))
    if (os.environ.get("ONEDNN_MAX_CPU_ISA", NATIVE)) != given.isa:
        sys.stderr.write(f"error: start it with ONEDNN_MAX_CPU_ISA={given.isa}\n")
        return 2
    if given.cpu_time:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        count_processor_time()
    for name in given.case:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name](Path(folder))
            if case is None:
                skip(f"int8 {name}", "shared/models is absent")
                continue
            bench = _Bench(
                name=name, case=case, isa=given.isa, folder=Path(folder), nncf=given.nncf
            )
            bench.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
