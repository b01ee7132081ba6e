"""Plans in int8 for PyTorch modules, which run on integers if compiled with frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from finecast.engines.torch.integers import compiled_frozen, relative_error
from finecast.engines.torch.session import Arguments
from finecast.errors import EngineError, UsageError
from finecast.frontends.torch import Captured, TorchApplied, applied
from finecast.frontends.torch.runnable import Isolated
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.progress import Progress, silent
from finecast.rules.policy import Policy, Scope

FREEZING: Final = "torch._inductor.config.freezing = True"
HOW_TO_RUN: Final = (
    f"set {FREEZING} and run it by torch.compile under torch.no_grad():"
    " its products are on integers there alone"
)

_WRONG: Final = "wrong numbers, as on CPUs without VNNI,"
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


def uses_codes(policy: Policy) -> bool:
    """Whether ops may read codes: modules are then compiled with frozen weights."""
    return policy.scope is not Scope.NONE and any(f.runs_on_codes for f in policy.formats)


def with_codes(
    captured: Captured, planner: Planner, arguments: Arguments, progress: Progress = silent
) -> tuple[Planner, tuple[str, ...]]:
    """``planner`` without products that compiled modules do not run on integers; and notes.

    Where products on integers are wrong here, no op has their format.

    Raises:
        UsageError: If the module cannot be compiled.
    """
    told: list[str] = []
    without, nodes = planner, planner.graph.nodes
    for turn in range(_MOST_TURNS):
        progress("compile", turn, turn + 1)
        built = applied(captured, without.lowest(Format.INT8))
        try:
            failed = unfused(captured, built, arguments)
        except EngineError as error:
            names = [nodes[i].name for i, p in planner.permissions.items()
                     if Format.INT8 in p.formats]  # fmt: skip
            text = f"{error.what}: nothing is planned in int8; {error.fix}"
            return planner.without(Format.INT8, dict.fromkeys(names, _WRONG)), (text,)
        if not failed:
            break
        without = without.without(Format.INT8, dict.fromkeys(failed, "floats"))
        first = ", ".join(repr(name) for name in failed[:_NAMED])
        more = f" and {len(failed) - _NAMED} more" if failed[_NAMED:] else ""
        told.append(f"not in int8: the compiled module runs {first}{more} on floats")
    return without, tuple(told)


def unfused(captured: Captured, built: TorchApplied, arguments: Arguments) -> list[str]:
    """Names of products that the plan puts in int8 and the compiled module runs on floats.

    Raises:
        UsageError: If the module cannot be compiled.
        EngineError: If what it computes on integers is wrong.
    """
    plan = built.model.finecast_plan
    if plan is None or Format.INT8 not in plan.formats.values():
        return []
    run, failed = _compiled(built, arguments)
    flat = tree_leaves(arguments)
    with torch.no_grad():
        exact, stated = (
            tree_leaves(Isolated(module).leaves(flat))
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
    built: TorchApplied, arguments: Arguments
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


def check_device(policy: Policy, device: str) -> None:
    """Raise UsageError for int8 on a device other than the CPU."""
    if Format.INT8 in policy.formats and device != "cpu":
        raise UsageError(
            f"int8 on {device}: plans are made for the CPU's kernels", fix="use bf16 or fp16"
        )
