"""One plan for several kinds of machines, by the prices that each of them left.

Laws: every machine is priced by its own times in its own units, so that its own best plan has
the time by which it was found. Ops that any of the machines decides together are decided
together for all. What a machine may not run in a format no plan of the fleet has in it. The
plan that loses least on the machine where it loses most is never worse, by these prices, than
the best plan of any single machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.planning.alternatives import explained, labels_of
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner, pick
from finecast.planning.problem import (
    Analysis,
    Choice,
    Proposal,
    Roundings,
    build_problem,
    predicted_error,
)
from finecast.planning.proposing import frontier_of, predicted_cost, proposal, within
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.solver.assignment import Floats, Ints
from finecast.solver.expansion import least_worst
from finecast.solver.labelling import LabelProblem, evaluate

_SHARES: Final = (1.0, 0.8, 0.6, 0.4)
"""Shares of the largest error of any machine's own plan that plans of a fleet are aimed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the ops of a graph take on one kind of machine, in each format that it runs.

    Attributes:
        graph: The digest of the graph.
        formats: Formats that were priced, fp32 first.
        units: The names of ops that are decided together there.
        times_s: Seconds of each unit in each of ``formats``.
        permitted: The low formats of each op by name, where it may have any.
        cast_formats: Formats that casts are priced between.
        casts_s: By the id of a value the seconds of its casts: from each of ``cast_formats``,
            to each of them.
        rest_s: Seconds of what no plan changes.
    """

    graph: str
    formats: tuple[Format, ...]
    units: tuple[tuple[str, ...], ...]
    times_s: tuple[tuple[float, ...], ...]
    permitted: Mapping[str, frozenset[Format]]
    cast_formats: tuple[Format, ...]
    casts_s: Mapping[int, tuple[float, ...]]
    rest_s: float = 0.0

    @classmethod
    def of(cls, planner: Planner, analysis: Analysis) -> Prices:
        """The prices by which plans are chosen here."""
        graph, formats = planner.graph, (*analysis.times,)
        results = (fmt.result for fmt in formats)
        between = (*dict.fromkeys((*formats, *results, *analysis.io.values())),)
        casts: dict[int, tuple[float, ...]] = {}
        for value in graph.values:
            if value.format is Format.FP32 and value.constant is None:
                table = [analysis.cast_time(value, a, b) for a in between for b in between]
                if any(table):
                    casts[value.id] = tuple(table)
        price, inside = analysis.node_time, analysis.units.of
        rest = (n for n in graph.nodes if price is not None and n.id not in inside)
        return cls(
            graph=graph.digest,
            formats=formats,
            units=tuple(
                tuple(graph.nodes[n].name for n in members)
                for members in analysis.units.members
            ),
            times_s=tuple(
                tuple(map(float, row)) for row in np.stack([*analysis.times.values()], axis=1)
            ),
            permitted={
                graph.nodes[n].name: lows
                for n, permission in planner.permissions.items()
                if (lows := permission.formats - {Format.FP32})
            },
            cast_formats=between,
            casts_s=casts,
            rest_s=sum(price(n, Format.FP32) for n in rest) if price else 0.0,
        )

    def cast_time(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds of a cast; of a format that was not priced none, as no plan has it."""
        table, known = self.casts_s.get(value.id), self.cast_formats
        if table is None or src not in known or dst not in known:
            return 0.0
        return table[known.index(src) * len(known) + known.index(dst)]

    def permits(self, planner: Planner) -> dict[int, Permission]:
        """The permissions of ``planner`` as far as this machine has kernels, too."""

        def also(node: Node, given: Permission) -> Permission:
            here = self.permitted.get(node.name, frozenset[Format]()) | {Format.FP32}
            return replace(given, formats=(given.formats & here) or given.formats)

        nodes = planner.graph.nodes
        return {i: also(nodes[i], given) for i, given in planner.permissions.items()}

    def analysis(self, graph: Graph, formats: Sequence[Format]) -> Analysis:
        """The units and times of this machine for ``formats``; roundings make no error."""
        ids = {node.name: node.id for node in graph.nodes}
        members = tuple(tuple(ids[name] for name in unit) for unit in self.units)
        of = {node: number for number, nodes in enumerate(members) for node in nodes}
        times = np.array(self.times_s).reshape(len(members), len(self.formats))
        none = np.zeros(len(members))
        columns = {fmt: times[:, number] for number, fmt in enumerate(self.formats)}
        return Analysis(
            units=Units(members=members, of=of),
            # One that was not priced is permitted nowhere.
            times={fmt: columns.get(fmt, columns[Format.FP32]) for fmt in formats},
            cast_time=self.cast_time,
            rounded={
                fmt: Roundings(units=none, shared=none, lists=(), errors=np.zeros(0))
                for fmt in formats[1:]
            },
        )


@dataclass(frozen=True, kw_only=True)
class PricedKind:
    """A kind of machine as plans are judged by: its prices and its own best plan.

    Attributes:
        prices: The prices.
        best: The low formats of its own best plan, by the op's name; none for fp32.
        planner: Makes plans of the graph.
    """

    prices: Prices
    best: Mapping[str, Format]
    planner: Planner

    @cached_property
    def _own(self) -> tuple[Planner, Analysis]:
        """A planner and an analysis of this machine's formats alone."""
        prices, planner = self.prices, self.planner
        permissions = {
            i: Permission(
                formats=prices.permitted.get(planner.graph.nodes[i].name, frozenset())
                | {Format.FP32},
                reasons=(),
            )
            for i in planner.permissions
        }
        own = replace(planner, permissions=permissions)
        return own, prices.analysis(planner.graph, prices.formats)

    def time_s(self, formats: Mapping[str, Format]) -> float:
        """Predicted seconds of a call of a plan; infinite if an op has no kernel for it."""
        own, analysis = self._own
        permitted = self.prices.permitted
        for name, fmt in formats.items():
            if fmt is not Format.FP32 and fmt not in permitted.get(name, ()):
                return math.inf
        plan = own.plan({n.id: formats.get(n.name, Format.FP32) for n in _fp32(own)}, "")
        return self.prices.rest_s + predicted_cost(own, analysis, plan)

    @cached_property
    def best_s(self) -> float:
        """That of its own best plan."""
        return self.time_s(self.best)

    @cached_property
    def fp32_s(self) -> float:
        """That of the fp32 model."""
        return self.time_s({})

    def loss(self, plan: Plan) -> float:
        """The share by which a call of ``plan`` takes longer than one of the best plan."""
        low = {name: fmt for name, fmt in plan.formats.items() if fmt is not Format.FP32}
        return self.time_s(low) / self.best_s - 1


def _fp32(planner: Planner) -> list[Node]:
    return [n for n in planner.graph.float_nodes if n.format is Format.FP32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A plan for some of the kinds.

    Attributes:
        proposal: The plan with its predicted error.
        losses: What each kind loses by it, as a share of the time of its own best plan.
        bound: What any plan of at most this error loses on the kind where it loses most, or
            more, as far as is proven.
    """

    proposal: Proposal
    losses: Mapping[str, float]
    bound: float = -math.inf

    @property
    def worst(self) -> float:
        """What the kind that loses most loses."""
        return max(self.losses.values())


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Kinds of machines that a model is planned for.

    Attributes:
        planner: Makes plans, as the rules here permit.
        analysis: Units and errors of rounding, as they were measured here.
        kinds: The kinds by name.
    """

    planner: Planner
    analysis: Analysis
    kinds: Mapping[str, PricedKind]
    _known: dict[frozenset[str], Sequence[Serving]] = field(
        init=False, repr=False, default_factory=dict[frozenset[str], "Sequence[Serving]"]
    )

    def servings(self, names: Collection[str]) -> Sequence[Serving]:
        """Plans for these kinds, the least worst loss first; the last one is fp32.

        Among them are the best plans of each kind, and for some errors that such plans have
        the plan that an integer program finds.
        """
        key = frozenset(names)
        if key not in self._known:
            self._known[key] = _Shared.of(self, [n for n in self.kinds if n in key]).servings()
        return self._known[key]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """The choice for some kinds: the same units, labels and errors at the prices of each.

    Attributes:
        kinds: The kinds by name.
        made: Makes plans of what the rules permit here.
        planner: Makes plans of what all kinds may run.
        here: The analysis of this machine.
        analyses: By kind its times, with the units and errors that all have in common.
        more: By kind the share of its best time that no plan changes.
    """

    kinds: Mapping[str, PricedKind]
    made: Planner
    planner: Planner
    here: Analysis
    analyses: Mapping[str, Analysis]
    more: Floats

    @classmethod
    def of(cls, fleet: Fleet, names: Sequence[str]) -> _Shared:
        planner, kinds = fleet.planner, {name: fleet.kinds[name] for name in names}
        for kind in kinds.values():
            planner = replace(planner, permissions=kind.prices.permits(planner))
        here, formats = fleet.analysis, (*fleet.analysis.times,)
        own = {n: k.prices.analysis(planner.graph, formats) for n, k in kinds.items()}
        units = _joined(here.units, [one.units for one in own.values()])
        rounded = {fmt: _merged(one, here.units, units) for fmt, one in here.rounded.items()}
        analyses: dict[str, Analysis] = {}
        more: list[float] = []
        for name, one in own.items():
            to, width = _places(one.units, units), len(units.members)
            free = to >= 0
            times = {
                fmt: np.bincount(to[free], np.asarray(of)[free], width).astype(np.float64)
                for fmt, of in one.times.items()
            }
            analyses[name] = replace(
                here,
                units=units,
                times=times,
                cast_time=one.cast_time,
                rounded=rounded,
                node_time=None,
            )
            fixed_s = kinds[name].prices.rest_s + float(one.times[Format.FP32][~free].sum())
            more.append(fixed_s / kinds[name].best_s)
        return cls(
            kinds=kinds,
            made=fleet.planner,
            planner=planner,
            here=here,
            analyses=analyses,
            more=np.array(more),
        )

    def servings(self) -> Sequence[Serving]:
        """All plans, the least worst loss first."""
        own = [self._own("fp32", {})]
        own += [self._own(f"the best of {n}", k.best) for n, k in self.kinds.items()]
        largest = max(one.error for one in own)
        aims = (*(share**2 * largest for share in _SHARES), *(one.error for one in own))
        bounds: dict[float, float] = {}
        found: dict[str, Proposal] = {}
        for error in sorted({e for e in aims if e > 0}, reverse=True):
            plan, bounds[error] = self._least_worst(error, own)
            found.setdefault(plan.plan.digest, plan)
        made: list[Serving] = []
        for plan in {one.plan.digest: one for one in (*own, *found.values())}.values():
            losses = {name: kind.loss(plan.plan) for name, kind in self.kinds.items()}
            least = min((error for error in bounds if error >= plan.error), default=None)
            bound = -math.inf if least is None else bounds[least]
            made.append(Serving(proposal=plan, losses=losses, bound=bound))
        made = [one for one in made if math.isfinite(one.worst)]
        return sorted(made, key=lambda one: (one.worst, one.proposal.error))

    def _own(self, name: str, best: Mapping[str, Format]) -> Proposal:
        """A plan of these low formats, as far as they are permitted here."""
        nodes, fp32 = self.made.graph.nodes, Format.FP32
        formats = {
            i: pick(permission, best.get(nodes[i].name, fp32), fp32)
            for i, permission in self.made.permissions.items()
        }
        plan = explained(self.made, self.here, self.made.plan(formats, ""))
        error = predicted_error(self.here, formats)
        return Proposal(name=name, plan=plan, time_s=math.nan, error=error)

    def _least_worst(self, error: float, own: Sequence[Proposal]) -> tuple[Proposal, float]:
        """The plan of at most this error whose worst loss is least, and the loss's bound."""
        planner, names = self.planner, [*self.kinds]
        problems = [
            build_problem(planner.graph, planner.permissions, self.analyses[n]) for n in names
        ]
        shares = [
            replace(one, time=one.time / kind.best_s, cast=one.cast / kind.best_s)
            for one, kind in zip(problems, self.kinds.values(), strict=True)
        ]
        apart = self.here.saturation.apart(error)
        found = least_worst(shares, self.more, apart, self._known(shares, error, own))
        losses = [evaluate(one, found.label).time_s for one in shares] + self.more
        worst = int(np.argmax(losses))
        analysis, problem = self.analyses[names[worst]], problems[worst]
        choice = Choice.of(evaluate(problem, found.label), problem, found.label, analysis)
        name = f"least worst of error {math.sqrt(choice.error):.3g}"
        return proposal(planner, analysis, choice, name), found.bound - 1

    def _known(
        self, shares: Sequence[LabelProblem], error: float, own: Sequence[Proposal]
    ) -> Ints:
        """The labels of least worst loss among simple ones of at most this error.

        They are those of the machines' own plans and of the frontier of the summed losses.
        """
        planner, kinds = self.planner, [*self.kinds.values()]
        summed = replace(
            self.here,
            units=next(iter(self.analyses.values())).units,
            rounded=next(iter(self.analyses.values())).rounded,
            times={
                fmt: np.sum(
                    [
                        one.times[fmt] / k.best_s
                        for one, k in zip(self.analyses.values(), kinds, strict=True)
                    ],
                    axis=0,
                )
                for fmt in self.here.times
            },
            cast_time=lambda value, src, dst: sum(
                k.prices.cast_time(value, src, dst) / k.best_s for k in kinds
            ),
            node_time=None,
        )
        steps = [
            c
            for c in frontier_of(planner, summed, errors=(0.0, error))
            if math.isfinite(c.time_s)
        ]
        between = within(planner, summed, steps, error)
        numbers = {fmt: number for number, fmt in enumerate(summed.times)}
        labels = [
            np.array([numbers[f] for f in choice.formats])
            for choice in (*steps, *((between,) if between else ()))
        ]
        labels += [labels_of(planner, summed, shares[0], one.plan) for one in own]
        apart = self.here.saturation.apart(error)
        kept = [one for one in labels if evaluate(shares[0], one).error <= apart]

        def worst(label: Ints) -> float:
            times = [evaluate(one, label).time_s for one in shares]
            return float(np.max(times + self.more))

        return min(kept or labels, key=worst)


def _joined(here: Units, others: Sequence[Units]) -> Units:
    """The units of ``here``, joined where another machine decides several together."""
    from scipy.cluster.hierarchy import DisjointSet  # a second to import

    sets = DisjointSet(here.of)
    for members in (*here.members, *(m for one in others for m in one.members)):
        inside = [node for node in members if node in here.of]
        for node in inside[1:]:
            sets.merge(inside[0], node)
    return Units.of_sets(sets.subsets())


def _places(units: Units, joined: Units) -> Ints:
    """For each unit the one of ``joined`` that has its ops; -1 if none has."""
    found = (
        next((joined.of[node] for node in nodes if node in joined.of), -1)
        for nodes in units.members
    )
    return np.array([*found], dtype=np.int64)


def _merged(given: Roundings, units: Units, joined: Units) -> Roundings:
    """The errors of rounding by the units of ``joined``."""
    to, width = _places(units, joined), len(joined.members)

    def moved(lists: Sequence[int]) -> list[int]:
        return [u if u < 0 else int(to[u]) for u in lists]  # pins stay

    return Roundings(
        units=np.bincount(to, given.units, width).astype(np.float64),
        shared=np.bincount(to, given.shared, width).astype(np.float64),
        lists=[moved(one) for one in given.lists],
        errors=given.errors,
    )
