"""Data sets and feeds, users' functions, metrics, and the accuracy criterion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.data.decisions import TopK as TopK
    from finecast.data.functions import check_finite as check_finite
    from finecast.data.functions import metric_value as metric_value
    from finecast.data.metrics import METRICS as METRICS
    from finecast.data.metrics import Accumulator as Accumulator
    from finecast.data.metrics import by_output as by_output
    from finecast.data.options import Data as Data
    from finecast.data.options import file_of as file_of
    from finecast.data.options import names_function as names_function
    from finecast.data.streams import to_array as to_array
    from finecast.data.workload import Workload as Workload
    from finecast.data.workload import spread as spread
else:
    __getattr__ = imported_on_use(__name__)
