"""Makes plans of one graph under one policy, after the rules have judged every op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from finecast.errors import EngineError, Unfit
from finecast.graph import Graph, Node
from finecast.graph.structure import structure_of
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.carried import Carried
from finecast.planning.plan import Decision, Plan
from finecast.planning.problem import Choice
from finecast.planning.range_scaling import RangeScaling, scaled_plan
from finecast.planning.units import Units
from finecast.plugin import title_of
from finecast.rules import Permission
from finecast.rules.base import DECISION, Reason
from finecast.rules.folded import settled
from finecast.rules.policy import Policy
from finecast.rules.scaled_operands import BIASES_AND_SCALES

# Formats of all nodes from their permissions alone, without a cost model.


def lowest(
    graph: Graph, permissions: Mapping[int, Permission], *lows: Format
) -> dict[int, Format]:
    """For each node the first of ``lows`` that is permitted, else fp32, else the smallest.

    An op that only moves numbers from fp32 ops to fp32 ops stays fp32 where it is permitted:
    in a low format it would round the numbers and save no computation. So does a bias or a
    scale of a product on codes, which runs in the product's kernel: with a cast in between
    it would need a kernel of its own.
    """
    formats = {i: pick(p, *lows, Format.FP32) for i, p in permissions.items()}
    formats |= {
        i: Format.FP32
        for i in _fused_into_codes(graph, formats)
        if Format.FP32 in permissions[i].formats
    }
    free = (
        i
        for i, fmt in formats.items()
        if _is_low(fmt) and Format.FP32 in permissions[i].formats
    )
    movers = {i for i in free if by_name(graph.nodes[i].op).places}
    apart = _apart_from_low(graph, formats, movers)
    return formats | dict.fromkeys(apart, Format.FP32)


def highest(permissions: Mapping[int, Permission]) -> dict[int, Format]:
    """For each node fp32 where it is permitted, else the smallest permitted format."""
    return {i: pick(p, Format.FP32) for i, p in permissions.items()}


def chosen(
    permissions: Mapping[int, Permission], units: Units, choice: Choice
) -> dict[int, Format]:
    """The units' ops in the formats of ``choice``, all other ops fp32 where permitted.

    An op of a unit that does not permit the unit's format has what that stores, else fp32: a
    unit may have a format for operands, or codes for constants, that only some of its ops can
    take.
    """
    of = choice.by_node(units)
    formats: dict[int, Format] = {}
    for i, permission in permissions.items():
        fmt = of.get(i, Format.FP32)
        formats[i] = pick(permission, fmt, fmt.storage, Format.FP32)
    return formats


def _fused_into_codes(graph: Graph, formats: Mapping[int, Format]) -> set[int]:
    """Biases and scales, as ops with constants, behind products whose formats are codes."""
    coded = {i for i, fmt in formats.items() if fmt.runs_on_codes}
    fused: set[int] = set()
    for node in graph.float_nodes:
        computed = [v for v in graph.following_inputs(node) if v.id not in graph.once(settled)]
        if node.op not in BIASES_AND_SCALES or len(computed) != 1:
            continue
        maker = graph.maker(computed[0])
        if maker is None or computed[0].uses != (node.id,) or computed[0].is_output:
            continue
        product = by_name(maker.op).matmul_engine and maker.id in coded
        if product or maker.id in fused:
            fused.add(node.id)
    return fused


def _apart_from_low(
    graph: Graph, formats: Mapping[int, Format], movers: Collection[int]
) -> set[int]:
    """The ``movers`` that no chain of movers connects to a low op or to a low value.

    Constants count as low values, because a plan may store them in a low format.
    """
    apart = set(movers)
    low = [n.id for n in graph.float_nodes if _is_low(formats[n.id]) and n.id not in apart]
    for value in graph.values:
        if value.constant is not None or _is_low(value.format):
            low += apart.intersection((*value.uses, value.producer))
    while low:
        node = graph.nodes[low.pop()]
        apart.discard(node.id)
        before = {v.producer for v in graph.following_inputs(node)}
        after = {n for v in graph.following_outputs(node) for n in v.uses}
        low += apart & (before | after)
    return apart


def _is_low(fmt: Format | None) -> bool:
    return fmt not in (None, Format.FP32)


def pick(permission: Permission, *preferred: Format) -> Format:
    """The first of ``preferred`` that is permitted, else the smallest permitted format."""
    for fmt in preferred:
        if fmt in permission.formats:
            return fmt
    return min(permission.formats, key=lambda f: (f.bits, f.label))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of one graph under one policy.

    Attributes:
        policy: The user's request.
        permissions: The formats that the rules permit, by node id.
        engine: The engine that plans are made for; empty for none.
        opset: Gives the ONNX opset that formats (by node id) need; 0 for other models.
        from_type: The type that the model was converted to fp32 from; empty for none.
        frozen: Whether weights that are inputs, too, were made constants or kept; None if the
            user did not say.
        scalings: Scalings of values that were made in ``graph``. A plan has the adjustments
            of those that serve it.
        carried: The state whose type plans decide, too.
    """

    graph: Graph
    policy: Policy
    permissions: Mapping[int, Permission]
    engine: str = ""
    opset: Callable[[Mapping[int, Format]], int] = lambda _: 0
    from_type: str = ""
    frozen: bool | None = None
    scalings: tuple[RangeScaling, ...] = ()
    carried: Carried = Carried()

    @property
    def is_free(self) -> bool:
        """Whether the rules permit any op more than one format."""
        return any(len(p.formats) > 1 for p in self.permissions.values())

    def without(self, unfit: Unfit) -> Planner:
        """This planner, with formats forbidden to ops that the engine does not run in them.

        Raises:
            EngineError: If the user left such an op no other format.
        """
        permissions = dict(self.permissions)
        for node in (n for n in self.graph.nodes if n.name in unfit):
            label, does = unfit[node.name]
            fmt, permission = Format.parse(label), permissions[node.id]
            if fmt not in permission.formats:
                continue
            if len(permission.formats) == 1:
                asked = f"{node.name!r} is planned in {label}, as was asked"
                raise EngineError(
                    f"{asked}, and {title_of(self.engine)} {does}", fix="let it be fp32, too"
                )
            why = f"planned in {label}, {title_of(self.engine)} {does}"
            permissions[node.id] = permission.without(fmt, why)
        return replace(self, permissions=permissions)

    def plan(
        self, formats: Mapping[int, Format], because: str, *, kept: str | None = None
    ) -> Plan:
        """The plan that gives node i ``formats[i]``, with the reasons of all rules.

        For nodes with several permitted formats ``because`` states why they have this one;
        for those of them in fp32 ``kept`` does, if given. Where the words are empty, the costs
        decide, and ``alternatives.explained`` says how.
        """
        plan = Plan(
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
            io=_declared(self.graph, self.policy) | self.carried.declared(self.graph, formats),
            engine=self.engine,
            from_type=self.from_type,
            frozen=self.frozen,
            keep_ops=self.policy.keep_ops,
            by_hint=self.policy.by_hint,
            structure=structure_of(self.graph),
        )
        return scaled_plan(plan, self.scalings)

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
        """The plan of ``lowest``; ``formats`` are the policy's by default.

        Beside ops in a format whose results have a type that the policy has, too, other ops
        have that: bf16 beside weights in codes that are decoded to bf16.
        """
        asked, known = formats or self.policy.formats, self.policy.formats
        beside = (f.storage for f in asked if f.storage in known)
        lows = (*dict.fromkeys((*asked, *beside)),)
        chosen = lowest(self.graph, self.permissions, *lows)
        how = self.policy.calibration
        stated = {f: f"@{how.value}" for f in lows if how.changes(f)}
        names = [f.label + stated.get(f, "") for f in lows]
        here = " or ".join(names)
        kept = (
            f"it cannot run in {here} here, only moves numbers between fp32 ops, or runs in an"
            " integer kernel"
        )
        does = f"every op that may have {names[0]} does"
        if len(names) > 1:
            does = f"every op has the first of {', '.join(names)} that it may have"
        return self.plan(chosen, does, kept=kept)

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
