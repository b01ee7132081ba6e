"""Metric and error of an emulated model over orders of summation.

A device documents in which format it adds up, seldom in which order, and that may change with
shapes, drivers and the load. So what it will compute is a draw. Law: an interval is that of
the orders tried, which are the same in each run; ops that keep their engine's order are
counted, so that it is known what the interval leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from finecast.data.workload import Workload, sample_count
from finecast.devices.emulation import Emulation
from finecast.engines.base import Session, UnorderedError
from finecast.engines.exact import Exact
from finecast.graph import Graph
from finecast.naming import number_of, percent, percents
from finecast.numbers.summation import Order, orders
from finecast.ops import OpKind, by_name
from finecast.ops.flops import Shape, flops
from finecast.progress import Progress, silent

if TYPE_CHECKING:
    from finecast.engines.emulator.session import EmulatorSession

TRIED: Final = 10
"""Orders that are tried: three or four that kernels have, and random ones."""
SHARE: Final = 0.9
"""The share of orders on which a plan has to keep the criterion where none is asked for."""
# Terms that are added in all orders where nobody asked for it: 1e9 to 4e9 take a second.
_UNASKED: Final = 4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    """What one order gives: metric, error of the worst output, whether it keeps the limit."""

    order: Order
    metric: float
    error: float
    keeps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpread:
    """Metric and error over orders of summation.

    Attributes:
        runs: What each order gives; empty if none was tried.
        share: The share of orders that have to keep the criterion.
        sums: Ops that were added up in these orders.
        others: Ops that sum, too, in the order of the engine here, or exactly.
        why: Why no order was tried.
    """

    runs: tuple[InOrder, ...] = ()
    share: float = SHARE
    sums: int = 0
    others: int = 0
    why: str = ""

    @property
    def metric(self) -> tuple[float, float]:
        """The least and the largest metric."""
        return _ends([run.metric for run in self.runs])

    @property
    def error(self) -> tuple[float, float]:
        """The least and the largest error."""
        return _ends([run.error for run in self.runs])

    @property
    def kept(self) -> int:
        """The orders that keep the criterion."""
        return sum(run.keeps for run in self.runs)

    @property
    def holds(self) -> bool:
        """Whether at least the share asked for keeps the criterion; True if none was tried."""
        return not self.runs or self.kept >= math.ceil(self.share * len(self.runs) - 1e-9)

    def deciding(self, *, higher_is_better: bool) -> float | None:
        """The worst metric of as many orders as have to keep it; None if none was tried."""
        ranked = sorted((run.metric for run in self.runs), reverse=higher_is_better)
        count = math.ceil(self.share * len(self.runs) - 1e-9)
        return ranked[count - 1] if count else None

    def text(self, metric: str, figure: str, *, judged: bool) -> str:
        """The same in words, with the names of the metric and of the error."""
        if not self.runs:
            return f"orders of summation: {self.why}" if self.why else ""
        low, high = (f"{end:.6g}" for end in self.metric)
        scores = f"{metric} {low}" if low == high else f"{metric} {low} to {high}"
        least, most = percents(*self.error)
        errors = f"{figure} {least}" if least == most else f"{figure} {least} to {most}"
        text = f"in {number_of(len(self.runs), 'order')} of summation: {scores}, {errors}"
        if len({(run.metric, run.error) for run in self.runs}) == 1:
            text += " (the order changes nothing here)"
        if judged:
            asked = f"{percent(self.share)} asked for"
            text += f"; {self.kept} of {len(self.runs)} keep your limit ({asked})"
        if self.others:
            text += f"; {number_of(self.others, 'op')} of {self.sums + self.others} that sum"
            text += " are exact or keep the order of the engine here"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The same in JSON's types."""
        return {
            "runs": [
                {
                    "order": run.order.label,
                    "metric": float(run.metric),
                    "error": run.error,
                    "keeps": run.keeps,
                }
                for run in self.runs
            ],
            "metric": [*map(float, self.metric)] if self.runs else None,
            "error": [*self.error] if self.runs else None,
            "kept": self.kept,
            "share": self.share,
            "summed_ops": self.sums,
            "other_ops": self.others,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTrials:
    """Tries orders of summation on one model and its data.

    Attributes:
        shapes: Observed shapes of its values, by id.
        workload: The data, on which the metric is evaluated.
        reference: The model to compare with.
        exact: Its outputs on calibration data, with which errors are computed.
    """

    graph: Graph
    shapes: Mapping[int, Shape]
    workload: Workload
    reference: Session
    exact: Exact
    progress: Progress = field(default=silent)

    def spread(
        self,
        session: Callable[[Emulation], EmulatorSession],
        emulation: Emulation,
        keeps: Callable[[float], bool] = lambda _: True,
    ) -> OrderSpread:
        """Metric and error of a model in each order.

        Args:
            session: Builds the emulated model for an emulation that states an order.
            emulation: The device; its share says whether orders are tried.
            keeps: Whether a metric keeps the criterion.

        Raises:
            UnorderedError: If a share is asked for, and no order can be chosen for the model.
        """
        share = SHARE if emulation.share is None else emulation.share
        if not share:
            return OrderSpread(share=share)
        matmul = emulation.target.engine_for(OpKind.MATMUL)
        tried = orders(TRIED, blocked=bool(matmul.blocks))
        why = "" if emulation.share is not None else self._too_long(emulation)
        if why:
            return OrderSpread(share=share, why=why)
        try:
            built = session(replace(emulation, order=tried[0]))
        except UnorderedError as error:
            if emulation.share is not None:
                raise
            return OrderSpread(share=share, why=error.what)
        every = sum(by_name(node.op).accumulates for node in self.graph.float_nodes)
        if not built.summed:
            none = "of none of the ops that sum can the order be chosen, or they are exact"
            return OrderSpread(share=share, others=every, why=none if every else "")
        runs: list[InOrder] = []
        for number, order in enumerate(tried):
            self.progress("orders of summation", number, len(tried))
            error = self.exact.error(built.in_order(order))
            metric = self.workload.evaluate(built.in_order(order), self.reference)
            runs.append(InOrder(order=order, metric=metric, error=error, keeps=keeps(metric)))
        return OrderSpread(
            runs=tuple(runs),
            share=share,
            sums=built.summed,
            others=max(0, every - built.summed),
        )

    def _too_long(self, emulation: Emulation) -> str:
        """Why orders are not tried unasked: it would take long, or nobody knows how long."""
        name = emulation.target.name
        ask = f"--target {name}:{percent(SHARE)} tries them"
        rows, samples = sample_count(self.exact.calls[:1]), self.workload.samples
        if not (rows and samples):
            return f"not tried, as the number of samples is not known ({ask})"
        products = (flops(self.graph, node, self.shapes) for node in self.graph.float_nodes)
        terms = sum(one or 0.0 for one in products) / 2 / rows
        terms *= TRIED * (samples + sample_count(self.exact.calls))
        if terms <= _UNASKED:
            return ""
        return f"not tried, as {terms:.2g} additions take long ({ask})"


def _ends(numbers: list[float]) -> tuple[float, float]:
    return (min(numbers), max(numbers)) if numbers else (math.nan, math.nan)
