"""Processes of finecast's own: what kills one is an error in the process that asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.processes.memory import available_bytes as available_bytes
    from finecast.processes.worker import Answer as Answer
    from finecast.processes.worker import WorkerDiedError as WorkerDiedError
else:
    __getattr__ = imported_on_use(__name__)
