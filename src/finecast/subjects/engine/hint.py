"""A model that its engine lowers by itself, and what it chose, as a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finecast.engines.base import Engine, HintingEngine, KernelSession
from finecast.errors import EngineError
from finecast.numbers.formats import Format
from finecast.pipeline.hinted_plan import stated
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.subjects.engine.native import NativeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedModel:
    """The fp32 model under the engine's own hint for ``fmt``; ``plan`` is what it chose.

    ``exact`` is that without rounding what the engine leaves unrounded.
    """

    source: NativeSource
    engine: HintingEngine
    fmt: Format
    plan: Plan
    exact: Plan
    loaded: KernelSession

    @property
    def model(self) -> Any:
        """The fp32 model."""
        return self.source.model

    @property
    def casts(self) -> int:
        """The model has none; the engine's own are not seen."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Of the model where it is stored."""
        return self.source.size_bytes

    def release(self) -> None:
        """It stays loaded: it is timed again at the end."""


def hinted_models(
    source: NativeSource, engine: Engine, planner: Planner
) -> Iterator[HintedModel]:
    """The model under the hint for each format of the policy that the engine heeds."""
    if not isinstance(engine, HintingEngine):
        return
    for fmt in planner.policy.formats:
        try:
            session = engine.load_hinted(source.loadable, fmt)
        except EngineError:
            continue
        kernels = session.kernel_formats()
        plan = stated(planner, kernels, fmt)
        if plan.lowers:
            yield HintedModel(
                source=source,
                engine=engine,
                fmt=fmt,
                plan=plan,
                exact=stated(planner, kernels, fmt, exact=True),
                loaded=session,
            )
