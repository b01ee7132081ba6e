"""Starts a process for a network, holds it to its limits, and collects what it says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.outcome import BUILD, Outcome, Status

_STARTING_S = 180.0
"""For the imports and the building of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds by stage; memory of each process in 2**30 bytes; whether to measure speed."""

    seconds: Mapping[str, float]
    memory_gb: float = 8.0
    speed: bool = False
    command: tuple[str, ...] = (sys.executable, "-m", "zoo.one")


def run(network: str, stages: list[str], limits: Limits) -> Iterator[Outcome]:
    """The outcome of every stage; a process that is stopped or dies is followed by another."""
    folder = Path(tempfile.mkdtemp(prefix=f"zoo-{network}-"))
    waiting, failed = list(stages), list[str]()
    try:
        while waiting:
            for outcome in _Process(network, limits).outcomes(folder, list(waiting), failed):
                yield outcome
                if outcome.stage == BUILD:
                    return
                waiting.remove(outcome.stage)
                if outcome.status is not Status.OK:
                    failed.append(outcome.stage)
    finally:
        shutil.rmtree(folder)


class _Process:
    """One process, and the step it is in."""

    def __init__(self, network: str, limits: Limits) -> None:
        self.network, self.limits = network, limits
        self.stage, self.step, self.status = BUILD, "starting", Status.NETWORK
        self.start = time.monotonic()

    def outcomes(
        self, folder: Path, stages: list[str], failed: list[str]
    ) -> Iterator[Outcome]:
        """What the process finds, last the stage that it did not survive, if there is one."""
        command = [*self.limits.command, self.network, str(folder), *stages]
        command += ["--memory-gb", str(self.limits.memory_gb)]
        command += [f"--failed={name}" for name in failed]
        command += ["--speed"] if self.limits.speed else []
        with (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        try:
            for line in self._lines(process):
                if "outcome" in line:
                    found = Outcome.from_json(line["outcome"])
                    if found.stage in stages:
                        stages.remove(found.stage)
                    yield found
                    if not stages or found.stage == BUILD:
                        return
                self._note(line)
            said = (folder / "stderr").read_text(errors="replace").strip().splitlines()
            yield self._stopped(f"died ({process.wait()}) {' '.join(said[-1:])[:200]}", stages)
        except TimeoutError as error:
            yield self._stopped(str(error), stages)
        finally:
            # Its children too: the compilers that Inductor starts.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _stopped(self, why: str, stages: list[str]) -> Outcome:
        # Between two stages it is the next one that fails.
        stage = self.stage if self.stage in {BUILD, *stages} else stages[0]
        return Outcome(
            network=self.network,
            stage=stage,
            status=self.status,
            seconds=time.monotonic() - self.start,
            cause=f"{self.step}: {why}",
        )

    def _note(self, line: dict[str, Any]) -> None:
        if "stage" in line:
            self.stage, self.start = line["stage"], time.monotonic()
        if "step" in line:
            self.step, self.status = line["step"], Status(line["status"])

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        pipe, kept = process.stdout.fileno(), b""
        while True:
            limit = self.limits.seconds.get(self.stage, _STARTING_S)
            rest = self.start + limit - time.monotonic()
            if rest <= 0 or not select.select([pipe], [], [], rest)[0]:
                raise TimeoutError(f"stopped after {limit:.0f} s")
            read = os.read(pipe, 1 << 16)
            if not read:
                return
            *whole, kept = (kept + read).split(b"\n")
            yield from (json.loads(line) for line in whole)
