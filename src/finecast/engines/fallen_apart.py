"""Kernels of one model whose nodes another one, of the same nodes, runs in several.

An engine that does not recognise a pattern in a low format runs its ops one by one: what was
one kernel costs several, and rounds between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finecast.engines.base import KernelTime


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


def fallen_apart(
    before: Sequence[KernelTime], after: Sequence[KernelTime]
) -> tuple[FallenApart, ...]:
    """Kernels of ``before`` that ``after`` runs in several, in the order of ``before``.

    Nodes that ``after`` does not have, or left out, are not counted.
    """
    home = {node: k.kernel for k in after for node in k.ops}
    found: list[FallenApart] = []
    for kernel in before:
        parts: dict[str, list[str]] = {}
        for node in kernel.ops:
            if node in home:
                parts.setdefault(home[node], []).append(node)
        if len(parts) > 1:
            found.append(FallenApart(parts=tuple(tuple(p) for p in parts.values())))
    return tuple(found)
