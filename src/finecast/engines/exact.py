"""The fp32 model's outputs, with which those of other models are compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from finecast.engines.base import (
    Array,
    Feeds,
    KernelTime,
    Session,
    calls_of,
    joined_outputs,
    outputs_on,
)
from finecast.planning.sensitivity import (
    Counted,
    ProbeOptions,
    Slices,
    counted_outputs,
    is_float,
    output_slices,
    squared_error,
    squared_errors,
)
from finecast.planning.slices import Slice, check_axis

RELATIVE_ERROR: Final = "relative output error"
"""What the error of float outputs is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What the fp32 model gives on ``calls``.

    Attributes:
        calls: The inputs.
        names: The names of the outputs, in order.
        outputs: The outputs over all calls, as ``outputs_on`` gives them.
        counted: Numbers of the outputs that errors are told of.
        each: The outputs of each call, where rows of a call are matched; else empty.
        axis: The axis of the outputs' slices that the user names; None to find them.
        slices: The slices by which outputs are compared, by number.
    """

    calls: Sequence[Feeds]
    names: tuple[str, ...]
    outputs: Sequence[Array]
    counted: Counted
    each: Sequence[Sequence[Array]] = ()
    axis: int | None = None
    slices: Slices = field(default_factory=dict[int, tuple[Slice, ...]])

    @classmethod
    def of(
        cls,
        session: Session,
        calls: Sequence[Feeds],
        of: Collection[str] = (),
        axis: int | None = None,
    ) -> Exact:
        """Run ``session``; ``of`` are the outputs that the user names, empty for none.

        Without names errors are told of the outputs that copy no input. They are of floats, or
        of free length; of a model without such outputs all.
        """
        runs = [session.run(feeds) for feeds in calls]
        names = tuple(runs[0]) if runs else ()
        free = {names.index(one.name): one for one in session.free if one.name in names}
        chosen = {n for n, name in enumerate(names) if name in of}
        chosen = {n for n in chosen if n in free or is_float(runs[0][names[n]])}
        if runs and not chosen:
            chosen = counted_outputs(calls[0].values(), [*runs[0].values()]) | free.keys()
            chosen = chosen or frozenset(range(len(names)))
        check_axis(axis, runs[0].values() if runs else ())
        each, counted = [[*one.values()] for one in runs], Counted.of(chosen, free)
        placed = [counted.matched(one, one)[1] for one in each] if free else each
        return cls(
            calls=calls,
            names=names,
            outputs=joined_outputs(each),
            counted=counted,
            each=each if free else (),
            axis=axis,
            slices=output_slices(joined_outputs(placed), frozenset(counted), axis),
        )

    @property
    def told(self) -> tuple[str, ...]:
        """Names of the outputs that errors are told of."""
        return tuple(self.names[number] for number in sorted(self.counted))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the float outputs that no error is told of."""
        return tuple(self.names[n] for n, _ in self._floats() if n not in self.counted)

    @property
    def figure(self) -> str:
        """What errors are: of a model without float outputs shares of numbers that differ."""
        floats = bool(self.each) or not self.counted.isdisjoint(n for n, _ in self._floats())
        return RELATIVE_ERROR if floats else "share of numbers that differ"

    def _floats(self) -> list[tuple[int, Array]]:
        return [(n, array) for n, array in enumerate(self.outputs) if is_float(array)]

    def differing(self, session: Session) -> dict[str, float]:
        """The shares of numbers that differ of outputs that no error is told of, by name.

        These are integers, bools and text; of floats see ``left_out``.
        """
        floats = {number for number, _ in self._floats()} | self.counted
        names = [n for n in range(len(self.names)) if n not in floats]
        outputs = outputs_on(session, self.calls) if names else []
        shares = {self.names[n]: _differing(outputs[n], self.outputs[n]) for n in names}
        return worst_first({name: share for name, share in shares.items() if share})

    def errors(self, session: Session) -> dict[str, float]:
        """Relative errors of another model's outputs by name, the worst first.

        Slices of an output are named as ``y[:, 4:24]``.
        """
        if self.each:
            runs = zip(
                (outputs_on(session, [one]) for one in self.calls), self.each, strict=True
            )
            pairs = [self.counted.matched(got, wanted) for got, wanted in runs]
            outputs, wanted = map(joined_outputs, zip(*pairs, strict=True))
            error_by_slice = squared_errors(
                outputs, wanted, frozenset(self.counted), self.slices
            )
        else:
            outputs = outputs_on(session, self.calls)
            error_by_slice = squared_errors(outputs, self.outputs, self.counted, self.slices)
        return worst_first(
            {
                f"{self.names[n]}{part}": math.sqrt(error)
                for (n, part), error in error_by_slice.items()
            }
        )

    def squared_error(self, outputs: Sequence[Array]) -> float:
        """The largest squared relative error of another model's ``outputs``."""
        return squared_error(outputs, self.outputs, self.counted, self.slices)

    def probing(self, on_probe: Callable[[int, int], None]) -> ProbeOptions:
        """How probes compare with these outputs; ``on_probe`` is told of each."""
        return ProbeOptions(counted=self.counted, axis=self.axis, on_probe=on_probe)

    def error(self, session: Session) -> float:
        """The largest relative error of another model's outputs; 0 if nothing is compared."""
        return max(self.errors(session).values(), default=0.0)


def _differing(got: Array, wanted: Array) -> float:
    return float(np.mean(got != wanted)) if got.shape == wanted.shape else 1.0


def worst_first(errors: Mapping[str, float]) -> dict[str, float]:
    """Errors by output or slice, the largest first."""
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


_KEPT_BYTES: Final = 256 << 20


@final
class CachedSession(Session):
    """``session``, run once on each feeds, which start with an empty state.

    Law: ``run`` gives what the session gives; outputs beyond ``limit`` bytes are not cached.
    """

    def __init__(self, session: Session, *, limit: int = _KEPT_BYTES) -> None:
        self.session = session
        self.inputs, self.outputs = session.inputs, session.outputs
        self.free, self.joined = session.free, session.joined
        self._left = limit
        self._known: dict[bytes, dict[str, Array]] = {}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name, in arrays that the caller may change."""
        key = feeds_digest(feeds)
        if key not in self._known:
            outputs = self.session.run(feeds)
            size = sum(a.nbytes for a in outputs.values())
            if size > self._left or any(a.dtype.hasobject for a in outputs.values()):
                return outputs
            self._left -= size
            self._known[key] = outputs
        return {name: array.copy() for name, array in self._known[key].items()}

    @property
    def keeps_state(self) -> bool:
        """Whether the session's model does."""
        return self.session.keeps_state

    def reset(self) -> None:
        """Empty the state of the session, if its model has one."""
        self.session.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """The session's, never cached: it may depend on the steps before."""
        return self.session.step(feeds) if self.keeps_state else self.run(feeds)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """The session's."""
        return self.session.profile(feeds, repeats=repeats)


def feeds_digest(feeds: Feeds) -> bytes:
    """Identifies names, types, shapes and numbers of feeds."""
    state = hashlib.blake2b(digest_size=16)
    for call in calls_of(feeds):
        state.update(b"call;")
        for name, array in sorted(call.items()):
            state.update(f"{name}:{array.dtype}:{array.shape};".encode())
            if array.dtype.hasobject:
                state.update(repr(array.tolist()).encode())
            else:
                state.update(array.tobytes())
    return state.digest()
