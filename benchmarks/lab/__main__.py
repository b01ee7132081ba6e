"""Searches on simulated nets: seconds, evaluations, regret and losses on new data.

    python -m benchmarks.lab                        # 105 nets, 3 seeds each; also ``make lab``
    python -m benchmarks.lab --families cnn mobile --nets 40 --seeds 20
    python -m benchmarks.lab --json
    python -m benchmarks.lab record MODEL --data DATA --write build/lab/recordings
    python -m benchmarks.lab fit build/lab/recordings
    python -m benchmarks.lab bound                  # what samples tell, whatever the search

Nets of architectures and seeds that nobody looked at are for the last run alone: --held-out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks.common import count, print_environment
from benchmarks.lab import bound, recording
from benchmarks.lab.figures import ALL, Run, all_runs, summed_up
from benchmarks.lab.nets import Key
from benchmarks.lab.searches import SEARCHES

_COLUMNS: Final = {
    "nets": "nets",
    "s": "seconds_median",
    "s 90%": "seconds_p90",
    "evals": "evaluations_median",
    "evals 95%": "evaluations_p95",
    "<= 5": "within_5_evaluations",
    "regret": "regret_mean",
    "regret 90%": "regret_p90",
    "accepted": "accepted",
    "loses": "loses_too_much",
    "same": "same_in_all_seeds",
    "told off": "told_off_median",
}
_SHARES: Final = frozenset(
    {"<= 5", "regret", "regret 90%", "accepted", "loses", "same", "told off"}
)
_VERBS: Final = {
    "record": recording.record_main,
    "fit": recording.fit_main,
    "bound": bound.main,
}
_WARNING: Final = (
    "held-out nets: this is for the last run. Whoever changes a search after looking at these"
    " figures has no nets left that tell whether it carries over."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run searches on nets and print a line for each family, and one for all."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in _VERBS:
        _VERBS[given[0]](given[1:])
        return
    asked = _parser().parse_args(given)
    if asked.held_out:
        print(_WARNING, file=sys.stderr)
    start = time.perf_counter()
    keys = [
        Key(family=family, held_out=asked.held_out, seed=asked.first + number)
        for number in range(asked.nets)
        for family in asked.families
    ]
    runs: list[Run] = []
    for of_net in all_runs(keys, asked.searches, asked.seeds, asked.jobs):
        runs += of_net
        print(f"\r{len(runs)} runs", end="", file=sys.stderr, flush=True)
    print(f" in {time.perf_counter() - start:.0f} s of this machine", file=sys.stderr)
    if asked.json:
        print_environment()
        for run in runs:
            print(json.dumps(asdict(run)))
    for search in asked.searches:
        of = [run for run in runs if run.search == search]
        groups = {name: [r for r in of if r.family == name] for name in asked.families}
        figures = {name: summed_up(some) for name, some in (*groups.items(), ("all", of))}
        if asked.json:
            for name, summary in figures.items():
                print(json.dumps({"search": search, "family": name, **summary}))
        else:
            _print_table(search, figures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=[*SEARCHES])
    parser.add_argument("--families", nargs="+", choices=ALL, default=[*ALL])
    parser.add_argument("--nets", type=count, default=15, help="of each family (default: 15)")
    parser.add_argument(
        "--first", type=int, default=0, help="the first net's seed (default: 0)"
    )
    parser.add_argument("--seeds", type=count, default=3, help="runs of each (default: 3)")
    parser.add_argument("--jobs", type=count, default=2, help="processes (default: 2)")
    parser.add_argument("--held-out", action="store_true", help="for the last run alone")
    parser.add_argument(
        "--json", action="store_true", help="lines of JSON: runs, then figures"
    )
    return parser


def _print_table(search: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """A row of each family, and one of all."""
    print("| " + " | ".join([search, *_COLUMNS]) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for name, row in figures.items():
        cells = [_cell(column, row[key]) for column, key in _COLUMNS.items()]
        print("| " + " | ".join([name, *cells]) + " |")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if column in _SHARES else f"{value:g}"


if __name__ == "__main__":
    main()
