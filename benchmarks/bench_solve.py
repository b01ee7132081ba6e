"""Times of the solver against its bars, one JSON line each. Not a test.

Bars: one lambda over 100,000 ops in 0.5 s; the whole frontier of 10,000 ops in 5 s, with two
formats and with three.

    python benchmarks/bench_solve.py
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from itertools import permutations
from statistics import median
from time import perf_counter

import numpy as np
import scipy
from numpy.typing import NDArray

from finecast.planning.proposing import MAX_STEPS
from finecast.solver.assignment import PINNED_HIGH, Problem
from finecast.solver.expansion import envelope
from finecast.solver.frontier import frontier
from finecast.solver.labelling import LabelProblem, RoundingErrors, Rows
from finecast.solver.mincut import solve

_CAST_S = 12e-6  # time to launch a cast; the time of its transfer is added
_REPEATS = 5
# What each op of a block reads: ops of the same block, or -1 for the block before.
_BLOCK = (
    "-1 0,-1 1 2 3,-1 4 4 4 5 6 7 8,9 11 12 13,10 14 15 16,-1 17 18,17 19 20 21,20 22 23,17"
)


def _problem(producer_of: list[list[int]], seed: int, matmuls: NDArray[np.bool_]) -> Problem:
    """A random problem: op i reads ``producer_of[i]``, and one op in ten has two outputs."""
    rng = np.random.default_rng(seed)
    n = len(producer_of)
    extra = np.flatnonzero(rng.random(n) < 0.1)
    producer = np.concatenate([np.arange(n), extra, np.full(n // 10, PINNED_HIGH)])
    counts = [len(p) for p in producer_of]
    reader = np.repeat(np.arange(n), counts)
    read = np.concatenate([np.asarray(p, dtype=np.int64) for p in producer_of])
    late = np.minimum(extra + rng.integers(1, 30, len(extra)), n - 1)
    inputs = rng.integers(0, n, n // 10)
    value = np.concatenate([read, n + np.arange(len(extra) + len(inputs)), [n - 1]])
    unit = np.concatenate([reader, late, inputs, [PINNED_HIGH]])
    m = len(producer)
    elements = 10 ** rng.uniform(3, 6.5, m)
    cast = _CAST_S + elements * 6 / 1e10
    time = np.where(matmuls, 10 ** rng.uniform(-4, -2, n), 10 ** rng.uniform(-6, -4, n))
    speedup = np.where(matmuls, rng.uniform(1.5, 4, n), rng.uniform(0.8, 2, n))
    return Problem(
        time_high=time,
        time_low=np.where(rng.random(n) < 0.02, np.inf, time / speedup),
        error=10 ** rng.uniform(-9, -2, n),
        producer=producer,
        consumer_ptr=np.concatenate([[0], np.cumsum(np.bincount(value, minlength=m))]),
        consumer_unit=unit[np.argsort(value, kind="stable")],
        down_cost=cast,
        up_cost=cast,
        value_error=np.where(rng.random(m) < 0.5, 10 ** rng.uniform(-10, -4, m), 0.0),
    )


def transformer(n: int) -> Problem:
    """Blocks of 25 ops: a residual stream, three projections of one value, a long MLP."""
    block = [[int(k) for k in reads.split(",")] for reads in _BLOCK.split()]
    reads = [[max(b * 25 + k, 0) for k in op] for b in range(n // 25) for op in block]
    reads[0] = []
    matmul = np.isin(np.arange(len(reads)) % 25, [5, 6, 7, 11, 14, 16, 20, 23])
    return _problem(reads, 1, matmul)


def chain(n: int) -> Problem:
    """Small ops in one long line: casts cost more than most ops gain."""
    return _problem([[i - 1] if i else [] for i in range(n)], 2, np.arange(n) % 40 == 0)


def tangle(n: int) -> Problem:
    """Each op reads one to three of the 200 before it."""
    rng = np.random.default_rng(3)
    reads = [[]] + [
        [max(0, i - int(d)) for d in rng.integers(1, 200, int(rng.integers(1, 4)))]
        for i in range(1, n)
    ]
    return _problem(reads, 4, rng.random(n) < 0.3)


def third_format(of: Problem) -> LabelProblem:
    """The same ops with a second low format: most are faster in it, and all err more."""
    rng = np.random.default_rng(5)
    n, m = len(of.error), len(of.producer)
    lower = np.where(rng.random(n) < 0.1, np.inf, of.time_low * rng.uniform(0.5, 1.2, n))
    cast = np.zeros((3, 3, m))
    for a, b in permutations(range(3), 2):
        cast[a, b] = of.down_cost if a < b else of.up_cost
    reads = Rows(ptr=of.consumer_ptr, unit=of.consumer_unit)
    return LabelProblem(
        time=np.stack([of.time_high, of.time_low, lower], axis=1),
        error=np.stack([np.zeros(n), of.error, of.error * 10 ** rng.uniform(0, 2, n)], axis=1),
        producer=of.producer,
        consumers=reads,
        cast=cast,
        roundings=(
            RoundingErrors(rows=reads, error=of.value_error),
            RoundingErrors(rows=reads, error=of.value_error * 30),
        ),
    )


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    times: list[float] = []
    for _ in range(_REPEATS):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return median(times), max(times)


def _line(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")


def main() -> None:
    """Print the machine, then every measurement."""
    _line(
        machine=platform.machine(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        numpy=np.__version__,
        scipy=scipy.__version__,
    )
    for shape in (transformer, chain, tangle):
        problem = shape(100_000)
        for lam in (0.0, 0.1, 10.0, 1e3, 1e5):
            middle, worst = _timed(lambda p=problem, x=lam: solve(p, x))
            _line(
                bench="solve",
                shape=shape.__name__,
                ops=len(problem.error),
                lam=lam,
                low=int(solve(problem, lam).sum()),
                median_s=round(middle, 4),
                worst_s=round(worst, 4),
                bar_s=0.5,
            )
        problem = shape(10_000)
        middle, worst = _timed(lambda p=problem: frontier(p))
        three = third_format(problem)
        start = perf_counter()
        found = envelope(three, max_steps=MAX_STEPS)
        _line(
            bench="frontier of three formats",
            shape=shape.__name__,
            ops=len(problem.error),
            steps=len(found),
            seconds=round(perf_counter() - start, 4),
            bar_s=5.0,
        )
        steps = frontier(problem)
        _line(
            bench="frontier",
            shape=shape.__name__,
            ops=len(problem.error),
            steps=len(steps),
            fastest_s=round(steps[-1].time_s, 4),
            median_s=round(middle, 4),
            worst_s=round(worst, 4),
            bar_s=5.0,
        )


if __name__ == "__main__":
    main()
