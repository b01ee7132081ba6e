"""Range scaling: values beyond a format's range are computed divided by a power of two.

fp16 ends at 65,504. A product whose result is larger would keep fp32, and with it all that is
added to the result. Here the weights of such a product are divided by a power of two, and so
is everything that is added to its result, up to the ops that absorb the factor: another
constant that is multiplied with the value, or a norm, whose epsilon is divided by the square.
Where nothing absorbs it, a multiplication is inserted.

Laws: every value of the scaled model is that of the model times a power of two, equal in all
bits as long as no number falls below the least normal number of fp32; the observed facts prove
that, or the reason says so. Constants are restored bit for bit. The model's inputs and
outputs, and what an op reads that is not homogeneous, such as a softmax, have their own
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import PHI, SCALARS, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import MOVES, by_name
from finecast.planning.adjustments import WHOLE, Adjustment, multipliable
from finecast.planning.plan import Plan
from finecast.planning.products import LINEAR
from finecast.rules.base import Reason
from finecast.rules.constants import scalars
from finecast.rules.facts import Facts, ValueFacts
from finecast.rules.observed import range_limit

RULE: Final = "range"
"""The rule of the reasons for scaled operands."""

# fp16 has 2**29 between its least normal number and its largest: a value whose largest number
# is divided by more than about the square root of that loses what is of ordinary size.
_LARGEST_EXPONENT: Final = 16
# That of a square. Where a value is added to its own square, no exponent is small enough.
_LARGEST_OF_SQUARE: Final = 2 * _LARGEST_EXPONENT
# Passes in which products hand on what their results need: one for each product without
# weights between a value and what it is made of.
_MOST_PASSES: Final = 16


# ------------------------------------------------------------------- how ops hand factors on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """How the exponents of an op's operands and results are tied.

    The op's results have one exponent, and so have the operands at the ports ``alike``. Times
    ``weight`` it is the sum of the exponents of the operands at ``factors``, each times the
    number given there; with weight 0 that ties nothing. A constant at one of the ports
    ``absorbs`` is multiplied so that the sum is right. The operand at port 0 may have any
    exponent if the attribute ``epsilon`` is scaled by it times ``epsilon``. With ``numbers``
    the numbers that the op has as operands have the results' exponent, too. All other
    operands have their own numbers. With ``shifts`` the results may have any exponent, by
    that times ln 2 added to the operand at port 0. Of the operands at ``types`` only the type
    is read, so they may have any exponent.
    """

    alike: tuple[int, ...] = ()
    factors: Mapping[int, int] = field(default_factory=dict[int, int])
    weight: int = 0
    absorbs: tuple[int, ...] = ()
    epsilon: int = 0
    numbers: bool = False
    shifts: bool = False
    types: tuple[int, ...] = ()


# Operands and results are all multiplied by one number, or none is.
_HOMOGENEOUS: Final = frozenset(
    {"abs", "add", "bias_add", "cum_sum", "dropout", "global_average_pool", "average_pool"}
    | {"global_max_pool", "identity", "leaky_relu", "max", "max_pool", "mean", "min", "neg"}
    | {"clip", "reduce_l1", "reduce_l2", "reduce_max", "reduce_mean", "reduce_min"}
    | {"reduce_sum", "relu", "sub", "sum", "where"}
)
# Homogeneous ops by what becomes of numbers that are no values, as the 2 of ``x + 2``: they
# are multiplied as operands are, or left as they are factors.
_ADDED: Final = frozenset({"add", "clip", "max", "min", "pad", "sub", "where"})
_FACTORS: Final = frozenset({"mul", "div", "leaky_relu", "reduce_l1", "reduce_l2"})
# With these settings ops are not homogeneous, or a number among them is no operand.
_SETTINGS: Final = frozenset({"alpha", "rounding_mode"})
_PRODUCT: Final = _Law(factors={0: 1, 1: 1}, weight=1, absorbs=(1, 0))
_LAWS: Final[Mapping[str, _Law]] = {
    "matmul": _PRODUCT,
    "mul": _PRODUCT,
    # Not the constant 1 of an inverse: that of a scaled value is scaled the other way.
    "div": _Law(factors={0: 1, 1: -1}, weight=1, absorbs=(1,)),
    "square": _Law(factors={0: 2}, weight=1),
    "reduce_sum_square": _Law(factors={0: 2}, weight=1),
    "sqrt": _Law(factors={0: 1}, weight=2),
    "rsqrt": _Law(factors={0: -1}, weight=2),
    "reciprocal": _Law(factors={0: -1}, weight=1),
    "attention": _Law(alike=(2,)),
    "exp": _Law(shifts=True),
    "cast": _Law(alike=(0,), types=(1,)),  # to the type of another value, as type_as
    "addmm": _Law(factors={1: 1, 2: 1}, weight=1, absorbs=(2, 1), alike=(0,)),
    "einsum": _PRODUCT,
    **dict.fromkeys(
        ("linear", "gemm", "conv", "group_conv", "conv_transpose"),
        _Law(factors={0: 1, 1: 1}, weight=1, absorbs=(1, 0), alike=(2,)),
    ),
}
# Norms: the ports of scale and bias, by which a result may be scaled.
_NORMS: Final[Mapping[str, tuple[int, ...]]] = {
    "layer_norm": (1, 2),
    "rms_norm": (1,),
    "group_norm": (1, 2),
    "instance_norm": (1, 2),
    "mean_variance_norm": (),
}
# Ops whose results, indices, do not change where all operands are multiplied.
_INDICES: Final = frozenset({"arg_max", "arg_min"})
# ``pow`` with these exponents.
_POWERS: Final = {2.0: _LAWS["square"], 0.5: _LAWS["sqrt"]}


def _law(graph: Graph, node: Node) -> _Law | None:
    """The law of ``node``; None if what it reads and gives has to have its own numbers."""
    if node.format is not Format.FP32 or node.region:
        return None
    reads = dict(_read(graph, node))
    law = _law_of(graph, node, tuple(reads))
    if law is None or not law.factors.keys() <= reads.keys():
        return None
    alike = (reads[port] for port in law.alike if port in reads)
    return law if all(map(_may_be_alike, alike)) else None


def _law_of(graph: Graph, node: Node, ports: tuple[int, ...]) -> _Law | None:
    if node.op == "pow":
        return _power(graph, node)
    if node.op in _NORMS:
        return _norm(graph, node)
    if SCALARS in node.attributes and node.op in _ADDED | _FACTORS:
        return _with_numbers(node, ports)
    if node.op in _HOMOGENEOUS or _moves(node):
        # A clip that reads one value alone has bounds that are not seen here.
        hidden = SCALARS in node.attributes or (node.op == "clip" and len(ports) < 2)
        return None if hidden else _Law(alike=ports)
    if node.op == "einsum" and len(ports) != len(_PRODUCT.factors):
        return None
    if node.op == "attention" and _gives_more(graph, node):
        return None
    if node.op == "exp" and node.native.rpartition("::")[2].lower() != node.op:
        return None  # another base, or less 1
    return _LAWS.get(node.op)


def _moves(node: Node) -> bool:
    info = by_name(node.op)
    return info.kind in MOVES and info.exact


def _with_numbers(node: Node, ports: tuple[int, ...]) -> _Law | None:
    """The law of an op one of whose operands is a number and no value."""
    named = node.attributes.keys()
    # Of the bounds of PyTorch's hardtanh the second may be left out.
    if (
        not _SETTINGS.isdisjoint(named)
        or len(ports) > 1
        or ("min_val" in named) > ("max_val" in named)
    ):
        return None
    if node.op in _FACTORS:
        return _Law(alike=ports)
    return _Law(alike=ports, numbers=True)


def _power(graph: Graph, node: Node) -> _Law | None:
    power = graph.read(node, 1) if len(node.inputs) > 1 else None
    constant = None if power is None else power.constant
    if constant is not None and constant.size == 1:
        return _POWERS.get(float(constant.read().reshape(-1)[0]))
    numbers = scalars(node)
    return _POWERS.get(numbers[0]) if len(numbers) == 1 and len(node.inputs) == 1 else None


def _may_be_alike(value: Value) -> bool:
    """Whether an operand may be multiplied: not a large constant that other ops read, too."""
    return value.constant is None or multipliable(value) or not _finite(value).any()


def _gives_more(graph: Graph, node: Node) -> bool:
    """Whether results of ``node`` are read beside its first."""
    results = [graph.values[i] for i in node.outputs[1:] if i is not None]
    return any(v.uses or v.is_output for v in results)


def _norm(graph: Graph, node: Node) -> _Law | None:
    if "epsilon" not in node.attributes or _gives_more(graph, node):
        return None
    ports = tuple(p for p, _ in _read(graph, node) if p in _NORMS[node.op])
    outside = str(node.attributes.get("eps_mode", "")).lower() == "outside_sqrt"
    return _Law(alike=ports, weight=0 if ports else 1, epsilon=1 if outside else 2)


def _read(graph: Graph, node: Node) -> Iterator[tuple[int, Value]]:
    """The fp32 operands of ``node`` that follow its format, by port.

    A norm's scale and shift may stay in fp32 beside low values. A cast from fp32 to fp32, as
    exporters write it, reads its operand in any format.
    """
    own = _NORMS.get(node.op, ())
    for port, (index, follows) in enumerate(zip(node.inputs, node.follows_in, strict=True)):
        if index is None or graph.values[index].format is not Format.FP32:
            continue
        cast = node.op == "cast" and port == 0
        if follows or cast or (port in own and graph.values[index].constant is not None):
            yield port, graph.values[index]


# ------------------------------------------------------------------- which exponents


@dataclass(slots=True, kw_only=True)
class _Exponents:
    """The exponents of a graph's values: those in one class share theirs.

    Attributes:
        laws: By node id, for nodes that hand factors on.
        parents: A forest over value ids, whose roots stand for classes.
        pinned: Ids of the values with exponent 0, each a class of its own.
        of: The exponents of classes, by root, that are settled; others have 0.
        freely: Roots of classes of which each value can be scaled where it is made.
    """

    graph: Graph
    laws: dict[int, _Law]
    parents: list[int]
    pinned: set[int]
    of: dict[int, int] = field(default_factory=dict[int, int])
    freely: set[int] = field(default_factory=set[int])

    @classmethod
    def read(cls, graph: Graph) -> _Exponents:
        """No exponents yet."""
        judged = ((n.id, _law(graph, n)) for n in graph.nodes)
        laws = {i: law for i, law in judged if law is not None}
        pinned = {v.id for v in graph.values if _is_pinned(graph, v, laws)}
        for node in graph.nodes:
            result_ids = [v.id for v in graph.following_outputs(node)]
            if not pinned.isdisjoint(result_ids):
                pinned.update(result_ids)
        exponents = cls(
            graph=graph, laws=laws, parents=list(range(len(graph.values))), pinned=pinned
        )
        exponents._unite()
        return exponents

    def root(self, value: int) -> int:
        """What stands for the class of a value."""
        parents = self.parents
        while parents[value] != value:
            parents[value] = parents[parents[value]]
            value = parents[value]
        return value

    def at(self, value: int) -> int:
        return self.of.get(self.root(value), 0)

    def result(self, node: Node) -> int:
        """The exponent of the results of ``node``."""
        return next((self.at(v.id) for v in self.graph.following_outputs(node)), 0)

    def operands(self, node: Node) -> list[tuple[int, Value]]:
        """The operands of ``node`` that are no constants, by port."""
        return [(p, v) for p, v in _read(self.graph, node) if v.constant is None]

    def _unite(self) -> None:
        for node in self.graph.nodes:
            law = self.laws.get(node.id)
            if law is None:
                continue
            results = [v.id for v in self.graph.following_outputs(node)]
            alike = [v.id for p, v in self.operands(node) if p in law.alike]
            free = [self.root(i) for i in (*results, *alike) if i not in self.pinned]
            if self.pinned.isdisjoint(results):
                for other in free[1:]:
                    self.parents[self.root(other)] = self.root(free[0])
        self.freely = {self.root(v.id) for v in self.graph.values}
        for node in self.graph.nodes:
            law = self.laws.get(node.id)
            if law is None or not law.weight or self.absorber(node) is not None:
                continue
            if not any(self._is_of_constants(v) for f, v in self._factors(node) if f == 1):
                results = self.graph.following_outputs(node)
                self.freely.difference_update(self.root(v.id) for v in results)

    def _is_of_constants(self, value: Value) -> bool:
        """Whether a factor is computed of constants for one op, as the ``1 + w`` of a norm."""
        maker = self.graph.maker(value)
        law = None if maker is None else self.laws.get(maker.id)
        return (
            maker is not None
            and law is not None
            and not law.weight
            and len(value.uses) == 1
            and value.id not in self.pinned
            and not self.operands(maker)
        )

    def absorber(self, node: Node) -> int | None:
        """The port of a constant that can give the results of ``node`` any exponent."""
        for port in self.laws[node.id].absorbs:
            value = self.graph.read(node, port)
            if value is not None and multipliable(value):
                return port
        return None

    def need(self, wanted: Mapping[int, int]) -> None:
        """Give the classes of these values at most these exponents, and what follows."""
        for value, exponent in wanted.items():
            if value not in self.pinned:
                root = self.root(value)
                self.of[root] = min(self.of.get(root, 0), exponent)
        products = [n for n in self.graph.nodes if self._is_free_product(n)]
        for _ in range(_MOST_PASSES):
            asked = [self._ask_operands(node) for node in reversed(products)]
            if not any(asked):
                break
        others = (self.graph.nodes[i] for i in self.laws.keys() - {n.id for n in products})
        apart = {r for n in others if self.laws[n.id].weight for r in self._made(n)}
        for _ in range(_MOST_PASSES):
            followed = [self._follow_operands(node, apart) for node in products]
            if not any(followed):
                break

    def _is_free_product(self, node: Node) -> bool:
        """Whether a product of ``node``, without weights, has the exponents of its factors."""
        law = self.laws.get(node.id)
        return law is not None and bool(law.factors) and self.absorber(node) is None

    def _factors(self, node: Node) -> list[tuple[int, Value]]:
        """The factors of a product that are no constants, and their weights."""
        factors = self.laws[node.id].factors
        return [(factors[p], v) for p, v in self.operands(node) if p in factors]

    def _made(self, node: Node) -> list[int]:
        return [self.root(v.id) for v in self.graph.following_outputs(node)]

    def _total(self, node: Node) -> int:
        return sum(factor * self.at(v.id) for factor, v in self._factors(node))

    def _left(self, node: Node) -> int:
        """What the result has beyond the exponents of the factors."""
        return self.laws[node.id].weight * self.result(node) - self._total(node)

    def _ask_operands(self, node: Node) -> bool:
        """Scale an operand so that the result is scaled enough, if that can be done freely."""
        left, roots = self._left(node), self._made(node)
        for factor, value in self._factors(node):
            root = self.root(value.id)
            free = root in self.freely and value.id not in self.pinned and root not in roots
            if left < 0 < factor and free:
                wanted = self.of.get(root, 0) + math.floor(left / factor)
                if wanted < -_LARGEST_OF_SQUARE:
                    continue
                self.of[root] = wanted
                return True
        return False

    def _follow_operands(self, node: Node, apart: Collection[int]) -> bool:
        """Scale the result as the operands are scaled, if it has no other exponent or less.

        Of the classes ``apart`` other ops give values, too: these keep the exponent that they
        need.
        """
        weight, total, roots = self.laws[node.id].weight, self._total(node), self._made(node)
        if not roots or roots[0] in self.pinned or not total or total % weight:
            return False
        root, wanted = roots[0], total // weight
        among = root in apart or root in (self.root(v.id) for _, v in self._factors(node))
        if root in self.of and (among or self.of[root] <= wanted):
            return False
        if abs(wanted) > _LARGEST_OF_SQUARE:
            return False
        self.of[root] = wanted
        return True


def _is_pinned(graph: Graph, value: Value, laws: Mapping[int, _Law]) -> bool:
    """Whether a value has to have its own numbers where it is made."""
    if value.producer not in laws or value.is_output or value.format is not Format.FP32:
        return True
    return any(node.region or node.op == PHI for node in graph.readers(value))


# ------------------------------------------------------------------- what is changed for them


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeScaling:
    """Connected values that are scaled, and the adjustments that it takes.

    Attributes:
        exponents: By value name: the value is multiplied by 2 to that power.
        adjustments: The changes of operands.
        reasons: By the name of each op that reads or gives a scaled value: why it is, and
            what proves that no bit of a result in fp32 changes.
    """

    exponents: Mapping[str, int]
    adjustments: tuple[Adjustment, ...]
    reasons: Mapping[str, Reason]

    def serves(self, plan: Plan) -> bool:
        """Whether an op of ``plan`` at a scaled value has a format of less range than fp32."""
        formats = (d.format for d in plan.decisions if d.node in self.reasons)
        return any(f.has_less_range or f.needs_ranges for f in formats)


def scaled_plan(plan: Plan, scalings: Iterable[RangeScaling]) -> Plan:
    """``plan`` with the adjustments of those ``scalings`` that serve an op of it."""
    serving = [s for s in scalings if s.serves(plan)]
    if not serving:
        return plan
    reasons: dict[str, list[Reason]] = {}
    for scaling in serving:
        for name, reason in scaling.reasons.items():
            reasons.setdefault(name, []).append(reason)
    return plan.adjusted([a for scaling in serving for a in scaling.adjustments], reasons)


def range_scalings(
    graph: Graph, facts: Facts, low: Format, kept: Collection[int]
) -> tuple[RangeScaling, ...]:
    """Scalings by which ops may be in ``low`` that would keep fp32 for their range alone.

    ``kept`` are those that the range of what they read or give keeps in fp32.
    """
    wanted: dict[int, int] = {}
    for node in map(graph.nodes.__getitem__, kept):
        for value in (*graph.following_inputs(node), *graph.following_outputs(node)):
            seen = facts.get(value.id)
            over = 0.0 if seen is None else seen.largest / range_limit(low)
            if value.constant is None and over >= 1:
                exponent = -math.frexp(over)[1]
                if exponent >= -_LARGEST_EXPONENT:
                    wanted[value.id] = exponent
    if not wanted:
        return ()
    exponents = _Exponents.read(graph)
    exponents.need(wanted)
    changes = _Changes(exponents=exponents, wanted=wanted)
    for node in graph.nodes:
        changes.make(node)
    parts = (changes.scaling(part, facts, low, kept) for part in changes.parts())
    return tuple(part for part in parts if part is not None)


def scaled_facts(
    graph: Graph, facts: Facts, scaled: Graph, scalings: Iterable[RangeScaling]
) -> dict[int, ValueFacts]:
    """Facts of the values of ``scaled``, in which ``scalings`` of ``graph`` were made."""
    exponents = {name: e for one in scalings for name, e in one.exponents.items()}
    names = {graph.values[i].name: f for i, f in facts.items()}
    facts_by_value = {
        v.id: names[v.name].scaled(exponents.get(v.name, 0))
        for v in scaled.values
        if v.name in names
    }
    own = {node.name for node in graph.nodes}
    for node in scaled.nodes:
        inserted = node.op == "mul" and node.name not in own
        factors = _numbers_of(scaled, node) if inserted else []
        # A multiplication that was inserted.
        if len(factors) == 1 and node.inputs[0] in facts_by_value:
            power = math.frexp(factors[0])[1] - 1
            for index in node.outputs:
                if index is not None:
                    facts_by_value[index] = facts_by_value[node.inputs[0]].scaled(power)
    return facts_by_value


def _numbers_of(graph: Graph, node: Node) -> list[float]:
    """The numbers that ``node`` multiplies by: constants, or none that are values."""
    constants = [float(c.read().reshape(-1)[0]) for c in graph.constants(node) if c.size == 1]
    return [*constants, *scalars(node)]


@dataclass(slots=True, kw_only=True)
class _Changes:
    """The adjustments that give values their exponents, by the op that they are made at.

    Attributes:
        exponents: The exponents of values.
        wanted: Those that values need, by id.
        made: The adjustments.
        read: By op id, the values that are multiplied in front of it, and what they have then.
        failed: Ids of ops of which no operand can be multiplied so.
        shifted: Ids of ops to whose operand a number is added, which rounds.
    """

    exponents: _Exponents
    wanted: Mapping[int, int]
    made: dict[int, list[Adjustment]] = field(default_factory=dict[int, "list[Adjustment]"])
    read: dict[int, dict[int, int]] = field(default_factory=dict[int, "dict[int, int]"])
    failed: set[int] = field(default_factory=set[int])
    shifted: set[int] = field(default_factory=set[int])

    @property
    def graph(self) -> Graph:
        return self.exponents.graph

    def make(self, node: Node) -> None:
        """Adjust what ``node`` reads so that its results have their exponent."""
        law = self.exponents.laws.get(node.id)
        if law is None:
            self._restore(node)
            return
        wanted, reads = self.exponents.result(node), dict(_read(self.graph, node))
        for port, value in reads.items():
            if port in law.alike:
                self._multiply(node, port, value, wanted - self._own(value))
            elif port not in {*law.factors, *law.types} and not (law.epsilon and port == 0):
                self._multiply(node, port, value, -self._own(value))
        if law.epsilon:
            self._multiply_attribute(node, "epsilon", law.epsilon * self._own(reads[0]))
        if law.numbers and any(scalars(node)):
            self._multiply_attribute(node, SCALARS, wanted)
        if law.shifts and wanted:
            self._shift(node, reads[0], wanted)
        if law.factors:
            factors = {p: reads[p] for p in law.factors}
            self._absorb(node, law, factors, law.weight * wanted)

    def _restore(self, node: Node) -> None:
        """Have an op that is not homogeneous read its operands as they were.

        An op that gives sizes or indices reads any.
        """
        if not by_name(node.op).has_numbers or node.op in _INDICES:
            return
        for port, index in enumerate(node.inputs):
            if index is not None:
                value = self.graph.values[index]
                self._multiply(node, port, value, -self._own(value))

    def _shift(self, node: Node, value: Value, exponent: int) -> None:
        """Add a number to the operand of an exponential, which multiplies its results."""
        adjustments = self.made.setdefault(node.id, [])
        before = adjustments.pop() if adjustments else None  # the operand is multiplied first
        by = Adjustment(
            node=node.name,
            axis=WHOLE,
            exponents=() if before is None else before.exponents,
            add=(float(np.float32(exponent * math.log(2))),),
        )
        adjustments.append(by)
        self.shifted.add(node.id)

    def _multiply_attribute(self, node: Node, name: str, exponent: int) -> None:
        if exponent:
            by = Adjustment(node=node.name, attribute=name, axis=WHOLE, exponents=(exponent,))
            self.made.setdefault(node.id, []).append(by)

    def _own(self, value: Value) -> int:
        return 0 if value.constant is not None else self.exponents.at(value.id)

    def _absorb(
        self, node: Node, law: _Law, factors: Mapping[int, Value], wanted: int
    ) -> None:
        """Multiply operands so that the exponents of the ``factors`` give ``wanted``."""
        port = self.exponents.absorber(node)
        for at, value in factors.items():
            own = self._own(value)
            # A value that keeps its own numbers is multiplied in front of a product with
            # weights that it is too large for.
            if port is not None and node.op in LINEAR and value.id in self.exponents.pinned:
                self._multiply(node, at, value, self.wanted.get(value.id, 0))
                own += self.wanted.get(value.id, 0)
            wanted -= law.factors[at] * own
        if not wanted:
            return
        if port is None:
            values = (p for p, v in factors.items() if v.constant is None)
            port = next((p for p in values if wanted % law.factors[p] == 0), None)
        if port is None:
            self.failed.add(node.id)
            return
        self._multiply(node, port, factors[port], wanted // law.factors[port])

    def _multiply(self, node: Node, port: int, value: Value, exponent: int) -> None:
        """Multiply the operand at ``port`` by 2 to the power ``exponent``."""
        if not exponent:
            return
        if value.constant is not None:
            finite = _finite(value)
            if not finite.any():
                return  # zeros and infinities stay what they are
            if not (multipliable(value) and _is_exact(finite, exponent)):
                self.failed.add(node.id)
        else:
            read = self.read.setdefault(node.id, {})
            read[value.id] = self._own(value) + exponent
        if node.inputs.count(value.id) > 1:
            self.failed.add(node.id)
        adjustment = Adjustment(node=node.name, port=port, axis=WHOLE, exponents=(exponent,))
        self.made.setdefault(node.id, []).append(adjustment)

    def parts(self) -> Iterator[frozenset[int]]:
        """Ids of ops that connected values with an exponent are read or made by."""
        graph, exponents = self.graph, self.exponents
        roots: dict[int, set[int]] = {}
        nodes: dict[int, set[int]] = {}
        for node in graph.nodes:
            ports = {*node.input_ids, *node.output_ids}
            node_roots = {exponents.root(i) for i in ports if exponents.at(i)}
            if node_roots or node.id in self.made:
                roots[node.id] = node_roots
            for root in node_roots:
                nodes.setdefault(root, set()).add(node.id)
        while roots:
            part, waiting = set[int](), [next(iter(roots))]
            while waiting:
                at = waiting.pop()
                if at in roots:
                    part.add(at)
                    waiting += [n for root in roots.pop(at) for n in nodes[root]]
            yield frozenset(part)

    def scaling(
        self, part: frozenset[int], facts: Facts, low: Format, kept: Collection[int]
    ) -> RangeScaling | None:
        """The scaling that is made at the ops of a part.

        None if a value of it was not observed, an operand cannot be multiplied, or more
        multiplications are inserted than ops gain by it.
        """
        graph, served = self.graph, [n for n in sorted(part) if n in kept and self._serves(n)]
        adjustments = [a for n in sorted(part) for a in self.made.get(n, ())]
        inserted = {(v, e) for n in part for v, e in self.read.get(n, {}).items()}
        scaled = {v.id: self.exponents.at(v.id) for n in part for v in self._values(n)}
        scaled = {i: e for i, e in scaled.items() if e}
        seen = all(i in facts for i in (*scaled, *(v for v, _ in inserted)))
        if not adjustments or not seen or not part.isdisjoint(self.failed):
            return None
        largest, smallest = _ends(facts, [*scaled.items(), *inserted])
        added = len(inserted) + len(part & self.shifted)
        if largest > Format.FP32.max or not served or added > len(served):
            return None
        smallest = min(smallest, *(self._least_product(n, facts) for n in part), math.inf)
        return RangeScaling(
            exponents={graph.values[i].name: e for i, e in scaled.items()},
            adjustments=tuple(adjustments),
            reasons={
                graph.nodes[n].name: self._reason(
                    n, served, facts, low, smallest, rounds=bool(part & self.shifted)
                )
                for n in sorted(part)
            },
        )

    def _reason(
        self,
        node: int,
        served: Collection[int],
        facts: Facts,
        low: Format,
        smallest: float,
        *,
        rounds: bool,
    ) -> Reason:
        """Why values at ``node`` are scaled: it is one of ``served``, or connected to them."""
        nodes = [node] if node in served else served
        candidates = [(n, v) for n in nodes for v in self._values(n) if v.id in self.wanted]
        at, worst = max(candidates, key=lambda one: facts[one[1].id].largest)
        power = self._seen(at, worst)
        text = (
            f"{worst.name} reaches {facts[worst.id].largest:.6g}, more than half of"
            f" {low.label}'s largest, {low.max:.6g}: it is computed times 2^{power}"
        )
        if node not in served:
            text += ", and so are values of this op"
        if rounds:
            text += "; the operand of an exponential is shifted for that, which rounds in fp32"
        elif smallest >= Format.FP32.smallest_normal:
            text += "; no bit of a result in fp32 changes"
        else:
            text += f"; in fp32 that changes what is below {Format.FP32.smallest_normal:.3g}"
        evidence: dict[str, float | str] = {
            "largest": facts[worst.id].largest,
            "limit": range_limit(low),
            "smallest": smallest,
        }
        return Reason(rule=RULE, text=text, evidence=evidence)

    def _seen(self, node: int, value: Value) -> int:
        """The exponent of a value as ``node`` reads or gives it."""
        return self.read.get(node, {}).get(value.id, self._own(value))

    def _serves(self, node: int) -> bool:
        """Whether all that ``node`` reads and gives is scaled as much as it needs."""
        wanted_values = [v for v in self._values(node) if v.id in self.wanted]
        return bool(wanted_values) and all(
            self._seen(node, v) <= self.wanted[v.id] for v in wanted_values
        )

    def _values(self, node: int) -> Iterator[Value]:
        """The fp32 values that an op reads or gives, without constants."""
        op = self.graph.nodes[node]
        for index in (*op.inputs, *op.outputs):
            if index is not None:
                value = self.graph.values[index]
                if value.constant is None and value.format is Format.FP32:
                    yield value

    def _least_product(self, node: int, facts: Facts) -> float:
        """The least magnitude of a product of two factors, scaled; inf for other ops."""
        op = self.graph.nodes[node]
        law = self.exponents.laws.get(node)
        if law is None or len(law.factors) < 2 or -1 in law.factors.values():
            return math.inf
        values = [self.graph.read(op, p) for p in law.factors]
        least = math.ldexp(1.0, self.exponents.result(op))
        for value in filter(None, values):
            constant, seen = value.constant, facts.get(value.id)
            if constant is not None:
                least *= constant.smallest_nonzero
            elif seen is not None:
                least *= seen.smallest_nonzero
        return least


def _ends(facts: Facts, scaled: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """The largest and the least magnitude of values times 2 to the power of exponents."""
    ends = [
        (math.ldexp(facts[i].largest, e), math.ldexp(facts[i].smallest_nonzero, e))
        for i, e in scaled
    ]
    return max((e[0] for e in ends), default=0.0), min((e[1] for e in ends), default=math.inf)


def _finite(value: Value) -> NDArray[np.float32]:
    assert value.constant is not None
    array = value.constant.read().astype(np.float32, copy=False)
    return array[np.isfinite(array)]


def _is_exact(numbers: NDArray[np.float32], exponent: int) -> bool:
    """Whether all can be multiplied by 2 to that power and divided again."""
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(numbers, exponent)
        back = np.ldexp(scaled, -exponent)
    normal = (np.abs(scaled) >= Format.FP32.smallest_normal) | (scaled == 0)
    return bool(np.array_equal(back, numbers) and normal.all())
