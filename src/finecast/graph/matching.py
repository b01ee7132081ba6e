"""Which ops of two structures are the same: a net exported again, retrained or changed.

Ops are paired by evidence, the strongest first. From a pair further pairs grow along the edges
of the graph: what the two read and what reads them is compared next.

1. Weights and neighbourhoods that are equal, and unique in both graphs. Neighbourhoods are
   compared by colours, refined as by Weisfeiler and Lehman ("A reduction of a graph to a
   canonical form", 1968).
2. Names, unless weights, shapes or neighbours speak against it: exporters number ops, and one
   new op then shifts the names of all that follow.
3. Neighbourhoods again, with less to tell ops apart by: without weights, without attributes,
   by kinds alone.
4. The order of ops whose neighbourhoods are alike, if both graphs have equally many; and of
   ops of one kind that lie between the same pairs.

A pair that only kinds of ops speak for is taken apart in the end. What is then left between
the same pairs are ops that were stated as others, as a Gelu by the five ops that compute it: a
``Regrouping``.

Law: each op is in at most one pair or regrouping. The time is linear in the number of inputs,
but for the last part of step 4, which compares the ops of small regions with one another.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Final

from finecast.graph.structure import MODEL_INPUT, OpStructure, Structure, fed
from finecast.graph.worklist import Worklist

# How far neighbourhoods reach. One that is unique within a few steps is found by the first;
# repeated layers are told apart by their place between anchors.
_RADII: Final = (4, 1)
# Stands for the readers of an op that has none: its results are the model's.
_NO_READER: Final = -2
# An op is written out as at most so many others, as a Gelu by tanh is as nine.
_MOST_REGROUPED: Final = 16
# A pair, or the model's inputs, that bounds more regions does not tell which one corresponds.
_MOST_BOUNDED: Final = 32
# Ops between the same pairs are aligned if the product of their numbers is at most this.
_MOST_ALIGNED: Final = 1 << 20

Label = Callable[[OpStructure], Hashable]


def _exact(op: OpStructure) -> Hashable:
    return op.op, op.shape, op.attributes, op.numbers


def _detailed(op: OpStructure) -> Hashable:
    return op.op, op.shape, op.attributes


def _shaped(op: OpStructure) -> Hashable:
    return op.op, op.shape


def _weighted(op: OpStructure) -> Hashable:
    return op.op, frozenset(op.numbers)


def _kind(op: OpStructure) -> Hashable:
    return op.op


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """Ops of one graph that the other states as other ops, by their numbers."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which ops of two structures are the same.

    Attributes:
        pairs: The number in the second structure by that in the first.
        regroupings: Ops that stand for one another as groups.
    """

    pairs: dict[int, int]
    regroupings: tuple[Regrouping, ...] = ()


def match(before: Structure, after: Structure) -> Matching:
    """Find the ops of ``before`` in ``after``; by name alone if ``before`` has no edges."""
    matcher = _Matcher(before=_Side.of(before), after=_Side.of(after))
    if not any(op.inputs for op in before):
        matcher.by_name(strict=False)
        return Matching(pairs=dict(matcher.pairs))
    matcher.by_colour(_exact)
    matcher.by_name(strict=True)
    for label in (_weighted, _detailed, _shaped, _kind):
        matcher.by_colour(label)
    matcher.by_name(strict=False)
    for label in (_exact, _detailed, _shaped, _kind):
        matcher.by_colour(label, in_order=True)
    for decided in (True, False):
        matcher.in_order(decided=decided)
    matcher.drop_guesses()
    regroupings = matcher.regrouped()
    return Matching(pairs=dict(sorted(matcher.pairs.items())), regroupings=regroupings)


@dataclass(slots=True, kw_only=True)
class _Side:
    """One structure.

    ``readers`` has the ops that read each op, with the input's number; ``counted`` those ops
    that plans decide and that compute from the numbers of an input: exporters differ much in
    how they compute sizes.
    """

    ops: Structure
    readers: list[list[tuple[int, int]]]
    counted: frozenset[int]
    partner: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, ops: Structure) -> _Side:
        readers: list[list[tuple[int, int]]] = [[] for _ in ops]
        for number, op in enumerate(ops):
            for port, maker in enumerate(op.inputs):
                if maker != MODEL_INPUT:
                    readers[maker].append((number, port))
        counted = frozenset(n for n in fed(ops) if ops[n].decided)
        return cls(ops=ops, readers=readers, counted=counted)

    def left(self) -> list[int]:
        """The ops without a partner, in order."""
        return [n for n in range(len(self.ops)) if n not in self.partner]

    def neighbours(self, number: int) -> Iterator[int]:
        """The ops that make what an op reads, and those that read it."""
        yield from (n for n in self.ops[number].inputs if n != MODEL_INPUT)
        yield from (n for n, _ in self.readers[number])


def _around(side: _Side, group: set[int]) -> set[int]:
    """The ops that count and read what a group of ops gives, or give what that reads."""
    near = {m for n in group for m in side.neighbours(n)} - group
    return near & side.counted


@dataclass(slots=True, kw_only=True)
class _Matcher:
    before: _Side
    after: _Side

    @property
    def pairs(self) -> dict[int, int]:
        return self.before.partner

    def pair(self, number: int, other: int) -> bool:
        """Pair two ops that have no partner yet; whether that was so."""
        if number in self.before.partner or other in self.after.partner:
            return False
        self.before.partner[number], self.after.partner[other] = other, number
        return True

    # Colours.

    def by_colour(self, label: Label, *, in_order: bool = False) -> None:
        """Pair ops with equal labels around them that are unique; pairs grow from there.

        With ``in_order`` ops of one colour are paired in their order, if they are equally many
        in both graphs: their neighbourhoods then have to be alike as far as colours reach.
        """
        if not (self.before.left() and self.after.left()):
            return
        self.grow(self.pairs.items(), label)
        for radius in _RADII[:1] if in_order else _RADII:
            self.grow(self._same_colours(label, radius, in_order=in_order), label)

    def _same_colours(
        self, label: Label, radius: int, *, in_order: bool
    ) -> list[tuple[int, int]]:
        mine, theirs = (self._colours(s, label, radius) for s in (self.before, self.after))
        return [
            one
            for colour, numbers in mine.items()
            if len(numbers) == len(theirs.get(colour, ())) and (in_order or len(numbers) == 1)
            for one in zip(numbers, theirs[colour], strict=True)
            if self.pair(*one)
        ]

    def _colours(self, side: _Side, label: Label, radius: int) -> dict[int, list[int]]:
        """The ops without a partner by colour; those with one have a colour of their own."""
        own = side is self.before
        colours = [
            hash(("pair", n if own else side.partner[n]))
            if n in side.partner
            else hash(label(op))
            for n, op in enumerate(side.ops)
        ]
        start, left = colours, side.left()
        for _ in range(radius):
            now = list(colours)
            for n in left:
                input_colours = tuple(
                    colours[i] if i != MODEL_INPUT else 0 for i in side.ops[n].inputs
                )
                read = sorted((port, colours[i]) for i, port in side.readers[n])
                now[n] = hash((start[n], input_colours, tuple(read)))
            colours = now
        by_colour: defaultdict[int, list[int]] = defaultdict(list)
        for n in left:
            by_colour[colours[n]].append(n)
        return by_colour

    # Growth along edges.

    def grow(self, anchors: Iterable[tuple[int, int]], label: Label) -> None:
        """Pair what ``anchors`` read and what reads them, if labels are equal; and go on."""
        waiting = deque(anchors)
        while waiting:
            number, other = waiting.popleft()
            for mine, theirs in self._facing(number, other):
                waiting += [one for one in self._only(mine, theirs, label) if self.pair(*one)]

    def _facing(
        self, number: int, other: int
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Neighbours of a pair that stand in the same place: at an input, or as readers."""
        a, b = self.before.ops[number].inputs, self.after.ops[other].inputs
        same = len(a) == len(b)
        yield from (((i,), (j,)) for i, j in zip(a, b, strict=True)) if same else ((a, b),)
        readers = defaultdict[int, tuple[list[int], list[int]]](lambda: ([], []))
        for side, at, place in ((self.before, number, 0), (self.after, other, 1)):
            for reader, port in side.readers[at]:
                readers[port][place].append(reader)
        yield from readers.values()

    def _only(
        self, mine: Sequence[int], theirs: Sequence[int], label: Label
    ) -> list[tuple[int, int]]:
        """Pairs of ops without partners whose label no other op has in the same place."""
        by_label: defaultdict[Hashable, tuple[list[int], list[int]]] = defaultdict(
            lambda: ([], [])
        )
        for side, numbers, place in ((self.before, mine, 0), (self.after, theirs, 1)):
            for n in dict.fromkeys(numbers):
                if n != MODEL_INPUT and n not in side.partner:
                    by_label[label(side.ops[n])][place].append(n)
        return [(a[0], b[0]) for a, b in by_label.values() if len(a) == len(b) == 1]

    # Names.

    def by_name(self, *, strict: bool) -> None:
        """Pair ops of equal kind and name; pairs grow from there.

        If ``strict``, only where neither labels nor neighbours speak against it.
        """
        named = {op.name: n for n, op in enumerate(self.after.ops)}
        alike = {
            n: other
            for n in self.before.left()
            if (other := named.get(self.before.ops[n].name)) is not None
            and other not in self.after.partner
            and self.after.ops[other].op == self.before.ops[n].op
        }
        if strict:
            for label in (_weighted, _detailed):
                here, there = ({*map(label, s.ops)} for s in (self.before, self.after))
                alike = {
                    n: other
                    for n, other in alike.items()
                    if (mine := label(self.before.ops[n]))
                    == (theirs := label(self.after.ops[other]))
                    or mine not in there
                    or theirs not in here
                }
            alike = {n: o for n, o in alike.items() if self._supported(n, o, alike)}
        self.grow([one for one in alike.items() if self.pair(*one)], _detailed)

    def _supported(self, number: int, other: int, alike: dict[int, int]) -> bool:
        """Whether at least half of the neighbours that have a counterpart agree."""
        around = [alike.get(n, self.pairs.get(n)) for n in self.before.neighbours(number)]
        known = [n for n in around if n is not None]
        near = {*self.after.neighbours(other)}
        return 2 * sum(n in near for n in known) >= len(known)

    # What lies between anchors.

    def in_order(self, *, decided: bool) -> None:
        """Pair ops of equal kinds between the same anchors in their order; pairs grow.

        Args:
            decided: Whether only ops are paired to which a plan gives a format.
        """
        pairs: list[tuple[int, int]] = []
        for regions in self._corresponding():
            mine, theirs = (
                [n for n in region if side.ops[n].decided or not decided]
                for side, region in zip((self.before, self.after), regions, strict=True)
            )
            if len(mine) * len(theirs) <= _MOST_ALIGNED:
                pairs += self._aligned(mine, theirs)
        self.grow([one for one in pairs if self.pair(*one)], _kind)

    def _aligned(self, mine: list[int], theirs: list[int]) -> Iterator[tuple[int, int]]:
        a = [self.before.ops[n].op for n in mine]
        b = [self.after.ops[n].op for n in theirs]
        for i, j, size in SequenceMatcher(a=a, b=b, autojunk=False).get_matching_blocks():
            yield from zip(mine[i : i + size], theirs[j : j + size], strict=True)

    def drop_guesses(self) -> None:
        """Take pairs apart that nothing but kinds speaks for.

        A pair has equal names, weights or shapes; or at least half of the pairs around it do.
        The same holds of several pairs that are joined alike in both graphs: a chain of moves
        whose sizes one exporter computes and the other states.
        """
        sure = {n for n, other in self.pairs.items() if self._alike(n, other)}
        self._hold(sure)
        for group in self._guessed(sure):
            if self._held(group, sure):
                sure |= group
        self._hold(sure)
        for n in [n for n in self.pairs if n not in sure]:
            del self.after.partner[self.before.partner.pop(n)]

    def _hold(self, sure: set[int]) -> None:
        """Add the pairs to ``sure`` that are held by those, one by one."""
        waiting = deque(self.pairs)
        while waiting:
            n = waiting.popleft()
            if n in self.pairs and n not in sure and self._held({n}, sure):
                sure.add(n)
                waiting += self.before.neighbours(n)

    def _guessed(self, sure: set[int]) -> Iterator[set[int]]:
        """The pairs that are not sure, those together that are joined in both graphs."""
        seen = set(sure)
        for start in self.pairs:
            if start in seen:
                continue
            group = Worklist([start])
            for n in group:
                near = {*self.after.neighbours(self.pairs[n])}
                around = (m for m in self.before.neighbours(n) if m in self.pairs)
                group.add(m for m in around if m not in seen and self.pairs[m] in near)
            seen |= group.seen
            yield group.seen

    def _held(self, group: set[int], sure: set[int]) -> bool:
        """Whether at least half of the ops around pairs belong together for sure."""
        around = _around(self.before, group)
        near = _around(self.after, {self.pairs[n] for n in group})
        agree = sum(n in sure and self.pairs[n] in near for n in around)
        return agree > 0 and 2 * agree >= max(len(around), len(near))

    def _alike(self, number: int, other: int) -> bool:
        a, b = self.before.ops[number], self.after.ops[other]
        weighed = bool(a.weights) and {*a.numbers} == {*b.numbers}
        return a.name == b.name or weighed or (bool(a.shape) and a.shape == b.shape)

    def regrouped(self) -> tuple[Regrouping, ...]:
        """Ops without partners between mostly the same anchors, in both graphs."""
        return tuple(
            Regrouping(before=tuple(mine), after=tuple(theirs))
            for mine, theirs in self._corresponding(least=0.5)
            if max(len(mine), len(theirs)) <= _MOST_REGROUPED
        )

    def _corresponding(self, least: float = 0.0) -> list[tuple[list[int], list[int]]]:
        """Ops without partners that lie between the same pairs in both graphs.

        Those that touch one another are a region, and the pairs that they read and that read
        them are its boundary. The two regions with the largest share of their boundaries in
        common correspond, if that is at least ``least``. With ``least`` above 0 the model's
        inputs and outputs do not suffice as a boundary: every net has them.
        """
        mine, theirs = self._regions(self.before), self._regions(self.after)
        boundaries = defaultdict[int, list[int]](list)
        for place, (_, pairs) in enumerate(theirs):
            for n in pairs:
                boundaries[n].append(place)
        wanted: list[tuple[float, int, int]] = []
        for place, (_, pairs) in enumerate(mine):
            few = (boundaries[n] for n in pairs if len(boundaries.get(n, ())) <= _MOST_BOUNDED)
            shared = Counter(other for regions in few for other in regions)
            wanted += [
                (-share, place, other)
                for other, count in shared.items()
                if (share := count / len(pairs | theirs[other][1])) >= least
                and (not least or max(pairs) >= 0)
            ]
        region_pairs: list[tuple[list[int], list[int]]] = []
        used: tuple[set[int], set[int]] = (set(), set())
        for _, place, other in sorted(wanted):
            if place not in used[0] and other not in used[1]:
                used[0].add(place)
                used[1].add(other)
                region_pairs.append((mine[place][0], theirs[other][0]))
        return region_pairs

    def _regions(self, side: _Side) -> list[tuple[list[int], set[int]]]:
        """The ops without partners that touch one another, and the pairs around them.

        A pair has the number of its op in the first graph. The model's inputs and outputs
        count as pairs, too.
        """
        regions: list[tuple[list[int], set[int]]] = []
        seen: set[int] = set()
        for start in side.left():
            if start in seen:
                continue
            ops, pairs = Worklist([start]), set[int]()
            for n in ops:
                pairs |= {MODEL_INPUT} & {*side.ops[n].inputs}
                pairs |= set() if side.readers[n] else {_NO_READER}
                for near in side.neighbours(n):
                    if near in side.partner:
                        pairs.add(near if side is self.before else side.partner[near])
                    else:
                        ops.add([near])
            seen |= ops.seen
            regions.append((sorted(ops.seen), pairs))
        return regions
