"""How far a model's outputs follow its inputs, without which they would show no error.

A converted model is verified by its outputs. Outputs that are constant, masked or saturated
stay the same whatever the model computes before them, and then agreement means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from finecast.data.deviation import deviation
from finecast.engines.base import Array, Feeds, calls_of, each_call
from finecast.naming import left_out
from finecast.numbers.rounding import widened
from finecast.numbers.thresholds import NOTICED

_SPREAD: Final = 0.5
"""Standard deviation of the relative noise on resampled numbers, so that a single number or a
constant array changes, too."""
_TOLD_APART: Final = 4
"""Where an output changes by so many times the error found, two of its binary digits were seen
to follow the inputs: a model that ignores them was told apart."""


def resampled(feeds: Feeds) -> Feeds | None:
    """Other inputs of the same kind: each array's elements drawn from its own.

    So integers stay valid indices, masks stay masks, and no size changes. Floats are
    multiplied by noise besides. None if no array changes by that.
    """
    generator = np.random.default_rng(0)
    other_feeds = each_call(
        feeds, lambda call: {n: _resampled(array, generator) for n, array in call.items()}
    )
    pairs = zip(calls_of(other_feeds), calls_of(feeds), strict=True)
    same = all(np.array_equal(new[n], array) for new, old in pairs for n, array in old.items())
    return None if same else other_feeds


def _resampled(array: Array, generator: np.random.Generator) -> Array:
    if not array.size:
        return array
    drawn = generator.choice(array.reshape(-1), array.shape)
    return _noisy(drawn, _SPREAD, generator)


def blurred(feeds: Feeds) -> Feeds | None:
    """The inputs with relative noise of ``NOTICED`` on floats; None if there are none.

    Errors below ``NOTICED`` are no engine's fault.
    """
    if all(array.dtype.kind != "f" for array in feeds.values()):
        return None
    generator = np.random.default_rng(0)
    return each_call(
        feeds, lambda call: {n: _noisy(array, NOTICED, generator) for n, array in call.items()}
    )


def _noisy(array: Array, spread: float, generator: np.random.Generator) -> Array:
    if array.dtype.kind != "f":
        return array
    factors = 1 + spread * generator.standard_normal(array.shape)
    with np.errstate(over="ignore"):  # what becomes Inf shows in the outputs
        return np.multiply(array, factors).astype(array.dtype)


def change(before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, float]:
    """The relative change of each output of floats; infinite where its shape changes."""
    changes: dict[str, float] = {}
    for name, array in before.items():
        if array.dtype.kind in "biuOSU" or not array.size:
            continue
        difference = deviation(after[name], array)
        changes[name] = difference.relative if difference.comparable else math.inf
    return changes


def nan_outputs(outputs: Mapping[str, Array], where: str) -> tuple[str, ...]:
    """A warning for each output in which the fp32 model has NaN on its inputs, ``where``.

    What a conversion has there cannot be wrong.
    """
    floats = {n: widened(a) for n, a in outputs.items() if a.dtype.kind not in "biuOSU"}
    counts = {name: int(np.isnan(array).sum()) for name, array in floats.items()}
    return tuple(
        f"the fp32 model gives NaN on {where}: output {name!r} has {count} in"
        f" {floats[name].size} numbers, and of these nothing can be said"
        for name, count in counts.items()
        if count
    )


def untold(
    outputs: tuple[Mapping[str, Array], Mapping[str, Array]],
    allowed: Mapping[str, float],
    coarsest: float,
    followed: Mapping[str, float],
    near: Callable[[], Mapping[str, Array] | None],
) -> tuple[str, ...]:
    """A warning if the given inputs leave outputs as they are, errors or none.

    An output says nothing if a model that ignores its inputs would pass: with other inputs it
    changes by no more than errors that are allowed, and the error found is not far below that
    change. Nor does it where rounding leaves no trace, and noise in the inputs leaves as
    little: it is saturated.

    Args:
        outputs: Those of the fp32 model and of the converted one.
        allowed: The relative error that the formats explain, by output; those that follow no
            low op are left out.
        coarsest: The largest unit roundoff of the formats.
        followed: The relative change of fp32's outputs with other inputs; empty if unknown.
        near: Runs the fp32 model on ``blurred`` inputs; None if that changes or runs nothing.
    """
    wanted, got = outputs
    error = change({name: wanted[name] for name in allowed}, got)
    said: dict[str, str] = {}
    for name, limit in allowed.items():
        moved = followed.get(name, math.inf)
        visible = moved > coarsest and _TOLD_APART * error.get(name, 0.0) < moved
        if moved <= max(limit, NOTICED) and not visible:
            said[name] = (
                "is the same with other inputs (constant or masked)"
                if moved == 0
                else f"changes by only {moved:.2g} with other inputs: rounding may do as much"
            )
    rest = {n: wanted[n] for n, e in error.items() if n not in said and e <= coarsest**2}
    nearby = near() if rest else None
    if nearby is not None:
        text = f"stays as it is where inputs change by {NOTICED:.0%} (saturated)"
        said |= {n: text for n, shift in change(rest, nearby).items() if shift <= coarsest**2}
    if not said:
        return ()
    name, text = next(iter(said.items()))
    doubt = "the inputs cannot tell a right model from a wrong one"
    more = left_out(len(said), 1, " of the kind")
    return (", ".join([f"{doubt}: output {name!r} {text}", *more]),)
