"""Workloads and feeds from files, arrays, batches and users' functions."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.data.datasets import Dataset, data_set, load_npz
from finecast.data.feeds import check_dims, check_sizes, synthetic_feeds
from finecast.data.input_ranges import Range
from finecast.data.metrics import get_metric
from finecast.data.streams import Stream, re_iterable, to_array
from finecast.engines.base import Feeds, Session, Steps, TensorSpec
from finecast.errors import UsageError
from finecast.files import digest
from finecast.graph import Dim, Graph
from finecast.naming import unknown_name
from finecast.pipeline.workload import (
    CalibrationFunction,
    DataWorkload,
    EvalFunction,
    FunctionWorkload,
    Workload,
)
from finecast.usercode import guarded

Data: TypeAlias = "str | Path | Mapping[str, Any] | Iterable[Any]"
Shapes: TypeAlias = Mapping[str, Sequence[Dim] | None]
DEFAULT_BATCH: Final = 32
CALIBRATION_SAMPLES: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Evaluation and calibration data: either ``data`` and ``metric``, or ``evaluate``.

    Attributes:
        data: An npz file, arrays by name, or batches that can be iterated again and again,
            such as a DataLoader: each of arrays by name, or of the inputs in order and labels.
        labels: The name of the labels in ``data``; None for ``label``.
        metric: The name of a metric; None for ``agreement``.
        evaluate: The user's metric.
        evaluate_name: Its name in messages.
        calib: Calibration data: as ``data``, without labels, or a function that yields feeds.
            Without it the first samples of ``data`` calibrate, with ``evaluate``, too.
        batch: Samples of a call.
        lower_is_better: Whether less of what ``evaluate`` returns is better.
        sample_axes: The axis of samples by input, None for an input that all samples share.
        of: Names of the outputs that the metric and the error are of, the worst of them; empty
            for all that copy no input.
    """

    data: Data | None = None
    labels: str | None = None
    metric: str | None = None
    evaluate: EvalFunction | None = None
    evaluate_name: str = ""
    calib: Data | CalibrationFunction | None = None
    batch: int = DEFAULT_BATCH
    lower_is_better: bool = False
    sample_axes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    of: Sequence[str] = ()


def workload_of(options: DataOptions, session: Session) -> Workload:
    """The workload that ``options`` describe, for a model loaded as ``session``.

    Raises:
        UsageError: If they do not fit together or do not fit the model.
    """
    of = known_outputs(options.of, session)
    calibration = _calibration(options, session)
    if options.evaluate is not None:
        _check_evaluation(options)
        return FunctionWorkload(
            function=options.evaluate,
            name=options.evaluate_name or getattr(options.evaluate, "__qualname__", ""),
            lower_is_better=options.lower_is_better,
            calibrate=calibration,
            of=of,
        )
    if options.data is None:
        raise UsageError(
            "no data to evaluate on", fix="give --data FILE.npz or --eval FILE.py:FUNCTION"
        )
    metric = get_metric(options.metric or "agreement")
    if options.lower_is_better and metric.higher_is_better:
        raise UsageError(
            f"of {metric.name} more is better",
            where="--lower-is-better",
            fix="leave it out: it is for --eval",
        )
    data = _samples(options.data, options, session, labels=options.labels)
    if metric.needs_labels and isinstance(data, Dataset) and data.labels is None:
        raise UsageError(
            f"metric {metric.name} needs labels",
            where=str(options.data) if isinstance(options.data, str | Path) else "data",
            fix="add an array 'label', name it with --labels, or use --metric agreement",
        )
    return DataWorkload(
        data=data,
        metric=metric,
        batch=options.batch,
        data_digest=_digest(options),
        calibrate=calibration or partial(_first_batches, data, options.batch),
        of=of,
    )


def known_outputs(of: Sequence[str], session: Session) -> tuple[str, ...]:
    """The outputs that the user names, each once.

    Raises:
        UsageError: If the model has no such output.
    """
    known = [spec.name for spec in session.outputs]
    for name in of:
        if name not in known:
            raise unknown_name(name, known, what="output", where="--of")
    return tuple(dict.fromkeys(of))


def _check_evaluation(options: DataOptions) -> None:
    """Raise UsageError for options that an evaluation function leaves without effect."""
    if options.metric is not None:
        raise UsageError(
            "both a built-in metric and an evaluation function are given",
            where="--metric, --eval",
            fix="give one of them",
        )
    if options.labels is not None:
        raise UsageError(
            "labels are named, and an evaluation function reads its own",
            where="--labels, --eval",
            fix="drop one of them",
        )


def _calibration(options: DataOptions, session: Session) -> CalibrationFunction | None:
    calib = options.calib
    if calib is None and options.evaluate is not None:
        calib = options.data  # the function reads its own data
    if calib is None:
        return None
    if callable(calib):
        calibrate = partial(_user_feeds, calib)
        if next(calibrate(), None) is None:
            raise UsageError("the calibration function yields nothing", where="--calib")
        return calibrate
    return partial(_first_batches, _samples(calib, options, session), options.batch)


def _user_feeds(calib: CalibrationFunction) -> Iterator[Feeds]:
    name = getattr(calib, "__qualname__", type(calib).__name__)
    with guarded(
        "the calibration function failed", where=name, fix="call it in python to see more"
    ):
        given: Any = calib()  # of the user's making, whatever its type says
        if not isinstance(given, Iterable):
            raise _no_feeds(name, f"returns {type(given).__name__}")
        for feeds in given:
            # A list has the steps of one sequence.
            steps = feeds if isinstance(feeds, list | tuple) and feeds else [feeds]
            for step in steps:
                if not isinstance(step, Mapping):
                    raise _no_feeds(name, f"yields {type(step).__name__}")
            yield feeds if isinstance(feeds, Mapping) else Steps(feeds)


def _no_feeds(name: str, what: str) -> UsageError:
    return UsageError(
        f"the calibration function {what}, and arrays by the names of the inputs are needed",
        where=name,
        fix="yield a dict for each batch: {INPUT: ARRAY}",
    )


def _samples(
    data: Data, options: DataOptions, session: Session, *, labels: str | None = None
) -> Dataset | Stream:
    """The samples in ``data``, checked against the model's inputs."""
    axes, inputs = options.sample_axes, session.inputs
    if isinstance(data, str | Path):
        return load_npz(data, inputs, labels=labels, sample_axes=axes)
    if isinstance(data, Mapping):
        arrays = {str(name): to_array(value) for name, value in data.items()}
        return data_set(arrays, inputs, labels=labels, sample_axes=axes)
    if axes:
        raise UsageError(
            "sample axes are of arrays, and batches are given", where="--sample-axis"
        )
    return Stream(inputs=tuple(inputs), source=re_iterable(data), label_name=labels)


def _digest(options: DataOptions) -> str:
    """Digest of the content of a file or of arrays; for batches a new one at each call."""
    data = options.data
    if isinstance(data, str | Path):
        content = digest(Path(data))
    elif isinstance(data, Mapping):
        found = hashlib.sha256()
        for name, value in data.items():
            array = np.ascontiguousarray(to_array(value))
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            plain = array.astype(str) if array.dtype.kind == "O" else array
            found.update(plain.tobytes())
        content = found.hexdigest()
    else:
        content = uuid.uuid4().hex
    return f"{content} {options.labels} {sorted(options.sample_axes.items())}"


def _first_batches(data: Dataset | Stream, batch: int) -> Iterator[Feeds]:
    return (b.feeds for b in data.batches(batch, limit=CALIBRATION_SAMPLES))


def calibration_batches(
    session: Session, options: DataOptions, *, limit: int = CALIBRATION_SAMPLES
) -> list[Feeds]:
    """The first feeds of the calibration data, else of the data.

    Raises:
        UsageError: If there are none, or they do not fit the inputs of ``session``.
    """
    calibration = _calibration(options, session)
    if calibration is None:
        if options.data is None:
            raise UsageError("no data", fix="give --data FILE.npz or --calib")
        data = _samples(options.data, options, session, labels=options.labels)
        calibration = partial(_first_batches, data, options.batch)
    return list(islice(calibration(), limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedMaker:
    """Feeds to verify a model with: the first of ``batches``, else random ones.

    Random feeds have ``batch`` samples, and free dimensions the sizes in ``dims``. If neither
    is stated, they are the ``examples`` that came with the model, where some did. Examples
    count as random: they are no data that the model was made for.
    """

    batches: Sequence[Feeds] = ()
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    examples: Feeds | None = None

    def check(self, shapes: Shapes) -> None:
        """Refuse random inputs that are too large; a file of few bytes may declare any size.

        Call this before an engine loads the model: it allocates its inputs then.

        Raises:
            UsageError: If they would take over 2 GiB.
        """
        if not self.batches:
            check_sizes(
                {n: s for n, dims in shapes.items() if (s := _static(dims)) is not None}
            )

    def check_dims(self, shapes: Shapes) -> None:
        """Refuse ``dims`` that have no effect.

        Raises:
            UsageError: If a dimension is not free in these inputs, or batches are given.
        """
        if self.dims and self.batches:
            raise UsageError(
                "--dim sizes random feeds, and data is given", where="--dim", fix="drop one"
            )
        check_dims(shapes, self.dims)

    def make(self, session: Session) -> Feeds | None:
        """Feeds for a loaded model; None if none can be made.

        Raises:
            UsageError: If none can be made of the ``dims`` that the user gave.
        """
        try:
            return self.draw(session)
        except UsageError:
            if self.dims:
                raise
            return None

    def draw(
        self,
        session: Session,
        ranges: Mapping[str, Range] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> Feeds:
        """The first batch, else the examples, else random feeds.

        Random numbers are as ``ranges`` says of them, by input name. A free dimension has the
        size in ``dims``, else in ``lengths``, else a small one.

        Raises:
            UsageError: If none can be made.
        """
        if self.batches:
            return self.batches[0]
        if self.examples is not None and not self.dims and self.batch == 1:
            return self.examples
        guessed = guessed_dims(session.inputs)
        free = {*guessed, *(d for spec in session.inputs for d in spec.shape or ())}
        long = {name: size for name, size in (lengths or {}).items() if name in free}
        sizes = {**guessed, **long, **self.dims}
        return synthetic_feeds(session.inputs, batch=self.batch, dims=sizes, ranges=ranges)


def _static(dims: Sequence[Dim] | None) -> tuple[int, ...] | None:
    if dims is None or not all(isinstance(d, int) for d in dims):
        return None
    return tuple(d for d in dims if isinstance(d, int))


OPEN_SIZES: Final = (16, 64, 256, 1024)
"""Sizes of open dimensions, tried in this order until a model takes one."""


def input_specs(graph: Graph) -> list[TensorSpec]:
    """The inputs of a graph, as sessions state them."""
    return [TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape) for v in graph.inputs]


def guessed_dims(inputs: Sequence[TensorSpec], size: int = OPEN_SIZES[0]) -> dict[str, int]:
    """``size`` by name for each free dimension that is not an input's first axis.

    The name is the symbol, or ``INPUT.AXIS`` where there is none.
    """
    batches = {s.shape[0] for s in inputs if s.shape}
    dims = [
        (d, f"{s.name}.{axis}")
        for s in inputs
        for axis, d in enumerate(s.shape or ())
        if axis and not isinstance(d, int)
    ]
    return {symbol or own: size for symbol, own in dims if not symbol or symbol not in batches}
