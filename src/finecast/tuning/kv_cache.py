"""The format of a KV cache that the engine keeps: one choice beside the formats of ops.

A model may have its engine keep the keys and values of earlier calls, as OpenVINO's stateful
decoders do. What each format of this cache saves and what it loses is measured on the fp32
model as it decodes texts, because a call on its own reads no cache. Times and squared errors
add up with those of ops. So each plan stands among the candidates with each cache with which
no other candidate is both faster and more accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finecast.engines.exact import Exact
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Proposal
from finecast.tuning.measuring import RANKING, Measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """A format of the cache, with the seconds and the squared error that it adds to a plan."""

    format: Format
    time_s: float
    error: float


def kv_caches(measuring: Measuring, planner: Planner, fp32_s: float) -> tuple[KvCache, ...]:
    """The formats of the cache that gain time here; none where texts are not decoded.

    A format with which the outputs stay the same is not kept by the engine, and left out.
    ``fp32_s`` is the predicted time of the fp32 model, of which formats save a share.
    """
    subject, workload = measuring.subject, measuring.workload
    if not measuring.objective.of_latency or not workload.decodes:
        return ()
    plan = planner.highest()
    built = {
        fmt: subject.model.build(replace(plan, kv_cache=fmt)) for fmt in subject.kv_caches
    }
    if not built:
        return ()
    reference = workload.decoded(subject.reference)
    exact = Exact.of(reference, workload.texts(), workload.of, workload.slices)
    errors = {
        fmt: exact.error(workload.decoded(subject.session(one))) for fmt, one in built.items()
    }
    kept = {fmt.label: one for fmt, one in built.items() if errors[fmt] > 0}
    race = measuring.race(kept, replace(RANKING, limit=1.0))
    return tuple(
        KvCache(
            format=fmt,
            time_s=fp32_s * (race.slowdown(fmt.label).median - 1),
            error=errors[fmt] ** 2,
        )
        for fmt in built
        if fmt.label in race.names and race.slowdown(fmt.label).high < 1
    )


def with_kv_caches(proposals: Sequence[Proposal], caches: Sequence[KvCache]) -> list[Proposal]:
    """The proposals, and those with a lower cache that are not beaten in time and error."""
    lower = [
        replace(
            proposal,
            name=f"{proposal.name}, KV cache in {cache.format.label}",
            plan=replace(proposal.plan, kv_cache=cache.format),
            time_s=proposal.time_s + cache.time_s,
            error=proposal.error + cache.error,
        )
        for proposal in proposals
        for cache in caches
        if proposal.plan.kv_cache is Format.FP32 and not proposal.plan.by_hint
    ]
    unbeaten = [*proposals]
    for proposal in sorted(lower, key=lambda p: (p.time_s, p.error)):
        if not any(
            o.time_s <= proposal.time_s and o.error <= proposal.error for o in unbeaten
        ):
            unbeaten.append(proposal)
    return unbeaten
