"""``python -m zoo``: run the architectures and report on them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from zoo import report, running
from zoo.networks import NETWORKS, SAMPLE
from zoo.outcome import Outcome, Status
from zoo.stages import STAGES


def main() -> int:
    """Exit code 1 if a failure is finecast's, or a network cannot be built."""
    given = _arguments()
    names: list[str] = given.names or list(SAMPLE if given.sample else NETWORKS)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    known = _read(given.json) if given.keep else []
    wanted: list[str] = given.stage or list(STAGES)
    done = {(o.network, o.stage) for o in known} if given.resume else set[tuple[str, str]]()
    if not given.report_only:
        seconds = {name: stage.limit_s for name, stage in STAGES.items()}
        limits = running.Limits(seconds=seconds, memory_gb=given.memory_gb, speed=given.speed)
        for number, name in enumerate(names, 1):
            stages = [s for s in wanted if (name, s) not in done]
            sys.stderr.write(f"[{number}/{len(names)}] {name}\n")
            for outcome in running.run(name, stages, limits):
                known = [o for o in known if not o.replaced_by(outcome)] + [outcome]
                _tell(outcome)
                _write(given.json, known)
    if given.write:
        given.write.write_text(report.render(known), encoding="utf-8")
    chosen = [o for o in known if o.network in names]
    counts = Counter(o.status for o in chosen)
    sys.stderr.write(", ".join(f"{n} {status}" for status, n in counts.items()) + "\n")
    return int(bool(counts[Status.FINECAST] + counts[Status.NETWORK]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    parser.add_argument("--sample", action="store_true", help=f"only {', '.join(SAMPLE)}")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one")
    parser.add_argument("--json", type=Path, default=Path("build/zoo.jsonl"))
    parser.add_argument("--resume", action="store_true", help="leave out what --json has")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, help="the report: docs/zoo.md")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="of each process")
    parser.add_argument("--speed", action="store_true", help="on a quiet machine only")
    given = parser.parse_args()
    partly = given.names or given.stage or given.resume or given.report_only
    given.keep = bool(partly)  # what --json has of the rest stays there
    for name in given.names:
        if name not in NETWORKS:
            parser.error(f"no network {name!r}: use {', '.join(NETWORKS)}")
    return given


def _tell(outcome: Outcome) -> None:
    line = f"  {outcome.stage:12s} {outcome.status:8s} {outcome.seconds:5.1f} s"
    figures = "  ".join(f"{name} {value:.3g}" for name, value in outcome.figures.items())
    sys.stderr.write(f"{line}  {outcome.cause or figures}\n")


def _read(path: Path) -> list[Outcome]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Outcome.from_json(json.loads(line)) for line in lines]


def _write(path: Path, outcomes: list[Outcome]) -> None:
    lines = (json.dumps(outcome.as_json()) + "\n" for outcome in outcomes)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
