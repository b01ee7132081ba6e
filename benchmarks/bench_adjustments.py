"""Which adjustments of int8 operands ever give a faster plan that keeps the accuracy.

    FINECAST_MODELS=... python -m benchmarks.bench_adjustments [--zoo PYTHON] [NET ...]
    python -m benchmarks.bench_adjustments --page       # the page of what was kept so far

Each net is tuned for a modelled device without adjustments, with all of them, and, where
there are several kinds and that does not tell them apart, with each alone. No measured time
decides: a plan's time is that of the device, its accuracy that of the device's emulator. The
device is AVX512-VNNI with casts and memory that take no time, as OpenVINO fuses roundings
into kernels: on it int8 gains most, so that adjustments have the most to win. ``tune`` makes
no adjustments for devices; here it does.

The accuracy is asked for in two ways. ``task`` is the metric and the tolerance of the peers'
benchmark. ``tight`` allows 3 dB less error than the fastest plan has: it just fails, which is
what adjustments are for. Every run is a line in ``--kept``, and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import kept_lines, run_apart
from benchmarks.peers import models
from benchmarks.peers.task import Feed
from finecast import api
from finecast.devices.emulation import Emulation
from finecast.devices.targets import parse_target
from finecast.measure.environment import cpu_label, environment
from finecast.native import emulated
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import SAME_TIME
from finecast.rules.policy import Adjust, Policy

_ROOT: Final = Path(__file__).resolve().parents[1]
_PAGE: Final = Path(__file__).with_name("RESULTS-adjustments.md")
_FIGURES: Final = "<!-- figures -->"

ZOO: Final = (
    "mobilenet_v2", "densenet", "vgg", "regnet", "squeezenet1_1", "swin", "mixer", "gpt2",
    "llama", "opt", "t5", "transformer", "lstm",
)  # fmt: skip
PEERS: Final = tuple(name for name in models.MODELS if name != "synthetic_5000")
KINDS: Final = tuple(kind for kind in Adjust if kind is not Adjust.RANGE)
TRIED: Final[Mapping[str, tuple[Adjust, ...]]] = {
    "none": (),
    "all": KINDS,
    **{kind.value: (kind,) for kind in KINDS},
}
_CLOSER_DB: Final = 3.0
_CALLS, _BATCH = 3, 8  # of the nets that have batches; of the others twelve


@dataclass(frozen=True, kw_only=True)
class Net:
    """A net with its data, in a folder that is written at the first use."""

    name: str
    kept: Path
    zoo: Path

    @cached_property
    def folder(self) -> Path:
        """The folder of its model and data."""
        if self.name in models.MODELS:
            return models.prepared(self.name, self.kept, self.zoo).folder
        folder = self.kept / self.name
        if not (folder / "inputs.npz").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            command = [self.zoo, "-m", "benchmarks.adjustment_nets", self.name, folder]
            subprocess.run(command, cwd=_ROOT, check=True, timeout=300, capture_output=True)
        return folder

    def options(self, asked: str) -> dict[str, Any]:
        """The options of ``tune`` for an accuracy that is asked for; its tolerance aside."""
        if asked == "tight":
            return {"data": few(self._calls()), "metric": "snr_db"}
        task = models.prepared(self.name, self.kept, self.zoo)
        calibration = few(task.feeds("calib"))

        def score(run: Callable[[Feed], Mapping[str, Any]]) -> float:
            return task.score(lambda feed: list(run(feed).values()), "search")

        return {"evaluate": score, "calib": lambda: calibration}

    def tolerance(self) -> float:
        """The loss of the metric that the peers' benchmark allows."""
        return models.prepared(self.name, self.kept, self.zoo).tolerance

    def _calls(self) -> list[Feed]:
        if self.name in models.MODELS:
            return models.prepared(self.name, self.kept, self.zoo).feeds("search")
        with np.load(self.folder / "inputs.npz") as stored:
            arrays = dict(stored)
        count = len(next(iter(arrays.values())))
        return [{name: a[i] for name, a in arrays.items()} for i in range(count)]


def few(calls: Sequence[Feed]) -> Sequence[Feed]:
    """Three calls of up to eight samples; twelve where a call has fewer."""
    largest = max(len(array) for array in calls[0].values() if array.ndim)
    if largest < _BATCH:
        return calls[: 4 * _CALLS]
    return [
        {name: array[:_BATCH] if array.ndim else array for name, array in call.items()}
        for call in calls[:_CALLS]
    ]


def device() -> Emulation:
    """AVX512-VNNI whose roundings are fused into kernels."""
    text = (files("finecast.devices.targets") / "avx512-vnni.toml").read_text("utf-8")
    for stated, instead in (
        ("cast_us = 12.0", "cast_us = 0.0"),
        ("op_us = 5.0", "op_us = 1.0"),
        ("free_casts = false", "free_casts = true"),
        ("bandwidth_gb_s = 5.0", "bandwidth_gb_s = 1e3"),
    ):
        if stated not in text:
            raise ValueError(f"avx512-vnni.toml has no {stated!r}")
        text = text.replace(stated, instead)
    return Emulation(target=parse_target(text, file="fused.toml"), format=Format.INT8)


def tuned(net: Net, asked: str, kinds: Sequence[Adjust], tolerance: float) -> dict[str, Any]:
    """What ``tune`` chooses with these kinds of adjustments."""
    begin = time.perf_counter()
    study = net.kept / f"{net.name}-{asked}.study.jsonl"
    outcome = api.tune(
        net.folder / "model.onnx", None, policy=Policy("auto:int8", adjust=tuple(kinds)),
        target=device(), criterion="absolute", tolerance=tolerance, study=study,
        resume=study.is_file(), timing_cache=False, progress=False, **net.options(asked),
    )  # fmt: skip
    return {
        "speed": round(outcome.speedup, 4) if outcome.improved else 1.0,
        "metric": outcome.tuned.metric,
        "digest": outcome.plan.digest,
        "kinds": [gain.kind.value for gain in outcome.gains],
        "int8": sum(f.has_scales for f in outcome.plan.formats.values()),
        "tried": [t.name for t in outcome.trials if "corrected" in t.name],
        "gains": [gain.to_dict() for gain in outcome.gains],
        "why": outcome.why,
        "evaluations": outcome.evaluations,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def compared(net: Net, asked: str) -> None:
    """Print what ``tune`` chooses without adjustments, with all, and with each."""
    # For devices ``tune`` makes no adjustments; the emulator runs plans that have some.
    emulated.OnDevice.adjusts = property(  # pyright: ignore
        lambda self: self.prepared.adjusts  # pyright: ignore
    )
    fastest = tuned(net, asked, (), 0.0) if asked == "tight" else {}
    tolerance = fastest["metric"] + _CLOSER_DB if fastest else net.tolerance()
    line: dict[str, Any] = {"net": net.name, "asked": asked, "tolerance": tolerance}
    line |= {"fastest": fastest} if fastest else {}
    for name in ("none", "all") if np.isfinite(tolerance) else ():
        line[name] = tuned(net, asked, TRIED[name], tolerance)
    if "all" in line and line["all"]["kinds"] not in ([], [KINDS[-1].value]):
        for kind in KINDS:
            line[kind.value] = tuned(net, asked, (kind,), tolerance)
    sys.stdout.write(json.dumps(line) + "\n")


def main() -> None:
    """Tune all nets that are not among the lines kept, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=(*PEERS, *ZOO))
    parser.add_argument("--asked", action="append", choices=("task", "tight"))
    parser.add_argument("--kept", type=Path, default=_ROOT / "build" / "adjustments")
    parser.add_argument("--zoo", type=Path, default=_ROOT / ".venv-zoo" / "bin" / "python")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds of a net")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.one:
        net = Net(name=given.nets[0], kept=given.kept, zoo=given.zoo)
        compared(net, given.asked[0])
        return
    lines = given.kept / "lines.jsonl"
    given.kept.mkdir(parents=True, exist_ok=True)
    for asked in given.asked or ("tight", "task"):
        for name in given.nets if not given.page else ():
            done = kept_lines(lines, "net", "asked")
            if (name, asked) in done or (asked == "task" and name not in models.MODELS):
                continue
            net = Net(name=name, kept=given.kept, zoo=given.zoo)
            line: dict[str, Any] = {"net": name, "asked": asked}
            try:
                _ = net.folder
                arguments = [name, "--one", "--asked", asked, "--kept", str(given.kept)]
                line |= run_apart("bench_adjustments", arguments, limit_s=given.limit)
            except (models.AbsentError, subprocess.SubprocessError) as why:
                line["failed"] = str(why)[:300]
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            sys.stderr.write(f"{name} {asked}: {_told(line)}\n")

    if given.page:
        head, _, _ = _PAGE.read_text(encoding="utf-8").partition(_FIGURES)
        text = "\n".join(
            (f"{head}{_FIGURES}", *page(kept_lines(lines, "net", "asked").values()))
        )
        _PAGE.write_text(text + "\n", encoding="utf-8")


def _told(line: Mapping[str, Any]) -> str:
    names = [name for name in TRIED if name in line]
    return line.get("failed") or ", ".join(f"{n} {line[n]['speed']:.3f}" for n in names)


# ------------------------------------------------------------------------------------ the page


def speeds(line: Mapping[str, Any]) -> dict[str, float]:
    """The speed of the plan by the names of ``TRIED``.

    Where the plan with all adjustments has none, or the last kind alone, the others were
    tried before and gained nothing.
    """
    known = {name: line[name]["speed"] for name in TRIED if name in line}
    for kind in KINDS:
        same = "all" if line["all"]["kinds"] == [kind.value] else "none"
        known.setdefault(kind.value, line[same]["speed"])
    return known


def page(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Wins by kind, and a row for each net and accuracy."""
    whole = [line for line in lines if "all" in line]
    yield f"Made on {cpu_label(environment())}, shared with other work."
    for asked in ("task", "tight"):
        rows = [line for line in whole if line["asked"] == asked]
        yield from (
            "",
            f"## {asked}",
            "",
            f"| {len(rows)} nets | faster | by more than 3% |",
            "|---|---|---|",
        )
        for name in ("all", *(kind.value for kind in KINDS)):
            ratios = [speeds(line)[name] / line["none"]["speed"] for line in rows]
            faster, clearly = (sum(r > least for r in ratios) for least in (1.0, SAME_TIME))
            yield f"| {name} | {faster} | {clearly} |"
        yield from (
            "",
            f"| net | allowed | fastest | {' | '.join(TRIED)} | in the plan | tried | s |",
            "|---" * 11 + "|",
        )
        for line in sorted(rows, key=lambda one: one["net"]):
            by = speeds(line)
            cells = [line["net"], f"{line['tolerance']:.4g}"]
            cells.append(f"{line['fastest']['speed']:.3f}" if "fastest" in line else "")
            cells += [f"{by[name]:.3f}" for name in TRIED]
            cells += [", ".join(line["all"]["kinds"]), str(len(line["all"]["tried"]))]
            cells.append(f"{line['none']['seconds']:.0f}, {line['all']['seconds']:.0f}")
            yield f"| {' | '.join(cells)} |"
    left = [line for line in lines if "all" not in line]
    yield from ("", "## Not compared", "") if left else ()
    for line in left:
        why = line.get("failed") or line["fastest"]["why"]
        yield f"- {line['net']}, {line['asked']}: {why}"


if __name__ == "__main__":
    main()
