"""Options for data, metrics and tolerances: the same in every verb that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.errors import UsageError
from finecast.naming import spelled

if TYPE_CHECKING:
    from finecast.data.criterion import Criterion
    from finecast.engines.base import Session
    from finecast.pipeline.sources import DataOptions
    from finecast.pipeline.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Samples of the model's inputs."""

    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Arrays with the inputs' names, and labels."),
    ] = None
    labels: Annotated[
        str | None, typer.Option(help="Array of labels in --data; default 'label'.")
    ] = None
    calib: Annotated[
        str | None,
        typer.Option(
            metavar="NPZ|FILE.py:FUNCTION",
            help="Calibration feeds: an unlabelled .npz, or a function that yields them.",
        ),
    ] = None
    sample_axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=none|AXIS",
            help="The axis of an input along which samples lie; none if all samples share it.",
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples a call; default 32 of data, 1 of random feeds."),
    ] = None

    @property
    def given(self) -> bool:
        """Whether an option names data."""
        return any(o is not None for o in (self.data, self.calib, self.labels))

    @property
    def reads(self) -> list[tuple[str, Path]]:
        """The files that the options name, each with its option."""
        found = [("--data", self.data)] if self.data is not None else []
        return found + ([("--calib", _function_file(self.calib))] if self.calib else [])

    def if_given(self, *, random_batch: bool = False) -> DataOptions | None:
        """These options for the Python API; None if they name no data.

        Args:
            random_batch: Whether ``batch`` also sizes random feeds, and so needs no data.

        Raises:
            UsageError: As ``options``, or if an option that needs data is given without any.
        """
        if self.given:
            return self.options()
        alone = {
            "--sample-axis": bool(self.sample_axis),
            "--batch": self.batch is not None and not random_batch,
        }
        for option, stated in alone.items():
            if stated:
                raise UsageError(
                    f"{option} is given without data",
                    where=option,
                    fix="give --data too, or size random feeds by --dim",
                )
        return None

    def options(self) -> DataOptions:
        """These options for the Python API.

        Raises:
            UsageError: If a function cannot be loaded, or labels are named without data.
        """
        from finecast.data.functions import load_function
        from finecast.pipeline.sources import DEFAULT_BATCH, DataOptions

        calib = self.calib
        if self.labels is not None and self.data is None:
            raise UsageError(
                "--labels names an array of --data", where="--labels", fix="give --data too"
            )
        if calib is None:
            feeds = None
        else:
            feeds = Path(calib) if calib.lower().endswith(".npz") else load_function(calib)
        return DataOptions(
            data=self.data,
            labels=self.labels,
            calib=feeds,
            batch=self.batch or DEFAULT_BATCH,
            sample_axes=_axes(self.sample_axis or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFeeds:
    """Sizes of random feeds, which are used where there is no data."""

    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="Size of a free dimension, for random feeds."),
    ] = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension that an option names.

        Raises:
            UsageError: If one is malformed.
        """
        sizes: dict[str, int] = {}
        for item in self.dim or ():
            name, equals, size = item.rpartition("=")
            if not (equals and name and size.isdecimal() and int(size) > 0):
                raise UsageError(
                    f"{item!r} is no size of a dimension",
                    where="--dim",
                    fix="write NAME=SIZE, with a whole number from 1 on; arrays that are "
                    "empty, as a decoder's first past is, are given by --data",
                )
            sizes[name] = int(size)
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How accuracy is measured on data."""

    metric: Annotated[
        str | None,
        typer.Option(
            help="top1 (or accuracy), top5, f1, agreement, cosine, spearman, snr_db, max_abs,"
            " mse, mae, perplexity; default agreement."
        ),
    ] = None
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="FILE.py:FUNCTION",
            help="Your own metric: gets run(feeds) -> outputs by name, returns a number.",
        ),
    ] = None
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="The --eval metric is a loss.")
    ] = False
    of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUTPUT",
            help="The model's output that the metric and the error are of, by name; of several"
            " the worst counts. Default: the worst of all for cosine, snr_db, max_abs and the"
            " error, else the first; never one that copies an input.",
        ),
    ] = None

    @property
    def reads(self) -> list[tuple[str, Path]]:
        """The file that the options name, with its option."""
        return [("--eval", _function_file(self.evaluate))] if self.evaluate else []

    @property
    def label(self) -> str:
        """The metric's name in reports."""
        return self.evaluate or self.metric or "agreement"

    def options(self, data: Data) -> DataOptions:
        """Data and metric for the Python API.

        Raises:
            UsageError: If a function cannot be loaded.
        """
        from dataclasses import replace

        from finecast.data.functions import load_function

        return replace(
            data.options(),
            metric=self.metric,
            evaluate=load_function(self.evaluate) if self.evaluate else None,
            evaluate_name=self.evaluate or "",
            lower_is_better=self.lower_is_better,
            of=tuple(self.of or ()),
        )

    def workload(self, session: Session, data: Data) -> Workload:
        """The workload for a model loaded as ``session``."""
        from finecast.pipeline.sources import workload_of

        return workload_of(self.options(data), session)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The accuracy to keep."""

    criterion: Annotated[
        str, typer.Option(help="How --tolerance is read: relative or absolute.")
    ] = "relative"
    tolerance: Annotated[float, typer.Option(help="Loss of the metric that is allowed.")] = (
        0.01
    )

    def stated(self) -> Criterion:
        """The criterion; whether higher is better is set later, from the metric."""
        from finecast.data.criterion import Criterion, CriterionKind

        kind = CriterionKind.parse(self.criterion)
        return Criterion(kind=kind, tolerance=self.tolerance)


def _axes(items: Sequence[str]) -> dict[str, int | None]:
    """Read ``NAME=none`` and ``NAME=AXIS`` items.

    Raises:
        UsageError: If one is malformed.
    """
    axes: dict[str, int | None] = {}
    for item in items:
        name, _, axis = item.rpartition("=")
        shared = spelled(axis) == "none"
        if not (name and (shared or axis.strip().isdecimal())):
            raise UsageError(
                f"{item!r} is no sample axis",
                where="--sample-axis",
                fix="write NAME=none, or NAME=AXIS with 0 for the first",
            )
        axes[name] = None if shared else int(axis)
    return axes


def _function_file(spec: str) -> Path:
    """The file of ``FILE.py:FUNCTION``; of an ``.npz`` the file itself."""
    file, colon, _ = spec.rpartition(":")
    return Path(file if colon and not spec.lower().endswith(".npz") else spec)
