"""Sessions whose roundings are switched on one by one.

A session that can round everything computes every rounding in each run, and keeps weights as
values: its runs take several times those of the model. Where many long runs are to come, each
few switches therefore have a session of their own, in which all else is the model's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array, Feeds, Session, outputs_on
from finecast.engines.loading import exact_session
from finecast.planning.sensitivity import Probe
from finecast.planning.switches import SWITCH, Switch
from finecast.subjects.engine.native import PreparedModel

# Fewer sessions than this, by the estimate, are not worth their loading.
_FEWEST_PARTS: Final = 3

Load = Callable[[Sequence[Switch]], Session]


def switched_probe(
    prepared: PreparedModel, switches: Sequence[Switch], feeds: Sequence[Feeds]
) -> Probe:
    """A function from a switch to the outputs on ``feeds``."""
    return SwitchedProbe(
        lambda some: exact_session(prepared.with_switches(some)), switches, feeds
    )


def part_size(count: int, load_s: float, run_s: float) -> int:
    """How many of ``count`` switches a session has, which is asked for each once.

    A part costs its loading and a run more, and each of its runs in proportion to what it can
    round: the sum is least at a square root.

    Args:
        count: Switches in all.
        load_s: Seconds to load a session.
        run_s: Seconds of a run of a session with all switches.
    """
    if run_s <= 0:
        return count
    size = max(1, math.ceil(math.sqrt(count * (load_s + run_s) / run_s)))
    return size if count >= _FEWEST_PARTS * size else count


class SwitchedProbe:
    """Outputs with some roundings on, in as few and as fast sessions as it takes.

    Law: outputs differ from those with nothing on as they do in one session that has every
    switch. One session is held at a time; switches that are on together and lie apart are
    served by the one that has all.
    """

    def __init__(self, load: Load, switches: Sequence[Switch], feeds: Sequence[Feeds]) -> None:
        self.load = load
        self.switches = switches
        self.feeds = feeds
        self.size = len(switches)
        self.span: range | None = None  # of the switches that the session has
        self.session: Session | None = None
        self.exact: list[Array] = []
        self.reference: list[Array] = []

    def __call__(self, switch: NDArray[np.bool_]) -> list[Array]:
        """Outputs on all feeds, those of the model where nothing is on."""
        if self.span is None:
            self._begin()
        on = np.flatnonzero(switch)
        if not len(on):
            return self.reference
        span = self._span(on)
        if span != self.span:
            self._open(span)
        outputs = self._run(switch)
        if self.exact is self.reference:
            return outputs
        return [
            _moved(a, b, c)
            for a, b, c in zip(self.reference, outputs, self.exact, strict=True)
        ]

    def _begin(self) -> None:
        """Load the session of all switches, which tells how long that and a run take."""
        load_s, run_s = self._open(range(len(self.switches)))
        self.reference = self.exact
        self.size = part_size(len(self.switches), load_s, run_s)

    def _span(self, on: NDArray[np.int64]) -> range:
        """The switches of a session that serves those that are on."""
        start = int(on[0]) // self.size * self.size
        part = range(start, min(start + self.size, len(self.switches)))
        return part if int(on[-1]) < part.stop else range(len(self.switches))

    def _open(self, span: range) -> tuple[float, float]:
        """Load the session of these switches, and run it with none on; seconds of both."""
        self.session = None  # one at a time
        start = time.perf_counter()
        self.session = self.load(self.switches[span.start : span.stop])
        self.span = span
        loaded = time.perf_counter()
        self.exact = self._run(np.zeros(len(self.switches), dtype=bool))
        return loaded - start, time.perf_counter() - loaded

    def _run(self, switch: NDArray[np.bool_]) -> list[Array]:
        assert self.session is not None
        assert self.span is not None
        mine = switch[self.span.start : self.span.stop]
        return outputs_on(self.session, ({**f, SWITCH: mine} for f in self.feeds))


def _moved(reference: Array, output: Array, exact: Array) -> Array:
    """``reference``, moved as ``output`` is from ``exact``: sessions sum in other orders."""
    if reference.dtype.kind != "f" or not reference.shape == output.shape == exact.shape:
        return output
    with np.errstate(invalid="ignore"):  # infinite in both
        moved = output.astype(np.float64) - exact.astype(np.float64)
        return reference.astype(np.float64) + moved
