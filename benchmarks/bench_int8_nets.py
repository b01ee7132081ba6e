"""``tune`` over int8 on every net on which the plain all-int8 model errs too much.

    python -m benchmarks.bench_int8_nets [--isa ISA] [--exports FOLDER] [--lines FILE] [NET ..]
    python -m benchmarks.bench_int8_nets --write

The criterion of a net is half of the error that it has all in int8, so that all int8 misses
it. Of the model that ``tune`` gives these are measured after it is loaded again: its error
against fp32 over eight inputs; its speed against fp32, and against bf16 where that keeps the
criterion; and the ops planned in int8 that no kernel ran on integers. ``--isa
AVX512_CORE_VNNI`` limits OpenVINO to the instructions of a CPU without bf16. Each net runs in
a process of its own on one core, and times are processor time. A net that has a line in the
file is not run again, unless it is named. The zoo's nets need the interpreter of
``.venv-zoo``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import hint_nets
from benchmarks.bench_hint import copies, errors, together
from benchmarks.common import (
    count_processor_time,
    kept_lines,
    print_environment,
    report,
    run_apart,
    skip,
)
from benchmarks.hint_kernels import Compiled
from benchmarks.int8_table import (
    BF16,
    FP32,
    INT8,
    NATIVE,
    TUNED,
    IntegerRow,
    write_table,
)
from finecast import api
from finecast.data.function_workload import Run
from finecast.engines import get_engine
from finecast.engines.integers import not_as_planned
from finecast.errors import FinecastError
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan

_BUILD: Final = Path(__file__).resolve().parents[1] / "build"
_EFFORT: Final = Effort(min_time_s=1.0, settle_s=3.0)
_LIMIT_S: Final = 420
_ISA_LIMIT: Final = "ONEDNN_MAX_CPU_ISA"
_INTEGERS: Final = (Format.INT8, Format.INT8_WEIGHTS)
_SHARE: Final = 0.5


def measured(net: hint_nets.Net, folder: Path) -> dict[str, Any]:
    """All figures of one net; only the reason if all int8 fails, or has no error."""
    files = {name: folder / f"{name}.onnx" for name in (INT8, BF16, TUNED)}
    calib = lambda: net.feeds  # noqa: E731
    try:
        for name in (INT8, BF16):
            api.convert(
                net.model, files[name], f"all:{name}", engine="openvino", verify=False,
                data=api.DataOptions(calib=calib),
            )  # fmt: skip
    except FinecastError as error:
        return {"nothing": str(error)[:200]}
    models = {FP32: Compiled.of(net.model, "f32")}
    models |= {n: Compiled.of(f, "f32") for n, f in files.items() if f.is_file()}
    ends = errors(models, net.feeds)
    allowed = _SHARE * ends[INT8]
    if not allowed > 0:
        return {"nothing": f"all of it in int8 has an error of {ends['int8']:.3g}"}
    outcome = tuned(net, models[FP32], files[TUNED], allowed)
    if outcome.improved:
        models[TUNED] = Compiled.of(files[TUNED], "f32")
    return {
        "allowed": allowed,
        "verdict": outcome.verdict.value,
        "why": outcome.why,
        "ops": dict(outcome.counts),
        "evaluations": outcome.evaluations,
        "seconds": outcome.seconds,
        "not_on_integers": floats_of(outcome.plan, net, files[TUNED]),
        "errors": errors(models, net.feeds),
        "speed": speeds(models, net),
    }


def tuned(net: hint_nets.Net, fp32: Compiled, output: Path, allowed: float) -> Any:
    """The outcome of ``tune`` where this error is ``allowed``."""
    wanted = [copies(fp32, given) for given in net.feeds]

    def score(run: Run) -> float:
        return 1.0 - together([[*run(given).values()] for given in net.feeds], wanted)

    return api.tune(
        net.model, output, evaluate=score, calib=lambda: net.feeds, criterion="absolute",
        tolerance=allowed, engine="openvino",
    )  # fmt: skip


def floats_of(plan: Plan, net: hint_nets.Net, output: Path) -> dict[str, str]:
    """Ops planned in int8 that run otherwise in the model that was written."""
    planned = {name: fmt for name, fmt in plan.formats.items() if fmt in _INTEGERS}
    if not planned or not output.is_file():
        return {}
    session = get_engine("openvino").load(output, profiling=True)
    return not_as_planned(session.profile(net.feeds[0]), planned)


def speeds(models: Mapping[str, Compiled], net: hint_nets.Net) -> dict[str, Any]:
    """How many times as fast as each model the result is: low, median, high."""

    def call(model: Compiled) -> Callable[[], object]:
        return lambda: model.run(net.feeds[0])

    result = TUNED if TUNED in models else FP32
    others = {f"{name} model": call(m) for name, m in models.items() if name != result}
    race = Race.of(call(models[result]), others, _EFFORT)
    found = {name: race.slowdown(f"{name} model") for name in models if name != result}
    times = {name: [s.low, s.median, s.high] for name, s in found.items()}
    return {**times, "ms": 1e3 * race.latency(ANCHOR).median_s}


def in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The line of one net, from a process of its own."""
    held = {} if given.isa == NATIVE else {_ISA_LIMIT: given.isa}
    more = ["--exports", str(given.exports), "--core", str(given.core)]
    line = run_apart("bench_int8_nets", [name, "--one", *more], limit_s=_LIMIT_S, held=held)
    return {"net": name, **line, "isa": given.isa}


def report_line(line: Mapping[str, Any]) -> None:
    """Report a net's figures beside the bars."""
    bench = f"int8 of {line['net']}, {line['isa']}"
    why = line.get("failed") or line.get("nothing")
    if why:
        skip(bench, why)
        return
    row = IntegerRow(line)
    report(
        bench, "error over the criterion's", round(row.error, 3), "x", bar=1.0,
        verdict=line["verdict"], ops=line["ops"], seconds=round(line["seconds"]),
    )  # fmt: skip
    report(
        bench, "slower than the best without int8", float(row.slower), "", bar=0.0,
        speed=row.speed,
    )  # fmt: skip
    report(
        bench, "ops planned in int8 and run in floats", len(line["not_on_integers"]), "",
        bar=0.0, which=line["not_on_integers"],
    )  # fmt: skip


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("net", nargs="*")
    parser.add_argument("--isa", default=NATIVE)
    parser.add_argument("--exports", type=Path, default=_BUILD / "hint-nets")
    parser.add_argument("--lines", type=Path, default=_BUILD / "int8-nets.jsonl")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--write", action="store_true", help="the table, of the lines kept")
    parser.add_argument("--one", action="store_true", help="one net, here; prints its line")
    return parser.parse_args(given)


def _one(given: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {given.core})
    count_processor_time()
    net = hint_nets.net(given.net[0], given.exports)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"net": given.net[0], **measured(net, Path(folder))}))


def main() -> int:
    """Run the nets asked for, or all that have no line yet."""
    given = _arguments()
    if given.one:
        _one(given)
        return 0
    if given.write:
        write_table(given.lines)
        return 0
    print_environment()
    given.lines.parent.mkdir(parents=True, exist_ok=True)
    before = {} if given.net else kept_lines(given.lines, "net", "isa")
    for name in given.net or hint_nets.known():
        line = before.get((name, given.isa))
        if line is None:
            line = in_process(name, given)
            with given.lines.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(line) + "\n")
        report_line(line)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of engines may keep the process from ending.
    os._exit(code)
