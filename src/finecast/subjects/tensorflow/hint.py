"""The model that Grappler's automatic mixed precision lowers, and what it chose, as a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finecast.engines.base import Feeds, KernelFormats, Session
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.frontends.tensorflow import FrozenModel
from finecast.numbers.formats import Format
from finecast.pipeline.hinted_plan import stated
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredByGrappler:
    """The fp32 model under ``auto_mixed_precision_onednn_bfloat16``, and its choice."""

    model: FrozenModel
    plan: Plan
    size_bytes: int
    loaded: Session

    @property
    def casts(self) -> int:
        """The model has none; Grappler's own are not seen."""
        return 0

    def release(self) -> None:
        """It stays loaded: it is timed again at the end."""


def lowered_models(
    model: FrozenModel,
    size_bytes: int,
    engine: TensorFlowEngine,
    planner: Planner,
    feeds: Feeds,
) -> Iterator[LoweredByGrappler]:
    """The model under the rewrite, if the policy has bf16 and Grappler lowers anything.

    Raises:
        EngineError: If TensorFlow cannot run it so.
    """
    if Format.BF16 not in planner.policy.formats:
        return
    profiled = engine.open(model, profiling=True, lowering=True)
    kernels = [
        KernelFormats(ops=k.ops, computed=k.format, stored=k.format)
        for k in profiled.profile(feeds, repeats=1)
        if k.ops
    ]
    plan = stated(planner, kernels, Format.BF16)
    if plan.lowers:
        yield LoweredByGrappler(
            model=model,
            plan=plan,
            size_bytes=size_bytes,
            loaded=engine.open(model, lowering=True),
        )
