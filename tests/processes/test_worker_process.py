"""A worker ends with the process that asks it, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ASKS = """
import sys
from finecast.processes.worker import Worker
worker = Worker(sys.argv[1], instead=None)
print(worker.start().process.pid, flush=True)
worker.call({}, tell=lambda status, text: print(text, flush=True))
"""
SLEEPS = """
import subprocess, sys, time

def answer(request, payload, tell):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tell(f"{child.pid}", "stdout")
    time.sleep(600)
"""


IMPORTS = "import time; time.sleep(600)"

pytestmark = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="Windows has no groups of processes"
)


@pytest.mark.parametrize("served", [SLEEPS, IMPORTS], ids=["it answers", "it imports"])
def test_neither_it_nor_what_it_started_outlives_a_caller_that_is_killed(
    tmp_path: Path, served: str
) -> None:
    (tmp_path / "served.py").write_text(served)
    command = [sys.executable, "-c", ASKS, str(tmp_path / "served.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        left = [int(caller.stdout.readline())]
        if served is SLEEPS:
            left.append(int(caller.stdout.readline()))
        else:  # until it has begun to import
            wait_until(lambda: b"served.py" in _command_of(left[0]))
        caller.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(_runs, left)))
    assert not any(map(_runs, left))


def wait_until(done: Callable[[], bool], most_s: float = 30.0) -> None:
    end = time.monotonic() + most_s
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def _command_of(number: int) -> bytes:
    return Path(f"/proc/{number}/cmdline").read_bytes()


def _runs(number: int) -> bool:
    """Whether a process runs; one that nobody waits for may be left as a zombie."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
