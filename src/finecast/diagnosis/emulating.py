"""One model on one emulated device: metric, output error, and where the error comes from."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.metrics import by_output
from finecast.data.workload import Workload, sample_count
from finecast.devices.emulation import Emulation, Setting, setting_of
from finecast.engines.base import Array, Session, outputs_on
from finecast.engines.exact import RELATIVE_ERROR, CachedSession, Exact
from finecast.errors import in_shell
from finecast.graph import Graph, Node, Value
from finecast.naming import number_of, percent
from finecast.native.device import DeviceModel
from finecast.native.model import OpenedModel
from finecast.native.orders import OrderSpread
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import OpKind, by_name
from finecast.ops.flops import flops
from finecast.planning.sensitivity import measure
from finecast.progress import Progress, silent
from finecast.reports.base import Report, TextTable, output_lines
from finecast.rules.calibration import calibrated_nodes
from finecast.rules.facts import ValueFacts
from finecast.rules.tier import elements

if TYPE_CHECKING:
    from finecast.engines.emulator.session import EmulatorSession

_SHOWN_OPS: Final = 3
"""Ops that a printed report names."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmulationReport(Report):
    """What the emulation of one device showed.

    Attributes:
        baseline: The metric of the model without a device.
        reference: What that model is called: fp32, or "the model given" if that was low.
        metric: That of the emulated model.
        errors: Errors of the outputs on the first samples of the data, or on calibration data,
            the worst first.
        error_figure: What these errors are called.
        samples: The number of samples that the errors are of; the metric is of all data.
        left_out: The outputs without one.
        cast_ops: The number of ops that read low operands.
        contributions: Cast ops by their error, the worst first.
        seconds: How long it took.
        target: The device's name.
        options: The compiler's options, spelled out.
        metric_name: The name of the metric.
        orders: Metric and error over orders of summation.
        warnings: Why the metric says little on the data.
    """

    baseline: float
    reference: str = Format.FP32.label
    metric: float
    errors: Mapping[str, float]
    left_out: tuple[str, ...]
    error_figure: str = RELATIVE_ERROR
    samples: int
    cast_ops: int
    contributions: tuple[Contribution, ...]
    seconds: float
    target: str = ""
    options: str = ""
    metric_name: str = ""
    warnings: tuple[str, ...] = ()
    orders: OrderSpread = field(default_factory=OrderSpread)

    @property
    def lines(self) -> list[str]:
        """Both metrics, the error, and the ops that cause most of it."""
        return [
            f"{self.target} {self.options}".strip(),
            *self.summary,
            *output_lines(self.errors, self.left_out, by_output(self.metric)),
            *(f"{c.node.name}: {c.share:.1%}" for c in self.contributions[:_SHOWN_OPS]),
            *(f"warning: {text}" for text in in_shell(self.warnings)),
        ]

    @property
    def summary(self) -> tuple[str, ...]:
        """Both metrics, the error, and how many ops are cast."""
        before = f"{self.reference} {self.baseline:.6g}"
        metrics = f"{self.metric_name}: {before}, emulated {self.metric:.6g}"
        if not self.cast_ops and not self.error:
            return (
                metrics,
                f"nothing is cast down: the numbers are those of {self.reference}",
            )
        on = number_of(self.samples, "sample")
        error = f"{self.error_figure} on {on} {percent(self.error)}"
        spread = self.orders.text(self.metric_name, self.error_figure, judged=False)
        cast = f"{error}; {number_of(self.cast_ops, 'op')} cast"
        return (metrics, cast, *filter(None, (spread,)))

    @property
    def tables(self) -> Sequence[TextTable]:
        """The ops that cause the error."""
        return [self.by_op(len(self.contributions))]

    def by_op(self, most: int) -> TextTable:
        """The ``most`` ops that cause the largest errors, and both metrics below them."""
        note = "; ".join((*self.summary, f"it took {self.seconds:.1f} s"))
        scores = by_output(self.metric)
        return TextTable(
            left=("op", "node", "why"),
            right=("output\nerror", "share of\nsquared error"),
            rows=[
                (
                    c.node.op,
                    c.node.name,
                    "; ".join(c.reasons),
                    percent(c.error),
                    f"{c.share:.1%}",
                )
                for c in self.contributions[:most]
            ],
            fold=("why",),
            notes=(note, *output_lines(self.errors, self.left_out, scores)),
        )

    def _content(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "options": self.options,
            "metric": self.metric_name,
            "fp32": self.baseline,
            "reference": self.reference,
            "emulated": self.metric,
            "output_error": self.error,
            "output_errors": self.errors,
            "figure": self.error_figure,
            "samples": self.samples,
            "left_out": list(self.left_out),
            "outputs": by_output(self.metric),
            "cast_ops": self.cast_ops,
            "orders": self.orders.to_dict(),
            "seconds": self.seconds,
            "ops": [
                {
                    "node": c.node.name,
                    "op": c.node.op,
                    "error": c.error,
                    "share": c.share,
                    "reasons": list(c.reasons),
                }
                for c in self.contributions
            ],
        }

    @property
    def error(self) -> float:
        """Relative error of the worst output."""
        return max(self.errors.values(), default=0.0)


def emulate(
    model: OpenedModel,
    loaded: Session,
    emulation: Emulation,
    workload: Workload,
    *,
    progress: Progress = silent,
) -> EmulationReport:
    """Evaluate a model as the device would run it.

    Raises:
        ModelError: If it cannot be emulated.
        EngineError: If it cannot be run.
    """
    start = time.perf_counter()
    reference = CachedSession(loaded)
    progress("fp32", 0, 1)
    baseline = workload.evaluate(reference, None)
    program = model.program(emulation)
    device = DeviceModel(program=program, workload=workload, reference=reference)
    if emulation.format.has_scales:
        signed = emulation.signed_codes
        coded = calibrated_nodes(device.graph, emulation.format, device.facts, signed=signed)
        emulation = replace(emulation, encodings=coded)
    setting = setting_of(device.graph, emulation)
    metric, errors, op_contributions = (
        baseline,
        dict.fromkeys(device.exact.told, 0.0),
        list[Contribution](),
    )
    spread = OrderSpread()
    if not device.computes_fp32(emulation, setting):
        progress("emulated", 0, 1)
        metric = workload.evaluate(device.session(emulation, setting), reference)
        switched = program.session(emulation, setting, switched=True)
        errors = device.exact.errors(switched)
        op_contributions = contributions(
            device.graph,
            switched,
            emulation,
            setting,
            device.exact,
            device.facts,
            progress=progress,
        )
        trials = device.order_trials(workload, reference, progress)
        spread = trials.spread(lambda how: device.session(how, setting), emulation)
    return EmulationReport(
        baseline=baseline,
        reference=model.reference_name(device.graph),
        metric=metric,
        errors=errors,
        left_out=device.exact.left_out,
        error_figure=device.exact.figure,
        samples=sample_count(device.exact.calls),
        cast_ops=len(setting.reads),
        contributions=tuple(op_contributions),
        orders=spread,
        seconds=time.perf_counter() - start,
    )


# Shares of a value's numbers below this are not reported.
_NOTED_SHARE: Final = 0.001
# Of a normal distribution that 255 steps cover up to 10 standard deviations, 3% are below half
# a step: a value that loses more than this share has outliers.
_COMMON_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The relative output error of one op, its share of all squared errors, the reasons."""

    node: Node
    error: float
    share: float
    reasons: tuple[str, ...]


def contributions(
    graph: Graph,
    session: EmulatorSession,
    emulation: Emulation,
    setting: Setting,
    exact: Exact,
    facts: Mapping[int, ValueFacts],
    *,
    progress: Progress = silent,
) -> list[Contribution]:
    """Every cast op that adds to the output error, the worst first.

    Law: each op is rounded alone, in one session whose roundings are switched; to first order
    the squared errors of single ops add up to that of all (``planning/sensitivity.py``).
    """
    nodes = sorted(setting.reads | setting.writes)
    if not nodes:
        return []

    def probe(bits: NDArray[np.bool_]) -> list[Array]:
        chosen = frozenset(n for n, on in zip(nodes, bits, strict=True) if on)
        session.apply(setting.only(chosen))
        # Rows of outputs of free length are matched within a call.
        calls = exact.calls[:1] if exact.each else exact.calls
        return outputs_on(session, calls)

    shares = measure(
        len(nodes),
        probe,
        probing=exact.probing(partial(progress, "ops")),
    ).shares
    session.apply(setting)
    total = float(shares.sum()) or 1.0
    order = np.argsort(shares)[::-1]
    return [
        Contribution(
            node=graph.nodes[nodes[k]],
            error=math.sqrt(float(shares[k])),
            share=float(shares[k]) / total,
            reasons=reasons(graph, graph.nodes[nodes[k]], emulation.format, facts),
        )
        for k in order
        if shares[k] > 0
    ]


def reasons(
    graph: Graph, node: Node, fmt: Format, facts: Mapping[int, ValueFacts]
) -> tuple[str, ...]:
    """What the facts say against ``fmt`` at ``node``; if nothing, its few digits."""
    texts: list[str] = []
    values = [*graph.following_inputs(node), *graph.following_outputs(node)]
    if fmt.needs_ranges:
        for value in graph.following_inputs(node):
            if value.id in facts:
                texts += _below_half_a_step(value, facts[value.id], fmt)
    for value in {v.id: v for v in values}.values():
        seen = facts.get(value.id)
        texts += _constant_range(value, fmt) if seen is None else _observed(value, seen, fmt)
    if by_name(node.op).accumulates and (depth := _depth(graph, node, facts)) > 1:
        texts.append(f"adds up the rounding errors of {depth} numbers")
    if not texts:
        size = f"{fmt.unit_roundoff:.2g}"
        of = f"half a step is {size} of the range" if fmt.has_scales else f"rounds to {size}"
        texts.append(f"digits: {fmt.label} {of}")
    return tuple(texts)


def _observed(value: Value, seen: ValueFacts, fmt: Format) -> list[str]:
    if seen.largest >= overflow_limit(fmt):
        return [
            f"overflow: {value.name} reaches {seen.largest:.3g}, {fmt.label} {fmt.max:.3g}"
        ]
    flushed, small = seen.flushed_share(fmt), seen.subnormal_share(fmt)
    if flushed > _NOTED_SHARE:
        return [f"underflow: {flushed:.1%} of {value.name} becomes 0"]
    if small > _NOTED_SHARE:
        return [f"underflow: {small:.1%} of {value.name} is subnormal"]
    return []


def _below_half_a_step(value: Value, seen: ValueFacts, fmt: Format) -> list[str]:
    """That one scale covers a few large numbers and rounds many small ones to 0."""
    lowest, highest = (np.array([one], np.float64) for one in (seen.lowest, seen.highest))
    scales, _ = fmt.grid(constant=False).fit(lowest, highest)
    step = float(scales[0])
    lost = seen.share_below(step / 2)
    if lost <= _COMMON_SHARE:
        return []
    text = f"outliers: {value.name} reaches {seen.largest:.3g}, and {lost:.0%} of it is below"
    return [f"{text} half of a step of {step:.2g}, and becomes 0"]


def _constant_range(value: Value, fmt: Format) -> list[str]:
    stats = value.constant
    if stats is None or stats.largest < overflow_limit(fmt):
        return []
    return [f"overflow: constant {value.name} reaches {stats.largest:.3g}"]


def _depth(graph: Graph, node: Node, facts: Mapping[int, ValueFacts]) -> int:
    """Terms of each sum: of a product by its FLOPs, else elements in over elements out.

    0 if a shape is unknown, or the op computes several products: attention, recurrent cells.
    """
    source, result = (elements(graph, p[0], facts) for p in (node.inputs, node.outputs))
    if not result:
        return 0
    info = by_name(node.op)
    if info.kind in (OpKind.MATMUL, OpKind.CONV):
        operations_per_term = len(node.inputs) if node.op == "einsum" else 2
        shapes = {i: f.shape for i, f in facts.items()}
        return round((flops(graph, node, shapes) or 0) / (operations_per_term * result))
    return 0 if info.matmul_engine else source // result
