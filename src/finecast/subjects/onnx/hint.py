"""An ONNX model that its engine lowers by itself, and what it chose, as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finecast.engines.base import Engine, HintedSession, HintingEngine
from finecast.errors import EngineError
from finecast.frontends.onnx import OnnxFile
from finecast.numbers.formats import Format
from finecast.planning.assign import pick
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


def hinted_models(file: OnnxFile, engine: Engine, planner: Planner) -> Iterator[HintedModel]:
    """The model under the hint for each format of the policy that the engine heeds."""
    if not isinstance(engine, HintingEngine):
        return
    for fmt in planner.policy.formats:
        try:
            session = engine.load_hinted(file.path, fmt)
        except EngineError:
            continue
        plan = stated(planner, session.computed_in(), fmt)
        if plan.lowers:
            yield HintedModel(file=file, engine=engine, fmt=fmt, plan=plan, loaded=session)


def stated(planner: Planner, computed_in: Mapping[str, str], fmt: Format) -> Plan:
    """The plan of ``fmt`` where the engine computes in it and the rules permit it.

    An op that the engine left out, which costs nothing, goes with those it reads: a cast
    between them would be one for nothing.
    """
    graph = planner.graph
    formats: dict[int, Format] = {}
    for node in graph.float_nodes:
        label = computed_in.get(node.name)
        if label is None:
            sources = (v.producer for v in graph.following_inputs(node))
            made = [formats[p] for p in sources if p is not None and p in formats]
            low = bool(made) and all(f is fmt for f in made)
        else:
            low = label == fmt.label
        permission = planner.permissions.get(node.id)
        if permission is None:
            continue
        wanted = (fmt, Format.FP32) if low else (Format.FP32,)
        formats[node.id] = pick(permission, *wanted)
    return planner.plan(formats, f"what the engine's hint for {fmt.label} computes in it")
