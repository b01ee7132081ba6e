"""Which outputs of a model, and which slices of them, a metric is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from finecast.data.metrics import Held, Metric, Reads, Scored
from finecast.data.samples import Outputs
from finecast.engines.base import Array, Feeds
from finecast.errors import UsageError
from finecast.naming import enumerated
from finecast.planning.detections import (
    DetectorOutputs,
    JoinedOutput,
    detector_outputs,
    row_parts,
    whole_columns,
)
from finecast.planning.free_rows import FreeOutput
from finecast.planning.sensitivity import counted_outputs, is_float
from finecast.planning.slices import WHOLE, slices_of


def scored_outputs(
    metric: Metric,
    of: Sequence[str],
    feeds: Feeds,
    outputs: Outputs,
    axis: int | None = None,
    free: Sequence[FreeOutput] = (),
    joined: Mapping[str, JoinedOutput] = MappingProxyType({}),
) -> tuple[Scored, ...]:
    """The outputs that ``metric`` is of, by slices whose numbers have a unit of their own.

    Without names a metric of scores is of those of a detector, wherever they are, or of the
    first output.

    Args:
        metric: The metric.
        of: The outputs that the user names; empty for none.
        feeds: What the fp32 model was given.
        outputs: What it gave.
        axis: The axis of their slices; None to find them.
        free: The outputs of free length: which rows they have is no matter of units.
        joined: The outputs that the graph joins of parts.

    Raises:
        UsageError: If the metric is of scores, and an output of different units has none.
    """
    rows = {one.name for one in free} if metric.of_rows else frozenset[str]()
    own, parts = _own(metric, feeds, outputs), _Parts(metric=metric, axis=axis, joined=joined)
    detector = None
    if metric.reads is Reads.SCORES:
        samples = {len(array) for array in feeds.values() if array.ndim}
        among = {n: outputs[n] for n in own if n not in {one.name for one in free}}
        detector = detector_outputs(among, samples)
    if detector is not None and not of and _is_of(detector, own[0], outputs[own[0]]):
        return tuple(_detected(parts, detector, outputs, first=own[0]))
    boxes = detector.boxes if detector is not None and detector.certain else ""
    return tuple(
        scored
        for name in of or (own if metric.each_output else own[:1])
        for scored in (
            [Scored(output=name)]
            if name in rows
            else [Scored(output=name, axis=detector.axis, held=Held.NUMBERS)]
            if detector is not None and name == boxes and Held.NUMBERS in metric.beside
            else parts.of(name, outputs[name])
        )
    )


def _own(metric: Metric, feeds: Feeds, outputs: Outputs) -> tuple[str, ...]:
    """Names of the outputs that ``metric`` may be of where the user names none."""
    names, arrays = [*outputs], [*outputs.values()]
    counted = counted_outputs(feeds.values(), arrays)
    own = [n for n, a in zip(names, arrays, strict=True) if not is_float(a)]
    own = [n for i, n in enumerate(names) if i in counted or n in own]
    if metric.each_output:
        return tuple(n for i, n in enumerate(names) if i in counted) or tuple(own[:1])
    return tuple(own)


def _is_of(detector: DetectorOutputs, first: str, array: Array) -> bool:
    """Whether the first output is one of the detector's, or says how many rows there are."""
    counts = array.ndim > 0 and array.size == len(array)
    return first in detector.names or (
        detector.certain and counts and bool(whole_columns(array.reshape(-1, 1)))
    )


def _detected(
    parts: _Parts, detector: DetectorOutputs, outputs: Outputs, *, first: str
) -> list[Scored]:
    """What a metric of scores is of in the outputs of a detector."""
    metric, boxes = parts.metric, detector.boxes
    if not detector.likely:
        doubt = (
            f"{metric.name} is of output {first!r}, the first. If its rows of 4 numbers are"
            f" boxes, name the output of scores: --of {' or '.join(detector.scores)}"
        )
        return [_doubted(one, doubt) for one in parts.of(first, outputs[first])]
    decided = [
        scored
        for name, axis in detector.scores.items()
        for scored in (
            parts.of(name, outputs[name])
            if axis == outputs[name].ndim - 1
            else [Scored(output=name, axis=axis)]
        )
    ]
    others: list[Scored] = []
    if Held.NUMBERS in metric.beside:
        count = [first] if first not in detector.names else []
        classes = [*count, *detector.classes]
        decided += [Scored(output=n, axis=None, held=Held.CLASSES) for n in classes]
        others += [Scored(output=n, axis=None, held=Held.NUMBERS) for n in detector.numbers]
        found = parts.of(boxes, outputs[boxes])
        whole = Scored(output=boxes, axis=detector.axis, held=Held.NUMBERS)
        others += [whole] if found[0].held is Held.SCORES else found
    elif not decided and metric.of_classes:
        decided = [Scored(output=n) for n in detector.classes if not is_float(outputs[n])]
    if not decided and not others:
        raise UsageError(
            f"no output holds scores of several classes: those of {boxes!r} are coordinates",
            where="--metric",
            fix="use --metric agreement or snr_db, or name another output: --of OUTPUT",
        )
    decided = decided if Held.NUMBERS in metric.beside else decided[:1]
    taken = [*dict.fromkeys(repr(one.output) for one in decided)]
    if first in {one.output for one in decided} or not taken:
        return [*decided, *others]
    seems = "holds" if detector.certain else "seems by its form to hold"
    also = f" and of the boxes in {boxes!r}, which are near or not" if others else ""
    doubt = (
        f"{metric.name} is of output {enumerated(taken)}{also}, as output {boxes!r} {seems}"
        " coordinates: name others with --of"
    )
    return [_doubted(decided[0], doubt), *decided[1:], *others]


def _doubted(scored: Scored, doubt: str) -> Scored:
    return replace(scored, doubt="; ".join(filter(None, (doubt, scored.doubt))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of one output that a metric is of."""

    metric: Metric
    axis: int | None
    joined: Mapping[str, JoinedOutput]

    def of(self, name: str, wanted: Array) -> list[Scored]:
        """What the metric is of in one output; alone by its units that differ."""
        metric = self.metric
        if metric.reads is Reads.NUMBERS:
            return [Scored(output=name, part=part) for part in slices_of(wanted, self.axis)]
        if metric.reads is Reads.SCORES:
            return self._decided(name, wanted)
        slices = slices_of(wanted)
        if metric.reads is Reads.FIRST or len(slices) == 1:
            return [Scored(output=name)]
        doubt = (
            f"the numbers of output {name!r} have different units, {enumerated(slices)}:"
            f" {metric.name} is of all together, and the largest decide it; use --eval"
        )
        return [Scored(output=name, doubt=doubt)]

    def _decided(self, name: str, wanted: Array) -> list[Scored]:
        """The slice with scores and, where the metric is of others, too, their slices."""
        metric, parts = self.metric, row_parts(wanted, self.joined.get(name))
        if WHOLE in parts.scores:
            return self._together(name, wanted, suspected=parts.doubt)
        if not parts.scores and metric.of_classes:
            return self._together(name, wanted)
        if not parts.scores and not metric.beside:
            others = enumerated([*parts.classes, *parts.numbers])
            raise UsageError(
                f"no slice of output {name!r} holds scores of several classes: the numbers of"
                f" {others} have different units",
                where="--metric",
                fix="use --metric snr_db or cosine, or --eval",
            )
        slices = [Scored(output=name, part=part, axis=part.axis) for part in parts.scores]
        if metric.of_classes:
            doubt = (
                f"{metric.name} is of {slices[0]}, as the other numbers have other units:"
                " labels are the numbers of its classes, from 0"
            )
            return [replace(one, doubt=doubt) for one in slices]
        for held, among in ((Held.CLASSES, parts.classes), (Held.NUMBERS, parts.numbers)):
            if held in metric.beside:
                slices += [
                    Scored(output=name, part=p, axis=p.axis or -1, held=held) for p in among
                ]
        return slices

    def _together(self, name: str, wanted: Array, *, suspected: bool = False) -> list[Scored]:
        """An output whose numbers all decide, along the last axis.

        They decide alone by the indices of another axis that the user named, unless labels are
        of all of them.
        """
        metric = self.metric
        parts = (WHOLE,) if self.axis is None else slices_of(wanted, self.axis)
        if WHOLE not in parts and parts[0].axis == wanted.ndim - 1:
            doubt = (
                f"which numbers of output {name!r} are scores is not known from the data:"
                f" {metric.name} is of the largest of each row, whatever --slices says; use"
                " --eval"
            )
            return [Scored(output=name, doubt=doubt)]
        parts = (WHOLE,) if metric.of_classes else parts
        doubt = (
            f"the largest number of each row of output {name!r} is one of the first 4, as"
            f" where boxes lie beside scores: {metric.name} says nothing then; use --eval"
        )
        return [Scored(output=name, part=part, doubt=doubt * suspected) for part in parts]
