"""The process that takes one network through some stages: ``python -m zoo.one``."""

from __future__ import annotations

import argparse
import os
import resource
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from zoo import libraries
from zoo.job import Job
from zoo.networks import NETWORKS
from zoo.outcome import (
    BUILD,
    Outcome,
    StageError,
    Status,
    during,
    own_stdout,
    say,
    traceback_of,
)
from zoo.stages import STAGES


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
    torch.manual_seed(0)
    name, needs = job.network.name, STAGES[stage].needs
    if failed.intersection(needs):
        cause = f"needs {', '.join(needs)}"
        return Outcome(network=name, stage=stage, status=Status.SKIPPED, cause=cause)
    try:
        with during(Status.NETWORK, stage):
            found = STAGES[stage].work(job)
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
