"""Adjusting a plan's operands by runs on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from finecast.engines.base import Engine, Feeds
from finecast.engines.loading import exact_session, load_model
from finecast.frontends.native_model import with_mean_errors
from finecast.frontends.prepared import PreparedModel
from finecast.native.gains import Gain, bias_gain, output_error
from finecast.native.source import Source
from finecast.numbers.formats import Format
from finecast.planning.biases import biases, corrected
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.range_scaling import range_scalings, scaled_facts
from finecast.rules.facts import ValueFacts
from finecast.rules.observed import OBSERVED
from finecast.rules.policy import Adjust

Batches = Callable[[], Iterable[Feeds]]


@dataclass(slots=True, kw_only=True)
class Adjuster:
    """Adjusts plans of one model by runs on ``batches``.

    Adjusted plans are kept: a search measures one, and tells of it later.
    """

    model: PreparedModel
    batches: Batches
    _plans: dict[str, Plan] = field(init=False, default_factory=dict)

    def corrected(self, plan: Plan) -> Plan:
        """``plan`` with its biases corrected by the mean errors on ``batches``.

        It is unchanged if no product on codes has a bias, or the model's cannot be adjusted.

        Raises:
            EngineError: If a copy of the model that outputs its values does not run.
        """
        if Adjust.BIAS not in self.model.adjusts:
            return plan
        if plan.digest not in self._plans:
            self._plans[plan.digest] = self._corrected(plan)
        return self._plans[plan.digest]

    def _corrected(self, plan: Plan) -> Plan:
        graph = self.model.graph
        ids = {n.name: n.id for n in graph.nodes}
        formats = {ids[n]: f for n, f in plan.formats.items() if f.has_scales}
        encodings = {ids[n]: e for n, e in plan.encodings.items()}
        places = biases(graph, formats)
        if not places:
            return plan
        copies = self.model.roundable(), self.model.roundable()
        errors = with_mean_errors(*copies, formats, encodings, places)
        session = exact_session(errors, apart=True)
        sums = [np.zeros(place.channels) for place in places]
        count = 0
        for feeds in self.batches():
            shown = session.run(feeds)
            for total, spec in zip(sums, session.outputs, strict=True):
                total += shown[spec.name].reshape(-1).astype(np.float64)
            count += 1
        return corrected(plan, graph, places, [s / max(count, 1) for s in sums])


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


def corrected_if_it_gains(
    plan: Plan,
    adjuster: Adjuster,
    source: Source,
    engine: Engine,
    batches: Sequence[Feeds],
) -> tuple[Plan, Gain | None]:
    """``plan`` with biases corrected if that gains on ``batches``, and what it does.

    Raises:
        EngineError: If the engine does not run the model.
    """
    reference = engine.load(source.loadable)

    def error(one: Plan) -> float:
        return output_error(load_model(engine, source.build(one).model), reference, batches)

    gain = bias_gain(plan, adjuster.corrected, error)
    return adjuster.corrected(plan) if gain is not None and gain.gains else plan, gain
