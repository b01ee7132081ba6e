"""Runs of searches on simulated nets, and the figures that sum them up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any, Final

import numpy as np

from benchmarks.lab import drawn, enumerated
from benchmarks.lab.architectures import FAMILIES
from benchmarks.lab.nets import ENUMERATED, Key, Net
from benchmarks.lab.searches import SEARCHES
from benchmarks.lab.simulation import Simulation

ALL: Final = (*(family.name for family in FAMILIES), ENUMERATED)
"""All families."""

SAME: Final = 1.02
"""Plans whose times have at most this ratio are the same result."""

MOST_EVALUATIONS: Final = 5
"""As the issue of the one search has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a search on a net; all of it is simulated.

    Attributes:
        search: Its name.
        net: The net's name.
        family: Its family.
        architecture: Its architecture.
        ops: Its ops.
        seed: The seed of the noise.
        seconds: What the run took.
        evaluations: Evaluations on all data.
        accepted: Whether a plan was chosen, rather than fp32.
        loss: The true loss of what was chosen, over what may be lost.
        true_s: The true time of what was chosen.
        best_s: That of the best plan that is known.
        fp32_s: That of fp32.
        told: The speed that the search tells, over the true one.
        expected: The loss on new data that the search expects, if it says so.
        beaten: Whether a search evaluated a faster valid plan than the long search knew.
    """

    search: str
    net: str
    family: str
    architecture: str
    ops: int
    seed: int
    seconds: float
    evaluations: int
    accepted: bool
    loss: float
    true_s: float
    best_s: float
    fp32_s: float
    told: float
    expected: float | None = None
    beaten: bool = False

    @property
    def valid(self) -> bool:
        """Whether what was chosen loses no more than is allowed, on new samples."""
        return self.loss <= 1

    @property
    def regret(self) -> float:
        """How much longer it takes than the best valid plan, as a share; 0 if shorter."""
        return max(self.true_s / self.best_s - 1, 0.0)


def net_of(key: Key) -> Net:
    """The net of a key."""
    return enumerated.draw(key) if key.family == ENUMERATED else drawn.draw(key)


def run_of(net: Net, search: str, seed: int) -> tuple[Run, float]:
    """One run of a search, and the true time of the fastest valid plan that it evaluated."""
    simulation = Simulation(net=net, seed=seed)
    with simulation.clock.in_place():
        chosen = SEARCHES[search](simulation)
    fp32_s, plan = net.fp32_s, chosen.plan
    true_s = fp32_s if plan is None else net.true_s(plan)
    valid = (p for p in simulation.plans.values() if net.loss(p) <= 1)
    run = Run(
        search=search,
        net=net.key.name,
        family=net.key.family,
        architecture=net.architecture,
        ops=simulation.ops,
        seed=seed,
        seconds=simulation.clock.now_s,
        evaluations=chosen.evaluations,
        accepted=plan is not None,
        loss=0.0 if plan is None else net.loss(plan),
        true_s=true_s,
        best_s=min(net.best.time_s, fp32_s),
        fp32_s=fp32_s,
        told=chosen.speedup * true_s / fp32_s,
        expected=chosen.loss,
    )
    return run, min(map(net.true_s, valid), default=fp32_s)


def runs_of(key: Key, searches: Sequence[str], seeds: int) -> list[Run]:
    """The runs of searches on one net.

    The best plan is that of the long search, or a faster valid one that any of them evaluated.
    """
    net = net_of(key)
    timed_runs = [run_of(net, search, seed) for search in searches for seed in range(seeds)]
    fastest_s = min(s for _, s in timed_runs)
    return [
        replace(run, best_s=min(run.best_s, fastest_s), beaten=fastest_s < run.best_s)
        for run, _ in timed_runs
    ]


def all_runs(
    keys: Sequence[Key], searches: Sequence[str], seeds: int, jobs: int
) -> Iterator[list[Run]]:
    """The runs on all nets, in their order, in ``jobs`` processes."""
    work = partial(runs_of, searches=searches, seeds=seeds)
    if jobs <= 1:
        yield from map(work, keys)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process has its own threads else
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(work, keys)


def summed_up(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of some runs of one search."""
    seconds = [r.seconds for r in runs]
    evaluations = [r.evaluations for r in runs]
    regrets = [r.regret for r in runs if r.valid]
    accepted = [r for r in runs if r.accepted]
    nets = _by_net(runs)
    same = [max(times) <= SAME * min(times) for times in nets.values()]
    return {
        "nets": len(nets),
        "runs": len(runs),
        "seconds_median": round(median(seconds), 1),
        "seconds_p90": round(_quantile(seconds, 0.9), 1),
        "evaluations_median": median(evaluations),
        "evaluations_p95": _quantile(evaluations, 0.95),
        "within_5_evaluations": round(mean(e <= MOST_EVALUATIONS for e in evaluations), 3),
        "regret_mean": round(mean(regrets), 4) if regrets else None,
        "regret_median": round(median(regrets), 4) if regrets else None,
        "regret_p90": round(_quantile(regrets, 0.9), 4) if regrets else None,
        "accepted": round(len(accepted) / len(runs), 3),
        "loses_too_much": round(mean(not r.valid for r in accepted), 4) if accepted else None,
        "same_in_all_seeds": round(mean(same), 3),
        "speedup_mean": round(mean(r.fp32_s / r.true_s for r in runs), 3),
        "best_speedup_mean": round(mean(r.fp32_s / r.best_s for r in runs), 3),
        "best_beaten": round(mean(r.beaten for r in runs), 4),
        "told_off_median": round(median(abs(r.told - 1) for r in accepted), 4)
        if accepted
        else None,
    }


def _by_net(runs: Iterable[Run]) -> Mapping[str, list[float]]:
    times: dict[str, list[float]] = {}
    for run in runs:
        times.setdefault(run.net, []).append(run.true_s)
    return times


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="higher"))
