"""A library in a process of its own that crashes at the stage that its argument names."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from finecast.frontends import dry_run_worker

STAGE = sys.argv[1] if len(sys.argv) > 1 else ""  # without: read by a test


def _load(tell_stage: Callable[[str], None]) -> Any:
    def load(settings: Mapping[str, Any], model: str | bytes) -> Any:
        del settings, model
        for stage in ("read", "compiled"):
            tell_stage(stage)
            if stage == STAGE:
                os.kill(os.getpid(), signal.SIGSEGV)

        def run(feeds: dry_run_worker._Feeds) -> None:
            rows = len(feeds[0][1])
            if STAGE == "run" or (STAGE == "rows" and rows > 2):
                os.kill(os.getpid(), signal.SIGFPE)

        return dry_run_worker._Run(run)

    return load


dry_run_worker._LIBRARIES = {STAGE: _load}  # type: ignore[misc]
answer = dry_run_worker._Served(STAGE).answer
