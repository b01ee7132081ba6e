"""What a low model has to keep: a metric, the error of its outputs, or a user's own check."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from finecast.data.criterion import Criterion
from finecast.data.deviation import expected, fp32_error
from finecast.data.functions import load_function
from finecast.data.metrics import by_output
from finecast.data.options import DataOptions, file_of
from finecast.data.workload import MOST_PROBED_ROWS, Workload, probed, sample_count
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.exact import RELATIVE_ERROR, Exact
from finecast.errors import UsageError, UserCodeError
from finecast.graph import Graph
from finecast.naming import Option
from finecast.native.model import Check, LowModel
from finecast.numbers.formats import Format
from finecast.usercode import guarded

_PEAK: Final = 4.0
"""How many times as large as its usual numbers the largest number of a value is. Codes have
steps that are a share of the largest one, and so round the usual ones by as much more."""


def peak_of(formats: Mapping[int, Format]) -> float:
    """How many times as large as by their digits roundings to the formats are."""
    return _PEAK if any(fmt.has_scales for fmt in formats.values()) else 1.0


class Judge(ABC):
    """Whether a model passes, and by which figure.

    Attributes:
        figure: The name of the figure.
        baseline: The fp32 model's.
        limit: The worst figure that passes.
        worst: The output or slice that the last figure is of; empty if there is one alone.
        samples: The number of samples that the figure is of; 0 for all data.
    """

    figure: str
    baseline: float
    limit: float
    worst: str
    samples: int

    @abstractmethod
    def judge(self, session: Session) -> tuple[float, bool]:
        """The figure of a model, and whether it passes."""

    @property
    def accepts(self) -> Check | None:
        """What judges inner values, if that is not their error."""
        return None


@dataclass(slots=True, kw_only=True)
class MetricJudge(Judge):
    """By the metric on all data."""

    workload: Workload
    reference: Session
    passes: Callable[[float], bool]
    figure: str
    baseline: float
    limit: float
    worst: str = ""
    samples: int = 0

    def judge(self, session: Session) -> tuple[float, bool]:
        """The metric, which has to be within the tolerance of the fp32 model's."""
        score = self.workload.evaluate(session, self.reference)
        outputs = by_output(score)
        self.worst = "" if len(outputs) < 2 else next(iter(outputs))
        return float(score), self.passes(float(score))


@dataclass(slots=True, kw_only=True)
class ErrorJudge(Judge):
    """By the relative error of the outputs on the samples, the worst output's.

    Of a model without float outputs it is the share of numbers that differ.
    """

    exact: Exact
    limit: float
    figure: str = RELATIVE_ERROR
    baseline: float = 0.0
    worst: str = ""
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        """The figure's name says what the error is of."""
        self.samples = sample_count(self.exact.calls)
        self.figure = self.exact.figure

    def judge(self, session: Session) -> tuple[float, bool]:
        """The error, which has to be within the limit."""
        errors = self.exact.errors(session)
        self.worst = "" if len(errors) < 2 else next(iter(errors))
        error = max(errors.values(), default=0.0)
        return error, error <= self.limit


@dataclass(slots=True, kw_only=True)
class CheckJudge(Judge):
    """By a function of the user's, which has to accept every output of every call."""

    exact: Session
    calls: Sequence[Feeds]
    check: Check
    figure: str
    baseline: float = 1.0
    limit: float = 1.0
    worst: str = ""
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the samples."""
        self.samples = sample_count(self.calls)

    def judge(self, session: Session) -> tuple[float, bool]:
        """The share of outputs that are accepted."""
        verdicts = [
            self.accepts(name, got, wanted)
            for feeds in self.calls
            for (name, wanted), got in zip(
                self.exact.run(feeds).items(), session.run(feeds).values(), strict=True
            )
        ]
        share = sum(verdicts) / max(len(verdicts), 1)
        return share, all(verdicts)

    @property
    def accepts(self) -> Check:
        """The function, whose result is checked."""
        return self._accepts

    def _accepts(self, name: str, got: Array, wanted: Array) -> bool:
        """Call the function.

        Raises:
            UserCodeError: If it fails, or returns neither True nor False.
        """
        fix = "it gets a value's name, its array and the fp32 array, and returns a bool"
        with guarded("the check function failed", where=self.figure, fix=fix):
            verdict: Any = self.check(name, got, wanted)
        if not isinstance(verdict, bool | np.bool_):
            raise UserCodeError(
                f"the check function returns {type(verdict).__name__}, not True or False",
                where=self.figure,
                fix=fix,
            )
        return bool(verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameOptions:
    """What a low model has to keep, where that is no metric.

    Attributes:
        check: A function of a value's name, what the low model gives for it, and what fp32
            gives; True if that is right. It judges the outputs, and inner values to find the
            first wrong one.
        max_error: The largest relative error of an output that passes; None for the error
            that rounding to the model's formats explains.
        check_name: The name of ``check`` in messages, where it was given as text.
    """

    check: Check | str | None = Option(
        help="Your own judgement in place of a metric: gets (name, array, fp32 array) of a"
        " value, returns True if it is right.",
        metavar="FILE.py:FUNCTION",
        python=((Callable, str), "a function of a name and two arrays"),
    ).field(None)
    max_error: float | None = Option(
        help="The largest relative error of an output that passes, without a metric; default:"
        " what rounding to the model's formats explains.",
        metavar="X",
        kind=float,
    ).field(None)
    check_name: str = ""

    def loaded(self) -> BlameOptions:
        """These options with a function in place of ``FILE.py:FUNCTION``."""
        if not isinstance(self.check, str):
            return self
        return replace(self, check=load_function(self.check), check_name=self.check)

    def check_beside(self, data: DataOptions, criterion: Criterion) -> None:
        """Refuse options that would have no effect.

        Raises:
            UsageError: If the model is judged in two ways, or a tolerance is given without a
                metric.
        """
        has_metric = data.metric is not None or data.evaluate is not None
        ways = {
            "--metric" if data.metric is not None else "--eval": has_metric,
            "--check": self.check is not None,
            "--max-error": self.max_error is not None,
        }
        given = [option for option, stated in ways.items() if stated]
        if len(given) > 1:
            raise UsageError(
                "the model is judged in two ways", where=", ".join(given), fix="keep one"
            )
        if criterion != Criterion() and not has_metric:
            raise UsageError(
                "the tolerance is that of a metric, and none is given",
                where="--tolerance",
                fix="give --metric or --eval, or --max-error in its place",
            )

    @property
    def reads(self) -> list[tuple[str, Path]]:
        """The file of ``--check``, if it was given as text."""
        return [("--check", file_of(self.check))] if isinstance(self.check, str) else []


def judge_of(
    options: BlameOptions,
    data: DataOptions,
    criterion: Criterion,
    workload: Workload,
    low: LowModel,
    reference: Session,
) -> Judge:
    """What the model has to keep: by a check, by a metric, or else by the outputs' error.

    ``data`` say whether there is a metric. Of the formats of ``low`` some error is explained.

    Raises:
        UsageError: If the metric's tolerance lets every result pass.
        UserCodeError: If a function of the user's fails.
    """
    if options.check is not None:
        assert not isinstance(options.check, str)
        name = options.check_name or getattr(options.check, "__qualname__", "check")
        calls = [*workload.calibration()]
        return CheckJudge(
            exact=reference, calls=calls, check=options.check, figure=f"share right by {name}"
        )
    if data.metric is not None or data.evaluate is not None:
        baseline = float(workload.evaluate(reference, None))
        kept = replace(criterion, higher_is_better=workload.higher_is_better)
        kept.check(baseline, workload.worst)
        return MetricJudge(
            workload=workload,
            reference=reference,
            passes=partial(kept.passes, baseline=baseline),
            figure=data.label,
            baseline=baseline,
            limit=kept.target(baseline),
        )
    calls = probed(workload.calibration(), reference, MOST_PROBED_ROWS)
    exact = Exact.of(reference, calls, workload.of, workload.slices)
    limit = options.max_error
    if limit is None:
        counted = {exact.names[number] for number in exact.counted}
        limit = explained_error(low.graph, low.formats, counted)
    return ErrorJudge(exact=exact, limit=limit)


def explained_error(
    graph: Graph, formats: Mapping[int, Format], names: Collection[str]
) -> float:
    """The relative error of the named outputs that rounding explains, the largest of them.

    Ops in fp32 round, too: two fp32 versions of a model differ by that.

    ``names`` are the outputs that errors are told of.
    """
    bounds = expected(graph, formats)
    errors = [bounds.relative.get(v.id, 0.0) for v in graph.outputs if v.name in names]
    low = max(errors, default=0.0) * peak_of(formats)
    return math.hypot(low, fp32_error(len(graph.float_nodes)))
