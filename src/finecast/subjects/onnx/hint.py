"""An ONNX model that its engine lowers by itself, and what it chose, as a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finecast.engines.base import Engine, HintedSession, HintingEngine
from finecast.errors import EngineError
from finecast.frontends.onnx import OnnxFile
from finecast.numbers.formats import Format
from finecast.pipeline.hinted_plan import stated
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedModel:
    """The fp32 model under the engine's own hint for ``fmt``; ``plan`` is what it chose."""

    file: OnnxFile
    engine: HintingEngine
    fmt: Format
    plan: Plan
    loaded: HintedSession

    @property
    def model(self) -> ir.Model:
        """The fp32 model."""
        return self.file.model

    @property
    def casts(self) -> int:
        """The model has none; the engine's own are not seen."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Of the file and its external data."""
        return self.file.size_bytes

    def release(self) -> None:
        """It stays loaded: it is timed again at the end."""


def hinted_models(file: OnnxFile, engine: Engine, planner: Planner) -> Iterator[HintedModel]:
    """The model under the hint for each format of the policy that the engine heeds."""
    if not isinstance(engine, HintingEngine):
        return
    for fmt in planner.policy.formats:
        try:
            session = engine.load_hinted(file.path, fmt)
        except EngineError:
            continue
        plan = stated(planner, session.kernel_formats(), fmt)
        if plan.lowers:
            yield HintedModel(file=file, engine=engine, fmt=fmt, plan=plan, loaded=session)
