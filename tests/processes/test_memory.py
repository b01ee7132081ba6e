"""What loaded models count as, and groups of them that fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.processes import memory


@given(st.dictionaries(st.text(), st.integers(0, 50)), st.integers(0, 60))
def test_groups_are_in_order_and_fit(sizes: dict[str, int], limit: int) -> None:
    groups = memory.packed(sizes, limit)
    assert [name for group in groups for name in group] == [*sizes]
    assert all(len(g) == 1 or sum(sizes[n] for n in g) <= limit for g in groups)
    firsts = [sizes[group[0]] for group in groups[1:]]
    fulls = [sum(sizes[n] for n in group) for group in groups]
    assert all(full + first > limit for full, first in zip(fulls, firsts, strict=False))


def test_a_model_counts_by_its_bytes_or_by_the_mappings_of_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "most_mappings", lambda: 100)
    assert memory.loaded_bytes(300, 20) == 300
    assert memory.loaded_bytes(300, 40) == 600
    assert memory.most_loaded_bytes() == 500


def test_where_mappings_have_no_limit_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_MAPPINGS", memory.Path("/no/such/limit"))
    assert memory.loaded_bytes(1, 100_000) == 1
