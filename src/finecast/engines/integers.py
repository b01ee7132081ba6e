"""Ops on integers: which engines they are written for, and whether they ran as such."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from finecast.engines.base import KernelTime

INTEGER_ENGINES: Final = frozenset({"openvino"})
"""Engines whose fusions of quantized ops plans are made for."""

_INTEGERS: Final = frozenset({"int8", "uint8"})


def not_on_integers(kernels: Sequence[KernelTime], nodes: Collection[str]) -> dict[str, str]:
    """Those of ``nodes`` that no kernel on 8-bit integers runs, and in what they ran.

    An op that no kernel names is not judged: it was fused into one, or left out.
    """
    formats: dict[str, set[str]] = {}
    for kernel in kernels:
        for name in kernel.ops:
            formats.setdefault(name, set()).add(kernel.format)
    ran = {name: formats[name] for name in nodes if name in formats}
    return {n: " and ".join(sorted(f)) for n, f in ran.items() if f.isdisjoint(_INTEGERS)}
