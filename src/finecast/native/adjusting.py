"""Adjusting a plan's operands by runs on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from finecast.engines.base import Engine, Feeds
from finecast.engines.integers import codes_results
from finecast.engines.loading import exact_session, load_model
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.native.gains import Gain, gaining_kinds, measure_gains, output_error
from finecast.native.observing import observe, observe_channels
from finecast.native.source import Source
from finecast.numbers.formats import Format
from finecast.planning.biases import biases, corrected
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.range_scaling import range_scalings, scaled_facts
from finecast.planning.rescaling import (
    Rescaling,
    re_encoded,
    reasons,
    smoothable,
    smoothed,
)
from finecast.rules.facts import ValueFacts
from finecast.rules.observed import OBSERVED
from finecast.rules.policy import Adjust

Batches = Callable[[], Iterable[Feeds]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Smoothed:
    """A model after ``rescalings`` of channels of the one before, and facts of its values."""

    model: PreparedModel
    facts: Mapping[int, ValueFacts]
    rescalings: Sequence[Rescaling] = ()


@dataclass(slots=True, kw_only=True)
class Adjuster:
    """Adjusts plans of one model, made by ``planner``, by runs on ``batches``.

    The smoothed model is kept for all plans: channels are rescaled for every product that may
    be on codes. Adjusted plans are kept, too: a search measures one, and tells of it later.
    """

    model: PreparedModel
    facts: Mapping[int, ValueFacts]
    planner: Planner
    batches: Batches
    _smooth: _Smoothed | None = field(init=False, default=None)
    _plans: dict[tuple[str, tuple[Adjust, ...]], Plan] = field(
        init=False, default_factory=dict
    )

    def adjusted(self, plan: Plan, kinds: Sequence[Adjust]) -> Plan:
        """``plan`` with these kinds of adjustments, made one after the other.

        It is unchanged if the model's operands cannot be adjusted, or none need be.

        Raises:
            EngineError: If a copy of the model that outputs its values does not run.
        """
        kinds = tuple(kind for kind in kinds if kind in self.model.adjusts)
        key = plan.digest, kinds
        if key not in self._plans:
            self._plans[key] = self._adjusted(plan, kinds)
        return self._plans[key]

    def _adjusted(self, plan: Plan, kinds: Sequence[Adjust]) -> Plan:
        model = self.model
        if Adjust.SMOOTH in kinds:
            self._smooth = self._smooth or self._smoothed()
            model, plan = self._smooth.model, self._rescaled(plan, self._smooth)
        return _corrected(model, plan, self.batches()) if Adjust.BIAS in kinds else plan

    @property
    def _codes(self) -> Format | None:
        """The policy's format on codes that loses most: by values, or else by groups."""
        formats = self.planner.policy.formats
        found = (
            *(f for f in formats if f.needs_ranges),
            *(f for f in formats if f.group_sizes),
        )
        return next(iter(found), None)

    def _smoothed(self) -> _Smoothed:
        """The model with channels rescaled by their values; itself if none is."""
        model, graph, fmt = self.model, self.model.graph, self._codes
        permissions, own = self.planner.permissions, self.planner.graph
        may = {own.nodes[i].name for i, p in permissions.items() if fmt in p.formats}
        coded = {n.id for n in graph.nodes if n.name in may}
        unchanged = _Smoothed(model=model, facts=self.facts)
        if fmt is None or not coded:
            return unchanged
        sites = smoothable(graph, coded)
        axes = {r.value: r.axis for s in sites for r in s.readers}
        seen = observe_channels(model, axes, self.facts, self.batches)
        rescalings = [r for r in smoothed(graph, sites, seen, fmt) if r.exponents.any()]
        if not rescalings:
            return unchanged
        after = model.adjusted([a for r in rescalings for a in r.adjustments(graph, coded)])
        names = {v.name: self.facts[v.id] for v in graph.values if v.id in self.facts}
        changed = _changed(after.graph, graph, rescalings)
        same = {
            v.id: names[v.name]
            for v in after.graph.values
            if v.name in names and v.id not in changed
        }
        facts = same | observe(after, self.batches, only=changed)
        return _Smoothed(model=after, facts=facts, rescalings=rescalings)

    def _rescaled(self, plan: Plan, after: _Smoothed) -> Plan:
        """``plan`` with the rescalings of ``after``, and encodings by its facts."""
        coded = {n for n, f in plan.formats.items() if f.needs_ranges or f.group_sizes}
        if not coded or not after.rescalings:
            return plan
        results = {f for f in plan.formats.values() if codes_results(self.planner.engine, f)}
        calibration, graph = self.planner.policy.calibration, self.model.graph
        try:
            encoded = re_encoded(plan, after.model.graph, after.facts, calibration, results)
        except ValueError:  # an operand has no scale there
            return plan
        ids = {n.id for n in graph.nodes if n.name in coded}
        changes = [a for r in after.rescalings for a in r.adjustments(graph, ids)]
        return encoded.adjusted(changes, reasons(graph, after.rescalings, ids))


def _changed(made: Graph, before: Graph, found: Sequence[Rescaling]) -> set[int]:
    """Ids of the values of ``made`` that rescalings changed: the others need no new facts.

    Those are new ones, and what lies between the ops whose constants are divided and the
    products that multiply again. Scaling by powers of two changes no digit of the others.
    """
    nodes, known = before.nodes, {v.name for v in before.values}
    divided = {nodes[c.node].name for r in found for c in r.site.divided}
    readers = {nodes[one.node].name for r in found for one in r.site.readers}
    changed = {v.id for v in made.values if v.name not in known and v.constant is None}
    for node in made.nodes:
        reads = node.name not in readers and not changed.isdisjoint(node.inputs)
        if reads or node.name in divided:
            changed |= {v for v in node.outputs if v is not None}
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A model whose every op the rules judged, in which values may have been scaled.

    ``facts`` are those of ``prepared``, which the plans of ``planner`` are made for.
    """

    prepared: PreparedModel
    facts: Mapping[int, ValueFacts]
    planner: Planner


def range_scaled(
    judged: Judged, judge: Callable[[PreparedModel, Mapping[int, ValueFacts]], Planner]
) -> Judged:
    """``judged``, with values scaled that keep ops out of a format by their range alone.

    ``judge`` lets the rules judge the scaled model.
    """
    planner, graph = judged.planner, judged.prepared.graph
    policy = planner.policy
    wanted = policy.adjust is None or Adjust.RANGE in policy.adjust
    low = next((f for f in policy.formats if f.has_less_range), None)
    wanted = wanted and Adjust.RANGE in judged.prepared.adjusts and not policy.by_hint
    if not (wanted and judged.facts):
        return judged
    kept = [] if low is None else kept_by_range(planner, low)
    if low is None or not kept:
        return judged
    scalings = range_scalings(graph, judged.facts, low, kept)
    if not scalings:
        return judged
    model = judged.prepared.adjusted([a for s in scalings for a in s.adjustments])
    facts = scaled_facts(graph, judged.facts, model.graph, scalings)
    made = replace(judge(model, facts), scalings=scalings)
    names = {graph.values[i].name: f for i, f in judged.facts.items()}
    before = {v.id: names[v.name] for v in model.graph.values if v.name in names}
    return Judged(prepared=model, facts=facts, planner=_with_digits(made, low, before, facts))


def _with_digits(
    planner: Planner,
    low: Format,
    before: Mapping[int, ValueFacts],
    scaled: Mapping[int, ValueFacts],
) -> Planner:
    """``planner`` without ops in ``low`` at values most of which lose digits by the scaling.

    A residual stream is scaled as a whole: where it is still small, as at a model's first
    norm, a mean of squares may fall below the format's normal numbers.
    """
    graph, permissions = planner.graph, dict(planner.permissions)
    lost = {
        i
        for i, facts in scaled.items()
        if i in before and _loses(facts, low) and not _loses(before[i], low)
    }
    for node in graph.float_nodes:
        values = (*graph.following_inputs(node), *graph.following_outputs(node))
        name = next((v.name for v in values if v.id in lost), "")
        if name and low in permissions[node.id].formats:
            why = f"most of {name}, scaled, is below the normal range of {low.label}"
            permissions[node.id] = permissions[node.id].without(low, why)
    return replace(planner, permissions=permissions)


def _loses(facts: ValueFacts, low: Format) -> bool:
    """Whether most of a value's numbers other than 0 have fewer digits than ``low`` has."""
    nonzero = facts.count - facts.zeros
    return 2 * facts.subnormal_share(low) * facts.count > nonzero


def kept_by_range(planner: Planner, low: Format) -> list[int]:
    """Ids of the ops that keep out of ``low`` for the range of observed values alone."""
    found: list[int] = []
    for index, permission in planner.permissions.items():
        against = {
            r.rule for r in permission.reasons if not r.waived and low.label not in r.permits
        }
        if low not in permission.formats and against == {OBSERVED.name}:
            found.append(index)
    return found


def rounded_error(source: Source, batches: Sequence[Feeds], plan: Plan) -> float:
    """The relative output error of a plan's numbers on ``batches``, by arithmetic in fp32.

    Raises:
        EngineError: If the model does not run.
    """
    return output_error(source.rounded_session(plan), source.reference(), batches)


def adjusted_if_it_gains(
    plan: Plan,
    adjuster: Adjuster,
    source: Source,
    engine: Engine,
    batches: Sequence[Feeds],
) -> tuple[Plan, tuple[Gain, ...]]:
    """``plan`` with those requested adjustments that gain on ``batches``, and what each does.

    Raises:
        EngineError: If the engine does not run the model.
    """
    asked = adjuster.planner.policy.adjust or ()
    kinds = tuple(kind for kind in asked if kind is not Adjust.RANGE)
    if not kinds:
        return plan, ()
    reference = engine.load(source.loadable)

    def error(one: Plan) -> float:
        return output_error(load_model(engine, source.build(one).model), reference, batches)

    found = measure_gains(plan, kinds, adjuster.adjusted, error)
    return adjuster.adjusted(plan, gaining_kinds(found)), found


def _corrected(model: PreparedModel, plan: Plan, batches: Iterable[Feeds]) -> Plan:
    """``plan`` with biases corrected by the mean errors on ``batches``."""
    graph = model.graph
    ids = {n.name: n.id for n in graph.nodes}
    formats = {ids[n]: f for n, f in plan.formats.items() if f.has_scales}
    encodings = {ids[n]: e for n, e in plan.encodings.items()}
    places = biases(graph, formats)
    if not places:
        return plan
    session = exact_session(model.with_mean_errors(formats, encodings, places), apart=True)
    sums = [np.zeros(place.channels) for place in places]
    count = 0
    for feeds in batches:
        shown = session.run(feeds)
        for total, spec in zip(sums, session.outputs, strict=True):
            total += shown[spec.name].reshape(-1).astype(np.float64)
        count += 1
    return corrected(plan, graph, places, [s / max(count, 1) for s in sums])
