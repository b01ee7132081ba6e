"""A model beside a low version of it, matched, in one session that returns any ops to fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from finecast.data.deviation import deviation, fp32_error
from finecast.engines import get_engine
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    each_call,
    feeds_for,
    joined_outputs,
    outputs_of_calls,
    outputs_on,
)
from finecast.engines.exact import Exact
from finecast.engines.loading import exact_session, load_model
from finecast.errors import ModelError
from finecast.frontends.joining import ModelPair, ShownValue, SwitchedValue, is_choice, join
from finecast.frontends.prepared import PreparedModel
from finecast.graph import PHI, Graph, Node, Value
from finecast.graph.matching import match
from finecast.graph.structure import structure_of
from finecast.naming import listed, number_of, percent
from finecast.native.model import Check, LowModel, OpGroup, Seen, grouped
from finecast.native.observing import SHOWN_BYTES, observe, unseen
from finecast.native.scales import StoredRange, WrongScale, stored_range, wrong_scale
from finecast.native.source import AS_IT_IS, Source
from finecast.numbers.formats import Format
from finecast.numbers.rounding import widened
from finecast.numbers.thresholds import LIMIT
from finecast.ops import OpKind, by_name
from finecast.ops.bodies import nodes_within, owner_of
from finecast.planning.free_rows import free_values
from finecast.planning.points import SWITCH, moves
from finecast.processes.memory import packed
from finecast.rules.draws import draws, random_notes
from finecast.rules.facts import Facts, ValueFacts, facts_in
from finecast.rules.folded import stored_bits
from finecast.rules.scaled_operands import origin

_LISTED: Final = 3
"""Values that a note names."""
_CODES: Final = frozenset({"quantize", "dequantize"})
_FOUR_BITS: Final = 4


@dataclass(slots=True, kw_only=True)
class BesideLow(LowModel):
    """The fp32 model ``source`` joined with ``other``, a low version of it by any tool.

    Attributes:
        source: The fp32 model.
        other: The low one.
        engine: ``NAME[:DEVICE]`` of the engine that runs them; None for one that computes in
            the types that the models state.
    """

    source: Source
    other: Source
    engine: str | None = None
    name: str = field(init=False)
    graph: Graph = field(init=False)
    groups: Sequence[OpGroup] = field(init=False)
    notes: Sequence[str] = field(init=False)
    _models: tuple[PreparedModel, PreparedModel] = field(init=False)
    _matched: dict[int, int] = field(init=False)
    _session: Session | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Match the values of both models.

        Raises:
            ModelError: If the low model has no op of the fp32 one, or none that is low.
        """
        self.name = self.other.name
        self._models = self.source.prepare(AS_IT_IS), self.other.prepare(AS_IT_IS)
        pair = self._pair()
        self.graph = pair.exact.graph
        named = self._models[0].names_stay
        self._matched = matched_values(self.graph, pair.low.graph, named=named)
        self.groups = grouped(self.graph, self._low_formats(pair))
        self.notes = self._notes()

    def _pair(self) -> ModelPair:
        """Fresh copies of both models."""
        exact, low = self._models
        return exact.pair(low, by_types=self.engine is None)

    def _low_formats(self, pair: ModelPair) -> dict[int, Format]:
        """The low formats of the fp32 model's nodes that have partners, by id."""
        formats: dict[int, Format] = {}
        free = free_values(self.graph)
        for value, partner in self._matched.items():
            node, other = self.graph.maker(value), pair.low.graph.maker(partner)
            if node is None or other is None or not is_choice(self.graph.values[value]):
                continue
            if draws(self.graph, node) or value in free:
                continue  # both read what fp32 draws; of other lengths none can be chosen
            low = pair.low.graph
            own = _codes_read(low, other)
            if own is None and by_name(node.op).kind in _PRODUCTS:
                own = _codes_multiplied(low, other)
            own = own or _weights_read(low, other) or pair.stored.get(partner, Format.FP32)
            inner = self._low_within(node).values()
            formats[node.id] = min((own, *inner), key=lambda fmt: fmt.bits)
        return dict(sorted(formats.items()))

    def _low_within(self, node: Node) -> dict[str, Format]:
        """Formats, by name, of the low ops in the bodies of which ``node`` is a result.

        They are the low model's, where its op with bodies has the name that it has here.
        """
        low = self._models[1].graph
        owner = owner_of(self.graph, node)
        same = (n for n in low.nodes if owner is not None and n.name == owner.name)
        inner = (n for found in same for n in nodes_within(low, found))
        formats = {n.name: _format_of(low, n) for n in inner}
        return {name: fmt for name, fmt in formats.items() if fmt is not Format.FP32}

    def within(self, group: int, feeds: Sequence[Feeds]) -> tuple[str, ...]:
        """Those of the low model; all of them if the fp32 model runs none of their bodies."""
        names = self._low_within(self.graph.nodes[self.groups[group].nodes[0]])
        if not names:
            return ()
        prepared = self._models[0]
        makers = (prepared.graph.maker(i) for i in unseen(prepared, lambda: feeds))
        left = {maker.name for maker in makers if maker is not None}
        return tuple(name for name in names if name not in left) or (*names,)

    def _notes(self) -> list[str]:
        computed_values = [v for v in self.graph.values if is_choice(v) and self._outside(v)]
        if not any(v.id in self._matched for v in computed_values):
            raise ModelError(
                "no op of the model in reduced precision is one of the fp32 model, by name"
                " or by structure",
                where=self.name,
                fix="give the model that it was made from",
            )
        notes = random_notes(self.graph, fixed=self.source.fixes_draws)
        left = self._without_partner()
        if left:
            names = listed([v.name for v in left], _LISTED)
            count = (
                f"{number_of(len(left), 'value')} of {len(computed_values)} without a partner"
            )
            notes.append(
                f"{count} in the model in reduced precision, computed in fp32: {names}"
            )
        return notes

    def _without_partner(self) -> list[Value]:
        """The values that fp32 ops compute whatever is returned, and may differ by that."""
        return [
            v
            for v in self.graph.values
            if is_choice(v) and self._outside(v)
            if not (v.id in self._matched or self._adds_none(v))
        ]

    def _adds_none(self, value: Value) -> bool:
        """Whether its op only moves or bounds a matched value, which codes do as exactly."""
        maker = self.graph.maker(value.id)
        if maker is None or not (maker.op in _SATURATES or moves(maker)):
            return False
        return maker.inputs[0] in self._matched

    def _outside(self, value: Value) -> bool:
        maker = self.graph.maker(value.id)
        return maker is not None and not maker.region and value.id in maker.outer_outputs

    # Sessions.

    def session(self, returned: frozenset[int]) -> Session:
        """One session for all sets of ops: another input of it."""
        if self._session is None:
            self._session = self._loaded(())
        switch = np.zeros(len(self.groups), dtype=bool)
        switch[[*returned]] = True
        return _Switched(self._session, switch)

    def _loaded(self, shown: Sequence[ShownValue]) -> Session:
        choices = [*self._choices()]
        model = join(self._pair(), choices, elements=len(self.groups), shown=shown)
        if self.engine is None:
            return exact_session(model)
        return load_model(get_engine(self.engine), model)

    def _choices(self) -> Iterator[SwitchedValue]:
        numbers = {n: k for k, group in enumerate(self.groups) for n in group.nodes}
        for value, partner in self._matched.items():
            maker = self.graph.values[value].producer
            element = None if maker is None else numbers.get(maker)
            yield SwitchedValue(value=value, partner=partner, element=element)

    def unexplained(self, exact: Exact, *, passed: bool) -> Sequence[str]:
        """What to say first if the error op by op is another one than the engine's whole.

        Of a model that passes a smaller error by itself is no news: it passes all the more.
        """
        alone = self.other.reference()
        if self.engine is not None:
            alone = load_model(get_engine(self.engine), self.other.loadable)
        names = {spec.name: own for spec, own in zip(alone.outputs, exact.names, strict=True)}
        calls = [
            {names[n]: a for n, a in alone.run(feeds_for(alone, feeds)).items()}
            for feeds in exact.calls
        ]
        own_outputs = joined_outputs([[one[name] for name in exact.names] for one in calls])
        error, joined = (
            math.sqrt(exact.squared_error(outputs))
            for outputs in (own_outputs, outputs_on(self.session(frozenset()), exact.calls))
        )
        fewer = error > _UNEXPLAINED * joined
        more = joined > _UNEXPLAINED * error and not passed
        if not (fewer or more) or max(error, joined) < fp32_error(len(self.graph.nodes)):
            return ()
        text = (
            f"what is blamed here adds up to a relative error of {percent(joined)}, and"
            f" {self.name} run by itself has {percent(error)}"
        )
        why = (
            "what has no partner in fp32 makes the difference"
            if fewer or self._without_partner()
            else "by itself the engine fuses ops, and rounds fewer values"
        )
        return [f"{text}: {why}"]

    # What values are like.

    def facts(self, feeds: Sequence[Feeds]) -> Mapping[int, ValueFacts]:
        """Observed in runs of the fp32 model."""
        prepared, _ = self._models
        prepared_facts = observe(prepared, lambda: feeds)
        return facts_in(self.graph, prepared_facts, prepared.graph)

    def wrong_scales(self, facts: Callable[[], Facts]) -> Mapping[int, Sequence[WrongScale]]:
        """Of operands of matched ops, and of outputs, which are quantized for the caller."""
        covered = [*self._covered(self._pair().low.graph)]
        seen = facts() if covered else {}
        wrong: dict[int, list[WrongScale]] = {}
        for node, value, numbers in covered:
            scale = wrong_scale(value, numbers, seen)
            if scale is not None:
                wrong.setdefault(node, []).append(scale)
        return wrong

    def _covered(self, low: Graph) -> Iterator[tuple[int, Value, StoredRange]]:
        """The id of an op, a value that it reads or gives, and what its scale covers."""
        values = {partner: value for value, partner in self._matched.items()}
        for value, partner in self._matched.items():
            node, other = self.graph.maker(value), low.maker(partner)
            if node is None or other is None:
                continue
            for port, index in enumerate(other.inputs):
                numbers = None if index is None else stored_range(low, low.values[index])
                if numbers is None:
                    continue
                if numbers.is_weight:
                    own = self.graph.read(node, port) if node.op == other.op else None
                    source = numbers.source if own is None or own.constant is None else own
                    yield node.id, source, numbers
                elif (own := values.get(_origin(low, numbers.source.id))) is not None:
                    yield node.id, self._saturated(self.graph.values[own]), numbers
        for end, low_end in _by_name(self.graph.outputs, low.outputs):
            numbers = stored_range(low, low_end)
            if numbers is not None and end.producer is not None:
                yield end.producer, end, numbers

    def _saturated(self, value: Value) -> Value:
        """The value after the Relus and Clips that the saturation of integers does."""
        readers = [*self.graph.readers(value)]
        while len(readers) == 1 and readers[0].op in _SATURATES:
            value = next(self.graph.values[i] for i in readers[0].output_ids)
            readers = [*self.graph.readers(value)]
        return value

    def seen(self, feeds: Feeds, check: Check | None) -> Mapping[int, Seen]:
        """By runs that output values, with nothing returned and with all.

        Partners that differ though all that reads them is right are no partners: another tool
        folded an op into the one before. They are left out from then on.
        """
        seen_by_value: dict[int, Seen] = {}
        chosen = (c.value for c in self._choices() if c.element is not None)
        names = {self.graph.values[i].name: i for i in chosen}
        sizes = {n: 2 * self._size(i) for n, i in names.items()}
        for group in packed(sizes, SHOWN_BYTES):
            shown = [
                ShownValue(value=names[n], exact=f"exact_{k}", low=f"low_{k}")
                for k, n in enumerate(group)
            ]
            session = self._loaded(shown)
            count = len(self.groups)
            none, every = (
                outputs_of_calls(_Switched(session, switch), feeds)
                for switch in (np.zeros(count, dtype=bool), np.ones(count, dtype=bool))
            )
            for name, shown_value in zip(group, shown, strict=True):
                right = np.concatenate([call[shown_value.exact].reshape(-1) for call in every])
                own = np.concatenate([call[shown_value.exact].reshape(-1) for call in none])
                low = np.concatenate([call[shown_value.low].reshape(-1) for call in none])
                seen_by_value[shown_value.value] = _compared(name, right, own, low, check)
        folded = {i for i in seen_by_value if self._is_folded(i, seen_by_value)}
        self._part(folded)
        return {i: one for i, one in seen_by_value.items() if i not in folded}

    def _is_folded(self, value: int, seen: Mapping[int, Seen]) -> bool:
        """Whether a value differs, and whatever is computed of it is right."""
        if seen[value].spoiled or seen[value].total < LIMIT:
            return False
        next_seen = [*self._readers(value, seen)]
        return bool(next_seen) and all(seen[i].total < _RIGHT for i in next_seen)

    def _readers(self, value: int, seen: Mapping[int, Seen]) -> Iterator[int]:
        """The next values in ``seen`` that are computed of ``value``."""
        for node in self.graph.readers(self.graph.values[value]):
            for index in node.outputs:
                if index is not None:
                    yield from [index] if index in seen else self._readers(index, seen)

    def _part(self, values: Collection[int]) -> None:
        """Take partners apart."""
        if not values:
            return
        for value in values:
            del self._matched[value]
        self._session = None
        self.groups = grouped(self.graph, self._low_formats(self._pair()))
        self.notes = self._notes()

    def _size(self, value: int) -> int:
        shape = self.graph.values[value].fixed_shape
        return 4 * math.prod(shape) if shape is not None else _GUESSED_BYTES


_GUESSED_BYTES: Final = 1 << 20
"""The assumed size of a value of unknown shape."""
_UNEXPLAINED: Final = 1.1
"""Errors that differ by less come of sums in another order."""
_HUGE: Final = 1000.0
"""Numbers so many times as large as the median one are judged apart from the others."""
_RIGHT: Final = 0.1
"""A value with a smaller relative error is right as far as the order of ops is concerned."""


def _compared(name: str, right: Array, own: Array, low: Array, check: Check | None) -> Seen:
    """What a value shows: right in the fp32 model, ``own`` by the fp32 op on low inputs."""
    finite = np.isfinite(own)
    spoiled = ~np.isfinite(widened(low)) & np.isfinite(right)
    return Seen(
        own=_error(low, own),
        total=_error(low, right),
        spoiled=int(spoiled.sum()),
        largest=float(np.abs(own[finite]).max(initial=0.0)),
        refused=check is not None and not check(name, low, right),
    )


def _error(got: Array, wanted: Array) -> float:
    """The relative error of all numbers, or of those that are not huge beside the others.

    A mask of -3.4e38 that is added to scores hides all errors of the scores.
    """
    whole = deviation(got, wanted).relative
    magnitude = np.abs(widened(wanted))
    usual = np.median(magnitude[magnitude > 0]) if (magnitude > 0).any() else 0.0
    rest = magnitude <= _HUGE * usual
    if rest.all() or not rest.any():
        return whole
    return max(whole, deviation(got[rest], wanted[rest]).relative)


@final
class _Switched(Session):
    """A session of a joined model under one setting of its switch."""

    def __init__(self, session: Session, switch: Array) -> None:
        self.of = session
        self.switch = switch
        self.inputs = [spec for spec in session.inputs if spec.name != SWITCH]
        self.outputs = session.outputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return self.of.run(self._fed(feeds))

    def _fed(self, feeds: Feeds) -> Feeds:
        switched = each_call(feeds, lambda call: {**call, SWITCH: self.switch})
        return feeds_for(self.of, switched)

    @property
    def keeps_state(self) -> bool:
        return self.of.keeps_state

    def reset(self) -> None:
        self.of.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        return self.of.step(self._fed(feeds))


# ------------------------------------ which values of a model are which of a low version of it
#
# Law: no value has two partners. Values are matched by their names, which tools keep even
# where they fuse ops; the others are results of ops that ``graph.matching`` pairs. Casts and
# codes, which the low version has more of, are read through.

_QUANTIZE, _DEQUANTIZE = "quantize", "dequantize"
_PRODUCTS: Final = frozenset({OpKind.MATMUL, OpKind.CONV})
_SCALES: Final = frozenset({"cast", "mul", "add"})
"""Ops that turn sums of products of integers into floats."""
_INTEGERS: Final = frozenset({"int8", "uint8"})
"""Types of integer codes."""
_PASSED: Final = frozenset({"cast", _QUANTIZE, _DEQUANTIZE})
"""Ops that give the same value in another encoding."""
_SATURATES: Final = frozenset({"relu", "clip"})
"""Ops that the saturation of codes can do."""


def matched_values(graph: Graph, other: Graph, *, named: bool = True) -> dict[int, int]:
    """Ids of values of ``other`` by those of ``graph``: float values outside of bodies.

    Inputs are matched by name, or by their order where the name is another one. ``named``
    says that names of computed values are evidence by themselves.
    """
    inputs = _by_name(graph.inputs, other.inputs)
    partners = {v.id: partner.id for v, partner in inputs if v.format is not None}
    taken = set(partners.values())
    for value, partner in _pairs(graph, other, named=named):
        if value.id not in partners and partner.id not in taken:
            partners[value.id] = partner.id
            taken.add(partner.id)
    return partners


def _pairs(graph: Graph, other: Graph, *, named: bool) -> Iterator[tuple[Value, Value]]:
    """Pairs of results by the names of outputs and of values, then by the ops they are of."""
    mine, theirs = ({v.id: v for v in _results(g)} for g in (graph, other))
    for value, end in _by_name(graph.outputs, other.outputs):
        maker = other.maker(end.id)
        # The codes of an output round it for the caller alone: they belong to it.
        coded = maker is not None and maker.op == _DEQUANTIZE
        partner = end if coded else theirs.get(_origin(other, end.id))
        if value.id in mine and partner is not None and value.name == end.name:
            yield value, partner
    names = {v.name: v for v in theirs.values()}
    for value in mine.values() if named else ():
        if value.name in names:
            partner = names[value.name]
            yield _before_clip(graph, value, other, partner), partner
    for node, partner in match(structure_of(graph), structure_of(other)).pairs.items():
        results = zip(graph.nodes[node].outputs, other.nodes[partner].outputs, strict=False)
        for value, result in results:
            if value in mine and result in theirs:
                yield mine[value], theirs[result]


def _before_clip(graph: Graph, value: Value, other: Graph, partner: Value) -> Value:
    """The value that ``partner``, of the same name as ``value``, is.

    Quantizers remove Relus and Clips before codes that saturate at their bounds, and give what
    they read the name of their result. That is the partner of what the first of them reads.
    """
    maker = other.maker(partner.id)
    readers = [*other.readers(partner)]
    coded = bool(readers) and all(node.op == _QUANTIZE for node in readers)
    before, made_by = value, graph.maker(value.id)
    while made_by is not None and made_by.op in _SATURATES and made_by.inputs[0] is not None:
        if maker is None or maker.op == made_by.op or not coded:
            return value
        before = graph.values[made_by.inputs[0]]
        made_by = graph.maker(before)
    same = made_by is not None and maker is not None and maker.op == made_by.op
    return before if same else value


def _origin(graph: Graph, value: int) -> int:
    """The value that ``value`` is, before casts and codes."""
    maker = graph.maker(value)
    while maker is not None and maker.op in _PASSED and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = graph.maker(value)
    return value


def _by_name(ports: Sequence[Value], others: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
    """Each port with the other model's of its name, or else in its place."""
    names = {v.name: v for v in others}
    for value, beside in zip(ports, others, strict=False):
        yield value, names.get(value.name, beside)


def _format_of(graph: Graph, node: Node) -> Format:
    """The format of what an op computes, by its own type or the codes that it reads."""
    if node.op in (*_PASSED, PHI) or not by_name(node.op).has_numbers:
        return Format.FP32
    read = (graph.maker(origin(graph, graph.values[i])) for i in node.input_ids)
    if any(maker is not None and maker.op in _CODES for maker in read):
        return Format.INT8
    return _weights_read(graph, node) or node.format or Format.FP32


def _weights_read(graph: Graph, node: Node) -> Format | None:
    """The format of weights that the op decodes, or that are decoded for it; None without."""
    bits = node.attributes.get("bits")  # of ONNX Runtime's products by packed weights
    if by_name(node.op).kind is not OpKind.MATMUL or not isinstance(bits, int):
        read = (graph.values[i] for i in node.input_ids)
        made = (v for v in read if v.producer is not None)
        bits = min(filter(None, (stored_bits(graph, v) for v in made)), default=None)
    if bits is None:
        return None
    return Format.INT4_WEIGHTS if bits <= _FOUR_BITS else Format.INT8_WEIGHTS


def _codes_read(graph: Graph, node: Node) -> Format | None:
    """The format of the codes that are decoded for an op; None if it reads none."""
    read = (origin(graph, graph.values[i]) for i in node.input_ids)
    makers = (maker for maker in map(graph.maker, read) if maker is not None)
    coding = next((maker for maker in makers if maker.op in _CODES), None)
    if coding is None:
        return None
    ends = (graph.read(coding, 0), *(graph.values[i] for i in coding.output_ids))
    return next(filter(None, map(_code_format, ends)), Format.INT8)


def _codes_multiplied(graph: Graph, node: Node) -> Format | None:
    """The format of the codes whose products are summed, as of dynamic quantization.

    Scales are applied to the sums, or to the codes before.
    """
    waiting, seen = [node], {node.id}
    while waiting:
        for index in waiting.pop().inputs:
            maker = None if index is None else graph.maker(index)
            if index is None or maker is None or maker.id in seen:
                continue
            fmt = _code_format(graph.values[index])
            if fmt is not None:
                return fmt
            if by_name(maker.op).kind is OpKind.QUANTIZE and maker.op not in _CODES:
                return Format.INT8
            seen.add(maker.id)
            waiting += [maker] if maker.op in _SCALES else []
    return None


def _code_format(value: Value | None) -> Format | None:
    """The format of codes of 8 bits; None if the value holds other numbers."""
    if value is None or value.dtype in _INTEGERS:
        return None if value is None else Format.INT8
    return value.format if value.format is not None and value.format.bits == 8 else None


def _results(graph: Graph) -> Iterator[Value]:
    """Float values that an op computes outside of bodies."""
    for node in graph.nodes:
        if node.region or node.op in _PASSED:
            continue
        for index in node.outer_outputs:
            if index is not None and graph.values[index].format is not None:
                yield graph.values[index]
