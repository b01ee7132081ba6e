"""Makes plans of one graph under one policy, after the rules have judged every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from finecast.graph import Graph, Node
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.assign import highest, lowest
from finecast.planning.plan import Decision, Plan
from finecast.rules import Permission
from finecast.rules.base import DECISION, Reason
from finecast.rules.policy import Policy


def _no_opset(_: Mapping[int, Format]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of one graph under one policy.

    Attributes:
        graph: The graph.
        policy: The user's request.
        permissions: The formats that the rules permit, by node id.
        engine: The engine that plans are made for; empty for none.
        opset: Gives the ONNX opset that formats (by node id) need; 0 for other models.
        from_type: The type that the model was converted to fp32 from; empty for none.
    """

    graph: Graph
    policy: Policy
    permissions: Mapping[int, Permission]
    engine: str = ""
    opset: Callable[[Mapping[int, Format]], int] = _no_opset
    from_type: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the rules permit any op more than one format."""
        return any(len(p.formats) > 1 for p in self.permissions.values())

    def without(self, fmt: Format, ran: Mapping[str, str]) -> Planner:
        """This planner, with ``fmt`` forbidden to ops that the engine ran in other types.

        ``ran`` has those types by node name.
        """
        planned = f"planned in {fmt.label}, {self.engine} runs it in"
        permissions = dict(self.permissions)
        for node in self.graph.nodes:
            if node.name in ran:
                why = f"{planned} {ran[node.name]} all the same"
                permissions[node.id] = permissions[node.id].without(fmt, why)
        return replace(self, permissions=permissions)

    def plan(
        self, formats: Mapping[int, Format], because: str, *, kept: str | None = None
    ) -> Plan:
        """The plan that gives node i ``formats[i]``, with the reasons of all rules.

        For nodes with several permitted formats ``because`` states why they have this one;
        for those of them in fp32 ``kept`` does, if given. Where the words are empty, the costs
        decide, and ``alternatives.explained`` says how.
        """
        return Plan(
            model=self.graph.digest,
            policy=self.policy.label,
            opset=self.opset(formats),
            decisions=tuple(
                self._decision(
                    node,
                    fmt := formats[node.id],
                    because if kept is None or fmt is not Format.FP32 else kept,
                )
                for node in self.graph.float_nodes
                if node.format is Format.FP32
            ),
            io=_declared(self.graph, self.policy),
            engine=self.engine,
            from_type=self.from_type,
            keep_ops=self.policy.keep_ops,
            by_hint=self.policy.by_hint,
        )

    def _decision(self, node: Node, fmt: Format, because: str) -> Decision:
        permission = self.permissions[node.id]
        chosen = Reason(rule=DECISION, text=because, permits=(fmt.label,))
        free = len(permission.formats) > 1
        return Decision(
            node=node.name,
            op=node.op,
            format=fmt,
            reasons=permission.reasons + ((chosen,) if free else ()),
            encodings=permission.encodings.get(fmt, Encodings()),
        )

    def lowest(self, *formats: Format) -> Plan:
        """The plan of ``assign.lowest``; ``formats`` are the policy's by default."""
        lows = formats or self.policy.formats
        chosen = lowest(self.graph, self.permissions, *lows)
        names = " or ".join(f.label for f in lows)
        kept = f"it may not have {names}, or only moves numbers between ops in fp32"
        return self.plan(chosen, f"every op that may have {names} does", kept=kept)

    def highest(self, because: str = "fp32 where permitted") -> Plan:
        """The plan in which every op that may stay fp32 does."""
        return self.plan(highest(self.permissions), because)

    def unchanged(self, why: str) -> Plan:
        """The plan in which every op keeps its type."""
        nodes = self.graph.float_nodes
        return self.plan({n.id: n.format for n in nodes if n.format is not None}, why)


def _declared(graph: Graph, policy: Policy) -> dict[str, Format]:
    """The new formats of inputs and outputs that change type, by name."""
    ports = [v for v in (*graph.inputs, *graph.outputs) if v.format is Format.FP32]
    stored = policy.stored
    low = {v.name: stored for v in ports} if policy.io_low else {}
    return {name: f for name, f in low.items() if f is not Format.FP32} | dict(policy.io)
