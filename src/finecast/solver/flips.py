"""What changes in a labelling if one unit alone takes another format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finecast.solver.assignment import Bools, Floats, Ints, total_by
from finecast.solver.labelling import LabelProblem, read_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Differences to a labelling, by unit and by the label that the unit alone takes instead.

    All differences are zero for the label that the unit has.

    Attributes:
        time_s: float64[n, k], additional seconds of the unit itself; inf where not permitted.
        casts_s: float64[n, k], additional seconds of all casts.
        errors: float64[n, k], the squared error that the unit adds with each label to that of
            all other units: of its own roundings, and of those that no other unit does.
        label: The label that each unit has.
    """

    time_s: Floats
    casts_s: Floats
    errors: Floats
    label: Ints

    @property
    def total_s(self) -> Floats:
        """float64[n, k], additional seconds of the unit and of all casts."""
        return self.time_s + self.casts_s

    @property
    def error(self) -> Floats:
        """float64[n, k], additional squared error."""
        return self.errors - self.errors[np.arange(len(self.label)), self.label][:, None]


def flips(problem: LabelProblem, label: Ints) -> Flips:
    """The differences that each change of one unit makes.

    Law: they are those of ``evaluate`` with and without the change; ``label`` is permitted.
    The work is proportional to the size of the problem, for all changes together.
    """
    n, k = problem.time.shape
    own = (np.arange(n), label)
    return Flips(
        time_s=problem.time - problem.time[own][:, None],
        casts_s=_casts(problem, label, k),
        errors=problem.error + _roundings(problem, label, k),
        label=label,
    )


def _casts(problem: LabelProblem, label: Ints, k: int) -> Floats:
    """Each value is priced anew for each unit that makes or reads it, in each label."""
    sides = problem.with_pins(label)
    rows = np.arange(len(problem.producer))
    row, unit, often = _pairs(
        np.concatenate([problem.consumers.row, rows]),
        np.concatenate([problem.consumers.unit, problem.producer]),
        np.repeat([1, 0], [len(problem.consumers.unit), len(rows)]),
    )
    readers = np.zeros((len(rows), k), dtype=np.int64)
    np.add.at(readers, (problem.consumers.row, sides[problem.consumers.unit]), 1)
    made = sides[problem.producer]
    before = _price(problem, rows, made, read_in(problem, sides))[row]
    others = readers[row]
    others[np.arange(len(row)), label[unit]] -= often
    costs = np.zeros((len(label), k))
    for to in range(k):
        read = others.copy()
        read[:, to] += often
        source = np.where(problem.producer[row] == unit, to, made[row])
        more = _price(problem, row, source, read > 0) - before
        costs[:, to] = total_by(unit, more, len(label))
    return costs


def _price(problem: LabelProblem, row: Ints, source: Ints, read: Bools) -> Floats:
    """The casts of the values ``row``, made in ``source``, each read in the formats ``read``.

    A cast that is not done counts nothing, and may be priced infinite.
    """
    return np.where(read, problem.cast[source, :, row], 0.0).sum(axis=1)


def _roundings(problem: LabelProblem, label: Ints, k: int) -> Floats:
    """The errors of roundings that each unit does with each label, and no other unit does."""
    sides, errors = problem.with_pins(label), np.zeros((len(label), k))
    for number, rounded in enumerate(problem.roundings, start=1):
        hits = sides[rounded.rows.unit] == number
        count = np.bincount(rounded.rows.row, hits, len(rounded.error)).astype(np.int64)
        row, unit, often = _pairs(rounded.rows.row, rounded.rows.unit, 1)
        others = count[row] - np.where(label[unit] == number, often, 0)
        alone = others == 0
        errors[:, number] = total_by(unit[alone], rounded.error[row[alone]], len(label))
    return errors


def _pairs(row: Ints, unit: Ints, often: Ints | int) -> tuple[Ints, Ints, Ints]:
    """Each pair of a row and a unit once, and how often it was there; pins are left out."""
    keep = unit >= 0
    width = int(unit.max(initial=0)) + 1
    pairs, inverse = np.unique(row[keep] * width + unit[keep], return_inverse=True)
    times = np.broadcast_to(np.asarray(often, dtype=np.float64), len(row))[keep]
    return pairs // width, pairs % width, total_by(inverse, times, len(pairs)).astype(np.int64)
