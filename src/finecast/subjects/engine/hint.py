"""Models beside the tuned one: the fp32 model under an engine's hint, a quantized original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finecast.engines.base import Engine, HintingEngine, KernelSession, Session
from finecast.errors import EngineError
from finecast.numbers.formats import Format
from finecast.pipeline.hinted_plan import stated
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.subjects.engine.native import NativeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedModel:
    """The fp32 model under the engine's hint for ``fmt``; ``plan`` states what it lowers.

    ``exact`` has those products in fp32 whose results the engine leaves unrounded.
    """

    source: NativeSource
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
        """0: the engine's own casts are not known."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        return self.source.size_bytes

    def release(self) -> None:
        """Stay loaded: the model is timed again at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalModel:
    """The model that the fp32 one was converted from; ``plan`` is the all-fp32 plan."""

    source: NativeSource
    model: Any
    plan: Plan
    loaded: Session

    @property
    def casts(self) -> int:
        """0: finecast put no cast in it."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        return self.source.size_bytes

    def release(self) -> None:
        """Stay loaded: the model is timed again at the end."""


def original_model(
    source: NativeSource, engine: Engine, planner: Planner
) -> OriginalModel | None:
    """The quantized model that ``source`` was converted from, if ``engine`` runs it."""
    if source.original is None:
        return None
    try:
        loaded = engine.load(source.original)
    except EngineError:
        return None
    return OriginalModel(
        source=source, model=source.original, plan=planner.highest(), loaded=loaded
    )


def hinted_models(
    source: NativeSource, engine: Engine, planner: Planner
) -> Iterator[HintedModel]:
    """The model under the hint for each format of the policy, where it lowers anything."""
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
                fmt=fmt,
                plan=plan,
                exact=stated(planner, kernels, fmt, exact=True),
                loaded=session,
            )
