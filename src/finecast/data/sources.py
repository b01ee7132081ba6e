"""Workloads, calibration and feeds of the data that users name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.data.datasets import Dataset
from finecast.data.decoding import Decoding, advice_on_whole
from finecast.data.feeds import check_dims, check_sizes, synthetic_feeds
from finecast.data.function_workload import FunctionWorkload
from finecast.data.input_ranges import Range
from finecast.data.kinds import Needed, kind_of, refuse_cut
from finecast.data.metrics import get_metric
from finecast.data.options import DEFAULT_METRIC, Data, DataOptions
from finecast.data.samples import Indices
from finecast.data.sizes import guessed_dims
from finecast.data.streams import Stream
from finecast.data.workload import (
    CalibrationFunction,
    CallsFunction,
    DataWorkload,
    Workload,
    whole_batch,
)
from finecast.engines.base import Feeds, Session, Steps, TensorSpec
from finecast.errors import UsageError
from finecast.graph import Dim
from finecast.naming import unknown_name
from finecast.usercode import guarded

Shapes: TypeAlias = Mapping[str, Sequence[Dim] | None]
CALIBRATION_SAMPLES: Final = 128


def workload_of(
    options: DataOptions,
    session: Session,
    of_function: Callable[..., Workload] = FunctionWorkload,
) -> Workload:
    """The workload that ``options`` describe, for a model loaded as ``session``.

    Args:
        options: The options.
        session: The fp32 model.
        of_function: Makes the workload of a user's evaluation function, of the fields of
            ``FunctionWorkload``.

    Raises:
        UsageError: If they do not fit together or do not fit the model.
    """
    options = options.loaded()
    _check_cut(options)
    of = known_outputs(options.of, session)
    decoding = _decoding(options, session)
    calibration = _calibration(options, session)
    evaluate = options.evaluate
    if evaluate is not None:
        assert not isinstance(evaluate, str)
        _check_evaluation(options)
        return of_function(
            function=evaluate,
            name=options.label,
            lower_is_better=options.lower_is_better,
            calibrate=calibration,
            of=of,
            slices=options.slices,
            groups=_groups(options),
        )
    if options.data is None:
        raise UsageError(
            "no data to evaluate on", fix="give --data FILE.npz or --eval FILE.py:FUNCTION"
        )
    metric = get_metric(options.metric or DEFAULT_METRIC)
    if options.lower_is_better and metric.higher_is_better:
        raise UsageError(
            f"of {metric.name} more is better",
            where="--lower-is-better",
            fix="leave it out: it is for --eval",
        )
    data = given_samples(options.data, options, session, labels=options.labels)
    if metric.needs_labels and isinstance(data, Dataset) and data.labels is None:
        raise UsageError(
            f"metric {metric.name} needs labels",
            where=str(options.data) if isinstance(options.data, str | Path) else "data",
            fix="add an array 'label', name it with --labels, or use --metric agreement",
        )
    calls = whole_batch
    if decoding is not None:
        calls = partial(decoding.phases, session)
        own = tuple(spec.name for spec in decoding.outputs(session))  # not the cache
        of = of or (own if metric.each_output else own[:1])
    return DataWorkload(
        data=data,
        metric=metric,
        batch=options.samples,
        data_digest=_digest(options),
        calibrate=calibration or partial(_first_batches, data, options.samples, calls),
        of=of,
        slices=options.slices,
        groups=_groups(options),
        decoding=decoding,
        calls=calls,
    )


def _decoding(options: DataOptions, session: Session) -> Decoding | None:
    """How texts are decoded; None if samples are given whole.

    Raises:
        UsageError: If state is named that is not carried, or none is found.
    """
    if options.decode_steps is not None:
        return Decoding.of(session, options.decode_steps, options.state)
    if options.state:
        raise UsageError(
            "a state is passed on only where texts are decoded",
            where="--state",
            fix="give --decode-steps",
        )
    return None


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
    if options.decode_steps is not None:
        raise UsageError(
            "an evaluation function calls the model by itself",
            where="--decode-steps, --eval",
            fix="pass the state on in the function, or use --data with a built-in metric",
        )


def _check_cut(options: DataOptions) -> None:
    """Raise UsageError for options that cut samples, where whole calls are given."""
    data = options.data
    if not (kind_of(data).is_cut or callable(data) or kind_of(options.calib).is_cut):
        refuse_cut(options)


def _calibration(
    options: DataOptions, session: Session, most: int = CALIBRATION_SAMPLES
) -> CalibrationFunction | None:
    calib = options.calib
    if calib is None and options.evaluate is not None:
        calib = options.data  # the function reads its own data
    if calib is None:
        return None
    if callable(calib):
        calibrate = partial(user_feeds, calib)
        if next(calibrate(), None) is None:
            raise UsageError("the calibration function yields nothing", where="--calib")
        return calibrate
    samples = given_samples(calib, options, session)
    return _batches_of(samples, options, session, most)


def _batches_of(
    found: Dataset | Stream, options: DataOptions, session: Session, most: int
) -> CalibrationFunction:
    """A function that yields the calls of the first ``most`` samples."""
    decoding = _decoding(options, session)
    calls = whole_batch if decoding is None else partial(decoding.phases, session)
    return partial(_first_batches, found, options.samples, calls, most)


def user_feeds(calib: CalibrationFunction) -> Iterator[Feeds]:
    """The feeds that a user's function yields.

    Raises:
        UserCodeError: If the function fails.
        UsageError: If it yields something else.
    """
    name = getattr(calib, "__qualname__", type(calib).__name__)
    with guarded(
        "the calibration function failed", where=name, fix="call it in python to see more"
    ):
        all_feeds: Any = calib()  # of the user's making, whatever its type says
        if not isinstance(all_feeds, Iterable):
            raise _no_feeds(name, f"returns {type(all_feeds).__name__}")
        for feeds in all_feeds:
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


def given_samples(
    data: Data, options: DataOptions, session: Session, *, labels: str | None = None
) -> Dataset | Stream:
    """The samples in ``data``, checked against the model's inputs.

    Raises:
        UsageError: If they do not fit, or are of no kind that is read.
        UserCodeError: If the user's function fails.
    """
    decoding = _decoding(options, session)
    inputs = session.inputs if decoding is None else decoding.inputs
    advice = advice_on_whole(session) if decoding is None else decoding.advice()
    if options.rows is not None and any(s.dtype in ("int64", "int32") for s in inputs):
        rows = options.rows()
        inputs = [replace(spec, rows=rows.get(spec.name)) for spec in inputs]
    needed = Needed(inputs=inputs, options=options, labels=labels, advice=advice)
    return kind_of(data).samples(data, needed)


def _groups(options: DataOptions) -> Indices | None:
    """The number of each sample's cluster; None if no clusters are named.

    Raises:
        UsageError: If the data have no such array, or it has not one entry for each sample.
    """
    name, data = options.groups, options.data
    if name is None:
        return None
    arrays_of = kind_of(data).arrays
    if arrays_of is None:
        raise UsageError(
            "clusters are named by an array, and batches are given",
            where="--groups",
            fix="give arrays by name, a table or an .npz",
        )
    arrays = arrays_of(data)
    if name not in arrays:
        raise unknown_name(name, arrays, what="array", where="--groups")
    if arrays[name].ndim != 1:
        raise UsageError(
            f"array {name!r} has {arrays[name].ndim} dimensions",
            where="--groups",
            fix="give one with a name or number for each sample",
        )
    return np.unique(arrays[name], return_inverse=True)[1]


def _digest(options: DataOptions) -> str:
    """Digest of the content of the data, and of what else decides what is evaluated."""
    content = kind_of(options.data).digest(options.data)
    decoded = options.decode_steps, sorted(options.state.items())
    return f"{content} {options.labels} {sorted(options.sample_axes.items())} {decoded}"


def _first_batches(
    data: Dataset | Stream, batch: int, calls: CallsFunction, most: int = CALIBRATION_SAMPLES
) -> Iterator[Feeds]:
    for samples in data.batches(batch, limit=most):
        yield from calls(samples.feeds)


def calibration_batches(
    session: Session, options: DataOptions, *, limit: int = CALIBRATION_SAMPLES
) -> list[Feeds]:
    """The first feeds of the calibration data, else of the data.

    Raises:
        UsageError: If there are none, or they do not fit the inputs of ``session``.
    """
    return list(islice(calibration_calls(session, options)(), limit))


def calibration_calls(
    session: Session, options: DataOptions, most: int = CALIBRATION_SAMPLES
) -> CalibrationFunction:
    """Yields the feeds of ``most`` samples of the calibration data, else of the data.

    Raises:
        UsageError: As ``calibration_batches``.
    """
    _check_cut(options)
    calibration = _calibration(options, session, most)
    if calibration is not None:
        return calibration
    if options.data is None:
        raise UsageError("no data", fix="give --data FILE.npz or --calib")
    samples = given_samples(options.data, options, session, labels=options.labels)
    return _batches_of(samples, options, session, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedMaker:
    """Feeds to verify a model with: the first of ``batches``, else random ones.

    Random feeds have ``batch`` samples, and free dimensions the sizes in ``dims``. If neither
    is stated, they are the ``examples`` that came with the model, where some did. Examples
    count as random: they are no data that the model was made for. ``slices`` is the axis along
    which the outputs are compared by index, if the user names one.
    """

    batches: Sequence[Feeds] = ()
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    examples: Feeds | None = None
    slices: int | None = None

    def check(self, shapes: Shapes) -> None:
        """Refuse random inputs that are too large; a file of few bytes may declare any size.

        Call this before an engine loads the model: it allocates its inputs then.

        Raises:
            UsageError: If they would take over 2 GiB.
        """
        if not self.batches:
            stated = {n: dims for n, dims in shapes.items() if dims is not None}
            sizes = {n: tuple(d for d in s if isinstance(d, int)) for n, s in stated.items()}
            check_sizes({n: s for n, s in sizes.items() if len(s) == len(stated[n])})

    def check_dims(self, shapes: Shapes) -> None:
        """Refuse ``dims`` and a ``batch`` that have no effect.

        Raises:
            UsageError: If a dimension is not free in these inputs, or batches are given.
        """
        if self.dims and self.batches:
            raise UsageError(
                "--dim sizes random feeds, and data is given", where="--dim", fix="drop one"
            )
        check_dims(shapes, self.dims, 1 if self.batches else self.batch)

    def make(self, inputs: Sequence[TensorSpec]) -> Feeds | None:
        """Feeds for a model's ``inputs``; None if none can be made.

        Raises:
            UsageError: If none can be made of the ``dims`` that the user gave.
        """
        try:
            return self.draw(inputs)
        except UsageError:
            if self.dims:
                raise
            return None

    def draw(
        self,
        inputs: Sequence[TensorSpec],
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
        guessed = guessed_dims(inputs)
        free = {*guessed, *(d for spec in inputs for d in spec.shape or ())}
        long = {name: size for name, size in (lengths or {}).items() if name in free}
        sizes = {**guessed, **long, **self.dims}
        return synthetic_feeds(inputs, batch=self.batch, dims=sizes, ranges=ranges)
