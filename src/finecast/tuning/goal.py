"""What is wanted of a tuned model, and what the search for it may cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from finecast.calls import checks
from finecast.data.criterion import Criterion
from finecast.data.options import DataOptions
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation
from finecast.errors import UsageError
from finecast.measure.racing import Effort
from finecast.naming import (
    Option,
    bytes_of,
    convert_options,
    default_of,
    member_of,
    number_of,
    path_of,
)
from finecast.native.model import ENGINE_OPTION, RULES_OPTION
from finecast.planning.plan import Plan
from finecast.plugin import absent_plugins, executors
from finecast.progress import Progress, silent
from finecast.reports import DRAWN, drawn
from finecast.reports.plan_report import report_path
from finecast.rules import UserRule
from finecast.rules.policy import Policy


class Objective(Enum):
    """What the search minimises; the accuracy is kept under any objective."""

    LATENCY = "latency"
    FIRST_TOKEN = "first_token"
    TOKENS_PER_SECOND = "tokens_per_second"
    THROUGHPUT = "throughput"
    SIZE = "size"
    MEMORY = "memory"

    @property
    def words(self) -> Words:
        """The words for results by this objective."""
        return _WORDS[self]

    def keyed(self, runner: str) -> str:
        """The runner's name in a study's keys: trials of other objectives do not count."""
        return runner if self is Objective.LATENCY else f"{runner} for {self.value}"

    @property
    def of_time(self) -> bool:
        """Whether the objective is a time, so that slow formats cannot serve it."""
        return self.of_latency or self is Objective.THROUGHPUT

    @property
    def of_latency(self) -> bool:
        """Whether it is the time of calls that are made one after the other."""
        return self is Objective.LATENCY or self.call is not None

    @property
    def call(self) -> int | None:
        """Which call counts where texts are decoded: the first or a step; None for both."""
        return {Objective.FIRST_TOKEN: 0, Objective.TOKENS_PER_SECOND: 1}.get(self)

    def timed(self, workload: Workload) -> Workload:
        """``workload`` with only the calls that count timed; raises as ``of_call``."""
        return workload if self.call is None else workload.of_call(self.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Words for results by an objective.

    A plan may be ``better`` than fp32, ``best``, or xN ``as_good`` as fp32. ``gain`` is
    the heading of the column of N.
    """

    better: str
    best: str
    as_good: str
    gain: str


_WORDS: Final = {
    Objective.LATENCY: Words(
        better="faster",
        best="fastest",
        as_good="as fast",
        gain="speed",
    ),
    Objective.FIRST_TOKEN: Words(
        better="faster to the first token",
        best="fastest to the first token",
        as_good="as fast to the first token",
        gain="speed",
    ),
    Objective.TOKENS_PER_SECOND: Words(
        better="of more tokens a second",
        best="best",
        as_good="as many tokens a second",
        gain="tokens/s",
    ),
    Objective.THROUGHPUT: Words(
        better="of more throughput",
        best="best",
        as_good="as much throughput",
        gain="throughput",
    ),
    Objective.SIZE: Words(
        better="smaller",
        best="smallest",
        as_good="as small",
        gain="smaller",
    ),
    Objective.MEMORY: Words(
        better="of less memory",
        best="one of least memory",
        as_good="as little in memory",
        gain="less memory",
    ),
}


class Preset(Enum):
    """How much time the search may take, and which gain is worth another measurement."""

    FAST = "fast"
    BALANCED = "balanced"
    EXACT = "exact"


_PRESETS: Final[Mapping[Preset, Mapping[str, Any]]] = {
    Preset.FAST: {"first_is_enough": True},
    Preset.BALANCED: {},
    Preset.EXACT: {"max_trials": 20},
}
"""The fields of ``Goal`` that each preset stands for, where they are not given themselves."""


MIN_SPEEDUP: Final = 1.02
"""The least gain over fp32 that counts: medians scatter by less on a quiet machine.

Bytes do not scatter; a smaller gain in bytes is not worth a loss of accuracy.
"""


ANY_SPEEDUP: Final = 0.1
"""The least gain where fp32 exceeds a bound on size: nearly any plan that keeps it counts."""


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The accuracy to keep, the gain that is worth it, and the budget of the search.

    Attributes:
        criterion: The accuracy to keep.
        objective: What the search minimises.
        preset: What the search may cost, where single fields do not say it: ``fast`` ends with
            the first plan that keeps the accuracy; ``balanced`` goes on while a gain of 0.5%
            is expected, for three evaluations; ``exact`` for twenty, whatever the gain.
        min_speedup: How many times as fast as fp32 a plan has to be; with another objective,
            how many times as good. Where fp32 exceeds a bound on size, the default asks for
            no gain.
        max_size: The most bytes of the file that is written.
        max_bits: The most bits that a number of the stored weights takes in the mean, its
            share of scales counted.
        max_trials: The most evaluations of plans on all data; None for no limit. A given
            number is used up: faster plans are looked for until it is spent.
        timeout_s: Seconds after which no evaluation is begun but the first, and the last race
            ends after its least rounds. What comes before the first evaluation is not cut
            short, nor is one that runs.
        first_is_enough: End the search with the first plan found, whatever budget is left.
        start_s: When the budget of time starts, by ``time.perf_counter``: when the goal was
            stated, so that loading the model counts.
    """

    criterion: Criterion = Criterion()
    objective: Objective = Option(
        help="latency, throughput (many requests at a time), size (of the file), memory (of"
        " the running model, estimated), or with --decode-steps first_token or"
        " tokens_per_second.",
        metavar="NAME",
        python=((str, Enum), "the name of an objective"),
        convert=partial(member_of, Objective, what="objective"),
    ).field(Objective.LATENCY)
    preset: Preset = Option(
        help="How long to search: fast stops at the first plan within the limit; balanced"
        " evaluates up to 3 plans on all data, as long as another 0.5% of speed is expected;"
        " exact up to 20, for any gain. If none passes, balanced evaluates 5. --max-trials and"
        " --timeout set other limits.",
        metavar="fast|balanced|exact",
        python=((str, Enum), "the name of a preset"),
        convert=partial(member_of, Preset, what="preset"),
    ).field(Preset.BALANCED)
    min_speedup: float = Option(
        help="How many times as fast as fp32 a plan has to be, or with another --objective as"
        " good.",
        kind=float,
    ).field(MIN_SPEEDUP)
    max_size: int | None = Option(
        help="The most that the written file may take, as 120MB: of the plans that do, the"
        " fastest is found that keeps the accuracy.",
        metavar="SIZE",
        python=((str, Integral), "a size, as 120MB, or a number of bytes"),
        convert=partial(bytes_of, where="--max-size"),
    ).field(None)
    max_bits: float | None = Option(
        help="The most bits that a weight may take in the mean of all weights, with its share"
        " of scales, as 5.",
        metavar="BITS",
        kind=float,
    ).field(None)
    max_trials: int | None = Option(
        help="The most plans that are evaluated on all data.",
        kind=int,
    ).field(None)
    timeout_s: float | None = Option(
        help="Stop trying plans after this time. Loading, profiling and sensitivities before"
        " it are not cut short, nor is an evaluation that runs.",
        flags=("--timeout",),
        metavar="SECONDS",
        kind=float,
    ).field(None)
    first_is_enough: bool = False
    start_s: float = field(default_factory=time.perf_counter, compare=False)

    def __post_init__(self) -> None:
        """Refuse goals that can never be met.

        Raises:
            UsageError: If the speedup is below 1, a budget leaves no trial, or a bound on size
                leaves no weight.
        """
        convert_options(self)
        for name, value in _PRESETS[self.preset].items():
            if getattr(self, name) == default_of(Goal, name):
                object.__setattr__(self, name, value)
        if self.max_bits is not None and not 0 < self.max_bits < math.inf:
            raise UsageError(
                f"{self.max_bits:g} bits hold no weight",
                where="--max-bits",
                fix="give more than 0, as 5",
            )
        least = ANY_SPEEDUP if self.bounds_size else 1
        if not least <= self.min_speedup < math.inf:
            raise UsageError(
                f"{self.min_speedup:g} times as good as fp32 is no gain to ask for",
                where="min_speedup",
                fix=f"give {least:g} or more, as 1.5",
            )
        if self.max_trials is not None and self.max_trials < 1:
            raise UsageError(
                f"{self.max_trials} trials find nothing",
                where="--max-trials",
                fix="give 1 or more",
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(
                f"{self.timeout_s:g} seconds are no time",
                where="--timeout",
                fix="give more than 0",
            )

    @property
    def bounds_size(self) -> bool:
        """Whether plans are bounded in size."""
        return self.max_size is not None or self.max_bits is not None

    @property
    def size_text(self) -> str:
        """The bounds on size, as users read them."""
        size = "" if self.max_size is None else megabytes(self.max_size)
        bits = "" if self.max_bits is None else f"{self.max_bits:g} bits a weight"
        return " and ".join(filter(None, (size, bits)))

    @property
    def goes_on(self) -> bool:
        """Whether what is left of the budget is spent on faster plans."""
        return not self.is_unlimited and not self.first_is_enough

    @property
    def is_unlimited(self) -> bool:
        """Whether there is no budget, so that the search ends by itself."""
        return self.max_trials is None and self.timeout_s is None


def megabytes(size_bytes: float) -> str:
    """A size as text: ``12.3 MB``, or ``12 bytes`` below a kilobyte."""
    if size_bytes < 1000:
        return number_of(round(size_bytes), "byte")
    return f"{size_bytes / 1e6:.4g} MB"


AUTO: Final = "auto"
LOCAL: Final = "local"
"""The executor of this machine."""


def place_of(executor: str) -> str:
    """The name of the place that ``NAME`` or ``NAME://ADDRESS`` names."""
    return executor.partition("://")[0]


def _executor(given: str) -> str:
    places = executors()
    if given == LOCAL or place_of(given) in places:
        return given
    raise UsageError(
        f"{given!r} is nothing that evaluates",
        where="--executor",
        fix=f"give {', '.join((LOCAL, *places, *(f'{p}://HOST:PORT' for p in places)))}"
        + absent_plugins(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Where plans are evaluated.

    Attributes:
        jobs: Worker processes that evaluate plans on all data; 0 for none: they are evaluated
            in this process, as are all models, data and functions that are Python objects.
        executor: ``local`` for worker processes of this machine, ``local:N`` for N of them; or
            a place of a plugin, as ``ray`` or ``ray://HOST:PORT`` for the nodes of a cluster.
    """

    jobs: int = Option(
        help="Processes that evaluate plans, so that a crash ends one of these alone; 0:"
        " none.",
        kind=int,
        least=0,
    ).field(1)
    executor: str = Option(
        help="Where plans are evaluated: in a process of this machine, in N of them, each with"
        " a part of the data (local:0: in finecast's own), or on the nodes of a Ray cluster.",
        metavar="local[:N]|ray[://ADDRESS]",
        convert=_executor,
    ).field(LOCAL)

    def __post_init__(self) -> None:
        """Read the executor's name, and the number of processes in ``local:N``.

        Raises:
            UsageError: If nothing of that name evaluates.
        """
        name, _, number = str(self.executor).partition(":")
        if name == LOCAL and number.isdecimal():
            object.__setattr__(self, "jobs", int(number))
            object.__setattr__(self, "executor", LOCAL)
        convert_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune for, and where.

    Attributes:
        data: The data, and the metric or function that tells accuracy on it.
        goal: The accuracy to keep, the gain that is worth it, and what it may cost.
        policy: What may be lowered.
        engine: ``NAME[:DEVICE]``; None for the one in which fp32 is expected to end fastest.
        device: A device that is not here, which is emulated.
        user_rules: Rule functions by name.
        study: The file in which trials are kept.
        resume: Whether trials in that file count.
        report: Where the report is written, as a page (.html), its picture of all plans (.svg)
            or its data (.json).
        start: A plan of this model, or of an earlier version of it, that is tried first.
        lock: Whether a lock is written beside the model, by which ``verify`` tells elsewhere
            whether the model does the same.
        timing_cache: Whether times of kernels are kept for later runs, and taken from earlier.
        execution: Where plans are evaluated.
        progress: Told of each step.
    """

    data: DataOptions = field(default_factory=DataOptions)
    goal: Goal = field(default_factory=Goal)
    policy: Policy = field(default_factory=Policy)
    engine: str | None = Option(
        help=f"{ENGINE_OPTION.help} Default: auto: OpenVINO, unless fp32 in another is x1.1 as"
        " fast as fp32 in OpenVINO, also by its bf16 hint.",
        metavar=f"auto|{ENGINE_OPTION.metavar}",
        convert=lambda given: None if str(given).lower() == AUTO else given,
    ).field(None)
    device: Emulation | None = None
    user_rules: Mapping[str, UserRule] = RULES_OPTION.field({})
    study: Path | None = Option(
        help="Keep trials here; default beside the plan: m.study.db for m.onnx,"
        " m.xml.study.db for m.xml. It may hold trials of several models; only one run at a"
        " time may write to it.",
        kind=Path,
        convert=path_of,
    ).field(None)
    resume: bool = Option(help="Go on with a search that was interrupted.", kind=bool).field(
        False
    )
    report: Path | None = Option(
        help="Write a report of what was found and why, op by op. FILE.svg is the picture of"
        " all plans alone, FILE.json the data.",
        metavar="FILE.html|.svg|.json",
        kind=Path,
        convert=partial(report_path, drawn=True),
    ).field(None)
    start: Path | Plan | None = Option(
        help="Try this plan first, of this model or of an earlier version of it. If its"
        " accuracy is within the limit, only faster plans are tried.",
        metavar="PLAN.json",
        kind=Path,
        python=((str, Path, Plan), "a plan or its path"),
        convert=lambda given: given if isinstance(given, Plan) else path_of(given),
    ).field(None)
    lock: bool = Option(
        help="Write no deployment manifest (OUTPUT.lock.json), with which finecast verify"
        " checks the model on other machines.",
        flags=("--no-lock",),
        kind=bool,
    ).field(True)
    timing_cache: bool = Option(
        help="Profile every kernel anew, and keep no times in the timing cache.",
        flags=("--no-timing-cache",),
        kind=bool,
    ).field(True)
    execution: Execution = field(default_factory=Execution)
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Read paths that were given as text.

        Raises:
            UsageError: If the criterion means nothing for the metric, or the report's file is
                neither a page, a picture nor data.
        """
        convert_options(self)
        self._check_criterion()
        suffix = "" if self.report is None else self.report.suffix.lower()
        if suffix in DRAWN:
            drawn(DRAWN[suffix])

    def _check_criterion(self) -> None:
        """Check the criterion where the fp32 model's metric is known without running it."""
        metric, criterion = self.data.built_in, self.goal.criterion
        if metric is not None and metric.ideal is not None:
            stated = replace(criterion, higher_is_better=metric.higher_is_better)
            stated.check(metric.ideal, metric.worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is left of a goal's budget."""

    goal: Goal

    def spent(self, trials: int) -> str:
        """Why no further trial may begin after ``trials`` of them; empty if one may.

        Time is no reason against the first: without it all that was measured is for nothing.
        """
        goal = self.goal
        if goal.max_trials is not None and trials >= goal.max_trials:
            most = "one trial" if goal.max_trials == 1 else f"{goal.max_trials} trials"
            return f"the limit of {most} is reached"
        if goal.timeout_s is not None and trials and self.seconds >= goal.timeout_s:
            return f"the limit of {goal.timeout_s:g} s is reached"
        return ""

    def within(self, effort: Effort) -> Effort:
        """``effort``, which times no model further once the time is over."""
        return replace(effort, settle_s=min(effort.settle_s, self.left_s))

    @property
    def seconds(self) -> float:
        """Seconds since the goal's start."""
        return time.perf_counter() - self.goal.start_s

    @property
    def left_s(self) -> float:
        """Seconds until the goal's timeout, 0 after it; infinite without one."""
        timeout_s = math.inf if self.goal.timeout_s is None else self.goal.timeout_s
        return max(timeout_s - self.seconds, 0.0)


def takes(share: float, min_speedup: float) -> str:
    """Text: the share of fp32's cost that a plan takes; if below 1, the share that counts."""
    if share >= 1:
        return f"takes {share:.3g} times what fp32 takes"
    return f"takes {share:.3g} of what fp32 takes, and at most {1 / min_speedup:.3g} counts"
