"""Draws that stand for those of random ops, so that two models draw the same numbers.

Without a seed each run of a model draws other numbers, and with one each call does. Two models
can be compared only if both draw the same. So models are loaded with a table in place of each
random op: element i of what it draws is entry i of the table, modulo its length, whatever the
shape. A model that is written keeps its ops.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

LENGTH: Final = 32749
"""Entries of a table: a prime number, so that rows of any usual length are different draws."""


def uniform(number: int) -> NDArray[np.float32]:
    """Uniform draws between 0 and 1, both left out, for a model's random op of that number."""
    return np.roll(_shuffled(), -_start(number)).astype(np.float32)


def normal(number: int) -> NDArray[np.float32]:
    """Standard normal draws for a model's random op of that number."""
    return np.roll(_quantiles(), -_start(number)).astype(np.float32)


def _start(number: int) -> int:
    """Where the draws of an op begin: those of several ops lie far apart."""
    return number * 7919 % LENGTH


@lru_cache
def _shuffled() -> NDArray[np.float64]:
    """The middles of ``LENGTH`` equal parts of the unit interval, in random order."""
    order = np.random.default_rng(0).permutation(LENGTH)
    return (order + 0.5) / LENGTH


@lru_cache
def _quantiles() -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(share) for share in _shuffled().tolist()])
