"""A worker ends with the process that asks it, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ASKS = """
import sys
from finecast.processes.worker import Worker
worker = Worker(sys.argv[1], instead=None)
worker.ask({}, tell=lambda status, text: print(text, flush=True))
"""
SLEEPS = """
import subprocess, sys, time

def answer(request, payload, tell):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tell(f"{child.pid}", "stdout")
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no groups of processes")
def test_neither_it_nor_what_it_started_outlives_a_caller_that_is_killed(
    tmp_path: Path,
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    command = [sys.executable, "-c", ASKS, str(tmp_path / "sleeps.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        child = int(caller.stdout.readline())
        worker = os.getpgid(child)  # it leads the group of what it starts
        assert worker not in (os.getpgid(0), caller.pid)
        caller.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(_runs, (worker, child))) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _runs(worker)
    assert not _runs(child)


def _runs(number: int) -> bool:
    """Whether a process runs; one that nobody waits for may be left as a zombie."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
