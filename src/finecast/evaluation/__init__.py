"""Where plans are evaluated: worker processes, of this machine or on others by plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.evaluation.workers import LocalWorker as LocalWorker
    from finecast.evaluation.workers import NodeLostError as NodeLostError
    from finecast.evaluation.workers import Opening as Opening
    from finecast.evaluation.workers import WorkerProcess as WorkerProcess
else:
    __getattr__ = imported_on_use(__name__)
