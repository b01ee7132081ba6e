"""Compares finecast's models with OpenVINO's own precision hint, on every net.

    python -m benchmarks.bench_hint [--exports FOLDER] [--lines FILE] [--tune] [--ir]
        [NET ...]
    python -m benchmarks.bench_hint --write

Three models of each net are compared: ``all:bf16``; ``choice``, a plan of what the hint
lowers; and ``exact``, that plan without roundings that the hint leaves out. Figures are
kernels, the error against fp32 over eight inputs, and the processor time of a call on one
core. Each net runs in a process of its own, and its line is kept in a file: a net that has a
line is not run again, unless it is named. ``--tune`` compares the result of ``tune`` with the
hint, where twice the hint's error is allowed. With ``--ir`` models are OpenVINO's IR, made for
the hint, with marks on what keeps fp32; ``tune`` chooses between that and casts. ``--write``
puts the tables into RESULTS-hint.md. The zoo's nets need the interpreter of ``.venv-zoo``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import hint_nets
from benchmarks.common import (
    count_processor_time,
    kept_lines,
    print_environment,
    report,
    run_apart,
    skip,
)
from benchmarks.hint_kernels import Compiled, kernels_of, low_only
from benchmarks.hint_table import ERROR, KERNELS, SPEED, Row, TunedRow, write_tables
from finecast import api
from finecast.data.deviation import deviation
from finecast.data.function_workload import FunctionWorkload, Run
from finecast.engines import get_engine
from finecast.engines.base import Array, Feeds
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan
from finecast.progress import silent
from finecast.rules.policy import Policy

_BUILD: Final = Path(__file__).resolve().parents[1] / "build"
_ALL: Final = "all"
_EFFORT: Final = Effort(min_time_s=1.0, settle_s=1.5)
_LIMIT_S: Final = 300


def measured(net: hint_nets.Net, folder: Path, *, ir: bool) -> dict[str, Any]:
    """All figures of one net; of IR those of ``all`` by the hint."""
    suffix = "xml" if ir else "onnx"
    files = {n: folder / f"{i}.{suffix}" for i, n in enumerate(("all", "choice", "exact"))}
    policy = replace(Policy.parse("all:bf16"), by_hint=ir)
    plan = api.convert(net.model, files[_ALL], policy, engine="openvino", verify=False).plan
    for name, chosen in ({} if ir else hint_plans(net)).items():
        api.apply(chosen, net.model, files[name], verify=False)
    models = _references(net)
    hint = "bf16" if ir else "f32"
    models |= {n: Compiled.of(f, hint) for n, f in files.items() if f.is_file()}
    return {
        "kernels": {n: asdict(kernels_of(m.model)) for n, m in models.items()},
        "low_only": low_only_in(plan, net.model, files[_ALL]),
        "errors": errors(models, net.feeds),
        "speed": speeds(models, net.feeds[0]),
    }


def tuned(net: hint_nets.Net, output: Path) -> dict[str, Any]:
    """The result of ``tune`` on one core, where the error may be twice the hint's.

    ``tune`` counts processor time, too.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    models = _references(net)
    wanted = [copies(models["fp32"], given) for given in net.feeds]

    def score(run: Run) -> float:
        made = [[*run(given).values()] for given in net.feeds]
        return 1.0 - together(made, wanted)

    allowed = 2 * errors(models, net.feeds)["hint"]
    outcome = api.tune(
        net.model, output, evaluate=score, calib=lambda: net.feeds,
        criterion="absolute", tolerance=allowed, policy="auto:bf16", engine="openvino",
    )  # fmt: skip
    # Loaded anew: what was loaded before the search lies in other memory, and was 4% faster.
    models = _references(net)
    if outcome.improved:
        models["tuned"] = Compiled.of(output, "bf16" if outcome.plan.by_hint else "f32")
    return {
        "verdict": outcome.verdict.value,
        "why": outcome.why,
        "ops": dict(outcome.counts),
        "by_hint": outcome.plan.by_hint,
        "chosen": [r.text for d in outcome.plan.decisions[:1] for r in d.reasons][-1:],
        "seconds": outcome.seconds,
        "errors": errors(models, net.feeds),
        "speed": speeds(models, net.feeds[0]),
    }


def _references(net: hint_nets.Net) -> dict[str, Compiled]:
    """The fp32 model, and the same under the hint."""
    return {"fp32": Compiled.of(net.model, "f32"), "hint": Compiled.of(net.model, "bf16")}


def hint_plans(net: hint_nets.Net) -> dict[str, Plan]:
    """The plans ``choice`` and ``exact`` of a net; none if the hint lowers nothing."""
    subject = api.load(net.model).subject("openvino", None)
    workload = FunctionWorkload(
        function=lambda _: 0.0, name="", calibrate=lambda: net.feeds, remembered=[*net.feeds]
    )
    examined = subject.examine(Policy.parse("auto:bf16"), (), workload, silent)
    for hinted in subject.hints(examined.planner):
        (_, choice), (_, exact) = hinted.choices
        return {"choice": choice, "exact": exact}
    return {}


def low_only_in(plan: Plan, fp32: Path, low: Path) -> dict[str, Any]:
    """Ops that ``low`` computes low and the hint does not; ops that only move do not count."""
    engine = get_engine("openvino")
    hinted = engine.load_hinted(fp32, Format.BF16).kernel_formats()
    ours = engine.load_hinted(low, Format.FP32).kernel_formats()
    names = [d.node for d in plan.decisions if not by_name(d.op).exact]
    return asdict(low_only(ours, hinted, names))


def errors(models: Mapping[str, Compiled], feeds: Sequence[Feeds]) -> dict[str, float]:
    """The relative error of the worst output against fp32, root mean square over inputs."""
    wanted = [copies(models["fp32"], given) for given in feeds]
    found: dict[str, float] = {}
    for name, model in models.items():
        if name != "fp32":
            found[name] = together([copies(model, given) for given in feeds], wanted)
    return found


def together(made: Sequence[Sequence[Array]], wanted: Sequence[Sequence[Array]]) -> float:
    """The relative error of the worst output, root mean square over the calls."""
    worst = [_worst(*pair) for pair in zip(made, wanted, strict=True)]
    return float(np.sqrt(np.mean(np.square(worst))))


def copies(model: Compiled, feeds: Feeds) -> list[Array]:
    """The outputs of one call."""
    return [np.array(array) for array in model.run(feeds)]


def _worst(made: Sequence[Array], wanted: Sequence[Array]) -> float:
    return max(deviation(*pair).relative for pair in zip(made, wanted, strict=True))


def speeds(models: Mapping[str, Compiled], feeds: Feeds) -> dict[str, list[float]]:
    """The hint's time of a call over each model's: low, median, high."""

    def call(model: Compiled) -> Callable[[], object]:
        return lambda: model.run(feeds)

    others = {f"{name} model": call(m) for name, m in models.items() if name != "hint"}
    race = Race.of(call(models["hint"]), others, _EFFORT)
    found = {name: race.speed(f"{name} model") for name in models if name != "hint"}
    times = {name: [s.low, s.median, s.high] for name, s in found.items()}
    return {**times, "hint_ms": [1e3 * race.latency(ANCHOR).median_s]}


def _lines_asked_for(given: argparse.Namespace) -> Path:
    """The file with the lines of the figures that the options ask for."""
    if given.ir:
        return given.tuned_ir_lines if given.tune else given.ir_lines
    return given.tuned_lines if given.tune else given.lines


def in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The line of one net, from a process of its own."""
    flags = {"--tune": given.tune, "--ir": given.ir}
    more = ["--exports", str(given.exports), *(name for name, on in flags.items() if on)]
    line = run_apart("bench_hint", [name, "--one", *more], limit_s=_LIMIT_S)
    return {"net": name, **line}


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    """The line of each net; of several the last one counts."""
    return {net: line for (net,), line in kept_lines(path, "net").items()}


def report_line(line: Mapping[str, Any]) -> None:
    """Report a net's figures beside the bars."""
    bench = f"hint {line['net']}"
    if "failed" in line:
        skip(bench, line["failed"])
        return
    row = Row(line)
    more, error = row.more_kernels, row.error(_ALL)
    report(bench, "kernels of all:bf16 over the hint's", round(more, 3), "x", bar=KERNELS)
    report(
        bench, "speed beside the hint", round(row.speed(_ALL), 3), "x", bar=SPEED,
        at_least=True,
    )  # fmt: skip
    bar = ERROR if row.same_low else None
    report(bench, "error over the hint's", round(error, 3), "x", bar=bar)


def report_tuned(line: Mapping[str, Any]) -> None:
    """Report whether the hint is better in both: a speed if its whole interval is below."""
    bench = f"hint {line['net']}, tune"
    if "failed" in line:
        skip(bench, line["failed"])
        return
    row = TunedRow(line)
    report(
        bench, "beaten by the hint in both", float(row.beaten), "", bar=0.0, speed=row.speed,
        error=round(row.error, 3), verdict=line["verdict"], seconds=round(line["seconds"]),
    )  # fmt: skip


def main() -> int:
    """Run the nets asked for, or all that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("net", nargs="*")
    parser.add_argument("--exports", type=Path, default=_BUILD / "hint-nets")
    parser.add_argument("--lines", type=Path, default=_BUILD / "hint.jsonl")
    parser.add_argument("--tuned-lines", type=Path, default=_BUILD / "hint-tuned.jsonl")
    parser.add_argument("--ir-lines", type=Path, default=_BUILD / "hint-ir.jsonl")
    parser.add_argument("--tuned-ir-lines", type=Path, default=_BUILD / "hint-tuned-ir.jsonl")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--ir", action="store_true", help="write OpenVINO's IR, by its hint")
    parser.add_argument("--write", action="store_true", help="the tables, of the lines kept")
    parser.add_argument("--one", action="store_true", help="one net, here; prints its line")
    given = parser.parse_args()
    if given.one:
        count_processor_time()
        net = hint_nets.net(given.net[0], given.exports)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / ("tuned.xml" if given.ir else "tuned.onnx")
            found = (
                tuned(net, made) if given.tune else measured(net, Path(folder), ir=given.ir)
            )
            print(json.dumps({"net": given.net[0], **found}))
        return 0
    if given.write:
        kept = (given.lines, given.tuned_lines, given.ir_lines, given.tuned_ir_lines)
        write_tables(*map(lines_of, kept))
        return 0
    print_environment()
    lines: Path = _lines_asked_for(given)
    lines.parent.mkdir(parents=True, exist_ok=True)
    before = {} if given.net else lines_of(lines)
    for name in given.net or hint_nets.known():
        line = before.get(name)
        if line is None:
            line = in_process(name, given)
            with lines.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(line) + "\n")
        (report_tuned if given.tune else report_line)(line)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of engines may keep the process from ending.
    os._exit(code)
