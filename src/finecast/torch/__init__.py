"""finecast for PyTorch: ``convert``, ``tune``, ``compile``, ``profile``; ``.pt2`` files."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from finecast.errors import EngineError, UsageError

if importlib.util.find_spec("torch") is None:
    raise EngineError("finecast.torch needs PyTorch", fix="pip install 'finecast[torch]'")

import torch
from torch.export import ExportedProgram

from finecast import api
from finecast.data.criterion import Criterion
from finecast.data.response import nan_outputs
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.session import Arguments, arguments_of
from finecast.frontends.torch.converted import ConvertedModule
from finecast.native.conversion_notes import NOTHING_CONVERTED
from finecast.native.torch.conversion import slow_formats
from finecast.native.torch.files import export, load, save
from finecast.native.torch.model import of_module
from finecast.native.torch.subject import TuneOptions
from finecast.native.torch.workload import Evaluate
from finecast.rules.guests import rule_set_of
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.torch.profiling import (
    Profile,
    activation_bytes,
    peak_bytes,
    profile,
    resident_bytes,
    saved_bytes,
)
from finecast.training.backend import Backend, compile  # noqa: A004 - as torch.compile
from finecast.training.step import TrainingStep
from finecast.tuning.result import Result

__all__ = [
    "Backend",
    "Profile",
    "Result",
    "TrainingStep",
    "TuneOptions",
    "activation_bytes",
    "compile",
    "convert",
    "export",
    "load",
    "peak_bytes",
    "profile",
    "resident_bytes",
    "save",
    "saved_bytes",
    "tune",
]

_LEAST_STEPS: Final = 2


def tune(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None,
    *,
    evaluate: Evaluate,
    example_kwargs: Mapping[str, Any] | None = None,
    criterion: Criterion | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    options: TuneOptions | None = None,
    **more: Any,
) -> Result:
    """``finecast.tune`` of a module: the fastest plan for which ``evaluate(module)`` is kept.

    Laws: the result never misses the criterion and, run in the same way on this machine, is
    never worse than fp32 by the objective. Where nothing helps, its ``model`` is the module as
    it was given, and ``why`` says why.

    Args:
        module: The module, or an exported program.
        example_inputs: Positional inputs, on which plans are timed and their errors estimated.
            None or empty for an exported program, which has its own.
        evaluate: Returns the accuracy of a module.
        example_kwargs: Keyword inputs.
        criterion: The accuracy to keep; by default at most 1% less.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        options: How plans are tried.
        more: Other options of ``finecast.tune``: ``objective``, ``max_trials``,
            ``baseline`` and the like.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
        UserCodeError: If ``evaluate`` fails, or what it returns says nothing of the module:
            no finite number, or one that does not follow from the module's outputs.
    """
    how, kept = _checked(options or TuneOptions(), criterion or Criterion())
    arguments = arguments_of(module, example_inputs, example_kwargs)
    model = of_module(module, arguments, dynamic_shapes=how.dynamic_shapes)
    model.tuning = how
    worse = not kept.higher_is_better
    return api.tune(
        model,
        policy=policy,
        evaluate=evaluate,
        criterion=kept,
        lower_is_better=worse or None,
        **more,
    )


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


def convert(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    rule_set: str = "finecast",
    calibration: Iterable[Arguments] = (),
    **more: Any,
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
        rule_set: ``finecast``, or a guest's (``rules/guests.py``), as ``raf``.
        calibration: Positional and keyword inputs of further calls, each as a pair: int8 has
            scales by the ranges of values on these. By default by those on the example inputs.
        more: Other options of ``finecast.convert``: ``user_rules``, ``progress`` and the like.

    Raises:
        ModelError: If the module cannot be captured, or a guest's rules lack an op.
        UsageError: If the policy cannot be read, a module comes without inputs, or an
            override names no op of the module.
    """
    arguments = arguments_of(module, example_inputs, example_kwargs)
    model = of_module(module, arguments, dynamic_shapes=dynamic_shapes)
    model.rule_set = rule_set_of(rule_set)
    model.calibration = [model.signature.feeds(*one) for one in calibration]
    done = api.convert(model, policy=policy, verify=False, **more)
    engine = model.runners(None)[0]
    assert isinstance(engine, TorchEngine)
    fp32 = nan_outputs(model.reference().run(model.examples), "the example inputs")
    for text in (*fp32, *done.warnings, *slow_formats(done.plan, engine)):
        if not text.startswith(NOTHING_CONVERTED):  # the plan at hand says that, with reasons
            warnings.warn(text, stacklevel=2)
    result: ConvertedModule = done.model
    return result
