"""Workloads and feeds from files, arrays, batches and users' functions."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.calls import checks
from finecast.data.datasets import Dataset, data_set, open_npz
from finecast.data.decoding import Decoding, advice_on_whole
from finecast.data.feeds import check_dims, check_sizes, no_effect, synthetic_feeds
from finecast.data.functions import load_function, source_digest
from finecast.data.input_ranges import Range
from finecast.data.metrics import Metric, get_metric
from finecast.data.samples import Indices
from finecast.data.sizes import guessed_dims
from finecast.data.streams import Stream, re_iterable, to_array
from finecast.data.tables import ImageFolder, samples_of, table_in
from finecast.data.workload import (
    CalibrationFunction,
    CallsFunction,
    DataWorkload,
    EvalFunction,
    FunctionWorkload,
    Workload,
    whole_batch,
)
from finecast.engines.base import Array, Feeds, Session, Steps, TensorSpec
from finecast.errors import UsageError
from finecast.files import digest
from finecast.graph import Dim
from finecast.naming import Option, assignments, convert_options, spelled, unknown_name
from finecast.usercode import guarded

Data: TypeAlias = "str | Path | Mapping[str, Any] | Iterable[Any] | Callable[[], Any]"
RowsFunction: TypeAlias = Callable[[], Mapping[str, range]]
Shapes: TypeAlias = Mapping[str, Sequence[Dim] | None]
DEFAULT_BATCH: Final = 32
_METRIC: Final = "agreement"
CALIBRATION_SAMPLES: Final = 128
_STATE: Final = "write INPUT=OUTPUT, as 'past.*=present.*'"


def _axes(given: Mapping[str, int | None] | Sequence[str] | None) -> Mapping[str, int | None]:
    """The axis of samples by input, also of ``NAME=none`` and ``NAME=AXIS`` texts."""

    def axis(text: str) -> int | None:
        return None if spelled(text) == "none" else _number(text)

    return assignments(
        given,
        axis,
        where="--sample-axis",
        form="NAME=none or NAME=AXIS",
        fix="write NAME=none, or NAME=0 for the first axis",
    )


def _sizes(given: Mapping[str, int] | Sequence[str] | None) -> Mapping[str, int]:
    """The size of each dimension, also of ``NAME=SIZE`` texts."""
    return assignments(
        given,
        partial(_number, least=1),
        where="--dim",
        form="NAME=SIZE",
        fix="write NAME=4, with a whole number from 1 on; arrays that are empty, as those of"
        " a decoder's first past, are given by --data",
    )


def _number(text: str, least: int = 0) -> int:
    """A whole number of digits alone; raises ValueError if it is none, or below ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise ValueError
    return int(text)


def _patterns(given: Mapping[str, str] | Sequence[str] | None) -> Mapping[str, str]:
    """Outputs by the inputs that they become, also of ``INPUT=OUTPUT`` texts.

    Raises:
        UsageError: If one name has a ``*`` that the other lacks.
    """
    patterns = assignments(given, str, where="--state", form="INPUT=OUTPUT", fix=_STATE)
    for name, output in patterns.items():
        if not output or name.count("*") != output.count("*"):
            raise UsageError(
                f"'{name}={output}' does not say which output becomes which input",
                where="--state",
                fix=_STATE,
            )
    return patterns


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Evaluation and calibration data: either ``data`` and ``metric``, or ``evaluate``.

    Attributes:
        data: A file (.npz, .csv, .tsv, .parquet), a folder of images, a table of pandas,
            pyarrow or ``datasets``, arrays by name, or batches that can be iterated again and
            again, such as a DataLoader: each of arrays by name, or of the inputs in order and
            labels. Also a function that returns one of these or yields batches, or such a
            function as ``FILE.py:FUNCTION``.
        labels: The name of the labels in ``data``; None for ``label``.
        calib: Calibration data: as ``data``, without labels; a function yields feeds. Without
            it the first samples of ``data`` calibrate, with ``evaluate``, too.
        sample_axes: The axis of samples by input, None for an input that all samples share.
        batch: Samples of a call; None for ``DEFAULT_BATCH`` of data, and 1 of random feeds.
        dims: Sizes of free dimensions, for random feeds.
        metric: The name of a metric; None for ``agreement``.
        evaluate: The user's metric, or ``FILE.py:FUNCTION``.
        lower_is_better: Whether less of what ``evaluate`` returns is better.
        of: Names of the outputs that the metric and the error are of, the worst of them; empty
            for all that copy no input.
        slices: The axis of the outputs along which numbers have different units; None to find
            it from what fp32 gives.
        groups: The name of an array of ``data`` that tells each sample's cluster (a text, a
            patient): samples of one are not independent, and a certificate draws them whole.
        decode_steps: Tokens at the end of each text that are given one a call, with the state
            of the calls before; None to give each sample whole.
        state: Outputs that become inputs in the next call, by the inputs' names, in which
            ``*`` stands for any text; empty to find them.
        baseline: What ``evaluate`` gives for the fp32 module, where that is known already.
        evaluate_name: The name of ``evaluate`` in messages, where it was given as text.
        rows: Gives the integers that inputs take, as ``input_ranges.rows_read``; to be called
            if an input has integers.
    """

    data: Data | None = Option(
        help="Arrays named like the model's inputs, and labels as 'label': an .npz, .csv or"
        " .parquet file, a folder of images by class, or a Python function that returns data.",
        metavar="FILE|FOLDER|FILE.py:FUNCTION",
        kind=Path,
        python=(object, "data"),
    ).field(None)
    labels: str | None = Option(
        help="The array of labels in --data; default 'label'.",
        metavar="NAME",
    ).field(None)
    calib: Data | CalibrationFunction | None = Option(
        help="Calibration data: as --data, without labels. Default: a part of --data.",
        metavar="FILE|FOLDER|FILE.py:FUNCTION",
        python=(object, "calibration data"),
    ).field(None)
    sample_axes: Mapping[str, int | None] = Option(
        help="The batch axis of an input; none if all samples share it.",
        flags=("--sample-axis",),
        metavar="NAME=none|AXIS",
        many=True,
        python=(Mapping, "a dict of axes by input"),
        convert=_axes,
    ).field({})
    batch: int | None = Option(
        help="Batch size; default 32 with data, 1 for random inputs.", kind=int, least=1
    ).field(None)
    dims: Mapping[str, int] = Option(
        help="The size of a dynamic dimension, for random inputs.",
        flags=("--dim",),
        metavar="NAME=SIZE",
        many=True,
        python=(Mapping, "a dict of sizes by dimension"),
        convert=_sizes,
    ).field({})
    metric: str | None = Option(
        help="top1 (or accuracy), top5, f1, agreement (or same_top1), cosine, spearman,"
        " snr_db, max_abs, mse, mae, perplexity, kld; default agreement with fp32.",
        metavar="NAME",
        python=(str, "the name of a metric (a function of your own is evaluate)"),
    ).field(None)
    evaluate: EvalFunction | str | None = Option(
        help="Your own metric: a function that gets run(inputs) -> outputs by name, and"
        " returns a number.",
        flags=("--eval",),
        metavar="FILE.py:FUNCTION",
        python=((Callable, str), "a function of run"),
    ).field(None)
    lower_is_better: bool = Option(
        help="Less of the --eval metric is better, as of a loss.", kind=bool
    ).field(False)
    of: Sequence[str] = Option(
        help="The output that metric and error are computed on; of several the worst counts."
        " Default: the worst of all for cosine, snr_db, max_abs and the error, else the first;"
        " never one that copies an input.",
        metavar="OUTPUT",
        many=True,
        python=(Iterable, "an output's name, or several,"),
        convert=_names,
    ).field(())
    slices: int | None = Option(
        help="The axis of the outputs along which units differ, as boxes beside scores."
        " Each index is compared by itself, and the worst counts. Default: found from the fp32"
        " outputs.",
        metavar="AXIS",
        kind=int,
    ).field(None)
    groups: str | None = Option(
        help="The array of --data that says which samples belong together, as those of one"
        " patient. --confidence draws such groups as a whole.",
        metavar="NAME",
    ).field(None)
    decode_steps: int | None = Option(
        help="Decode the last N tokens of each text one by one with the model's KV cache; the"
        " metric is computed on these tokens.",
        metavar="N",
        kind=int,
        least=1,
    ).field(None)
    state: Mapping[str, str] = Option(
        help="The output that becomes an input of the next call, as 'past.*=present.*';"
        " default: found by these two names.",
        metavar="INPUT=OUTPUT",
        many=True,
        python=(Mapping, "a dict of outputs by input"),
        convert=_patterns,
    ).field({})
    baseline: float | None = Option(
        help="The metric of the fp32 model, if it is known already.", kind=float
    ).field(None)
    evaluate_name: str = ""
    rows: RowsFunction | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Convert what was given as text.

        Raises:
            UsageError: If there is no such metric.
        """
        convert_options(self)
        if self.metric is not None:
            get_metric(self.metric)

    @property
    def built_in(self) -> Metric | None:
        """The metric; None where it is a function of the user's."""
        return get_metric(self.metric or _METRIC) if self.evaluate is None else None

    @property
    def given(self) -> bool:
        """Whether there are data."""
        return any(o is not None for o in (self.data, self.calib, self.labels, self.evaluate))

    @property
    def calibrates_apart(self) -> bool:
        """Whether a model is calibrated by other data than those that judge it."""
        return self.calib is not None and (self.data is not None or self.evaluate is not None)

    @property
    def samples(self) -> int:
        """Samples of a call on data."""
        return self.batch or DEFAULT_BATCH

    @property
    def label(self) -> str:
        """The metric's name in reports, a built-in one in lower case."""
        evaluation = self.evaluate
        name = (
            evaluation
            if isinstance(evaluation, str)
            else getattr(evaluation, "__qualname__", "")
        )
        name = self.evaluate_name or name
        return name if self.evaluate is not None else spelled(self.metric or _METRIC)

    @property
    def reads(self) -> list[tuple[str, Path]]:
        """The files that are read, each with its option.

        A folder is none of them: that it cannot be read is said where it would be.
        """
        sources = {"--data": self.data, "--calib": self.calib, "--eval": self.evaluate}
        named = ((role, one) for role, one in sources.items() if isinstance(one, str | Path))
        files = ((role, file_of(one)) for role, one in named)
        return [(role, path) for role, path in files if not path.is_dir()]

    def loaded(self) -> DataOptions:
        """These options with functions in place of ``FILE.py:FUNCTION``.

        Raises:
            UsageError: If a function cannot be loaded, or labels are named without data.
        """
        data, calib, evaluate = self.data, self.calib, self.evaluate
        for option, name in (("--labels", self.labels), ("--groups", self.groups)):
            if name is not None and self.data is None:
                raise UsageError(
                    f"{option} names an array of --data", where=option, fix="give --data too"
                )
        if isinstance(data, str | Path) and names_function(data):
            data = load_function(str(data))
        if isinstance(calib, str) and names_function(calib):
            calib = load_function(calib)
        if not isinstance(evaluate, str):
            return replace(self, data=data, calib=calib)
        function = load_function(evaluate)
        return replace(self, data=data, calib=calib, evaluate=function, evaluate_name=evaluate)

    def if_given(self, *, sizes_feeds: bool = False) -> DataOptions | None:
        """These options, ``loaded``; None if they name no data.

        Args:
            sizes_feeds: Whether ``batch`` also sizes random feeds, and so needs no data.

        Raises:
            UsageError: As ``loaded``; or if an option that needs data is given without any.
        """
        if self.given:
            return self.loaded()
        alone = {
            "--decode-steps": self.decode_steps is not None,
            "--state": bool(self.state),
            "--sample-axis": bool(self.sample_axes),
            "--batch": self.batch is not None and not sizes_feeds,
        }
        for option, stated in alone.items():
            if stated:
                raise UsageError(
                    f"{option} is given without data",
                    where=option,
                    fix="give --data too, or size random feeds by --dim",
                )
        return None


def names_function(given: str | Path) -> bool:
    """Whether ``FILE.py:FUNCTION`` is given, whose file is run; all else is a file of data."""
    file, _, name = str(given).rpartition(":")
    return (bool(file) and name.isidentifier()) or name.endswith(".py")


def file_of(given: str | Path) -> Path:
    """The file of ``FILE.py:FUNCTION``; of a file of data itself."""
    return Path((names_function(given) and str(given).rpartition(":")[0]) or given)


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
    metric = get_metric(options.metric or _METRIC)
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
    if not (_is_cut(data) or callable(data) or _is_cut(options.calib)):
        _refuse_cut(options)


def _refuse_cut(options: DataOptions) -> None:
    """Raise UsageError for an option that cuts samples out of arrays."""
    stated = {"--batch": options.batch is not None, "--sample-axis": bool(options.sample_axes)}
    for option in (option for option, is_stated in stated.items() if is_stated):
        raise UsageError(
            "samples are cut out of arrays, and whole calls are given",
            where=option,
            fix="leave it out, or give arrays by name, a table or an .npz",
        )


def _is_cut(data: object) -> bool:
    """Whether calls are cut out of the data: arrays by name."""
    named = hasattr(data, "column_names") or hasattr(data, "columns")
    return isinstance(data, str | Path | Mapping) or named


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
    axes, decoding = options.sample_axes, _decoding(options, session)
    inputs = session.inputs if decoding is None else decoding.inputs
    advice = advice_on_whole(session) if decoding is None else decoding.advice()
    if options.rows is not None and any(s.dtype in ("int64", "int32") for s in inputs):
        rows = options.rows()
        inputs = [replace(spec, rows=rows.get(spec.name)) for spec in inputs]
    stream = partial(Stream, inputs=tuple(inputs), label_name=labels, advice=advice)
    if callable(data) and not hasattr(data, "__iter__"):
        function, data = data, _returned(data)
        if not _is_cut(data):
            _refuse_cut(options)
        if isinstance(data, Iterator):
            return stream(source=partial(_yielded, function))
    if isinstance(data, str | Path) and Path(data).is_dir():
        images = ImageFolder.of(Path(data), inputs, options.samples)
        return stream(source=lambda: images, notices=images.notices)
    columns = table_in(data)
    if columns is None and not isinstance(data, str | Path | Mapping):
        return stream(source=re_iterable(data))
    where, beside = str(data) if isinstance(data, str | Path) else "data", options.groups
    if columns is not None:
        arrays = samples_of(columns, inputs, labels=labels, beside=beside, where=where)
    else:
        arrays = _arrays(data)
    samples = data_set(
        arrays,
        inputs,
        labels=labels,
        sample_axes=axes,
        beside=beside,
        advice=advice,
        where=where,
    )
    check_batch(samples, options.batch)
    return samples


_DATA_FUNCTION: Final = "call it in python to see more"


def _returned(function: Callable[[], Any]) -> Any:
    """What a user's function of the data returns.

    Raises:
        UserCodeError: If it fails.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    with guarded("the function of the data failed", where=name, fix=_DATA_FUNCTION):
        return function()


def _yielded(function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """The batches that a user's generator yields."""
    name = getattr(function, "__qualname__", type(function).__name__)
    with guarded("the function of the data failed", where=name, fix=_DATA_FUNCTION):
        yield from function()


def check_batch(data: Dataset, batch: int | None) -> None:
    """Refuse a batch size that the user gave where the model has another one.

    Raises:
        UsageError: If the model's batch is fixed at another size.
    """
    if batch is not None and data.fixed_batch not in (None, batch):
        raise no_effect(batch, data.fixed_batch)


def _arrays(data: Any) -> dict[str, Array]:
    """The arrays of a table, of a mapping, or of an .npz, by name."""
    columns = table_in(data)
    if columns is None and isinstance(data, str | Path):
        return open_npz(Path(data))
    named: Mapping[str, Any] = data if columns is None else columns
    return {str(name): to_array(value) for name, value in named.items()}


def _groups(options: DataOptions) -> Indices | None:
    """The number of each sample's cluster; None if no clusters are named.

    Raises:
        UsageError: If the data have no such array, or it has not one entry for each sample.
    """
    name, data = options.groups, options.data
    if name is None:
        return None
    if not _is_cut(data):
        raise UsageError(
            "clusters are named by an array, and batches are given",
            where="--groups",
            fix="give arrays by name, a table or an .npz",
        )
    arrays = _arrays(data)
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
    """Digest of the content of files or of arrays, or of a function's code.

    For batches it is a new one at each call.
    """
    data = options.data
    if isinstance(data, str | Path):
        path = Path(data)
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        content = " ".join((digest(*files), *(str(f.relative_to(path)) for f in files)))
    elif callable(data) and not hasattr(data, "__iter__"):
        content = source_digest(data)
    elif isinstance(data, Mapping):
        hasher = hashlib.sha256()
        for name, value in data.items():
            array = np.ascontiguousarray(to_array(value))
            hasher.update(f"{name} {array.dtype} {array.shape}".encode())
            plain = array.astype(str) if array.dtype.kind == "O" else array
            hasher.update(plain.tobytes())
        content = hasher.hexdigest()
    else:
        content = uuid.uuid4().hex
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
            check_sizes(
                {n: s for n, dims in shapes.items() if (s := _static(dims)) is not None}
            )

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


def _static(dims: Sequence[Dim] | None) -> tuple[int, ...] | None:
    if dims is None or not all(isinstance(d, int) for d in dims):
        return None
    return tuple(d for d in dims if isinstance(d, int))
