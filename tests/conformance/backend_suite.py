"""ONNX's own test suite through finecast: every case has an outcome and a reason.

    python -m tests.conformance.backend_suite [--format bf16|fp16|int8] [--sample N]
                                              [--match REGEX] [--write docs/operators.md]

Exits with 1 if a model is invalid though it was not before, fails to convert, or disagrees.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from finecast.numbers.formats import Format
from tests.conformance.cases import LIGHT, Case, all_cases
from tests.conformance.outcome import Outcome, Result, outcome
from tests.conformance.runners import ENGINES
from tests.conformance.table import page

FORMATS: Final = (Format.BF16, Format.FP16)
OF_NETS: Final = (*FORMATS, Format.INT8)
"""Formats that whole nets are converted to; single ops are not run in int8."""
BAD: Final = frozenset({Result.FAILED, Result.INVALID, Result.DISAGREES})


def run(cases: Sequence[Case], formats: Sequence[Format]) -> list[Outcome]:
    """Outcomes of all cases under all formats, in this process."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        return [outcome(c, f, Path(folder)) for f in formats for c in cases]


def run_apart(cases: Sequence[Case], formats: Sequence[Format]) -> list[Outcome]:
    """The same in a process of its own, as engines crash on some cases."""
    found: list[Outcome] = []
    with ExitStack() as stack:
        pool = stack.enter_context(_pool())
        for fmt in formats:
            for case in (c for c in cases if c.kind == LIGHT or fmt in FORMATS):
                for skipped in range(len(ENGINES.get(fmt.label, ())) + 1):
                    job = pool.submit(_one, case, fmt, skipped)
                    try:
                        found.append(job.result())
                        break
                    except BrokenProcessPool:
                        pool = stack.enter_context(_pool())
                else:
                    found.append(
                        Outcome(
                            case=case.name,
                            kind=case.kind,
                            op=case.op,
                            format=fmt.label,
                            result=Result.FAILED,
                            reason="crashes in every engine",
                        )
                    )
    return found


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _one(case: Case, fmt: Format, skipped: int) -> Outcome:
    """One case, in the worker; the first ``skipped`` engines crashed on it."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        return outcome(case, fmt, Path(folder), skipped=skipped)


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """``count`` cases spread evenly over all of them, always the same."""
    if count >= len(cases):
        return list(cases)
    return [cases[i * len(cases) // count] for i in range(count)]


def main(arguments: Sequence[str]) -> int:
    """Run the suite and print its totals."""
    parser = argparse.ArgumentParser(prog="backend_suite", description=__doc__)
    parser.add_argument("--format", choices=[f.label for f in OF_NETS])
    parser.add_argument("--sample", type=int, metavar="N", help="only N cases, spread evenly")
    parser.add_argument("--match", default="", metavar="REGEX", help="only cases so named")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the generated page")
    options = parser.parse_args(arguments)
    formats = [Format.parse(options.format)] if options.format else list(OF_NETS)
    cases = [c for c in all_cases() if re.search(options.match, c.name)]
    cases = sample(cases, options.sample or len(cases))
    start = time.perf_counter()
    outcomes = run_apart(cases, formats)
    for (fmt, result), count in sorted(
        Counter((o.format, o.result.value) for o in outcomes).items()
    ):
        sys.stdout.write(f"{fmt:5} {count:5} {result}\n")
    for o in outcomes:
        if o.result in BAD:
            sys.stdout.write(f"{o.case} {o.format}: {o.result.value}: {o.reason}\n")
    sys.stdout.write(f"{len(cases)} cases, {time.perf_counter() - start:.0f} s\n")
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        single = [o for o in outcomes if o.kind != LIGHT]
        options.write.write_text(page(single), encoding="utf-8")
    return int(any(o.result in BAD for o in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
