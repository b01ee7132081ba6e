"""The search for the fastest plan that keeps an accuracy, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.tuning.goal import Budget as Budget
    from finecast.tuning.search import Candidate as Candidate
    from finecast.tuning.search import chain as chain
    from finecast.tuning.search import same_time as same_time
    from finecast.tuning.trials import nan_baseline as nan_baseline
    from finecast.tuning.tune import Place as Place
else:
    __getattr__ = imported_on_use(__name__)
