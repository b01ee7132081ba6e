"""The process that takes one network through some stages: ``python -m zoo.one``."""

from __future__ import annotations

import argparse
import os
import resource
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from zoo import libraries
from zoo.job import Found, Job
from zoo.networks import NETWORKS
from zoo.outcome import (
    BUILD,
    Outcome,
    StageError,
    Status,
    WrongNumbersError,
    during,
    own_stdout,
    say,
    traceback_of,
)
from zoo.stages import STAGES

_OTHER_INPUTS: Final = (1, 2)
"""Seeds of the inputs that are tried where the first give wrong numbers."""


def main() -> None:
    """Say one line for each step as it begins, and one for each stage as it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--memory-gb", type=float, required=True)
    parser.add_argument("--failed", action="append", default=[], help="stages that failed")
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    limit = int(given.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    own_stdout()
    warnings.simplefilter("ignore")
    network = NETWORKS[given.network]
    try:
        with during(Status.NETWORK, "building"):
            libraries.prepare()
            net, inputs = network.make()
    except StageError as error:
        _tell(_failed(network.name, BUILD, error))
        return
    job = Job(network=network, net=net, inputs=inputs, folder=given.folder, speed=given.speed)
    failed = set[str](given.failed)
    for stage in given.stages:
        say({"stage": stage})
        outcome = run(job, stage, failed)
        if outcome.status is not Status.OK:
            failed.add(stage)
        _tell(outcome)
        torch.compiler.reset()


def run(job: Job, stage: str, failed: set[str]) -> Outcome:
    """One stage; exceptions become its outcome."""
    start = time.perf_counter()
    name, needs = job.network.name, STAGES[stage].needs
    if failed.intersection(needs):
        cause = f"needs {', '.join(needs)}"
        return Outcome(network=name, stage=stage, status=Status.SKIPPED, cause=cause)
    try:
        found = _work(job, stage)
    except StageError as error:
        return replace(_failed(name, stage, error), seconds=time.perf_counter() - start)
    return Outcome(
        network=name,
        stage=stage,
        status=Status.OK,
        seconds=time.perf_counter() - start,
        figures=dict(found.figures),
        notes=found.notes,
    )


def _work(job: Job, stage: str) -> Found:
    """What the stage finds; wrong numbers have to be wrong for other inputs, too.

    A network that chooses by numbers, as one of experts does, chooses otherwise now and then
    where two are nearly equal: a rounding tips it, whoever rounds. A fault is there always.
    """
    try:
        return _once(job, stage)
    except WrongNumbersError as error:
        wrong = error
    others = [_once(_redrawn(job, seed), stage) for seed in _OTHER_INPUTS]
    note = f"a choice was tipped for one of three inputs: {wrong.cause}"
    return replace(others[-1], notes=(*others[-1].notes, note))


def _redrawn(job: Job, seed: int) -> Job:
    torch.manual_seed(seed)
    return replace(job, inputs=job.network.inputs())


def _once(job: Job, stage: str) -> Found:
    torch.compiler.reset()
    torch.manual_seed(0)
    with during(Status.NETWORK, stage):
        return STAGES[stage].work(job)


def _failed(network: str, stage: str, error: StageError) -> Outcome:
    return Outcome(
        network=network,
        stage=stage,
        status=error.status,
        cause=error.cause,
        trace=traceback_of(error),
    )


def _tell(outcome: Outcome) -> None:
    say({"outcome": outcome.as_json()})


if __name__ == "__main__":
    main()
    # Engines' own threads may keep a process that is done.
    os._exit(0)
