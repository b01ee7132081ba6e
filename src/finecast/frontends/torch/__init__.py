"""The PyTorch frontend: captures modules as neutral graphs, and applies plans to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from finecast.frontends.replaying import check_made_for, edits_of
from finecast.frontends.torch.aten import native_name
from finecast.frontends.torch.capture import Captured, capture, shared_copy
from finecast.frontends.torch.converted import ConvertedModule
from finecast.frontends.torch.input_check import input_check
from finecast.frontends.torch.reader import read
from finecast.frontends.torch.writer import apply_edits
from finecast.planning.edits import Edit
from finecast.planning.plan import Plan

__all__ = ["Captured", "ConvertedModule", "apply", "capture", "native_name", "planned_edits"]


def planned_edits(captured: Captured, plan: Plan, where: str = "") -> tuple[Edit, ...]:
    """The edits that ``plan`` asks for; errors name ``where``.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, captured.graph.digest, where)
    plan.check(captured.graph, where=where)
    # Inductor recognises codes only right before a product.
    return edits_of(captured.graph, plan, moves_codes=False)


def apply(captured: Captured, edits: Sequence[Edit]) -> ConvertedModule:
    """A copy of the captured module with ``edits`` made.

    Parameters that stay fp32 are shared with the module that was captured; tensors that the
    graph writes to (running statistics, caches) are not. The copy checks its inputs.
    """
    module = shared_copy(captured.module)
    graph, binding = read(module)
    with torch.no_grad():
        apply_edits(graph, binding, edits)
    return ConvertedModule.of(module, input_check(module, captured.program))
