"""Which ops of a low model cost its accuracy, and what shows it.

Law: the ops named are a smallest set whose return to fp32 makes the model pass, confirmed by
runs: without any one of them it fails. A model that passes has none, nor has one whose error
is spread over so many ops that no small set of them is to blame.

The order of suspicion comes from sensitivities: runs on few samples in which one op alone is
low. Where these explain little of the error, ops are harmful only together, and runs tell in
which one op alone is returned to fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.deviation import ROUNDINGS_PER_OP, expected, fp32_error
from finecast.data.workload import Workload, probed, probed_rows
from finecast.diagnosis.emulating import reasons
from finecast.diagnosis.judging import ErrorJudge, Judge, peak_of
from finecast.engines.base import Array, Session, outputs_on
from finecast.engines.exact import RELATIVE_ERROR, CachedSession, Exact
from finecast.errors import in_shell
from finecast.graph import Graph, Node
from finecast.naming import enumerated, excluding, left_out, listed, number_of, percent
from finecast.native.model import LowModel, Seen
from finecast.native.scales import WrongScale
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.numbers.thresholds import ENGINE_FACTOR, LIMIT
from finecast.ops.bodies import owner_of
from finecast.planning.contributions import told_shares
from finecast.planning.sensitivity import measure
from finecast.progress import Progress, silent
from finecast.reports.base import Report, TextTable
from finecast.rules.facts import Facts, ValueFacts
from finecast.solver.smallest_set import smallest_set

_SUSPICIOUS: Final = 0.25
"""Ops are harmful only together if their single errors add up to less than this share of the
error of all: the errors of independent roundings add up (``planning/sensitivity.py``)."""

_TESTS_BEYOND: Final = 2
"""Tests of sets of ops, as a multiple of those of the usual case, before a set is left as it
is."""

_LARGEST_SHARE: Final = 0.25
"""Ops are a small set if they are at most this share of all. Those of a larger set have on
average less than four times the mean squared error: no binary digit more than the rest."""

_FEW: Final = 3
"""So many ops are always a small set."""

_SHOWN_OPS: Final = 10
"""Culprits that a printed result names."""

_KEPT_OPS: Final = 20
"""Culprits up to which the option that keeps them in fp32 is printed."""

_SHOWN_SHARES: Final = 3
"""Ops whose shares of the squared error are told."""

_NOT_SPREAD: Final = 0.5
"""An error of which one op makes more than half is not spread over the model."""

_SHOWN_SCALES: Final = 3
"""Wrong scales that a printed result states beside those of the culprits."""

_AS_GOOD: Final = 4.0
"""Another op restores a model as well if the squared error left is at most so many times that
which the best one leaves: one binary digit."""

_OTHER_TOOLS: Final = (
    "a tool that quantizes the model again, as quantize_static with nodes_to_exclude, has to"
    " leave out the ops that make their inputs, too: else these stay integers"
)
_BY_DEFINITIONS: Final = (
    "both models were computed op by op, as the ops are defined and in the file's own types;"
    " --engine NAME compares them in the kernels of an engine"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """An op that has to be in fp32.

    Attributes:
        node: Its name.
        op: Its native type.
        format: The low format's label.
        moved: Names of the ops that only move its result, and are kept with it.
        within: Of an op of control flow the names of the low ops in its bodies.
        alone: The relative output error if this op alone is low.
        reasons: What shows it, in words.
        source: Its line of PyTorch code; empty if the model does not tell.
    """

    node: str
    op: str
    format: str
    moved: tuple[str, ...]
    alone: float
    reasons: tuple[str, ...]
    source: str
    within: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON."""
        return {
            "node": self.node,
            "op": self.op,
            "format": self.format,
            "moved": list(self.moved),
            "within": list(self.within),
            "error_alone": self.alone,
            "reasons": list(self.reasons),
            "source": self.source or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """The first op, in the order of computation, whose result is wrong.

    Attributes:
        node: Its name.
        op: Its native type.
        why: What is wrong with the result.
        absorbed: The op that reads the Inf or NaN and gives finite numbers; empty if none.
        source: Its line of PyTorch code; empty if the model does not tell.
    """

    node: str
    op: str
    why: str
    absorbed: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON."""
        return {
            "node": self.node,
            "op": self.op,
            "why": self.why,
            "absorbed_at": self.absorbed or None,
            "source": self.source or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Blame(Report):
    """Which ops of a low model cost its accuracy; printed it is a few lines.

    Attributes:
        low: The low model's name.
        figure: The name of what was judged by.
        worst: The output or slice with the worst of it in the low model, named as
            ``y[:, 4:24]``; empty if there is one alone.
        samples: The number of probed samples that the figures are of; 0 for all data.
        fp32: The fp32 model's figure.
        value: The low model's.
        restored: The figure with the culprits in fp32; that of the low model if it passes.
        limit: The worst figure that passes.
        passed: Whether the low model passes.
        culprits: The smallest set of ops whose return to fp32 makes it pass.
        spread: The number of ops in that set where it is no small one. The error is then
            spread over the model, and none is named.
        is_minimal: Whether each of them was seen to be needed.
        instead: Ops of which each would do in place of the culprit: they are harmful only
            together with it.
        first: The first op whose result is wrong; None if none was seen.
        wrong_scales: Scales that do not fit the numbers that they are for, by op, the worst
            first; those of culprits, too.
        largest_shares: The ops with the largest shares of the low model's squared error, the
            largest first; empty if it passes or if the errors of single ops do not add up.
        ops: The number of ops, or of ops with those that only move their results.
        evaluations: Runs on all data, or on all samples.
        probes: Runs on few samples.
        seconds: How long it took.
        engine: The engine whose kernels computed the figures; None if they follow from the
            ops' definitions in the types that the files state.
        unexplained: That the engine's whole error is another one than that of these ops.
        warnings: What a user should know.
    """

    low: str
    figure: str
    worst: str = ""
    samples: int = 0
    fp32: float
    value: float
    restored: float
    limit: float
    passed: bool
    culprits: tuple[Culprit, ...] = ()
    spread: int = 0
    is_minimal: bool = True
    instead: tuple[str, ...] = ()
    first: WrongResult | None = None
    wrong_scales: Sequence[tuple[str, WrongScale]] = ()
    largest_shares: Mapping[str, float] = field(default_factory=dict[str, float])
    ops: int
    evaluations: int
    probes: int = 0
    seconds: float = 0.0
    engine: str | None = None
    unexplained: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        of = f" of {self.worst}" if self.worst else ""
        on = f" on {number_of(self.samples, 'sample')}" if self.samples else ""
        value, fp32, limit, restored = map(
            self._shown, (self.value, self.fp32, self.limit, self.restored)
        )
        beside = "" if self.figure == RELATIVE_ERROR else f", fp32 {fp32}"
        against = f"{self.figure}{of}{on} {value}{beside}"
        if self.passed:
            return f"nothing to blame: {against}, within the limit of {limit}"
        least = "" if self.is_minimal else " (fewer may do)"
        if self.spread:
            needed = f"{self.spread} of {number_of(self.ops, 'op')}{least} in fp32"
            how = f"the error is spread: {needed} give {restored}"
            # A share of decisions, for one, does not follow the squared error.
            node, share = next(iter(self.largest_shares.items()), ("", 0.0))
            if share > _NOT_SPREAD:
                how = (
                    f"{node} makes {percent(share)} of the squared error, and does not"
                    f" suffice: {needed} give {restored}"
                )
            return f"no small set of ops to blame: {against}, limit {limit}; {how}"
        count = number_of(len(self.culprits), "op")
        return (
            f"{count} to blame{least}: {against}, limit {limit}; with"
            f" {'it' if len(self.culprits) == 1 else 'them'} in fp32 {restored}"
        )

    def _shown(self, figure: float) -> str:
        """A figure, an error in percent as in every other verb."""
        return percent(figure) if self.figure == RELATIVE_ERROR else f"{figure:.6g}"

    @property
    def keep(self) -> str:
        """The option that keeps the culprits in fp32; empty if there are none."""
        names = [n for c in self.culprits for n in (*(c.within or (c.node,)), *c.moved)]
        return excluding(names) if names else ""

    @property
    def effort(self) -> str:
        """What it took, in words."""
        ranked = (
            f", {number_of(self.probes, 'run')} on few samples to rank"
            f" {number_of(self.ops, 'op')}"
            if self.probes
            else ""
        )
        took = f"it took {self.seconds:.1f} s"
        return f"{number_of(self.evaluations, 'evaluation')}{ranked}; {took}"

    @property
    def lines(self) -> list[str]:
        """The verdict, the culprits and what shows them, and what to do."""
        told = [f"{c.node} ({c.format}): {'; '.join(c.reasons)}" for c in self.culprits]
        return [
            "; ".join((*self.unexplained, self.verdict)),
            *told[:_SHOWN_OPS],
            *self._notes(),
            *(f"warning: {text}" for text in in_shell(self.warnings)),
        ]

    @property
    def tables(self) -> list[TextTable]:
        """The culprits."""
        return [self.by_op(len(self.culprits))]

    def by_op(self, most: int) -> TextTable:
        """The culprits, at most so many, with what shows them."""
        rows = [
            (
                c.node,
                c.format,
                "; ".join(filter(None, (*c.reasons, c.source))),
                percent(c.alone, 2),
            )
            for c in self.culprits[:most]
        ]
        return TextTable(
            left=("node", "type", "why"),
            right=("error\nalone",),
            rows=rows,
            fold=("node", "why"),
            notes=(*left_out(len(self.culprits), most), *self._notes()),
        )

    def _notes(self) -> list[str]:
        """What would do in place of the culprits, what is wrong first, and what to do."""
        notes = [*self._scales(), *told_shares(self.largest_shares)]
        if self.instead:
            notes.append(f"in its place any of these would do: {', '.join(self.instead)}")
        if (first := self.first) is not None:
            notes.append(f"first wrong result: {first.node}: {first.why}")
            if first.absorbed:
                notes.append(f"its NaN or Inf is absorbed at {first.absorbed}")
            if first.source:
                notes.append(f"first wrong result in the code: {first.source}")
        if self.keep and len(self.culprits) <= _KEPT_OPS:
            notes.append(f"convert and tune keep them in fp32 by {self.keep}")
            notes += self._fitting()
            if any(c.format == Format.INT8.label for c in self.culprits):
                notes.append(_OTHER_TOOLS)
        if self.engine is None:
            notes.append(_BY_DEFINITIONS)
        return [*notes, self.effort]

    def _fitting(self) -> list[str]:
        """Scales that fit culprits whose own are too coarse: the ops may then stay low."""
        nodes = {c.node for c in self.culprits}
        fitting = dict.fromkeys(
            scale.fitting for node, scale in self.wrong_scales if node in nodes
        )
        advised = [text for text in fitting if text]
        if not advised:
            return []
        more = left_out(len(advised), _SHOWN_SCALES, " scales")
        texts = enumerated([*advised[:_SHOWN_SCALES], *more])
        return [f"or keep the reduced format, by a scale that fits the values: {texts}"]

    def _scales(self) -> list[str]:
        """The worst scales among those that no culprit's reasons state."""
        stated = {text for c in self.culprits for text in c.reasons}
        texts = dict.fromkeys(scale.text for _, scale in self.wrong_scales)
        left = [text for text in texts if text not in stated]
        return [*left[:_SHOWN_SCALES], *left_out(len(left), _SHOWN_SCALES, " wrong scales")]

    def _content(self) -> dict[str, Any]:
        return {
            "low": self.low,
            "verdict": self.verdict,
            "unexplained": list(self.unexplained),
            "figure": self.figure,
            "worst_output": self.worst or None,
            "samples": self.samples or None,
            "fp32": self.fp32,
            "value": self.value,
            "restored": self.restored,
            "limit": self.limit,
            "passed": self.passed,
            "culprits": [one.to_dict() for one in self.culprits],
            "spread": self.spread,
            "is_minimal": self.is_minimal,
            "instead": list(self.instead),
            "first_wrong": None if self.first is None else self.first.to_dict(),
            "wrong_scales": [
                {"node": node, **scale.to_dict()} for node, scale in self.wrong_scales
            ],
            "largest_shares": dict(self.largest_shares),
            "keep": self.keep or None,
            "ops": self.ops,
            "evaluations": self.evaluations,
            "probes": self.probes,
            "seconds": self.seconds,
            "engine": self.engine,
            "warnings": in_shell(self.warnings),
        }


def blame(low: LowModel, judge: Judge, exact: Exact, *, progress: Progress = silent) -> Blame:
    """Find the ops of ``low`` whose return to fp32 makes it pass.

    ``exact`` has the fp32 model's outputs on the samples that are probed.

    Raises:
        EngineError: If a model cannot be run.
    """
    return _Search(low=low, judge=judge, exact=exact, progress=progress).found()


@dataclass(slots=True, kw_only=True)
class _Search:
    low: LowModel
    judge: Judge
    exact: Exact
    progress: Progress
    evaluations: int = 0
    probes: int = 0
    figures: dict[frozenset[int], float] = field(default_factory=dict[frozenset[int], float])
    observed: Facts | None = None

    def found(self) -> Blame:
        start = time.perf_counter()
        low = self.low
        self.progress("the other model", 0, 1)
        passed = self._passes(frozenset())
        value = self.figures[frozenset()]
        result = Blame(
            low=low.name,
            figure=self.judge.figure,
            worst=self.judge.worst,
            samples=self.judge.samples,
            fp32=self.judge.baseline,
            value=value,
            restored=value,
            limit=self.judge.limit,
            passed=passed,
            ops=len(low.groups),
            evaluations=1,
            engine=low.engine,
        )
        if not passed and low.groups:
            result = self._searched(result)
        scales = low.wrong_scales(self._facts).items()
        named = [(low.graph.nodes[n].name, scale) for n, wrong in scales for scale in wrong]
        return replace(
            result,
            wrong_scales=sorted(named, key=lambda one: one[1].order),
            evaluations=self.evaluations,
            probes=self.probes,
            seconds=time.perf_counter() - start,
            unexplained=tuple(low.unexplained(self.exact, passed=passed)),
            warnings=(*low.notes, *self._not_counted()),
        )

    def _facts(self) -> Facts:
        """Those of the fp32 model's values, observed once."""
        if self.observed is None:
            self.observed = self.low.facts(self.exact.calls)
        return self.observed

    def _not_counted(self) -> list[str]:
        """A note on integers that differ, where the model is judged by the error of floats."""
        if not isinstance(self.judge, ErrorJudge):
            return []
        shares = self.exact.differing(self.low.session(frozenset()))
        if not shares:
            return []
        texts = [f"{percent(share)} of {name}" for name, share in shares.items()]
        return [
            (
                f"numbers of outputs without floats differ, which the error leaves out:"
                f" {listed(texts, _SHOWN_SHARES)}: --metric agreement --of NAME judges by them"
            )
        ]

    def _searched(self, failed: Blame) -> Blame:
        low = self.low
        seen = low.seen(self.exact.calls[0], self.judge.accepts)
        facts = self._facts()
        scales = low.wrong_scales(self._facts)
        alone, after = self._sensitivities()
        scores = alone if after is None else -after
        order = [int(k) for k in np.argsort(-scores, kind="stable")]
        usual = math.ceil(math.log2(max(len(order), 2))) + 3
        least = smallest_set(order, self._passes, most=_TESTS_BEYOND * usual)
        members = frozenset(least.members)
        if members not in self.figures:  # all of them, which is the fp32 model
            self.figures[members] = self.judge.baseline
        first = _first_wrong(low, seen) or _first_out_of_range(low, facts)
        failed = replace(
            failed,
            restored=self.figures[members],
            is_minimal=least.is_minimal,
            first=first,
            largest_shares={} if after is not None else self._largest(alone),
            ops=len(low.groups),
        )
        if len(members) > max(_FEW, _LARGEST_SHARE * len(low.groups)):
            return replace(failed, spread=len(members))
        instead: tuple[str, ...] = ()
        if after is not None and len(least.members) == 1:
            as_good = np.flatnonzero(after <= _AS_GOOD * after[least.members[0]]).tolist()
            instead = tuple(self._name(k) for k in as_good if k not in members)
        return replace(
            failed,
            culprits=tuple(
                self._culprit(k, alone[k], seen, facts, scales, together=after is not None)
                for k in least.members
            ),
            instead=instead,
        )

    def _passes(self, returned: frozenset[int]) -> bool:
        self.evaluations += 1
        self.progress("sets of ops", self.evaluations - 1, self.evaluations)
        self.figures[returned], passed = self.judge.judge(self.low.session(returned))
        return passed

    def _node(self, group: int) -> Node:
        return self.low.graph.nodes[self.low.groups[group].nodes[0]]

    def _name(self, group: int) -> str:
        return _named(self.low.graph, self._node(group)).name

    def _largest(self, errors: NDArray[np.float64]) -> dict[str, float]:
        """The groups with the most of the squared error, as shares of all of it."""
        order = np.argsort(-errors, kind="stable")[:_SHOWN_SHARES]
        total = float(errors.sum())
        return {self._name(k): float(errors[k]) / total for k in order if errors[k] > 0}

    def _sensitivities(self) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Squared errors with each group alone low; and with each alone in fp32, if needed.

        They are needed where the first ones explain little of the error.
        """
        count = len(self.low.groups)
        every = frozenset(range(count))

        def outputs(bits: NDArray[np.bool_]) -> list[Array]:
            low = frozenset(int(k) for k in np.flatnonzero(bits))
            return outputs_on(self.low.session(every - low), self.exact.calls)

        sensitivity = measure(
            count,
            outputs,
            probing=self.exact.probing(partial(self.progress, "ops")),
        )
        self.probes += sensitivity.probes
        if sensitivity.added >= _SUSPICIOUS * sensitivity.total:
            return sensitivity.values, None
        after = np.empty(count)
        for k in range(count):
            found_outputs = outputs(np.arange(count) != k)
            error = self.exact.squared_error(found_outputs)
            after[k] = min(error, sensitivity.total)
            self.progress("ops together", k + 1, count)
        self.probes += count
        return sensitivity.values, after

    def _culprit(
        self,
        group: int,
        alone: float,
        seen: Mapping[int, Seen],
        facts: Facts,
        scales: Mapping[int, Sequence[WrongScale]],
        *,
        together: bool,
    ) -> Culprit:
        low, node = self.low, self._node(group)
        members = self.low.groups[group]
        shown = [seen[i] for i in node.output_ids if i in seen]
        told = [scale.text for n in members.nodes for scale in scales.get(n, ())]
        told += (text for one in shown for text in _told(one, members.format))
        if together:
            told.append("harmless by itself: harmful only together with others")
        if not any(n in scales for n in members.nodes):
            told += reasons(low.graph, node, members.format, facts)
        cancelled = _cancellation(low.graph, node, facts)
        named, moved = node, members.nodes[1:]
        within = low.within(group, self.exact.calls)
        if within:
            named, moved = _named(low.graph, node), members.nodes
            told.insert(
                0, f"ops in reduced precision in its bodies: {listed(within, _SHOWN_OPS)}"
            )
        return Culprit(
            node=named.name,
            op=named.native,
            format=members.format.label,
            moved=tuple(low.graph.nodes[n].name for n in moved),
            within=within,
            alone=math.sqrt(alone),
            reasons=(*told, *cancelled),
            source=node.source,
        )


def _named(graph: Graph, node: Node) -> Node:
    """The op of control flow that ``node`` is a result of, or ``node`` itself."""
    return owner_of(graph, node) or node


def _told(seen: Seen, fmt: Format) -> list[str]:
    """What a value shows of the op that gives it."""
    if seen.spoiled:
        return [f"{number_of(seen.spoiled, 'number')} NaN or Inf, finite in fp32"]
    if seen.own <= ROUNDINGS_PER_OP * fmt.unit_roundoff:
        return []
    rounds = f"rounding to {fmt.label} alone errs by {percent(fmt.unit_roundoff, 2)}"
    own = percent(seen.own, 2)
    return [f"on the same inputs its result differs from fp32's by {own}; {rounds}"]


_CANCELS: Final = 16.0
"""A sum cancels if an operand is so many times as large as the result: four binary digits."""


def _cancellation(graph: Graph, node: Node, facts: Mapping[int, ValueFacts]) -> list[str]:
    """How many times as large as its result the operands of a sum are, if that is many."""
    if node.op not in ("add", "subtract", "reduce_sum", "reduce_mean", "sum"):
        return []
    result = next((facts[i].largest for i in node.output_ids if i in facts), 0)
    operands = [facts[i].largest for i in node.input_ids if i in facts]
    ratio = max(operands, default=0.0) / result if result else 0.0
    if ratio < _CANCELS:
        return []
    return [f"cancellation: operands are {ratio:.3g} times as large as the result"]


def _first_wrong(low: LowModel, seen: Mapping[int, Seen]) -> WrongResult | None:
    """The first op whose result leaves range or digits, or is refused."""
    graph, formats = low.graph, low.formats
    bounds = expected(graph, formats)
    # Engines may round a value for one of its readers alone, so that ops in fp32 err, too.
    coarsest = max((f.unit_roundoff for f in formats.values()), default=0.0)
    peak = peak_of(formats)
    own_order = fp32_error(len(graph.float_nodes))
    for node in graph.nodes:
        fmt = formats.get(node.id, Format.FP32)
        for index in node.outputs:
            one = None if index is None else seen.get(index)
            if index is None or one is None:
                continue
            explained = bounds.relative.get(index, 0.0)
            limit = max(peak * max(explained, ROUNDINGS_PER_OP * coarsest), own_order)
            if index in bounds.decided:  # its error has no bound, that of its op has one
                limit = max(limit, LIMIT)
            errs = one.own > ENGINE_FACTOR * ROUNDINGS_PER_OP * coarsest
            if one.spoiled or one.refused or one.total > limit or errs:
                absorbed = _absorbing(graph, node, seen) if one.spoiled else None
                named = _named(graph, node)
                return WrongResult(
                    node=named.name,
                    op=named.native,
                    why=_wrong(one, fmt),
                    absorbed="" if absorbed is None else absorbed.name,
                    source=node.source,
                )
    return None


def _wrong(seen: Seen, fmt: Format) -> str:
    """What is wrong with a value."""
    if not seen.spoiled:
        total, own = percent(seen.total, 2), percent(seen.own, 2)
        if total == own:
            return f"its relative error is {total}, and as much on fp32's inputs"
        return f"its relative error is {total}; compared with fp32 on the same inputs, {own}"
    text = f"{number_of(seen.spoiled, 'number')} NaN or Inf"
    if seen.largest < overflow_limit(fmt):
        return text
    return f"{text}: fp32 reaches {seen.largest:.3g} there, {fmt.label} {fmt.max:.3g}"


def _absorbing(graph: Graph, start: Node, seen: Mapping[int, Seen]) -> Node | None:
    """The first op that reads the NaN or Inf of ``start`` and gives none."""
    spoiled = {i for i, one in seen.items() if one.spoiled}
    reached = {i for i in start.outputs if i in spoiled}
    for node in graph.nodes[start.id + 1 :]:
        if not any(i in reached for i in node.inputs):
            continue
        made = [i for i in node.output_ids if i in seen]
        bad = {i for i in made if i in spoiled}
        if made and not bad:
            return node
        reached |= bad
    return None


def _first_out_of_range(low: LowModel, facts: Mapping[int, ValueFacts]) -> WrongResult | None:
    """The first low op whose result in fp32 is beyond its format's range."""
    for node in low.graph.nodes:
        fmt = low.formats.get(node.id)
        for value in low.graph.following_outputs(node) if fmt is not None else ():
            one = facts.get(value.id)
            if fmt is not None and one is not None and one.largest >= overflow_limit(fmt):
                why = f"fp32 reaches {one.largest:.3g} there, {fmt.label} {fmt.max:.3g}"
                line = node.source
                return WrongResult(node=node.name, op=node.native, why=why, source=line)
    return None


def samples_of(workload: Workload, reference: Session, groups: int) -> Exact:
    """The fp32 model's outputs on the calibration samples that ``groups`` are probed on."""
    calls = probed(workload.calibration(), reference, probed_rows(groups))
    return Exact.of(CachedSession(reference), calls, workload.of, workload.slices)
