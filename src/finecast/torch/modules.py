"""``convert`` and ``tune`` for modules and exported programs in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
from torch.export import ExportedProgram

from finecast.data.criterion import Criterion
from finecast.data.response import nan_outputs
from finecast.engines.base import Feeds, Session
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.session import Arguments, arguments_of
from finecast.errors import UsageError, UserCodeError
from finecast.frontends.torch.converted import ConvertedModule, own_tensors
from finecast.pipeline import tuning
from finecast.pipeline.artefact import Destination
from finecast.pipeline.conversion import NOTHING_CONVERTED
from finecast.pipeline.evaluation import check_baseline, check_finite, metric_value
from finecast.pipeline.goal import Goal, Objective
from finecast.pipeline.model import RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.sources import known_outputs
from finecast.pipeline.workload import Workload
from finecast.progress import Progress, reporting, silent
from finecast.rules import UserRule
from finecast.rules.guests import rule_set_of
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.subjects.torch.conversion import slow_formats
from finecast.subjects.torch.model import of_module
from finecast.subjects.torch.subject import TuneOptions
from finecast.torch.recorded_calls import RecordedCalls
from finecast.usercode import guarded

Evaluate = Callable[[torch.nn.Module], float]
_LEAST_STEPS: Final = 2


def tune(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None,
    *,
    evaluate: Evaluate,
    example_kwargs: Mapping[str, Any] | None = None,
    baseline: float | None = None,
    criterion: Criterion | None = None,
    objective: Objective | str = Objective.LATENCY,
    policy: str | Policy = DEFAULT_POLICY,
    of: Sequence[str] = (),
    user_rules: Mapping[str, UserRule] | None = None,
    max_trials: int | None = None,
    timeout_s: float | None = None,
    options: TuneOptions | None = None,
    progress: Progress | bool = True,
) -> Outcome:
    """Find the fastest plan for which ``evaluate(module)`` keeps ``criterion``.

    Laws: the result never misses the criterion and, run in the same way on this machine, is
    never worse than fp32 by the objective. Where nothing helps, its ``model`` is the module as
    it was given, and ``why`` says why.

    Args:
        module: The module, or an exported program.
        example_inputs: Positional inputs, on which plans are timed and their errors estimated.
            None or empty for an exported program, which has its own.
        evaluate: Returns the accuracy of a module.
        example_kwargs: Keyword inputs.
        baseline: The value of ``evaluate`` for ``module``, if it is known already.
        criterion: The accuracy to keep; by default at most 1% less.
        objective: What to minimise: ``latency`` of a call, ``size`` of the module's state, or
            ``memory`` of the running module, by an estimate.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        of: Names of the outputs that plans' errors are of, the worst of them; by default all
            that copy no input. They are named as in the exported program.
        user_rules: Rule functions by name.
        max_trials: The most evaluations; those not needed are spent on faster plans.
        timeout_s: Seconds after which no evaluation is begun.
        options: How plans are tried.
        progress: True shows progress on a terminal and in a notebook, False nothing; or a
            function that is told of each step.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
        UserCodeError: If ``evaluate`` fails, or what it returns says nothing of the module:
            no finite number, or one that does not follow from the module's outputs.
    """
    how, kept = _checked(options or TuneOptions(), criterion or Criterion())
    goal = Goal(
        criterion=kept,
        objective=Objective.of(objective),
        max_trials=max_trials,
        timeout_s=timeout_s,
    )
    with reporting(progress, "tuning") as report:
        wanted = Policy.of(policy)
        arguments = arguments_of(module, example_inputs, example_kwargs)
        model = of_module(module, arguments, dynamic_shapes=how.dynamic_shapes, policy=wanted)
        subject = model.tuned_as(how)
        found = tuning.tune(
            subject,
            ModuleWorkload(
                function=evaluate,
                known=baseline,
                criterion=goal.criterion,
                examples=model.examples,
                of=known_outputs([of] if isinstance(of, str) else of, subject.reference),
            ),
            goal,
            wanted,
            user_rules=tuple((user_rules or {}).items()),
            progress=report,
        )
    return _with_own_tensors(found)


def _with_own_tensors(found: Outcome) -> Outcome:
    if isinstance(found.model, ConvertedModule):
        own_tensors(found.model)
    return found


def _checked(how: TuneOptions, criterion: Criterion) -> tuple[TuneOptions, Criterion]:
    """The arguments; a UsageError for other kinds, or too few steps."""
    _check_is(criterion, Criterion, "criterion", "finecast.Criterion(tolerance=0.01)")
    _check_is(how, TuneOptions, "options", "finecast.torch.TuneOptions(steps=3)")
    if how.steps < _LEAST_STEPS:
        raise UsageError(
            f"{how.steps} steps: the fastest plan and the most accurate one are two",
            where="options",
            fix=f"give at least {_LEAST_STEPS}, or max_trials for fewer evaluations",
        )
    return how, criterion


def _check_is(given: object, kind: type, where: str, example: str) -> None:
    if not isinstance(given, kind):
        raise UsageError(
            f"{given!r} is no {kind.__name__}", where=where, fix=f"give {example}"
        )


class _OfModule(Protocol):
    module: torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWorkload(Workload):
    """A user's evaluation of a module; the only data are the module's example inputs."""

    function: Evaluate
    known: float | None
    criterion: Criterion
    examples: Feeds
    of: tuple[str, ...] = ()

    @property
    def higher_is_better(self) -> bool:
        """Whether higher is better, by the criterion."""
        return self.criterion.higher_is_better

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The function's value for the session's module; for fp32 ``known``, if given.

        Raises:
            UserCodeError: If the function fails, or what it returns for fp32 says nothing.
        """
        if reference is None and self.known is not None:
            return self.known
        module = cast("_OfModule", session).module
        if reference is not None:
            return self._called(module)
        calls = RecordedCalls(module)
        try:
            with calls.recorded():
                value = self._called(module)
        except (
            UserCodeError
        ):  # it may compile the module as one graph, and then needs it as is
            value = self._called(module)
            check_finite(value, self._name)
            return value
        check_baseline(
            value,
            self._name,
            runs=calls.runs > 0,
            again=lambda: self._within(module, calls.replayed()),
            replaced=lambda how: (
                self._within(module, calls.replaced(how)) if calls.is_whole else None
            ),
            call="the module",
        )
        return value

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", "evaluate")

    def _within(self, module: torch.nn.Module, calls: AbstractContextManager[None]) -> float:
        with calls:
            return self._called(module)

    def _called(self, module: torch.nn.Module) -> float:
        with (
            torch.no_grad(),
            guarded(
                "the evaluation function failed",
                where=self._name,
                fix="it gets a module and returns a number: try it on the fp32 module",
            ),
        ):
            found = self.function(module)
        return metric_value(found, self._name)

    def calibration(self) -> Iterable[Feeds]:
        """The module's example inputs."""
        return (self.examples,)


def convert(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    rule_set: str = "finecast",
    calibration: Iterable[Arguments] = (),
    progress: Progress = silent,
) -> ConvertedModule:
    """Convert a module to mixed precision by one plan over its whole graph.

    Laws: inputs and outputs keep their types; ops that stay fp32 compute as before; ``auto``
    never chooses a format that is slower here; neither the example inputs nor the state of
    ``module`` change, now or when the result runs. The result has tensors of its own, so that
    it stays as it is where ``module`` is trained on. The predicted error of ``auto`` and
    ``like-autocast`` is at most that of ``torch.autocast``: among such plans ``auto`` takes
    the fastest, and ``like-autocast``, with every product low, the one that moves least
    memory. The plan, with every rule's reason, is ``result.finecast_plan``.

    Args:
        module: The module (captured in evaluation mode), or an exported program.
        example_inputs: Positional inputs, on which the plan's errors are estimated. May be
            left out for an exported program, which has its own.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        dynamic_shapes: As ``torch.export.export`` takes them.
        example_kwargs: Keyword inputs.
        user_rules: Rules by name, as ``--rules`` of the command line takes them.
        rule_set: ``finecast``, or a guest's (``rules/guests.py``), as ``raf``.
        calibration: Positional and keyword inputs of further calls, each as a pair: int8 has
            scales by the ranges of values on these. By default by those on the example inputs.
        progress: Told of each step: for int8 the module is compiled, which takes a while.

    Raises:
        ModelError: If the module cannot be captured, or a guest's rules lack an op.
        UsageError: If the policy cannot be read, a module comes without inputs, or an
            override names no op of the module.
    """
    arguments = arguments_of(module, example_inputs, example_kwargs)
    wanted = Policy.of(policy)
    model = of_module(module, arguments, dynamic_shapes=dynamic_shapes, policy=wanted)
    model.rule_set = rule_set_of(rule_set)
    model.calibration = [model.signature.feeds(*one) for one in calibration]
    model.check_policy(wanted)
    options = RunOptions(user_rules=user_rules or {}, verify=False, progress=progress)
    done = model.convert(Destination(path=None), wanted, options)
    engine = model.runners(None)[0]
    assert isinstance(engine, TorchEngine)
    fp32 = nan_outputs(model.reference().run(model.examples), "the example inputs")
    for text in (*fp32, *done.warnings, *slow_formats(done.plan, engine)):
        if not text.startswith(NOTHING_CONVERTED):  # the plan at hand says that, with reasons
            warnings.warn(text, stacklevel=2)
    own_tensors(done.model)
    result: ConvertedModule = done.model
    return result
