"""Plans that are stated by an engine's precision hint, and marks on the ops that keep fp32.

The model stays in fp32, and has no casts: under the hint the engine puts its own. So it gets
the kernels that the engine has under its hint, and what must keep fp32 keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from finecast.engines.base import Engine, Session
from finecast.errors import EngineError, UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy


def hint_formats(engine: Engine, prepared: PreparedModel) -> Collection[Format]:
    """Formats whose hint in ``engine`` the model can be made for."""
    return (prepared.hints or ()) if engine.lowers_by_hint else ()


def check_by_hint(policy: Policy, engine: Engine, prepared: PreparedModel) -> None:
    """Raise UsageError if plans of ``policy`` cannot be stated by a hint and marks."""
    known = prepared.hints
    if known is None or not engine.lowers_by_hint:
        raise UsageError(
            f"this model of {prepared.library} cannot be made for a precision hint of"
            f" {engine.name}, with marks on the ops that keep fp32",
            where="--by-hint",
            fix="write OpenVINO's IR, -o NAME.xml, without --target",
        )
    if not known:
        raise UsageError(
            "the model has ops that are low or quantized, and a precision hint is for models"
            " in fp32",
            where="--by-hint",
            fix="give the model in fp32, or leave --by-hint out",
        )
    if len(policy.formats) != 1 or policy.format not in known:
        raise UsageError(
            "a precision hint has one low format",
            where="--by-hint",
            fix=f"give --auto-cast-type {' or '.join(f.label for f in known)}",
        )
    if policy.io or policy.io_low:
        raise UsageError(
            "inputs and outputs keep their types under a precision hint",
            where="--by-hint",
            fix="leave --io out",
        )


def by_hint(engine: Engine, prepared: PreparedModel, plan: Plan) -> Plan | None:
    """``plan`` stated by a hint and marks; None if it cannot be, or is so already."""
    if plan.by_hint or plan.io or plan.adjustments or len(plan.low_formats) != 1:
        return None
    if not plan.low_formats.issubset(hint_formats(engine, prepared)):
        return None
    return replace(plan, by_hint=True)


def check_marks(plan: Plan, graph: Graph, session: Session) -> None:
    """Check that the engine computes in fp32 what ``plan``, by its hint, has in fp32.

    An engine's passes may lose the marks of ops that they replace. A kernel may compute low
    that has ops of both, as long as no product is among those in fp32.

    Args:
        plan: The plan.
        graph: The graph of its model.
        session: The model that it gives, loaded with the names of its kernels.

    Raises:
        EngineError: If it does not, or does not show it; names the first op.
    """
    kernels = session.kernel_formats() if plan.by_hint and plan.lowers else ()
    if not kernels:
        return
    (low,) = plan.low_formats
    fp32 = {d.node: by_name(d.op) for d in plan.decisions if d.format is Format.FP32}
    in_bodies = (n.name for n in graph.nodes if n.region)
    hidden = next((n for n in in_bodies if n in fp32 and not fp32[n].exact), None)
    if hidden is not None:
        raise _lost(
            f"{hidden!r} is planned in fp32 in a body of control flow, where the engine does"
            " not show whether its mark is kept"
        )
    formats = plan.formats
    for kernel in kernels:
        kept = [n for n in kernel.ops if n in fp32 and not fp32[n].exact]
        alone = all(n in fp32 or n not in formats for n in kernel.ops)
        lost = next((n for n in kept if alone or fp32[n].matmul_engine), None)
        if lost is not None and kernel.computed == low.label:
            raise _lost(
                f"{lost!r} is planned in fp32 and runs in {low.label}: its mark is lost there"
            )


def _lost(what: str) -> EngineError:
    return EngineError(
        what, fix="leave --by-hint out: casts can state this plan; or let that op be low"
    )
