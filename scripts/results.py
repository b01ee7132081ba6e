"""Print the table of results of README.md, and draw a picture: the shared models, tuned here.

They are written as OpenVINO's IR, which states most plans: by casts, and by marks and a hint.

Times say something on an idle machine only. Models that are absent are left out, and a model
that gains nothing has its row, too. ``python scripts/results.py [MODEL ...]`` prints Markdown.
``--frontier FILE.svg`` draws the frontier of the first model, as it was measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import shared_case
from finecast import api
from finecast.data.function_workload import Run
from finecast.measure.environment import cpu_label, environment
from finecast.tuning.result import Result
from finecast_report.frontier import picture

_HEADS: Final = ("model", "accuracy, fp32 → tuned", "speed", "types", "evaluations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model of the table.

    Attributes:
        title: Its name there.
        key: The case's name of the metric.
        metric: The metric's name in the table.
        batch: Samples of a call; None where the case decides.
    """

    title: str
    key: str
    metric: str
    batch: int | None = None


ROWS: Final[Mapping[str, Row]] = {
    "cifar10_resnet20": Row(
        title="ResNet-20, CIFAR-10, batch 20", key="top1", metric="top-1", batch=20
    ),
    "sts_minilm_l6": Row(
        title="MiniLM-L6, sentence similarity", key="spearman", metric="Spearman", batch=16
    ),
    "speaker_ge2e_lstm": Row(
        title="speaker network (LSTM)", key="pair_auc", metric="AUC", batch=16
    ),
    "sst2_minilm_l6": Row(
        title="MiniLM-L6 with a probe, SST-2", key="accuracy", metric="accuracy", batch=16
    ),
    "vad_silero": Row(title="voice detector", key="frame_auc", metric="AUC"),
}


def main() -> None:
    """Tune each model once, and print its row."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(ROWS))
    asked.add_argument("--frontier", type=Path)
    given = asked.parse_args()
    unknown = [name for name in given.models if name not in ROWS]
    if unknown:
        asked.error(f"unknown {', '.join(unknown)}: use {', '.join(ROWS)}")
    print(f"Measured by `python scripts/results.py` on {cpu_label(environment())}.\n")
    print(_line(_HEADS))
    print(_line(["---"] * len(_HEADS)), flush=True)
    picture_of = given.frontier
    for name in given.models or ROWS:
        found = tuned(name)
        if found is None:
            continue
        print(_line(cells(found, ROWS[name])), flush=True)
        for text in found.warnings:
            print(f"{name}: warning: {text}", file=sys.stderr)
        if picture_of is not None:
            picture_of.write_text(picture(found.to_dict(), ROWS[name].title))
            picture_of = None


def tuned(name: str) -> Result | None:
    """A shared model tuned by its own metric; None where it is absent."""
    case, row = shared_case(name), ROWS[name]
    if case is None:
        return None
    sizes = {} if row.batch is None else {"batch": row.batch}

    def evaluate(run: Run) -> float:
        found = case.metric(lambda feeds: list(run(feeds).values()), **sizes)
        return float(found[row.key])

    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        return api.tune(
            case.model(),
            Path(folder) / "tuned.xml",
            evaluate=evaluate,
            calib=lambda: list(case.calib(8)),
            tolerance=0.005,
        )


def cells(found: Result, row: Row) -> list[str]:
    """The cells of a model's row."""
    before, after = (f"{one.metric:.4f}" for one in (found.baseline, found.tuned))
    types = ", ".join(f"{count} {label}" for label, count in found.counts.items())
    if not found.improved:
        accuracy, speed = f"{before} {row.metric}: stays in fp32", "1.00 x: nothing gained"
    else:
        accuracy, speed = f"{before} → {after} {row.metric}", f"{found.speedup:.2f} x"
    return [row.title, accuracy, speed, types, str(found.evaluations)]


def _line(parts: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    main()
