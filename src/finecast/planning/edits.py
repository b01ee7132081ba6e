"""From a plan to the fewest casts.

Laws: at most one cast per value and format, serving all its consumers; constants are
converted, never cast; the plan that changes nothing gives no edits.

Few ops are defined for 8-bit formats, and tf32 is not a storage type. With such a format a
node computes in its own type on operands that were rounded to the format and back, each with
its own parameters where the format has some. Engines with 8-bit kernels recognise a cast to
an 8-bit format and back in front of a product, and run the product in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from finecast.graph import ROUNDS, Graph
from finecast.numbers.encodings import Dynamic, Encoding, Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.ops import READS_ANY_FORMAT
from finecast.rules.scaled_operands import coded_result, moved_by, reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Input ``index`` of node ``node``; if node is None, the output of the model itself."""

    node: int | None
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertCast:
    """Cast ``value`` to ``to`` once, for all of ``uses``."""

    value: int
    to: Format
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConstant:
    """Store the constant ``value`` in ``to`` for ``uses``, rounded from its own numbers."""

    value: int
    to: Format
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFormat:
    """``node`` computes in ``to``; its outputs that follow its format are stored in ``to``."""

    node: int
    to: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPort:
    """The model's input or output ``value`` is declared as ``to``."""

    value: int
    to: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Round ``value`` to ``to`` and back, once for all ``uses``; store constants in ``to``."""

    value: int
    to: Encoding
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRounding:
    """Kernels of ``uses`` round ``value`` as they read it: the model states no rounding."""

    value: int
    to: Dynamic
    uses: tuple[Use, ...]


Edit: TypeAlias = (
    InsertCast | ConvertConstant | SetFormat | SetPort | RoundTrip | KernelRounding
)

APART: Final = -1
"""What is added to the codes of constants that meet exact values in a model where other values
are rounded by kernels. OpenVINO (2026.4) rounds no value that meets signed codes with a zero
point, and folds away a zero point of 0. A probe checks this (``engines.probe``)."""


def edits(
    graph: Graph,
    formats: Mapping[int, Format],
    io: Mapping[int, Format] | None = None,
    encodings: Mapping[int, Encodings] | None = None,
    *,
    moves_codes: bool = True,
) -> tuple[Edit, ...]:
    """The edits that give node i the format ``formats[i]``; other nodes keep theirs.

    Args:
        graph: The graph.
        formats: Format by node id.
        io: Declared format by value id of inputs and outputs that change type.
        encodings: By node id, for nodes whose format has parameters.
        moves_codes: Whether the engine can transpose, reshape and slice integer codes; if
            not, values are rounded directly in front of the ops that read them rounded.
    """
    io = io or {}
    rounds = {n: f for n, f in formats.items() if f.has_scales or not f.encodes_results}
    formats = {n: f for n, f in formats.items() if f.encodes_results}
    changed: list[Edit] = [
        SetFormat(node=n.id, to=formats[n.id].storage)
        for n in graph.float_nodes
        if n.id in formats and formats[n.id].storage is not n.format
    ]
    changed += [
        SetPort(value=v, to=f) for v, f in io.items() if graph.values[v].format is not f
    ]
    stored = storage(graph, formats, io)
    inside = _in_kernels(graph, rounds, encodings or {})
    rounded = _rounded(graph, rounds, stored, encodings or {}, apart=APART if inside else 0)
    coded = {use for uses in rounded.values() for use in uses}
    casts = _casts(graph, stored, formats, io)
    for (value_id, fmt), uses in sorted(casts.items(), key=lambda c: c[0][0]):
        if graph.values[value_id].constant is None:
            changed.append(InsertCast(value=value_id, to=fmt, uses=tuple(uses)))
        elif plain := tuple(use for use in uses if use not in coded):
            changed.append(ConvertConstant(value=value_id, to=fmt, uses=plain))
    if moves_codes:
        _hoist(graph, rounded, stored)
    changed += [
        RoundTrip(value=v, to=e, uses=tuple(dict.fromkeys(uses)))
        for (v, e), uses in sorted(rounded.items(), key=lambda w: w[0][0])
        if not _came_from(graph, v, e.format)
    ]
    return (*changed, *inside)


def _in_kernels(
    graph: Graph, for_operands: Mapping[int, Format], encodings: Mapping[int, Encodings]
) -> list[KernelRounding]:
    """The values that kernels round as they read them, by value and encoding."""
    uses_by_rounding: dict[tuple[int, Dynamic], list[Use]] = {}
    for number in for_operands:
        operands = encodings[number].operands if number in encodings else {}
        for index, to in operands.items():
            source = graph.nodes[number].inputs[index]
            if source is not None and isinstance(to, Dynamic):
                uses_by_rounding.setdefault((source, to), []).append(
                    Use(node=number, index=index)
                )
    ordered = sorted(uses_by_rounding.items(), key=lambda item: item[0][0])
    return [KernelRounding(value=v, to=to, uses=tuple(uses)) for (v, to), uses in ordered]


def _rounded(
    graph: Graph,
    for_operands: Mapping[int, Format],
    stored: Mapping[int, Format],
    encodings: Mapping[int, Encodings],
    apart: int,
) -> dict[tuple[int, Encoding], list[Use]]:
    """Uses of each value that read it rounded, by value and encoding.

    ``apart`` is added to the codes of constants that meet values which no kernel rounds.
    """
    wanted: dict[tuple[int, Encoding], list[Use]] = {}
    for number, fmt in for_operands.items():
        node, scaled = graph.nodes[number], encodings.get(number)
        for index, (source, follows) in enumerate(
            zip(node.inputs, node.follows_in, strict=True)
        ):
            if source is None or not follows:
                continue
            dtype = stored.get(source)
            if fmt.storage is Format.FP32 and dtype is not None and fmt.holds(dtype):
                continue
            to = scaled.at(index) if scaled is not None else fmt
            if isinstance(to, Scaled) and not (fmt.encodes_values or fmt.multiplies_codes):
                to = to.moved(apart)
            if to is not None and not isinstance(to, Dynamic):
                wanted.setdefault((source, to), []).append(Use(node=number, index=index))
        if scaled is not None and isinstance(scaled.result, Scaled):
            value = coded_result(graph, node)
            assert value is not None
            uses = [Use(node=n, index=index) for n, index in reading(graph, value)]
            if uses:
                wanted.setdefault((value.id, scaled.result), []).extend(uses)
    return wanted


def _hoist(
    graph: Graph, wanted: dict[tuple[int, Encoding], list[Use]], stored: Mapping[int, Format]
) -> None:
    """Round in front of an op that only moves numbers if all readers of its result round it.

    One rounding then serves the op and other readers of the same value, and the engine moves
    codes. Only for scaled formats: values in other formats are cast and cast back.
    """
    for value, to in sorted(wanted, key=lambda key: -key[0]):
        while (value, to) in wanted and to.format.runs_on_codes:
            producer = graph.values[value].producer
            before = None if producer is None else moved_by(graph, graph.nodes[producer])
            if producer is None or before is None or not _all_round(graph, value, wanted, to):
                break
            if (
                stored.get(value) is not Format.FP32
                or stored.get(before.id) is not Format.FP32
            ):
                break
            index = graph.nodes[producer].inputs.index(before.id)
            del wanted[value, to]
            value = before.id
            wanted.setdefault((value, to), []).append(Use(node=producer, index=index))


def _all_round(
    graph: Graph, value: int, wanted: Mapping[tuple[int, Encoding], list[Use]], to: Encoding
) -> bool:
    """Whether ``value`` is its op's only used result, and all its readers round it so."""
    source = graph.values[value]
    result_ids = () if source.producer is None else graph.nodes[source.producer].outputs
    results = [graph.values[i] for i in result_ids if i is not None]
    used = [v.id for v in results if v.uses or v.is_output]
    readers = {use.node for use in wanted[value, to]}
    return used == [value] and not source.is_output and readers == set(source.uses)


def _came_from(graph: Graph, value_id: int, fmt: Format) -> bool:
    """Whether the value's numbers are in ``fmt`` already: rounded to it, or cast from it.

    A constant with numbers of an 8-bit format counts as not: it can still be stored smaller.
    """
    value = graph.values[value_id]
    if value.constant is not None:
        return fmt.storage is Format.FP32 and value.constant.all_in(fmt)
    maker = graph.maker(value)
    if maker is None or maker.attributes.get(ROUNDS) == fmt.label:
        return maker is not None
    source = graph.read(maker, 0) if maker.op == "cast" else None
    return source is not None and source.format is fmt


def storage(
    graph: Graph, formats: Mapping[int, Format], io: Mapping[int, Format]
) -> dict[int, Format]:
    """The format in which each float value is stored by its producer."""
    stored = {v.id: v.format for v in graph.values if v.format is not None}
    stored |= {v: f for v, f in io.items() if graph.values[v].is_input}
    for node in graph.float_nodes:
        if node.id in formats:
            for value in graph.following_outputs(node):
                stored[value.id] = formats[node.id].storage
    return stored


def _casts(
    graph: Graph,
    stored: Mapping[int, Format],
    formats: Mapping[int, Format],
    io: Mapping[int, Format],
) -> dict[tuple[int, Format], list[Use]]:
    """Uses of each value in a format other than the stored one; linear in the ports."""
    wanted: dict[tuple[int, Format], list[Use]] = {}
    for node in graph.nodes:
        if node.native in READS_ANY_FORMAT:
            continue
        own = formats[node.id].storage if node.id in formats else None
        for index, (source, follows) in enumerate(
            zip(node.inputs, node.follows_in, strict=True)
        ):
            if source is None or source not in stored:
                continue
            declared = graph.values[source].format
            needs = own if own and follows and node.format is not None else declared
            if needs is not None and needs is not stored[source]:
                wanted.setdefault((source, needs), []).append(Use(node=node.id, index=index))
    for value in graph.values:
        if value.is_output and value.format is not None:
            needs = io.get(value.id, value.format)
            if needs is not stored[value.id]:
                wanted.setdefault((value.id, needs), []).append(Use(node=None))
    return wanted


def cast_count(graph: Graph, all_edits: tuple[Edit, ...]) -> int:
    """Number of casts inside the model; tf32, which is rounded by arithmetic, has none."""
    return sum(
        (1 if isinstance(e, InsertCast) else 2)
        for e in all_edits
        if isinstance(e, InsertCast | RoundTrip)
        and e.to is not Format.TF32
        and graph.values[e.value].constant is None
        and not graph.values[e.value].is_input
        and any(u.node is not None for u in e.uses)
    )
