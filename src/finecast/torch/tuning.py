"""``tune``: the fastest plan of a module that keeps the accuracy asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.export import ExportedProgram

from finecast.data.criterion import Criterion
from finecast.engines.base import Feeds, Session
from finecast.pipeline import tuning
from finecast.pipeline.goal import Goal
from finecast.pipeline.objective import Objective
from finecast.pipeline.outcome import Outcome
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import Policy
from finecast.subjects.torch.subject import TorchSubject, TuneOptions
from finecast.usercode import guarded

Evaluate = Callable[[torch.nn.Module], float]


def tune(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None,
    *,
    evaluate: Evaluate,
    example_kwargs: Mapping[str, Any] | None = None,
    baseline: float | None = None,
    criterion: Criterion | None = None,
    objective: Objective | str = Objective.LATENCY,
    policy: str | Policy = "auto:bf16",
    user_rules: Mapping[str, UserRule] | None = None,
    max_trials: int | None = None,
    timeout_s: float | None = None,
    options: TuneOptions | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest plan for which ``evaluate(module)`` keeps ``criterion``.

    Laws: the result never misses the criterion and is never worse than fp32 here by the
    objective, run in the same way; where nothing helps its ``model`` is the module as it was,
    and ``why`` says why.

    Args:
        module: The module, or an exported program.
        example_inputs: Positional inputs: plans are timed and their errors estimated on them.
            None, or none, for an exported program, which carries its own.
        evaluate: The accuracy of a module.
        example_kwargs: Keyword inputs.
        baseline: What ``evaluate`` gives for ``module``, where that is known already.
        criterion: The accuracy to keep; by default at most 1% less.
        objective: What to have least of: ``latency`` of a call, ``size`` of the module's
            state, or ``memory`` of the running module, by an estimate.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        user_rules: Rule functions by name.
        max_trials: Evaluations of plans at most; what is left goes into faster plans.
        timeout_s: Seconds after which none is begun.
        options: How plans are tried.
        progress: Told of each step.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
        UserCodeError: If ``evaluate`` fails.
    """
    goal = Goal(
        criterion=criterion or Criterion(),
        objective=Objective.of(objective),
        max_trials=max_trials,
        timeout_s=timeout_s,
    )
    subject = TorchSubject.of_module(
        module, example_inputs, example_kwargs, options or TuneOptions()
    )
    return tuning.tune(
        subject,
        ModuleWorkload(function=evaluate, known=baseline, criterion=goal.criterion),
        goal,
        Policy.of(policy),
        user_rules=tuple((user_rules or {}).items()),
        progress=progress,
    )


class _OfModule(Protocol):
    module: torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWorkload:
    """A user's function of a module; the examples are all the data that is known of."""

    function: Evaluate
    known: float | None
    criterion: Criterion
    digest: str = ""
    worst: None = None
    warnings: tuple[str, ...] = ()

    @property
    def higher_is_better(self) -> bool:
        """As the criterion says."""
        return self.criterion.higher_is_better

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """What the function gives of the session's module."""
        if reference is None and self.known is not None:
            return self.known
        module = cast("_OfModule", session).module
        name = getattr(self.function, "__qualname__", "evaluate")
        with (
            torch.no_grad(),
            guarded(
                "the evaluation function failed",
                where=name,
                fix="it gets a module and returns a number: try it on the fp32 module",
            ),
        ):
            return float(self.function(module))

    def calibration(self) -> Iterable[Feeds]:
        """None: the examples serve."""
        return ()

    def timing(self) -> Sequence[Feeds]:
        """None: the examples serve."""
        return ()
