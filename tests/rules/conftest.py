"""Fixtures for the tests of single rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finecast.graph import Graph
from finecast.rules import Context, Rule, Ruling
from finecast.rules.policy import Policy
from tests.graph.text import from_text


@pytest.fixture
def judged() -> Callable[..., dict[str, Ruling | None]]:
    """``judged(rule, graph, policy="all:fp16", facts=...)``: verdicts by node name."""

    def judge(
        rule: Rule, graph: Graph | str, *, policy: str | Policy = "auto:bf16", **context: Any
    ) -> dict[str, Ruling | None]:
        read = from_text(graph) if isinstance(graph, str) else graph
        asked = Policy.parse(policy) if isinstance(policy, str) else policy
        whole = Context(graph=read, policy=asked, **context)
        return {n.name: rule.judge(n, whole) for n in read.float_nodes}

    return judge
