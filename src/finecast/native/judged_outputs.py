"""By what outputs of a converted model are judged: errors of floats, decisions that change.

Laws: floats are judged by their relative error. Steps of rounded floats (casts to integers,
codes) are judged by theirs beyond one step. Choices by rounded floats (classes, masks, places)
are judged by the share of decisions that are others than fp32's; each has a chance of its own,
so that a few of them say nothing. What follows from earlier decisions in any other way has no
bound, and is not judged: a single one may change all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finecast.data.deviation import Expected, chance_share, deviation
from finecast.engines.base import Array
from finecast.graph import Graph, Node, Value
from finecast.naming import percent
from finecast.numbers.thresholds import LIMIT, UNSEEN, USELESS, excused, excused_share


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedOutput:
    """An output of the fp32 model, and how others are compared with it.

    Attributes:
        wanted: What fp32 gives.
        explained: The relative error that its formats explain; 0 if it follows no low op.
        stepped: Whether it is a step of rounded floats.
        chooser: The op that chooses it by rounded floats; None if it is no choice.
        ranked: The axis of the largest k, of which the order does not count; None for others.
    """

    name: str
    wanted: Array
    explained: float
    stepped: bool
    chooser: Node | None
    ranked: int | None

    @classmethod
    def of(
        cls, graph: Graph, bounds: Expected, value: Value, wanted: Array
    ) -> JudgedOutput | None:
        """How the output ``value`` is judged; None if no error of it says anything."""
        index = value.id
        chooser = bounds.choices.get(index) if wanted.dtype.kind in "biuOSU" else None
        if index in bounds.decided and index not in bounds.stepped and chooser is None:
            return None
        node = None if chooser is None else graph.nodes[chooser]
        return cls(
            name=value.name,
            wanted=wanted,
            explained=bounds.relative.get(index, 0.0),
            stepped=index in bounds.stepped,
            chooser=node,
            ranked=None if node is None else _ranked_axis(graph, node, wanted.ndim),
        )

    @property
    def unnoticed(self) -> float:
        """The error up to which nothing has to be compared."""
        return self.explained if self.chooser is None else UNSEEN / max(self.wanted.size, 1)

    def error(self, got: Array) -> float:
        """The relative error of another model's, or the share of decisions that change."""
        difference = deviation(got, self.wanted)
        return difference.beyond_step if self.stepped else difference.relative

    def excused(self, predicted: float) -> float:
        """The largest error of an engine that ``predicted``, by its formats, explains."""
        if self.chooser is not None:
            return excused_share(predicted, self.wanted.size)
        if not self.stepped and self.wanted.dtype.kind in "biuOSU":
            return predicted  # integers that follow no rounded numbers are exact
        return max(self.explained, excused(predicted))

    @property
    def limit(self) -> float:
        """The error from which on no digit is right.

        Of decisions it is half of what drawing them would change, and a quarter at least: of
        masks that are nearly all false, drawing changes next to nothing.
        """
        if self.chooser is None:
            return min(USELESS, max(LIMIT, self.explained))
        return LIMIT * max(chance_share(self.wanted), LIMIT)

    def is_lost(self, got: Array) -> bool:
        """Whether no digit of another model's is right; of the largest k in any order."""
        if self.chooser is None:
            return self.error(got) >= self.limit
        share = self.error(got)
        if self.ranked is not None and got.shape == self.wanted.shape:
            share = _members_lost(got, self.wanted, self.ranked)
        return share - UNSEEN / max(self.wanted.size, 1) >= self.limit

    def figure(self, error: float) -> str:
        """An error, or a share of decisions, in digits."""
        return f"{error:.3g}" if self.chooser is None else percent(error)

    def text(self, error: float) -> str:
        """The error in words, of the output by its name."""
        if self.chooser is not None:
            return f"{percent(error)} of the decisions of output {self.name!r} change"
        return f"output {self.name!r} has a relative error of {error:.3g}"

    @property
    def loss(self) -> str:
        """What is lost of an output that ``is_lost``, in words."""
        if self.chooser is not None:
            return "too few digits are right of what decides"
        return "no digit of it is right"


def _ranked_axis(graph: Graph, node: Node, ndim: int) -> int | None:
    """The axis of the largest k, for several, in a result of the op that has ``ndim`` axes.

    It is the last one if the op does not state it, or the result was reshaped.
    """
    if node.op != "top_k" or not ndim:
        return None
    shapes = [graph.values[i].shape for i in node.output_ids]
    shape = next((shape for shape in shapes if shape), None)
    axis = node.attributes.get("axis", node.attributes.get("dim", -1))
    axis = axis if isinstance(axis, int) else -1
    if shape is None or not -len(shape) <= axis < len(shape):
        return -1
    if shape[axis] == 1:  # a class, as of arg_max
        return None
    return axis if len(shape) == ndim else -1


def _members_lost(got: Array, wanted: Array, axis: int) -> float:
    """The share of the largest k that are not among fp32's largest k."""
    both = np.sort(np.concatenate([got, wanted], axis=axis), axis=axis)
    kept = np.sum(np.diff(both, axis=axis) == 0)
    return 1.0 - float(kept) / max(wanted.size, 1)
