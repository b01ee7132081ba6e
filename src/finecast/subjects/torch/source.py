"""A PyTorch module that plans are made for and built of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from finecast.engines.torch.planning import check_formats
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured, ConvertedModule
from finecast.frontends.torch.aten import BODIES
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.conversion import kept_types
from finecast.pipeline.subject import Built, SourceModel
from finecast.planning.edits import Edit, cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.rules.policy import Policy, Scope

CODED: Final = (Format.INT8,)
"""Formats of codes that kernels of compiled modules compute in."""


@dataclass(slots=True, kw_only=True)
class TorchBuilt(Built):
    """The module of a plan; ``run`` is the prepared module that is timed, once it was made."""

    model: ConvertedModule
    edits: Sequence[Edit]
    run: Callable[..., Any] | None = None

    def release(self) -> None:
        """Forget the prepared module."""
        self.run = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSource(SourceModel):
    """A module or an exported program, with its graph."""

    model: Any
    captured: Captured
    name: str
    digest: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the module's parameters and buffers."""
        return state_bytes(self.model)

    def check_policy(self, policy: Policy) -> None:
        """Raise UsageError for types of ports, unsupported formats, or unknown names."""
        if policy.io or policy.io_low:
            raise UsageError("--io does not apply to PyTorch models", fix="leave it out")
        check_formats(policy, coded=CODED)
        check_names(policy, self.captured.graph)
        check_overrides(self.captured.graph)

    def build(self, plan: Plan) -> TorchBuilt:
        """The module of a plan, with the plan attached."""
        return built_of(self.captured, plan, self.name)

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes on ops that keep a type other than fp32."""
        return kept_advice(planner.graph, planner.policy)


def uses_codes(policy: Policy) -> bool:
    """Whether ops may read codes: modules are then compiled with frozen weights."""
    return policy.scope is not Scope.NONE and any(f in CODED for f in policy.formats)


def without_codes(policy: Policy) -> Policy:
    """The policy without formats of codes; of scope ``none`` if it has no others."""
    left = tuple(f for f in policy.formats if f not in CODED)
    return replace(policy, formats=left) if left else replace(policy, scope=Scope.NONE)


def built_of(captured: Captured, plan: Plan, where: str = "") -> TorchBuilt:
    """The module that ``plan`` gives, with the plan attached as ``finecast_plan``."""
    edits = frontend.planned_edits(captured, plan, where)
    model = frontend.apply(captured, edits)
    model.eval()
    model.finecast_plan = plan
    casts = cast_count(captured.graph, edits)
    size = state_bytes(model)
    return TorchBuilt(model=model, plan=plan, size_bytes=size, edits=edits, casts=casts)


def kept_advice(graph: Graph, policy: Policy) -> tuple[str, ...]:
    """Notes on ops that keep a type other than fp32, or bodies, and what to do about it."""
    if policy.scope is Scope.NONE:
        return ()
    fix = "convert copy.deepcopy(module).float(), with inputs in fp32"
    types = tuple(f"{text}: {fix}" for text in kept_types(graph, policy).values())
    bodies = Counter(n.native for n in graph.nodes if n.native.startswith(f"{BODIES}::"))
    return types + tuple(
        f"what is inside of {native} keeps its types ({count} in the model): state short"
        " branches by torch.where, or convert modules that have none"
        for native, count in bodies.items()
    )


def state_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; of sparse ones those that they would have if dense."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(t.numel() * t.element_size() for t in tensors)
