"""neuronx-cc: the flags of ``--auto-cast`` that differ from the plan in the fewest ops."""

from __future__ import annotations

from typing import Final

from finecast import Format, Plan
from finecast.ops import Tier, by_name
from finecast.planning import Decision
from finecast_export.exporting import Exported, LeftOut

TOOL: Final = "neuron"
_TYPES: Final = {Format.BF16: "bf16", Format.FP16: "fp16", Format.TF32: "tf32"}
_SCOPES: Final = ("none", "matmult", "all")


def _cast(decision: Decision, scope: str) -> bool:
    """Whether the compiler casts the op in a scope."""
    info = by_name(decision.op)
    if scope == "none" or info.tier is Tier.NEVER:
        return False
    return scope == "all" or info.matmul_engine


def export(plan: Plan) -> Exported:
    """The flags; ops that they lower, or leave, other than the plan are notes."""
    used = [d.format for d in plan.counted if d.format in _TYPES]
    fmt = max(_TYPES, key=used.count)

    def planned(decision: Decision) -> bool:
        return decision.format is fmt

    def differing(scope: str) -> list[Decision]:
        return [d for d in plan.counted if _cast(d, scope) is not planned(d)]

    scope = min(_SCOPES, key=lambda one: len(differing(one)))
    flags = f"--auto-cast {scope}"
    if scope != "none":
        flags += f" --auto-cast-type {_TYPES[fmt]}"
    left = [
        LeftOut.of(d, f"{flags} leaves it in FP32")
        for d in plan.counted
        if d.format is not Format.FP32 and not _cast(d, scope)
    ]
    notes = [
        f"{d.node} is {d.format.label} in the plan, and {flags} casts it to {fmt.label}"
        for d in plan.counted
        if _cast(d, scope) and not planned(d)
    ]
    stated = sum(planned(d) and _cast(d, scope) for d in plan.counted)
    return Exported(
        tool=TOOL,
        text=flags + "\n",
        stated={fmt.label: stated} if stated else {},
        left_out=tuple(left),
        notes=tuple(notes),
    )
