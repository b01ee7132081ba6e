"""A low model of which any ops can be returned to fp32, and what its values are like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from finecast.devices.emulation import Emulation, Setting, setting_of
from finecast.engines.base import Array, EmulatedSession, Feeds, Session
from finecast.engines.exact import Exact
from finecast.graph import Graph
from finecast.native.device import Program
from finecast.numbers.formats import Format
from finecast.planning.points import moves
from finecast.rules.facts import ValueFacts

Check = Callable[[str, Array, Array], bool]
"""A user's judgement of a value: its name, what the low model gives, and what fp32 gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that are returned to fp32 together: one that computes, and those that only move.

    Attributes:
        nodes: Their ids, the one that computes first.
        format: The low format that they have.
    """

    nodes: tuple[int, ...]
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a value of the low model was like on the samples.

    Attributes:
        own: Relative error of the low op, against the fp32 op on the same inputs; infinite if
            the low op gives NaN or Inf and the fp32 op does not.
        total: Relative error against the fp32 model; infinite likewise.
        spoiled: How many numbers are NaN or Inf where they are finite in fp32.
        largest: The largest magnitude that the fp32 op gives on the low model's inputs.
        refused: Whether the user's function does not accept it.
    """

    own: float
    total: float
    spoiled: int
    largest: float
    refused: bool = False


class LowModel(ABC):
    """A low model of which any groups of ops can be returned to fp32.

    Attributes:
        graph: The graph of the fp32 model.
        groups: The groups, in the order of computation.
        name: What messages call the low model.
        notes: What a user should know about how the low model was read.
    """

    graph: Graph
    groups: Sequence[OpGroup]
    name: str
    notes: Sequence[str] = ()

    @abstractmethod
    def session(self, returned: frozenset[int]) -> Session:
        """The model with the groups of these numbers in fp32, up to the next call."""

    def seen(self, feeds: Feeds, check: Check | None) -> Mapping[int, Seen]:
        """What values are like by id; empty if they cannot be seen.

        Call it before ``session``: groups that turn out to be none are left out then.
        """
        del feeds, check
        return {}

    def unexplained(self, exact: Exact) -> Sequence[str]:
        """Notes on an error of the low model that no group of ops explains."""
        del exact
        return ()

    @abstractmethod
    def facts(self, feeds: Sequence[Feeds]) -> Mapping[int, ValueFacts]:
        """Facts of the fp32 model's values, by id."""

    @property
    def formats(self) -> dict[int, Format]:
        """Low formats by node id."""
        return {n: group.format for group in self.groups for n in group.nodes}


def grouped(graph: Graph, formats: Mapping[int, Format]) -> tuple[OpGroup, ...]:
    """Groups of the nodes in ``formats``: each that computes, with those that move its result.

    A move between two ops in fp32 would round what they hand on, so that returning these two
    alone would change nothing.
    """
    group_of: dict[int, int] = {}
    members: list[list[int]] = []
    for node in graph.nodes:
        if node.id not in formats:
            continue
        source = graph.maker(next(iter(graph.following_inputs(node)), None))
        if moves(node) and source is not None and source.id in group_of:
            group_of[node.id] = group_of[source.id]
            members[group_of[node.id]].append(node.id)
        else:
            group_of[node.id] = len(members)
            members.append([node.id])
    return tuple(OpGroup(nodes=tuple(ids), format=formats[ids[0]]) for ids in members)


@dataclass(slots=True, kw_only=True)
class EmulatedLow(LowModel):
    """A model as a device that is not here would run it."""

    program: Program
    emulation: Emulation
    name: str
    graph: Graph = field(init=False)
    groups: Sequence[OpGroup] = field(init=False)
    setting: Setting = field(init=False)
    switched: EmulatedSession = field(init=False)

    def __post_init__(self) -> None:
        """Build the emulated model, whose settings are switched."""
        self.graph = self.program.graph
        self.setting = setting_of(self.graph, self.emulation)
        cast = self.setting.reads | self.setting.writes
        self.groups = grouped(self.graph, dict.fromkeys(sorted(cast), self.emulation.format))
        self.switched = self.program.session(self.emulation, self.setting, switched=True)

    def session(self, returned: frozenset[int]) -> Session:
        """The switched session under the setting that is left."""
        left = frozenset(
            node
            for number, group in enumerate(self.groups)
            if number not in returned
            for node in group.nodes
        )
        setting = self.setting if not returned else self.setting.only(left)
        return self.switched.apply(setting)

    def facts(self, feeds: Sequence[Feeds]) -> Mapping[int, ValueFacts]:
        """Those of the emulated program in fp32."""
        return self.program.observe(feeds)
