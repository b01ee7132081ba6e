"""Kernels that fall apart: one kernel of a model whose nodes another model runs in several.

The models have the same nodes. An engine that does not recognise a pattern in a low format
runs its ops one by one, which takes longer, and rounds between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from finecast.engines.base import Engine, Loadable, Session
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan

# Names of the nodes in each kernel.
Kernels: TypeAlias = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallenApart:
    """The nodes of one kernel, grouped by the kernels of the other model that run them."""

    parts: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """The parts, as text."""
        return (
            f"{len(self.parts)} kernels of one: {' | '.join(' '.join(p) for p in self.parts)}"
        )


def load_with_kernels(engine: Engine, model: Loadable) -> tuple[Session, Kernels]:
    """A session and the nodes in each of its kernels; none if the engine does not tell.

    Raises:
        EngineError: As ``engine.load``.
    """
    if not engine.lowers_by_hint:
        return engine.load(model), ()
    session = engine.load_hinted(model, Format.FP32)
    return session, [kernel.ops for kernel in session.kernel_formats()]


def try_with_kernels(engine: Engine, model: Loadable) -> tuple[Session, Kernels]:
    """As ``load_with_kernels``, in another process if the engine can; not for timing.

    So a model is compiled once, and none of its runs crashes this process.

    Raises:
        EngineError: As ``engine.load``.
    """
    session = engine.load_tried(model)
    known = session.kernel_formats() if engine.lowers_by_hint else ()
    return session, [kernel.ops for kernel in known]


def fallen_apart(before: Kernels, after: Kernels) -> tuple[FallenApart, ...]:
    """Kernels of ``before`` that ``after`` runs in several, in the order of ``before``.

    Nodes that are in no kernel of ``after`` are not counted. Kernels that fall apart alike,
    such as those of one node that an engine runs once for each head, are told once.
    """
    home = {node: k for k, nodes in enumerate(after) for node in nodes}
    broken_kernels: dict[FallenApart, None] = {}
    for kernel in before:
        parts: dict[int, list[str]] = {}
        for node in kernel:
            if node in home:
                parts.setdefault(home[node], []).append(node)
        if len(parts) > 1:
            broken_kernels[FallenApart(parts=tuple(tuple(p) for p in parts.values()))] = None
    return tuple(broken_kernels)


def broken_by(plan: Plan, before: Kernels, after: Kernels) -> tuple[FallenApart, ...]:
    """Kernels that fall apart although ``plan`` has all their nodes in one low format.

    Between nodes of different formats the plan itself puts casts. Parts that only move numbers
    are not counted: they take little time.
    """
    low = {d.node: d.format for d in plan.decisions if d.format is not Format.FP32}
    computes = {d.node for d in plan.decisions if not by_name(d.op).exact}
    broken_kernels: dict[FallenApart, None] = {}
    for kernel in fallen_apart(before, after):
        nodes = {node for part in kernel.parts for node in part}
        parts = tuple(part for part in kernel.parts if not computes.isdisjoint(part))
        if nodes <= low.keys() and len({low[n] for n in nodes}) == 1 and len(parts) > 1:
            broken_kernels[FallenApart(parts=parts)] = None
    return tuple(broken_kernels)
