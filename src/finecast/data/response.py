"""How far a model's outputs follow its inputs, without which they would show no error.

A converted model is verified by its outputs. Outputs that are constant, masked or saturated
stay the same whatever the model computes before them, and then agreement means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from finecast.data.deviation import NOTICED, deviation
from finecast.engines.base import Array, Feeds, calls_of, each_call

_SPREAD: Final = 0.5
"""Standard deviation of the relative noise on resampled numbers, so that a single number or a
constant array changes, too."""


def resampled(feeds: Feeds, seed: int = 0) -> Feeds | None:
    """Other inputs of the same kind: each array's elements drawn from its own.

    So integers stay valid indices, masks stay masks, and no size changes. Floats are
    multiplied by noise besides. None if no array changes by that.
    """
    generator = np.random.default_rng(seed)
    found = each_call(
        feeds, lambda call: {n: _resampled(array, generator) for n, array in call.items()}
    )
    pairs = zip(calls_of(found), calls_of(feeds), strict=True)
    same = all(np.array_equal(new[n], array) for new, old in pairs for n, array in old.items())
    return None if same else found


def _resampled(array: Array, generator: np.random.Generator) -> Array:
    if not array.size:
        return array
    drawn = generator.choice(array.reshape(-1), array.shape)
    return _noisy(drawn, _SPREAD, generator)


def blurred(feeds: Feeds, seed: int = 0) -> Feeds | None:
    """The inputs with relative noise of ``NOTICED`` on floats; None if there are none.

    Errors below ``NOTICED`` are no engine's fault.
    """
    if all(array.dtype.kind != "f" for array in feeds.values()):
        return None
    generator = np.random.default_rng(seed)
    return each_call(
        feeds, lambda call: {n: _noisy(array, NOTICED, generator) for n, array in call.items()}
    )


def _noisy(array: Array, spread: float, generator: np.random.Generator) -> Array:
    if array.dtype.kind != "f":
        return array
    factors = 1 + spread * generator.standard_normal(array.shape)
    return np.multiply(array, factors).astype(array.dtype)


def change(before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, float]:
    """The relative change of each output of floats; infinite where its shape changes."""
    found: dict[str, float] = {}
    for name, array in before.items():
        if array.dtype.kind in "biuOSU" or not array.size:
            continue
        one = deviation(after[name], array)
        found[name] = one.relative if one.comparable else math.inf
    return found


def untold(
    outputs: tuple[Mapping[str, Array], Mapping[str, Array]],
    allowed: Mapping[str, float],
    coarsest: float,
    followed: Mapping[str, float],
    near: Callable[[], Mapping[str, Array] | None],
) -> tuple[str, ...]:
    """A warning if the given inputs leave outputs as they are, errors or none.

    An output says nothing if a model that ignores its inputs would pass: with other inputs it
    changes by less than errors that are allowed. Nor does it where rounding leaves no trace,
    and noise in the inputs leaves as little: it is saturated.

    Args:
        outputs: Those of the fp32 model and of the converted one.
        allowed: The relative error that the formats explain, by output; those that follow no
            low op are left out.
        coarsest: The largest unit roundoff of the formats.
        followed: The relative change of fp32's outputs with other inputs; empty if unknown.
        near: Runs the fp32 model on ``blurred`` inputs; None if that changes or runs nothing.
    """
    wanted, got = outputs
    fixed = [n for n, a in allowed.items() if followed.get(n, math.inf) <= max(a, NOTICED)]
    error = change({n: wanted[n] for n in allowed if n not in fixed}, got)
    traceless = {n: wanted[n] for n, found in error.items() if found <= coarsest**2}
    nearby = near() if traceless else None
    if nearby is not None:
        fixed += [n for n, found in change(traceless, nearby).items() if found <= coarsest]
    if not fixed:
        return ()
    more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
    text = (
        f"the inputs cannot tell a right model from a wrong one: output {fixed[0]!r}{more}"
        " stays as it is with other inputs (constant, masked or saturated)"
    )
    return (text,)
