"""Plans of one graph under one policy, once the rules have judged every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from finecast.graph import Graph, Node
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.assign import highest, lowest
from finecast.planning.plan import Decision, Plan
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.rules.reason import Reason


def _no_opset(_: Mapping[int, Format]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of one graph under one policy.

    Attributes:
        graph: The graph.
        policy: What was asked for.
        permissions: What the rules left each op, by node id.
        engine: What plans say they were made for; empty for none.
        opset: The ONNX opset that formats, by node id, need; 0 for other models.
        from_type: The type that the model was taken to fp32 from; empty for none.
    """

    graph: Graph
    policy: Policy
    permissions: Mapping[int, Permission]
    engine: str = ""
    opset: Callable[[Mapping[int, Format]], int] = _no_opset
    from_type: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the rules leave any op a choice."""
        return any(len(p.formats) > 1 for p in self.permissions.values())

    def without(self, fmt: Format, ran: Mapping[str, str]) -> Planner:
        """The same, but ops that a device runs otherwise than in ``fmt`` may not have it.

        ``ran`` says in what they ran, by name.
        """
        names = {n.name: n.id for n in self.graph.nodes}
        taken = {names[name]: text for name, text in ran.items()}
        planned = f"planned in {fmt.label}, {self.engine} runs it in"
        permissions = {
            i: p.without(fmt, f"{planned} {taken[i]} all the same") if i in taken else p
            for i, p in self.permissions.items()
        }
        return replace(self, permissions=permissions)

    def plan(
        self,
        formats: Mapping[int, Format],
        because: str,
        evidence: Mapping[int, Mapping[str, float | str]] | None = None,
    ) -> Plan:
        """The plan that gives node i ``formats[i]``, with the reasons of all rules.

        Where they left a choice, ``because`` says why it is this one, and ``evidence`` has by
        node id what that was based on: times, errors.
        """
        known = evidence or {}
        return Plan(
            model=self.graph.digest,
            policy=self.policy.label,
            opset=self.opset(formats),
            decisions=tuple(
                self._decision(node, formats[node.id], because, known.get(node.id, {}))
                for node in self.graph.float_nodes
                if node.format is Format.FP32
            ),
            io=_declared(self.graph, self.policy),
            engine=self.engine,
            from_type=self.from_type,
            keep_ops=self.policy.keep_ops,
        )

    def _decision(
        self, node: Node, fmt: Format, because: str, evidence: Mapping[str, float | str]
    ) -> Decision:
        permission = self.permissions[node.id]
        chosen = Reason(rule="decision", text=because, permits=(fmt.label,), evidence=evidence)
        free = len(permission.formats) > 1
        return Decision(
            node=node.name,
            op=node.op,
            format=fmt,
            reasons=permission.reasons + ((chosen,) if free else ()),
            encodings=permission.encodings.get(fmt, Encodings()),
        )

    def lowest(self, *formats: Format) -> Plan:
        """Everything that may have one of ``formats`` (by default the policy's) has it."""
        chosen = lowest(self.graph, self.permissions, *(formats or self.policy.formats))
        return self.plan(chosen, "every op that may be low is")

    def highest(self, because: str = "fp32 where permitted") -> Plan:
        """Everything that may stay fp32 does."""
        return self.plan(highest(self.permissions), because)

    def unchanged(self, why: str) -> Plan:
        """Every op keeps the type it has."""
        nodes = self.graph.float_nodes
        return self.plan({n.id: n.format for n in nodes if n.format is not None}, why)


def _declared(graph: Graph, policy: Policy) -> dict[str, Format]:
    """The formats of inputs and outputs that do not keep theirs, by name."""
    ports = [v for v in (*graph.inputs, *graph.outputs) if v.format is Format.FP32]
    stored = policy.stored
    low = {v.name: stored for v in ports} if policy.io_low else {}
    return {name: f for name, f in low.items() if f is not Format.FP32} | dict(policy.io)
