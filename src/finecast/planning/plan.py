"""A plan: the format of every op, with its reasons; saved as JSON, replayable on its model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from finecast.errors import ModelError, UsageError
from finecast.files import read_text
from finecast.files.saved import Saved, converted, reading, sealed
from finecast.graph import Graph, Node
from finecast.graph.structure import Structure, read_structure, write_structure
from finecast.naming import listed
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.adjustments import Adjustment, AdjustOperand, together
from finecast.rules.base import DECIDED_BY, DECISION, Reason
from finecast.rules.quantized import computed_in
from finecast.rules.scaled_operands import coded_result

T = TypeVar("T")

_MOST_PORTS: Final = 4
"""Inputs and outputs whose names are told."""
PLAN_VERSION: Final = 11
_SEALED: Final = 11
"""The first version whose plans all have a checksum, as the digest leaves out policy, reasons
and structure. Of the versions before some have one."""
# A million ops with five reasons each take half of this.
_LARGEST_BYTES: Final = 1 << 30
_CACHED: Final = frozenset({"variable", "attention"})
"""Ops of models whose engine keeps a KV cache: a state, and attention that reads it."""
_MAKE_ANEW: Final = "make a plan for this model with this version of finecast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The format of one op, with the reasons for it.

    A format without parameters encodes the op's operands, constants and, unless it is a
    format for operands only, its result. For a format with parameters ``encodings`` has the
    parameters of each operand, constant and result that is encoded.
    """

    node: str
    op: str
    format: Format
    reasons: tuple[Reason, ...] = ()
    encodings: Encodings = field(default_factory=Encodings)

    @property
    def deciding(self) -> tuple[Reason, ...]:
        """The reasons that left the op no other format.

        That is the choice between several permitted formats, where there was one. Else it is
        each rule that permits this format alone, or, if no rule does so by itself, all that
        forbid any format.
        """
        chosen = tuple(r for r in self.reasons if r.rule == DECISION)
        counted = [r for r in self.reasons if not r.waived]
        alone = tuple(r for r in counted if r.permits == (self.format.label,))
        return chosen or alone or tuple(r for r in counted if len(r.permits) < len(Format))

    @property
    def why(self) -> str:
        """What decided the format, in a sentence."""
        return "; ".join(r.text for r in self.deciding) or "the plan has no reason"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Formats of all float ops of one model; ops that are not named keep their type.

    Printed it is one line; ``to_json`` has all of it.

    Attributes:
        model: Digest of the model that the plan was made for.
        policy: The policy that it was made under.
        opset: The ONNX opset that the model is converted to first; 0 for other models.
        decisions: The format of each op.
        io: New types of the model's inputs and outputs, by name; others keep theirs.
        engine: The engine that it was made for, whose fused kernels decide how low ops are
            stated in the model (unless ``keep_ops``).
        from_type: The type that a model in low precision is converted to fp32 from, before
            anything else; empty for a model in fp32.
        frozen: Whether weights that are inputs, too, are made constants first, or are kept
            inputs; None for what is the rule of the model's version.
        keep_ops: Whether all ops are stated as they were.
        by_hint: Whether the model stays in fp32 and marks the ops that keep it, and the
            engine lowers the others by its own precision hint, with casts of its own.
        kv_cache: The format in which the engine keeps keys and values of earlier calls, where
            the model has it keep them.
        adjustments: Changes of operands, made before the decisions are applied.
        structure: The ops of the model without their numbers, by which they are found in
            another version of it. Plans written before there was one have none.
    """

    model: str
    policy: str
    opset: int
    decisions: tuple[Decision, ...]
    io: Mapping[str, Format] = field(default_factory=dict[str, Format])
    engine: str = ""
    from_type: str = ""
    frozen: bool | None = None
    keep_ops: bool = False
    by_hint: bool = False
    kv_cache: Format = Format.FP32
    adjustments: tuple[Adjustment, ...] = ()
    structure: Structure = field(default=(), compare=False)
    _digest: list[str] = field(default_factory=list[str], init=False, compare=False)

    def __repr__(self) -> str:
        """The policy, the engine and the number of ops in each format."""
        engine = f" for {self.engine}" if self.engine else ""
        counts = ", ".join(f"{count} {label}" for label, count in self.counts.items())
        return f"<Plan {self.digest} of {self.policy}{engine}: {counts or 'no op'}>"

    @property
    def reasons(self) -> Iterator[Reason]:
        """The reasons of all decisions."""
        return (reason for decision in self.decisions for reason in decision.reasons)

    @property
    def formats(self) -> dict[str, Format]:
        """Format by node name."""
        return {d.node: d.format for d in self.decisions}

    @property
    def encodings(self) -> dict[str, Encodings]:
        """Encodings by node name, for nodes whose format has parameters."""
        return {d.node: d.encodings for d in self.decisions if d.format.has_scales}

    @property
    def counted(self) -> tuple[Decision, ...]:
        """The decisions of ops that read or give numbers.

        An op that gives sizes, such as Shape, has a decision, too: its operand is read as it
        is stored, without a cast.
        """
        return tuple(d for d in self.decisions if by_name(d.op).has_numbers)

    @property
    def declared(self) -> tuple[str, ...]:
        """A text for each format of inputs and outputs, and of a KV cache lower than fp32.

        Without one of its own the cache has the type of an engine's hint.
        """
        names: dict[str, list[str]] = {}
        for name, fmt in sorted(self.io.items()):
            names.setdefault(fmt.label, []).append(name)
        ports = (
            f"inputs and outputs in {label}: {listed(of, _MOST_PORTS)}"
            for label, of in names.items()
        )
        kept, made_of = self.kv_cache, {one.op for one in self.structure}
        if self.by_hint and self.low_floats and kept is Format.FP32 and made_of >= _CACHED:
            (kept,) = self.low_floats
        cache = () if kept is Format.FP32 else (f"KV cache kept in {kept.label}",)
        return (*ports, *cache)

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops per format, most frequent first."""
        return dict(Counter(d.format.label for d in self.counted).most_common())

    def counts_in(self, graph: Graph) -> dict[str, int]:
        """Like ``counts``; an op that keeps its type counts as what it computes in.

        That may be a type that it came with, or one of a quantized region. In an older opset
        an op may have no format of its own, and counts as decided.
        """
        decided = {d.node: d.format for d in self.counted}

        def label(node: Node) -> str:
            chosen = decided.get(node.name)
            if chosen is not None and chosen is not node.format:
                return chosen.label
            info, came_low = by_name(node.op), node.format not in (None, Format.FP32)
            computes = info.has_numbers and info.kind is not OpKind.CAST
            kept = chosen is not None or (came_low and computes)
            return computed_in(graph, node) if kept else ""

        labels = filter(None, map(label, graph.nodes))
        return dict(Counter(labels).most_common())

    @property
    def lowers(self) -> bool:
        """Whether any op, or the cache of keys and values, has a format lower than fp32."""
        return bool(self.low_formats) or self.kv_cache is not Format.FP32

    @property
    def low_formats(self) -> frozenset[Format]:
        """The formats lower than fp32 that ops have."""
        return frozenset(d.format for d in self.decisions) - {Format.FP32}

    @property
    def low_floats(self) -> tuple[Format, ...]:
        """The low formats that ops have, without codes."""
        return tuple(f for f in Format if f in self.low_formats and not f.has_scales)

    @property
    def of_codes(self) -> Plan:
        """The plan in which the ops on codes alone are low."""
        decisions = tuple(
            d if d.format.has_scales else replace(d, format=Format.FP32)
            for d in self.decisions
        )
        return replace(self, decisions=decisions)

    @property
    def digest(self) -> str:
        """Hash of what the plan does: of all but policy, engine, reasons and structure."""
        if not self._digest:  # made once: there may be millions of scales
            self._digest.append(self._hashed())
        return self._digest[0]

    def _hashed(self) -> str:
        content: dict[str, Any] = {
            "model": self.model,
            "opset": self.opset,
            "formats": sorted((n, f.label) for n, f in self.formats.items()),
            "io": sorted((n, f.label) for n, f in self.io.items()),
            **self._options,
        }
        if self.encodings:
            named = sorted(self.encodings.items())
            content["encodings"] = {name: e.to_dict() for name, e in named}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def _options(self) -> dict[str, Any]:
        """Content of the fields that are saved only if they differ from the default."""
        options: dict[str, Any] = {"from_type": self.from_type} if self.from_type else {}
        options |= {"frozen": self.frozen} if self.frozen is not None else {}
        options |= {"keep_ops": True} if self.keep_ops else {}
        options |= {"by_hint": True} if self.by_hint else {}
        options |= (
            {"kv_cache": self.kv_cache.label} if self.kv_cache is not Format.FP32 else {}
        )
        adjusted = [a.to_dict() for a in self.adjustments]
        return options | ({"adjustments": adjusted} if adjusted else {})

    def decision(self, node: str) -> Decision | None:
        """The decision for ``node``; None if the plan does not name it."""
        return next((d for d in self.decisions if d.node == node), None)

    def check(self, graph: Graph, *, where: str) -> None:
        """Check that the plan fits the graph that it is to be replayed on.

        Raises:
            ModelError: If it names a node that the graph lacks, or that is another op there,
                or encodes or adjusts inputs that the op does not have.
        """
        self.adjusting(graph, where=where)
        nodes = {n.name: n for n in graph.nodes}
        fix = _MAKE_ANEW
        for one in self.decisions:
            node = nodes.get(one.node)
            if node is None:
                what = f"the plan names a node the model lacks: {one.node!r}"
                raise ModelError(what, where=where, fix=fix)
            if node.op != one.op:
                what = f"by the plan {one.node!r} is {one.op!r}, in the model {node.op!r}"
                raise ModelError(what, where=where, fix=fix)
            _check_result(graph, node, one.encodings, where)
            wrong = _wrong_input(graph, node, one.encodings)
            if wrong is not None:
                what = f"the plan encodes input {wrong} of {one.node!r}, which does not fit"
                raise ModelError(what, where=where, fix=fix)

    def adjusted(
        self, adjustments: Iterable[Adjustment], reasons: Mapping[str, Sequence[Reason]]
    ) -> Plan:
        """This plan with further ``adjustments``, and their ``reasons`` by node name."""

        def told(decision: Decision) -> Decision:
            more = reasons.get(decision.node, ())
            own = (replace(r, permits=(decision.format.label,)) for r in more)
            return replace(decision, reasons=(*decision.reasons, *own))

        return replace(
            self,
            adjustments=together(self.adjustments, adjustments),
            decisions=tuple(told(d) for d in self.decisions),
        )

    def explained(self, reasons: Mapping[str, Reason]) -> Plan:
        """This plan with other ``reasons`` of its decisions, by node name.

        A reason stands only beside the format that it permits.
        """

        def told(decision: Decision) -> Decision:
            new = reasons.get(decision.node)
            if new is None or new.permits != (decision.format.label,):
                return decision
            own = tuple(new if r.rule == DECISION else r for r in decision.reasons)
            return replace(decision, reasons=own)

        return replace(self, decisions=tuple(told(d) for d in self.decisions))

    def without_figures(self) -> Plan:
        """This plan as model files have it: reasons that compare measured figures are empty.

        Two searches that find the same plan measure other figures.
        """
        measured = {
            d.node: Reason(rule=DECISION, text="", permits=r.permits)
            for d in self.decisions
            for r in d.reasons
            if r.rule == DECISION and DECIDED_BY in r.evidence
        }
        return self.explained(measured)

    def adjusting(self, graph: Graph, *, where: str) -> tuple[AdjustOperand, ...]:
        """The edits that make the adjustments.

        Raises:
            ModelError: If an op does not have an operand that is adjusted.
        """
        nodes = {n.name: n for n in graph.nodes}
        edits: list[AdjustOperand] = []
        for one in self.adjustments:
            edit = one.edit(graph, nodes)
            if edit is None:
                at = one.attribute or f"input {one.port}"
                what = f"the plan adjusts {at} of {one.node!r}, which does not fit"
                raise ModelError(what, where=where, fix=_MAKE_ANEW)
            edits.append(edit)
        return tuple(edits)

    def check_complete(self, graph: Graph, *, where: str) -> None:
        """Check that a saved plan decides every op of its graph, as tune's and convert's do.

        Raises:
            ModelError: If it leaves out an op that has a float type to decide.
        """
        decided = {d.node for d in self.decisions}
        left = [
            n.name for n in graph.nodes if n.format is Format.FP32 and n.name not in decided
        ]
        if left:
            what = f"the plan leaves out {left[0]!r}"
            raise ModelError(what, where=where, fix=_MAKE_ANEW)

    def to_json(self) -> str:
        """Text that ``from_json`` reads back to an equal plan."""
        content: dict[str, Any] = {
            "version": PLAN_VERSION,
            "model": self.model,
            "digest": self.digest,
            "policy": self.policy,
            "engine": self.engine,
            "opset": self.opset,
            **self._options,
            "io": {name: f.label for name, f in self.io.items()},
            "decisions": [_decision_to_dict(d) for d in self.decisions],
            **({"structure": write_structure(self.structure)} if self.structure else {}),
        }
        return json.dumps(sealed(content), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """Read a plan.

        Raises:
            UsageError: If the text is not a plan of a version this release reads.
        """
        fix = "give a file that `finecast tune` or `convert --plan-out` wrote, unchanged"
        with reading("finecast plan", where, fix) as at:
            file = at.parsed(text, _SavedPlan, newest=PLAN_VERSION, sealed_from=_SEALED)
            plan = cls(
                model=file.model,
                policy=file.policy,
                engine=file.engine,
                opset=file.opset,
                io=file.io,
                decisions=tuple(map(_decision, at.each("decisions", file.decisions))),
                from_type=file.from_type,
                frozen=file.frozen,
                keep_ops=file.keep_ops,
                by_hint=file.by_hint,
                kv_cache=file.kv_cache,
                adjustments=tuple(
                    map(Adjustment.from_dict, at.each("adjustments", file.adjustments))
                ),
                structure=read_structure(file.structure) if file.structure else (),
            )
            counts = Counter(d.node for d in plan.decisions)
            twice = [node for node, count in counts.items() if count > 1]
            if twice:
                raise UsageError(f"the plan decides {twice[0]!r} twice")
            if file.digest != plan.digest:
                stated = f"its digest is {plan.digest}, the file says {file.digest!r}"
                raise UsageError(f"the plan was changed: {stated}")
        return plan

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan file.

        Raises:
            UsageError: If it is missing or not a plan.
        """
        fix = "give a file that `finecast tune` or `convert --plan-out` wrote"
        text = read_text(path, what="plan", most_bytes=_LARGEST_BYTES, fix=fix)
        return cls.from_json(text, where=str(path))


def _check_result(graph: Graph, node: Node, encodings: Encodings, where: str) -> None:
    """Raise ModelError if the plan encodes a result that cannot be encoded."""
    if isinstance(encodings.result, Format):
        return
    with suppress(ValueError):
        if coded_result(graph, node) is not None:
            return
    what = f"the plan encodes the result of {node.name!r}, which stays as it is"
    raise ModelError(what, where=where, fix=_MAKE_ANEW)


def _wrong_input(graph: Graph, node: Node, encodings: Encodings) -> int | None:
    """The first encoded input that does not exist, or whose kind or shape does not fit."""
    follows = dict(enumerate(zip(node.inputs, node.follows_in, strict=True)))
    for constant, named in ((False, encodings.operands), (True, encodings.constants)):
        for index, encoding in named.items():
            source, own = follows.get(index, (None, False))
            value = graph.values[source] if source is not None and own else None
            if value is None or (value.constant is not None) is not constant:
                return index
            if value.constant is not None and isinstance(encoding, Scaled):
                try:
                    encoding.spread(value.constant.read().shape)
                except ValueError:
                    return index
    return None


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    return {
        "node": decision.node,
        "op": decision.op,
        "format": decision.format.label,
        **(decision.encodings.to_dict() if decision.format.has_scales else {}),
        "reasons": [
            {
                "rule": r.rule,
                "text": r.text,
                "permits": list(r.permits),
                "evidence": dict(r.evidence),
            }
            for r in decision.reasons
        ],
    }


class _SavedDecision(msgspec.Struct, kw_only=True):
    """What a decision has besides its encodings."""

    node: str
    op: str
    format: Format
    reasons: tuple[Reason, ...] = ()


def _decision(content: dict[str, Any]) -> Decision:
    stated = converted(content, _SavedDecision)
    return Decision(
        node=stated.node,
        op=stated.op,
        format=stated.format,
        encodings=Encodings.from_dict(stated.format, content),
        reasons=stated.reasons,
    )


class _SavedPlan(Saved, kw_only=True):
    model: str
    digest: str
    policy: str
    engine: str = ""
    opset: int
    from_type: str = ""
    frozen: bool | None = None
    keep_ops: bool = False
    by_hint: bool = False
    kv_cache: Format = Format.FP32
    io: dict[str, Format] = msgspec.field(default_factory=dict[str, Format])
    decisions: list[dict[str, Any]]
    adjustments: tuple[dict[str, Any], ...] = ()
    structure: dict[str, Any] | None = None
