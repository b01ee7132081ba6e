"""A PyTorch module, run compiled or as it is: accuracy and times are measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from finecast.calls import checks
from finecast.data.workload import Workload
from finecast.engines.base import Feeds, Session
from finecast.engines.exact import Exact
from finecast.engines.torch import TorchEngine, deployed
from finecast.engines.torch.integers import Prepare, compiled_frozen
from finecast.engines.torch.rates import wait_for
from finecast.engines.torch.session import (
    Arguments,
    ModuleSession,
    as_engine_error,
    unwritten,
)
from finecast.errors import EngineError, UsageError, UserCodeError
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import TorchPrepared
from finecast.frontends.torch.capture import evaluating
from finecast.frontends.torch.runnable import RunnableModule
from finecast.measure.racing import Effort, Race
from finecast.native.adjusting import Judged, range_scaled
from finecast.native.engine_subject import EngineExamined, EngineSubject
from finecast.native.observing import observe_for_rules
from finecast.native.planning import Judging
from finecast.native.roundings import Times
from finecast.native.subject import Built, UserRules
from finecast.native.torch.planning import (
    FREEZING,
    check_device,
    compiled_times,
    device_of,
    judged,
    measured_errors,
    named,
    uses_codes,
)
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.sensitivity import Sensitivity
from finecast.progress import Progress, silent
from finecast.rules.calibration import uncalibrated
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.usercode import guarded

if TYPE_CHECKING:
    from finecast.native.torch.model import TorchBuilt, TorchModel

FROZEN_TIMES: Final = (
    f"times are those of modules compiled with frozen weights ({FREEZING}): on integers"
    " products run there alone"
)

_AS_IT_IS: Final = (
    "no plan was worth compiling: the time of a call is that of the module as it is"
)

# Plans of the frontier that are built and timed: each costs a compilation.
_STEPS: Final = 5
_LEAST_STEPS: Final = 2


def deployed_frozen() -> Prepare:
    """``deployed`` with frozen weights.

    A module that was compiled without that option before is compiled again.
    """
    if deployed() is not torch.compile:
        return deployed()
    return partial(torch.compile, options={"freezing": True})


def _prepared_by(prepare: Prepare, module: torch.nn.Module) -> Callable[..., Any]:
    """What a user's ``prepare`` gives for a module.

    Raises:
        UserCodeError: If it fails, or gives nothing that can be called.
    """
    where = getattr(prepare, "__qualname__", "prepare")
    fix = "it gets a module and returns what is called in its place, as torch.compile does"
    with guarded("the function prepare failed", where=where, fix=fix):
        run = prepare(module)
    if not callable(run):
        raise UserCodeError(
            f"the function prepare returns a {type(run).__name__}, which cannot be called",
            where=where,
            fix=fix,
        )
    return run


def waiting_notes(denied: float) -> tuple[str, ...]:
    """A note that times are wrong on a busy machine, unless one thread runs a module.

    OpenMP's threads wait for the last one of them by spinning. Where that one waits for a
    processor, the others compute nothing and count as computing: a net of 12 ms on one thread
    took 200 ms on two beside other processes, and ten times the processor time.

    Args:
        denied: The share of the processor time wanted that other processes had.
    """
    threads = torch.get_num_threads()
    passive = "PASSIVE" in os.environ.get("OMP_WAIT_POLICY", "").upper()
    if not denied or threads == 1 or passive or os.environ.get("GOMP_SPINCOUNT") == "0":
        return ()
    note = (
        f"times and speeds are wrong on this busy machine, as PyTorch's {threads} threads use"
        " the processor while they wait for one another: set OMP_NUM_THREADS=1, or tune on a"
        " quiet machine"
    )
    return (note,)


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How plans of modules are tried.

    Attributes:
        prepare: ``prepare(module)`` is what is timed; by default the compiled module, if there
            is a compiler.
        probing: Probe every rounding alone, instead of one backward pass for all.
        steps: Plans of the frontier that are built and timed, at least 2.
        dynamic_shapes: As ``torch.export.export`` takes them.
    """

    prepare: Prepare | None = None
    probing: bool = False
    steps: int = _STEPS
    dynamic_shapes: Any = None

    def __post_init__(self) -> None:
        """Refuse too few steps.

        Raises:
            UsageError: If they are fewer than two.
        """
        if self.steps < _LEAST_STEPS:
            raise UsageError(
                f"{self.steps} steps: the fastest plan and the most accurate one are two",
                where="options",
                fix=f"give at least {_LEAST_STEPS}, or max_trials for fewer evaluations",
            )


@dataclass(slots=True, kw_only=True)
class TorchSubject(EngineSubject):
    """A PyTorch module to tune; ``options`` say how plans are tried."""

    model: TorchModel  # pyright: ignore[reportIncompatibleVariableOverride]  # never set anew
    options: TuneOptions = TuneOptions()
    _frozen: bool = field(default=False, init=False)
    _run: Callable[..., Any] | None = field(default=None, init=False)
    _progress: Progress = field(default=silent, init=False)

    def __post_init__(self) -> None:
        """An eager engine times modules as they are."""
        eager = isinstance(self.engine, TorchEngine) and self.engine.eager
        if eager and self.options.prepare is None:
            self.options = replace(self.options, prepare=lambda module: module)

    @property
    def formats(self) -> tuple[Format, ...]:
        """bf16."""
        return (Format.BF16,)

    @property
    def threads(self) -> int:
        """Those of PyTorch in this process."""
        return torch.get_num_threads()

    @property
    def max_steps(self) -> int:
        """The number of steps in the options."""
        return self.options.steps

    @property
    def compiles(self) -> bool:
        """Whether ``torch.compile`` is what modules are timed under.

        Not for modules with codes: whether their products run on integers is seen compiled.
        """
        prepare = self.options.prepare
        return (
            not self._frozen and (deployed() if prepare is None else prepare) is torch.compile
        )

    @property
    def _module(self) -> torch.nn.Module:
        return cast("ModuleSession", self.reference).module

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that PyTorch's ops or compiled kernels lack."""
        EngineSubject.check_formats(self, policy)
        check_device(policy, device_of(self._module, ()))

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> TorchExamined:
        """Let the rules judge; drop missing kernels, and int8 where it runs on floats."""
        self._progress = progress
        self._frozen = uses_codes(policy, self.engine.device)
        prepared, engine = self.model.prepare(policy), self.engine
        assert isinstance(engine, TorchEngine)
        ranges = any(f.has_less_range or f.multiplies_codes for f in policy.formats)
        facts = observe_for_rules(prepared, workload.calibration, ranges=ranges)
        self.tell(*uncalibrated(prepared.graph, policy.formats, facts))
        if self._frozen:
            self.tell(FROZEN_TIMES)

        def judge(model: PreparedModel, facts: Mapping[int, ValueFacts]) -> Planner:
            assert isinstance(model, TorchPrepared)
            how = Judging(facts=facts, user_rules=user_rules, measured=True)
            planner, notes = judged(
                self.model, model, policy, engine, how, workload.timing()[0], progress
            )
            self.tell(*notes)
            return planner

        own = Judged(prepared=prepared, facts=facts, planner=judge(prepared, facts))
        judgement = range_scaled(own, judge)
        assert isinstance(judgement.prepared, TorchPrepared)
        return TorchExamined(
            subject=self,
            prepared=judgement.prepared,
            facts=judgement.facts,
            planner=judgement.planner,
            workload=workload,
            progress=progress,
        )

    def told_on(self, workload: Workload) -> Sequence[Feeds]:
        """The first of the feeds that are timed: that of the backward pass."""
        return workload.timing()[:1]

    def session(self, built: Built) -> Session:
        """A session of a plan's module, not compiled."""
        if built.loaded is None:
            program = self.model.file.program
            built.loaded = self.engine.load(
                RunnableModule(module=built.model, program=program)
            )
        return built.loaded

    def tried(self, built: Built) -> Session:
        """``session``, not kept: a module that is not compiled is loaded in no time."""
        return self.session(replace(built))

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Time all modules, each prepared as it is deployed."""
        signature = self.model.signature
        args, kwargs = signature.unflattened(signature.leaves(workload.timing()[0]))
        device = signature.device.type

        def call(run: Callable[..., Any]) -> object:
            with torch.no_grad(), as_engine_error():
                outputs = run(*args, **kwargs)
                wait_for(device)
            return outputs

        original = self._module
        modules = [original, *(build.model for build in built.values())]
        calls: dict[str, Callable[[], object]] = {}
        with evaluating(original), unwritten(modules):
            for name, build in built.items():
                try:
                    calls[name] = partial(call, self._prepared(build, (args, kwargs)))
                except EngineError as error:
                    self.tell(build.dropped(error))
            if not built and self._run is None and self.compiles:
                self.tell(_AS_IT_IS)  # a compilation takes longer than all else up to here
                return Race.of(partial(call, original), {}, effort)
            anchor = self._prepared(None, (args, kwargs))
            self._compile([partial(call, anchor), *calls.values()])
            race = Race.of(partial(call, anchor), calls, effort)
            self.tell(*(built[name].dropped(error) for name, error in race.failed.items()))
            self.tell(*waiting_notes(race.denied))
            return race

    def _compile(self, calls: Sequence[Callable[[], object]]) -> None:
        """Call each module once: ``torch.compile`` compiles at the first call."""
        for done, first in enumerate(calls):
            self._progress("compile", done, len(calls))
            with suppress(EngineError):  # it fails in the race, too, and leaves it
                first()
        self._progress("timing", 0, 1)

    def _prepared(self, built: Built | None, arguments: Arguments) -> Callable[..., Any]:
        """The prepared module of a plan, or of fp32 for None; made once."""
        if built is None:
            # Compared with None, as the truth of a compiled module may be its length.
            if self._run is None:
                self._run = self._prepare(self._module, arguments)[0]
            return self._run
        build = cast("TorchBuilt", built)
        if build.run is None:
            run, failed = self._prepare(build.model, arguments)
            if failed:
                raise EngineError(
                    f"{failed[0]!r} is planned on integers and runs in floats",
                    fix="keep it in fp32 by --exclude",
                )
            build.run = run
        return build.run

    def _prepare(
        self, module: torch.nn.Module, arguments: Arguments
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        """A module as it is deployed, and its products on codes that run on floats there."""
        own = self.options.prepare
        prepare = None if own is None else partial(_prepared_by, own)
        if not self._frozen:
            return (prepare or deployed())(module), ()
        run, failed = compiled_frozen(module, *arguments, prepare or deployed_frozen())
        return run, named(self.model.file.captured(Policy().label), failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchExamined(EngineExamined):
    """A module whose every op the rules have judged."""

    subject: TorchSubject
    prepared: TorchPrepared

    def times(self, exact: Exact, *, of_time: bool) -> Times:
        """Times by single kernels."""
        self.progress("profile", 0, 1)
        return compiled_times(self.planner, self.prepared)

    def _key(self, fmt: Format, times: Times, exact: Exact) -> str:
        """The same; errors that are probed are others than those of a backward pass."""
        key = EngineExamined._key(self, fmt, times, exact)
        return f"{key}, probed" if self.subject.options.probing else key

    def errors(self, times: Times, exact: Exact) -> Mapping[Format, Sensitivity]:
        """Errors by one backward pass, of codes by probing."""
        self.progress("sensitivity", 0, 1)
        probing = self.subject.options.probing
        return measured_errors(
            self.prepared, self.planner, times, exact, probing=probing, progress=self.progress
        )
