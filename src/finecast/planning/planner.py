"""Plans of one graph under one policy, once the rules have judged every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.assign import highest, lowest, make_plan
from finecast.planning.plan import Plan
from finecast.rules import Permission
from finecast.rules.policy import Policy


def _no_opset(_: Mapping[int, Format]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of one graph under one policy.

    Attributes:
        graph: The graph.
        policy: What was asked for.
        permissions: What the rules left each op, by node id.
        engine: What plans say they were made for.
        opset: The ONNX opset that formats, by node id, need; 0 for other models.
        from_type: The type that the model was taken to fp32 from; empty for none.
    """

    graph: Graph
    policy: Policy
    permissions: Mapping[int, Permission]
    engine: str
    opset: Callable[[Mapping[int, Format]], int] = _no_opset
    from_type: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the rules leave any op a choice."""
        return any(len(p.formats) > 1 for p in self.permissions.values())

    def plan(
        self,
        formats: Mapping[int, Format],
        because: str,
        evidence: Mapping[int, Mapping[str, float | str]] | None = None,
    ) -> Plan:
        """The plan that gives node i ``formats[i]``."""
        plan = make_plan(
            self.graph,
            formats,
            self.permissions,
            self.policy,
            opset=self.opset(formats),
            engine=self.engine,
            because=because,
            evidence=evidence,
        )
        return replace(plan, from_type=self.from_type, keep_ops=self.policy.keep_ops)

    def lowest(self, *formats: Format) -> Plan:
        """Everything that may have one of ``formats`` (by default the policy's) has it."""
        chosen = lowest(self.permissions, *(formats or self.policy.formats))
        return self.plan(chosen, "every op that may be low is")

    def highest(self, because: str = "fp32 where permitted") -> Plan:
        """Everything that may stay fp32 does."""
        return self.plan(highest(self.permissions), because)

    def unchanged(self, why: str) -> Plan:
        """Every op keeps the type it has."""
        nodes = self.graph.float_nodes
        return self.plan({n.id: n.format for n in nodes if n.format is not None}, why)
