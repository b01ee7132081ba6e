"""Output errors of single roundings to bf16 in a program, measured in both ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from finecast.engines.torch.session import ProgramSignature
from finecast.frontends.torch import Captured, TorchNative, TorchPrepared
from finecast.frontends.torch import probing as backward
from finecast.native.roundings import switched_probe
from finecast.numbers.formats import Format
from finecast.planning.points import (
    Point,
    RoundingPoint,
    RoundingPoints,
    find_points,
    switches,
)
from finecast.planning.sensitivity import ProbeOptions, measure

Errors = NDArray[np.float64]


def points_of(captured: Captured) -> tuple[Point, ...]:
    """All points, if every op may be low."""
    return find_points(captured.graph, frozenset(n.id for n in captured.graph.nodes))


def probed(
    captured: Captured,
    points: Sequence[Point],
    args: Sequence[torch.Tensor],
    counted: Collection[int] | None = None,
) -> Errors:
    """From a run for each point."""
    prepared = TorchPrepared(graph=captured.graph, source=captured)
    feeds = ProgramSignature.of(captured.program).feeds(args, {})
    made = switches(_alone(points), {}, Format.BF16)
    probe = switched_probe(prepared, made, [feeds])
    return measure(len(points), probe, probing=ProbeOptions(counted=counted)).shares


def first_order(
    captured: Captured,
    points: Sequence[Point],
    args: Sequence[torch.Tensor],
    counted: Collection[int] | None = None,
    *,
    draws: int = 2,
) -> Errors:
    """From backward passes for all points."""
    where = {Format.BF16: _alone(points)}
    return backward.first_order(TorchNative.of(captured), where, args, counted, draws=draws)[
        Format.BF16
    ].values


def _alone(points: Sequence[Point]) -> RoundingPoints:
    each = (RoundingPoint(places=((p.reader, p.port),), readers=p.path) for p in points)
    return RoundingPoints(points=tuple(each), weights=(), weight_units=())
