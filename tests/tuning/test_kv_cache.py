"""Plans with each format of a KV cache, as candidates of a search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.tuning.kv_cache import KvCache, with_kv_caches

PLAN = Plan(model="m", policy="auto:bf16", opset=0, decisions=())
LOW = (Format.FP16, Format.INT8)
numbers = st.integers(0, 20).map(float)


def proposals(costs: list[tuple[float, float]]) -> list[Proposal]:
    return [
        Proposal(name=f"plan {i}", plan=PLAN, time_s=30 + time_s, error=error)
        for i, (time_s, error) in enumerate(costs)
    ]


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5),
    st.lists(st.tuples(numbers, numbers), min_size=2, max_size=2),
)
def test_a_lower_cache_is_left_out_if_another_plan_is_as_fast_and_as_accurate(
    costs: list[tuple[float, float]], saved: list[tuple[float, float]]
) -> None:
    given_ = proposals(costs)
    caches = [
        KvCache(format=f, time_s=-s, error=e) for f, (s, e) in zip(LOW, saved, strict=True)
    ]
    found = with_kv_caches(given_, caches)
    assert found[: len(given_)] == given_
    pairs = {(one.time_s, one.error) for one in found}
    every = {(p.time_s + c.time_s, p.error + c.error) for p in given_ for c in caches} | {
        (p.time_s, p.error) for p in given_
    }
    for time_s, error in every - pairs:  # what is left out is beaten by what is there
        assert any(t <= time_s and e <= error for t, e in pairs)
    for one in found[len(given_) :]:
        assert one.plan.kv_cache in LOW
        beside = {(o.time_s, o.error) for o in found if o is not one}
        assert not any(t < one.time_s and e < one.error for t, e in beside)


def test_the_digest_and_the_file_of_a_plan_have_its_cache() -> None:
    (one,) = proposals([(0.0, 0.0)])
    _, low = with_kv_caches([one], [KvCache(format=Format.INT8, time_s=-1.0, error=1.0)])
    assert low.name == "plan 0, KV cache in int8"
    assert low.plan.digest != one.plan.digest
    assert low.plan.lowers
    assert Plan.from_json(low.plan.to_json()) == low.plan
    assert with_kv_caches([low], [KvCache(format=Format.FP16, time_s=-1.0, error=0.0)]) == [
        low
    ]
