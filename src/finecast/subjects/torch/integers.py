"""Plans in int8 for PyTorch modules, which run on integers if compiled with frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from finecast.engines.torch.integers import compiled_frozen, relative_error
from finecast.engines.torch.kernel_check import flat_inputs
from finecast.engines.torch.planning import Sensitivities, device_of
from finecast.engines.torch.session import Arguments
from finecast.errors import EngineError, UsageError
from finecast.frontends.torch import Captured
from finecast.frontends.torch.observing import observe
from finecast.frontends.torch.probing import Isolated, switched
from finecast.numbers.formats import Format
from finecast.pipeline.adjusting import no_adjustments
from finecast.pipeline.subject import UserRules
from finecast.planning.planner import Planner
from finecast.planning.units import make_units
from finecast.progress import Progress, silent
from finecast.rules.facts import merge
from finecast.rules.override import check_overrides
from finecast.rules.policy import Policy, Scope
from finecast.rules.user_rules import check_names
from finecast.subjects.engine.roundings import points_of, probe_sensitivity
from finecast.subjects.torch.judging import judged
from finecast.subjects.torch.source import TorchBuilt, built_of, kept_advice

FREEZING: Final = "torch._inductor.config.freezing = True"
HOW_TO_RUN: Final = (
    f"set {FREEZING} and run it by torch.compile under torch.no_grad():"
    " its products are on integers there alone"
)

# The compiled module's error may be this many times that of the module's own ops, and _SLACK
# more: a value between two codes may get the other code if sums are in another order, which is
# no more than half a step of all outputs. Beyond that, kernels are wrong: on CPUs without VNNI
# sums of 8-bit products saturate.
_MORE_WRONG: Final = 1.25
_SLACK: Final = Format.INT8.unit_roundoff
# Each turn drops ops, and the compiler fuses the others anew: more turns have not been needed.
_MOST_TURNS: Final = 4
# Most ops that a message names.
_NAMED: Final = 3


def quantized(
    captured: Captured,
    arguments: Arguments,
    policy: Policy,
    rules: UserRules,
    progress: Progress = silent,
    calibration: Iterable[Arguments] = (),
) -> tuple[TorchBuilt, tuple[str, ...]]:
    """The module with every product in int8 that the compiled module runs on integers.

    Scales are chosen by the ranges of values on the arguments in ``calibration``, else on the
    example inputs. Any other product has the next of the policy's formats.

    Returns:
        The module, and notes for the user.

    Raises:
        UsageError: If the policy, the device or the compiler does not allow int8.
    """
    graph = captured.graph
    args = flat_inputs(*arguments)
    _check(policy, device_of(captured.module, args))
    check_names(policy, graph)
    check_overrides(graph)
    progress("observe", 0, 1)
    seen = [flat_inputs(*one) for one in calibration] or [args]
    facts = reduce(merge, (observe(captured, one) for one in seen))
    planner = judged(captured, arguments, policy, rules, facts)
    advice = kept_advice(graph, policy)
    try:
        planner, told = drop_unfused(captured, planner, arguments, progress)
    except EngineError as error:
        why = f"{error.what}: every op keeps fp32; {error.fix}"
        return built_of(captured, planner.highest(error.what)), (*advice, why)
    built = built_of(captured, planner.lowest())
    runs = any(d.format is Format.INT8 for d in built.plan.decisions)
    nothing = () if told else ("no op can have int8 here: see the plan's reasons",)
    return built, (*advice, *told, *((HOW_TO_RUN,) if runs else nothing))


def drop_unfused(
    captured: Captured, planner: Planner, arguments: Arguments, progress: Progress = silent
) -> tuple[Planner, tuple[str, ...]]:
    """``planner`` without products that compiled modules do not run on integers; and notes.

    Raises:
        UsageError: If the module cannot be compiled.
        EngineError: If products on integers are wrong here.
    """
    told: tuple[str, ...] = ()
    for turn in range(_MOST_TURNS):
        progress("compile", turn, turn + 1)
        failed = unfused(captured, built_of(captured, planner.lowest(Format.INT8)), arguments)
        if not failed:
            break
        planner = planner.without(Format.INT8, dict.fromkeys(failed, "floats"))
        first = ", ".join(repr(name) for name in failed[:_NAMED])
        more = f" and {len(failed) - _NAMED} more" if failed[_NAMED:] else ""
        told = (*told, f"not in int8: the compiled module runs {first}{more} on floats")
    return planner, told


def unfused(captured: Captured, built: TorchBuilt, arguments: Arguments) -> list[str]:
    """Names of products that the plan puts in int8 and the compiled module runs on floats.

    Raises:
        UsageError: If the module cannot be compiled.
        EngineError: If what it computes on integers is wrong.
    """
    if Format.INT8 not in built.plan.formats.values():
        return []
    run, failed = _compiled(built, arguments)
    flat = flat_inputs(*arguments)
    with torch.no_grad():
        exact, stated = (
            tree_leaves(Isolated(module).run(*flat, enable_io_processing=False))
            for module in (captured.module, built.model)
        )
        got = tree_leaves(run(*copy.deepcopy(arguments[0]), **copy.deepcopy(arguments[1])))
    error, own = relative_error(got, exact), relative_error(stated, exact)
    if not error <= _MORE_WRONG * own + _SLACK:
        raise EngineError(
            f"products on integers are wrong by {error:.2g} on this CPU, not by {own:.2g}",
            fix="it takes VNNI",
        )
    return named(captured, failed)


def named(captured: Captured, fx_names: Collection[str]) -> list[str]:
    """Names in the graph of the ops with these FX names."""
    nodes = captured.binding.nodes
    names = {n.name: nodes[n.id].name for n in captured.graph.nodes}
    return [name for name, fx in names.items() if fx in fx_names]


def _compiled(
    built: TorchBuilt, arguments: Arguments
) -> tuple[Callable[..., Any], frozenset[str]]:
    from torch._inductor.exc import InvalidCxxCompiler

    args, kwargs = arguments
    try:
        return compiled_frozen(built.model, args, kwargs)
    except RuntimeError as error:
        # Dynamo's own error begins with the backend's name; what failed is within.
        cause = getattr(error, "inner_exception", error)
        missing = isinstance(cause, InvalidCxxCompiler)
        lines: Sequence[Any] = str(cause).strip().splitlines() or [""]
        raise UsageError(
            "int8 runs in compiled modules, and this one cannot be compiled:"
            f" {type(cause).__name__}: {lines[0]}",
            where="policy",
            fix="install a C++ compiler, or use bf16"
            if missing
            else "see if torch.compile(module)(*example_inputs) works, or use bf16",
        ) from error


def coded_sensitivities(
    planner: Planner,
    captured: Captured,
    args: Sequence[Any],
    progress: Progress,
    counted: Collection[int] | None = None,
) -> Sensitivities:
    """Errors of each rounding to codes alone, by fake quantization in the module's graph.

    ``counted`` are numbers of the outputs that errors are of; None for all.
    """
    formats = planner.policy.formats
    units = make_units(planner.graph, planner.permissions, formats)
    points = points_of(planner, units, {f: () for f in formats if f.runs_on_codes})
    found = probe_sensitivity(
        planner,
        points,
        lambda rounded: switched(captured, rounded, args),
        progress,
        counted=counted,
    )
    return {fmt: (where, found[fmt]) for fmt, where in points.items()}


def check_adjusts(policy: Policy) -> None:
    """Raise UsageError if the policy adjusts operands: those of programs are not."""
    if policy.adjust:
        raise no_adjustments("a program of PyTorch")


def check_device(policy: Policy, device: str) -> None:
    """Raise UsageError for int8 on a device other than the CPU."""
    if Format.INT8 in policy.formats and device != "cpu":
        raise UsageError(
            f"int8 on {device}: plans are made for the CPU's kernels", fix="use bf16 or fp16"
        )


def _check(policy: Policy, device: str) -> None:
    """Raise UsageError for a policy that cannot be converted to int8 without measuring."""
    if policy.scope is Scope.AUTO:
        raise UsageError(
            f"policy {policy.label}: what is converted by it is measured, op by op",
            fix='use tune, or "matmult:int8" for all products',
        )
    check_adjusts(policy)
    check_device(policy, device)
