"""Steps whose times are stated, in place of kernels that are compiled and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from finecast.measure.racing import Race
from finecast_training import step_search
from finecast_training.step_plan import StepPlan


def stated(monkeypatch: pytest.MonkeyPatch, times: Callable[[StepPlan], float]) -> None:
    """From here on steps run op by op, and take these times."""
    compiles, plans = StepPlan.compile, dict[str, StepPlan]()

    def op_by_op(self: StepPlan, module: Any, *, kernels: bool = True) -> Any:
        del kernels
        plans[self.digest] = self
        return compiles(self, module, kernels=False)

    def timed(steps: Mapping[str, Any], *, anchor: str, effort: object) -> Race:
        del effort
        for step in steps.values():
            step()
        named = {name: times(plans[name]) for name in steps}
        return Race.stated(named[anchor], named)

    monkeypatch.setattr(StepPlan, "compile", op_by_op)
    monkeypatch.setattr(step_search, "timed", timed)
