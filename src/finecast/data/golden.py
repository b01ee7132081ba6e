"""Golden samples: inputs of a model with the outputs that it gave, kept beside it.

Laws: they are stored as plain arrays, of bounded size, and are read without running code. The
inputs come in the calls in which they were evaluated, as kernels depend on a call's shapes.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeVar, cast

import msgspec
import numpy as np

from finecast.data.datasets import open_npz
from finecast.data.deviation import deviation
from finecast.data.workload import feed_bytes, sample_count, samples
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    Steps,
    calls_of,
    feeds_for,
    joined_arrays,
)
from finecast.engines.exact import worst_first
from finecast.errors import UsageError, malformed
from finecast.files.saved import SavedPart
from finecast.numbers.thresholds import OWN_SHARE, REORDERED, USELESS
from finecast.planning.free_rows import FreeOutput, matched
from finecast.planning.slices import WHOLE, slices_of

T = TypeVar("T")

WANTED: Final = 20
"""Samples that are kept, in whole calls."""
_MOST_BYTES: Final = 64 << 20
"""Of inputs; a single call may have as many."""


class SavedCall(SavedPart):
    """A call: its steps, and the names of its inputs and outputs in the order of arrays."""

    steps: Annotated[int, msgspec.Meta(ge=1)]
    inputs: list[str]
    outputs: Annotated[list[str], msgspec.Meta(min_length=1)]


class SavedSamples(SavedPart):
    """What a lock says of its golden samples, whose arrays are in a file of their own.

    Attributes:
        digest: That of the file of arrays.
        calls: The names of the arrays.
        tolerances: As those of ``GoldenSamples``; null for an output that has none.
        free: The outputs of free length.
    """

    digest: str
    calls: Annotated[list[SavedCall], msgspec.Meta(min_length=1)]
    tolerances: dict[str, Annotated[float, msgspec.Meta(ge=0, le=USELESS)] | None]
    free: tuple[FreeOutput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSamples:
    """Calls of a model and the outputs that it gave.

    Attributes:
        calls: The inputs of each call, or of each step of a sequence.
        outputs: The outputs of each call, by name.
        tolerances: By output: the relative deviation that floats may have, or of other types
            the share of elements that may differ. Slices of an output with units of their own
            are apart, named as ``y[:, 4:24]``. One that zeros would keep is infinite: there
            is nothing that an output so far from fp32 can be held to.
        free: The outputs of free length, whose rows are matched.
    """

    calls: Sequence[Feeds]
    outputs: Sequence[Mapping[str, Array]]
    tolerances: Mapping[str, float]
    free: Sequence[FreeOutput] = ()

    @classmethod
    def of(cls, session: Session, reference: Session, calls: Sequence[Feeds]) -> GoldenSamples:
        """Run a low model on ``calls``; its error against ``reference`` sets the tolerances.

        Raises:
            EngineError: If one of them cannot be run.
        """
        outputs, exact = _run(session, calls), _run(reference, calls)
        names = _named_as({n: n for n in exact[0]}, outputs[0]) if calls else {}
        free = [
            replace(one, name=low)
            for one in reference.free
            for low, name in names.items()
            if name == one.name
        ]
        both = zip(exact, outputs, strict=True)
        errors = _deviations(outputs, [_named_as(one, low) for one, low in both], free)
        shares = {n: max(OWN_SHARE * error, REORDERED) for n, error in errors.items()}
        tolerances = {
            n: share if share <= USELESS else math.inf for n, share in shares.items()
        }
        return cls(calls=calls, outputs=outputs, tolerances=tolerances, free=free)

    @property
    def count(self) -> int:
        """The samples."""
        return sample_count(self.calls)

    def deviations(self, session: Session) -> dict[str, float]:
        """How far the outputs of ``session`` are from those kept, by name, the worst first.

        Infinite for an output that is absent, of another shape, or not finite where it was.

        Raises:
            UsageError: If the inputs do not fit the model.
            EngineError: If it cannot be run.
        """
        deviation_by_output = _deviations(
            _run(session, self.calls), self.outputs, self.free, self.tolerances
        )
        return worst_first(deviation_by_output)

    def to_npz(self) -> tuple[bytes, SavedSamples]:
        """The arrays as the content of an npz file, and the names and numbers beside it."""
        arrays: dict[str, Array] = {}
        calls: list[SavedCall] = []
        for number, (call, outputs) in enumerate(zip(self.calls, self.outputs, strict=True)):
            steps = calls_of(call)
            for step, feeds in enumerate(steps):
                arrays |= {f"{number}.{step}.in{i}": a for i, a in enumerate(feeds.values())}
            arrays |= {f"{number}.out{i}": a for i, a in enumerate(outputs.values())}
            calls.append(SavedCall(steps=len(steps), inputs=[*call], outputs=[*outputs]))
        file = io.BytesIO()
        np.savez(file, **{n: _plain(a) for n, a in arrays.items()})  # pyright: ignore[reportArgumentType]
        content = file.getvalue()
        return content, SavedSamples(
            digest=hashlib.sha256(content).hexdigest(),
            calls=calls,
            tolerances={n: t if t < math.inf else None for n, t in self.tolerances.items()},
            free=tuple(self.free),
        )

    @classmethod
    def from_npz(cls, path: Path, stated: SavedSamples) -> GoldenSamples:
        """Read what ``to_npz`` gave.

        Raises:
            UsageError: If the file is missing, cannot be read, or is not the one that was
                written with the lock.
        """
        fix = "copy it with the deployment manifest, or tune anew"
        if not path.is_file():
            raise UsageError(
                "the deployment manifest's samples are missing", where=str(path), fix=fix
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != stated.digest:
            raise UsageError(
                "these are not the samples that were written with the deployment manifest",
                where=str(path),
                fix=fix,
            )
        arrays = open_npz(path)
        calls: list[Feeds] = []
        outputs: list[dict[str, Array]] = []
        try:
            for number, call in enumerate(stated.calls):
                steps = [
                    {n: arrays[f"{number}.{s}.in{i}"] for i, n in enumerate(call.inputs)}
                    for s in range(call.steps)
                ]
                calls.append(Steps(steps) if len(steps) > 1 else steps[0])
                outputs.append(
                    {n: arrays[f"{number}.out{i}"] for i, n in enumerate(call.outputs)}
                )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"the golden samples lack an array, or are others: {malformed(error)}",
                where=str(path),
                fix="give the file that was written with the deployment manifest",
            ) from error
        tolerances = {n: math.inf if t is None else t for n, t in stated.tolerances.items()}
        return cls(calls=calls, outputs=outputs, tolerances=tolerances, free=stated.free)


def chosen(timing: Sequence[Feeds], others: Iterable[Feeds]) -> list[Feeds]:
    """The calls to keep: the first that is timed, and more until there are enough samples.

    Args:
        timing: Calls that are timed, the one that counts first.
        others: Calls of the evaluation, the first of which may be the same.

    Returns:
        No call if the first one is too large to be kept, or has what no array holds.
    """
    kept_calls = [timing[0]]
    have, size = samples(calls_of(timing[0])[0]), feed_bytes(timing[0])
    if size > _MOST_BYTES:
        return []
    shapes = _shapes(timing[0])
    for number, call in enumerate(others):
        if have >= WANTED:
            break
        size += feed_bytes(call)
        if size > _MOST_BYTES:
            break
        if number and _shapes(call) == shapes:
            kept_calls.append(call)
            have += samples(calls_of(call)[0])
    return kept_calls


def _shapes(call: Feeds) -> list[dict[str, tuple[int, ...]]]:
    return [{n: array.shape for n, array in step.items()} for step in calls_of(call)]


def _run(session: Session, calls: Sequence[Feeds]) -> list[dict[str, Array]]:
    return [session.run(feeds_for(session, call)) for call in calls]


def _deviations(
    got: Sequence[Mapping[str, Array]],
    wanted: Sequence[Mapping[str, Array]],
    free: Sequence[FreeOutput],
    whole: Collection[str] = (),
) -> dict[str, float]:
    """By output or slice the deviation over all calls: relative, or the share of elements.

    The outputs in ``whole`` are not sliced, as those of locks that know no slices.
    """
    pairs = [matched(free, *both) for both in zip(got, wanted, strict=True)]
    got, wanted = [pair.got for pair in pairs], [pair.wanted for pair in pairs]
    deviations: dict[str, float] = {}
    for name in dict.fromkeys(name for one in wanted for name in one):
        here = [one[name] for one in got if name in one]
        there = [one[name] for one in wanted if name in one]
        alike = [a.shape for a in here] == [a.shape for a in there]
        first, second = (
            joined_arrays([*map(_plain, arrays)]) for arrays in (here or there, there)
        )
        for part in (WHOLE,) if name in whole else slices_of(second):
            pair = (part.of(array).reshape(-1) for array in (first, second))
            deviations[f"{name}{part}"] = deviation(*pair).relative if alike else math.inf
    return deviations


def _named_as(exact: Mapping[str, T], low: Mapping[str, Array]) -> Mapping[str, T]:
    """Outputs of fp32 by the names of the low model's, which PyTorch gives after its ops."""
    if exact.keys() == low.keys() or len(exact) != len(low):
        return exact
    return dict(zip(low, exact.values(), strict=True))


def _plain(array: Array) -> Array:
    """An array that an npz file holds without pickling; it has the same values."""
    if array.dtype.kind == "O":
        return cast("Array", array.astype(str))
    low = array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8"))
    return array.astype(np.float32) if low else array
