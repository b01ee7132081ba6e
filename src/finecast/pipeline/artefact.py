"""Where a converted model goes, and how its numbers are compared with fp32's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finecast.data.deviation import deviation
from finecast.engines.base import Array
from finecast.errors import WrongNumbersError
from finecast.files import DATA_SUFFIX, check_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a model goes.

    Attributes:
        path: The model's file; None for a model in memory, verified as if it were written.
        force: Whether files that are there may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside it; None: if they are more
            than fit one file, or came in that form.
    """

    path: Path | None
    force: bool = False
    external_data: bool | None = None

    def check(self, *, apart: bool = False) -> None:
        """Raise UsageError unless a model, with tensors ``apart``, may be written here."""
        if self.path is None:
            return
        check_writable(self.path, force=self.force)
        if apart:
            data = self.path.with_name(self.path.name + DATA_SUFFIX)
            check_writable(data, force=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the written model was verified; errors are None where it was not run.

    ``relative_error`` is the largest over outputs of ||y - r|| / ||r|| against
    ``reference``: the fp32 model, the fp64 model that it was taken from, or the model given
    where that was converted or quantized before. Of an error against fp64 ``taken_error`` is
    what taking the model to fp32 alone gives. ``sizes`` are those that the free dimensions of
    the inputs had. ``kernels`` are those of the fp32 model and of the written one, and
    ``apart`` tells of each kernel whose low ops run in several now, where the engine says what
    runs in which.
    """

    engine: str | None
    max_abs_error: float | None = None
    relative_error: float | None = None
    note: str = ""
    reference: str = "fp32"
    taken_error: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    kernels: tuple[int, int] | None = None
    apart: tuple[str, ...] = ()


def compare(engine: str, got: Sequence[Array], wanted: Sequence[Array]) -> Verified:
    """Largest absolute and relative error over float outputs.

    Raises:
        WrongNumbersError: If an output has a NaN or Inf where fp32 has none.
    """
    for number, pair in enumerate(zip(got, wanted, strict=True)):
        if deviation(*pair).nonfinite:
            raise WrongNumbersError(
                f"output {number} has NaN or Inf where fp32 has none",
                fix="use bf16, exclude ops with --exclude or --op NAME=fp32, or use `tune`",
            )
    return compared(engine, got, wanted)


def compared(engine: str, got: Sequence[Array], wanted: Sequence[Array]) -> Verified:
    """The same, where it was judged already."""
    found = [deviation(one, other) for one, other in zip(got, wanted, strict=True)]
    unlike = sum(not d.comparable for d in found)
    empty = all(not one.size for one in wanted)
    note = f"{unlike} outputs of another shape: what is in them decides it" if unlike else ""
    return Verified(
        engine=engine,
        max_abs_error=max((d.largest for d in found), default=0.0),
        relative_error=max((d.relative for d in found), default=0.0),
        note="every output is empty: nothing was compared" if empty else note,
    )
