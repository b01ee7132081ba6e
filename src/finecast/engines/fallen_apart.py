"""Kernels of one model whose nodes another one, of the same nodes, runs in several.

An engine that does not recognise a pattern in a low format runs its ops one by one: what was
one kernel costs several, and rounds between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from finecast.engines.base import Engine, HintingEngine, Session
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan

# The nodes in each kernel.
Kernels: TypeAlias = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallenApart:
    """The nodes of one kernel, grouped by the kernels that run them now."""

    parts: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """The parts, in words."""
        return (
            f"{len(self.parts)} kernels of one: {' | '.join(' '.join(p) for p in self.parts)}"
        )


def load_telling(engine: Engine, model: Path | bytes) -> tuple[Session, Kernels]:
    """The model, loaded, and the nodes in each of its kernels; none if the engine is silent.

    Raises:
        EngineError: As ``engine.load``.
    """
    if not isinstance(engine, HintingEngine):
        return engine.load(model), ()
    session = engine.load_hinted(model, Format.FP32)
    return session, [kernel.ops for kernel in session.kernel_formats()]


def fallen_apart(before: Kernels, after: Kernels) -> tuple[FallenApart, ...]:
    """Kernels of ``before`` that ``after`` runs in several, in the order of ``before``.

    Nodes that ``after`` does not have, or left out, are not counted.
    """
    home = {node: k for k, nodes in enumerate(after) for node in nodes}
    found: list[FallenApart] = []
    for kernel in before:
        parts: dict[int, list[str]] = {}
        for node in kernel:
            if node in home:
                parts.setdefault(home[node], []).append(node)
        if len(parts) > 1:
            found.append(FallenApart(parts=tuple(tuple(p) for p in parts.values())))
    return tuple(found)


def broken_by(plan: Plan, before: Kernels, after: Kernels) -> tuple[FallenApart, ...]:
    """Kernels that fall apart though ``plan`` has all their nodes in one low format.

    Between nodes of several formats a plan means to cast; what only moves numbers costs little
    by itself.
    """
    low = {d.node: d.format for d in plan.decisions if d.format is not Format.FP32}
    computes = {d.node for d in plan.decisions if not by_name(d.op).exact}
    found: list[FallenApart] = []
    for one in fallen_apart(before, after):
        nodes = {node for part in one.parts for node in part}
        parts = tuple(part for part in one.parts if not computes.isdisjoint(part))
        if nodes <= low.keys() and len({low[n] for n in nodes}) == 1 and len(parts) > 1:
            found.append(FallenApart(parts=parts))
    return tuple(found)
