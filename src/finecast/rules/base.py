"""The interface of rules: a rule judges one op and narrows the formats that it may take.

Its verdict is recorded as a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.ops import OpInfo, by_name
from finecast.rules.facts import Facts, ValueFacts
from finecast.rules.policy import Policy

DECISION: Final = "decision"
"""The rule of a reason for one of several formats that the rules permit."""

WAIVED: Final = "(waived) "
"""In front of the text of a verdict that a user's word set aside."""
UNFIT: Final = "not run in"
"""The evidence, in a reason, that names a format in which the engine did not run the op."""
DECIDED_BY: Final = "decided by"
"""The evidence of such a reason that says in a word what decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The verdict of one rule on an op: the labels that it permits, why, and the evidence."""

    rule: str
    text: str
    permits: tuple[str, ...] = ()
    evidence: Mapping[str, int | float | str] = field(
        default_factory=dict[str, int | float | str]
    )

    @property
    def waived(self) -> bool:
        """Whether a user's word set the verdict aside."""
        return self.text.startswith(WAIVED)


# Whether the engine has a kernel for a node in a format; None where that is not known.
KernelQuery = Callable[[Node, Format], bool | None]
# A user's rule: the formats that a node may take, by label, or None for no opinion.
UserRule = Callable[["NodeView"], "str | list[str] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All that a rule may depend on besides the node."""

    graph: Graph
    policy: Policy
    facts: Facts = field(default_factory=dict[int, ValueFacts])
    kernels: KernelQuery = lambda _node, _fmt: None
    engine: str = ""
    # By format and node id: why the engine's kernel is not used. An empty text means that it
    # does not work at all, any other text how its results are wrong.
    faults: Mapping[Format, Mapping[int, str]] = field(
        default_factory=dict[Format, Mapping[int, str]]
    )
    user_rules: tuple[tuple[str, UserRule], ...] = ()
    measured: bool = False  # errors will be measured: rules of thumb about them do not apply
    # Formats for operands that the frontend can round to in this model.
    casts_around: frozenset[Format] = frozenset()
    # Formats with parameters in which the engine needs results stored as codes, too.
    coded_results: frozenset[Format] = frozenset()
    # Whether values are encoded around 0, as the device's products on integers take them.
    signed_codes: bool = False
    # The encodings in the low format that were found so far, by node id.
    encodings: dict[int, Encodings] = field(init=False, default_factory=dict[int, Encodings])

    @property
    def low(self) -> Format:
        """The low format that is judged beside fp32."""
        return self.policy.format

    def of_format(self, fmt: Format) -> Context:
        """This context with ``fmt`` as the policy's only low format."""
        return replace(self, policy=replace(self.policy, formats=(fmt,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A rule's verdict: the formats that it permits a node, why, and on what evidence.

    ``waives`` marks a user's explicit choice, which overrides the verdicts of rules that are
    not ``hard``; those are then recorded as waived.
    """

    permits: frozenset[Format]
    text: str
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    waives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named rule. ``hard`` rules state facts and cannot be waived.

    Law: ``judge`` depends on its arguments only, and its verdict can only narrow the formats,
    so the order of rules does not matter. None means that the rule has no opinion.
    """

    name: str
    judge: Callable[[Node, Context], Ruling | None]
    hard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What a user's rule function sees of a node."""

    node: Node
    context: Context

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def op(self) -> str:
        """Canonical op: ``matmul``, ``softmax``."""
        return self.node.op

    @property
    def native(self) -> str:
        """Native op: ``onnx::MatMul``."""
        return self.node.native

    @property
    def info(self) -> OpInfo:
        """The op's row in the op table."""
        return by_name(self.node.op)

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """Values read, None for omitted ones."""
        values = self.context.graph.values
        return tuple(None if i is None else values[i] for i in self.node.inputs)

    @property
    def outputs(self) -> tuple[Value | None, ...]:
        """Values written."""
        values = self.context.graph.values
        return tuple(None if i is None else values[i] for i in self.node.outputs)

    def facts(self, value: Value) -> ValueFacts | None:
        """What was observed of ``value`` on the calibration data."""
        return self.context.facts.get(value.id)


def only(fmt: Format) -> frozenset[Format]:
    """The set of just ``fmt``."""
    return frozenset({fmt})


ANY = frozenset(Format)
"""No restriction."""

KEEP = frozenset({Format.FP32})
"""The op keeps fp32."""
