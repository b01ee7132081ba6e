"""Every op that opsets define anew, raised from each opset to each later one, in both engines.

    python -m tests.conformance.opsets [--match REGEX] [--write docs/conformance.md]

Exits with 1 if a raised model computes other numbers in an engine than the model itself does.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx.opset import raise_as_far
from tests.conformance.opset_cases import CASES, OpsetCase
from tests.conformance.runners import NotRunError, Runner, by_onnxruntime, by_openvino

ENGINES: Final = {"ONNX Runtime": by_onnxruntime, "OpenVINO": by_openvino}
_TOLERANCE: Final = 1e-4
_MARKS: Final = ("<!-- opsets -->", "<!-- /opsets -->")
_NEW_LINE: Final = "\n"


class Reading(Enum):
    """What an engine makes of a raised model; the value is its name in the table."""

    SAME = "same"
    """The numbers of the model itself."""
    OWN = "as unraised"
    """What it makes of the model itself, too, where the engines differ."""
    REFUSED = "refused"
    """The model is not raised: a later opset cannot state it."""
    NOT_RUN = "not run"
    OTHER = "other"
    """Other numbers, shapes or types."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case, raised from one opset to another, in one engine."""

    case: OpsetCase
    own: int
    to: int
    engine: str
    reading: Reading
    why: str = ""


def cells(case: OpsetCase, own: int, targets: Iterable[int], folder: Path) -> list[Cell]:
    """What both engines make of ``case`` at ``own``, raised as far as each of ``targets``.

    Numbers are compared with those of the model itself: in ONNX Runtime, where that runs it.
    """
    made = case.model(own)
    x = np.random.default_rng(0).normal(size=case.shape).astype(np.float32)
    feeds = {"x": np.abs(x) if "LogSum" in case.text else x}
    before = {name: _run(made, feeds, engine, folder) for name, engine in ENGINES.items()}
    truth = next((b for b in before.values() if not isinstance(b, str)), None)
    assert truth is not None, f"no engine runs {case.text} at opset {own}: {before}"
    found: list[Cell] = []
    for to in targets:
        try:
            model = ir.from_proto(made)
            raised = ir.to_proto(raise_as_far(model, [to])) if to > own else made
        except ModelError as error:
            readings = dict.fromkeys(ENGINES, (Reading.REFUSED, error.what))
        else:
            readings = {
                name: _reading(_run(raised, feeds, engine, folder), truth, before[name])
                for name, engine in ENGINES.items()
            }
        found += [
            Cell(case=case, own=own, to=to, engine=engine, reading=kind, why=why)
            for engine, (kind, why) in readings.items()
        ]
    return found


def _run(
    model: onnx.ModelProto, feeds: dict[str, Any], engine: Runner, folder: Path
) -> list[Any] | str:
    """The outputs of ``model``, or why it does not run."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    try:
        return engine(path, feeds)
    except NotRunError as error:
        return str(error)


def _reading(
    got: list[Any] | str, truth: Sequence[Any], own: list[Any] | str
) -> tuple[Reading, str]:
    if isinstance(got, str):
        return Reading.NOT_RUN, got
    problem = _difference(got, truth)
    if not problem:
        return Reading.SAME, ""
    unchanged = not isinstance(own, str) and not _difference(got, own)
    return (Reading.OWN if unchanged else Reading.OTHER), problem


def _difference(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """How the outputs ``got`` differ from those ``wanted``; nothing if they do not."""
    for index, (value, want) in enumerate(zip(got, wanted, strict=True)):
        a, b = np.asarray(value), np.asarray(want)
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
        low, high = a.astype(np.float64), b.astype(np.float64)
        scale = float(np.max(np.abs(high), initial=1.0))
        if not np.allclose(low, high, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
            return f"output {index} differs by {np.max(np.abs(low - high)):.3g}"
    return ""


def table(found: Sequence[Cell]) -> str:
    """One row for each op; then one line for each reading that is not the model's own."""
    rows = [["op", "models", *ENGINES]]
    for op, cells_of in _grouped(found, lambda c: c.case.op):
        models = len({(c.case, c.own) for c in cells_of})
        by_engine = [[c for c in cells_of if c.engine == e] for e in ENGINES]
        rows.append([op, str(models), *(_counts(c) for c in by_engine)])
    lines = ["| " + " | ".join(r) + " |" for r in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    unequal = [c for c in found if c.reading is not Reading.SAME]
    kinds = _grouped(unequal, lambda c: (c.case, c.engine, c.reading, c.why))
    notes = [
        f"- `{case.text.replace(_NEW_LINE, '; ')}` in {engine}: {kind.value}"
        f" {_raisings(cells_of)}: {why}"
        for (case, engine, kind, why), cells_of in kinds
    ]
    return "\n".join([*lines, "", *notes])


def _raisings(found: Sequence[Cell]) -> str:
    """From which opsets to which ones."""
    return ", ".join(
        f"{own} to {'/'.join(str(c.to) for c in cells_of)}"
        for own, cells_of in _grouped(found, lambda c: c.own)
    )


def _counts(found: Sequence[Cell]) -> str:
    counts = Counter(c.reading for c in found)
    return ", ".join(f"{counts[r]} {r.value}" for r in Reading if counts[r])


def _grouped(
    found: Sequence[Cell], key: Callable[[Cell], Any]
) -> list[tuple[Any, list[Cell]]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in found:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.items())


def main(arguments: Sequence[str]) -> int:
    """Raise all cases, print the table, and write it between its marks in a page."""
    parser = argparse.ArgumentParser(prog="opsets", description=__doc__)
    parser.add_argument("--match", default="", metavar="REGEX", help="only ops so written")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page with the table")
    options = parser.parse_args(arguments)
    found: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        for case in CASES:
            if re.search(options.match, case.text):
                for own in case.opsets:
                    targets = [v for v in case.later if v >= own]
                    found += cells(case, own, targets, Path(folder))
    text = table(found)
    sys.stdout.write(f"{text}\n{_counts(found)}\n")
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(_MARKS[0])
        _, after = rest.split(_MARKS[1])
        options.write.write_text(
            f"{before}{_MARKS[0]}\n\n{text}\n\n{_MARKS[1]}{after}", encoding="utf-8"
        )
    return int(any(c.reading is Reading.OTHER for c in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
