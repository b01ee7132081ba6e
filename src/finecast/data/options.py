"""The options of data: which data a model is evaluated, calibrated and fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from finecast.calls import checks
from finecast.data.function_workload import EvalFunction
from finecast.data.functions import load_function
from finecast.data.metrics import Metric, get_metric
from finecast.data.workload import CalibrationFunction
from finecast.errors import UsageError
from finecast.naming import Option, assignments, convert_options, spelled

Data: TypeAlias = "str | Path | Mapping[str, Any] | Iterable[Any] | Callable[[], Any]"
RowsFunction: TypeAlias = Callable[[], Mapping[str, range]]
DEFAULT_BATCH: Final = 32
DEFAULT_METRIC: Final = "agreement"
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
        " snr_db, max_abs, mse, mae, perplexity, kld; default agreement with fp32"
        " (of blame the error of the outputs).",
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
        return get_metric(self.metric or DEFAULT_METRIC) if self.evaluate is None else None

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
        return name if self.evaluate is not None else spelled(self.metric or DEFAULT_METRIC)

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
