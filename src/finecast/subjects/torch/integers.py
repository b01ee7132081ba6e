"""PyTorch modules whose products run on integers, once compiled with frozen weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from finecast.engines.torch.integers import (
    CompiledProducts,
    products_on_integers,
    takes_codes,
)
from finecast.engines.torch.kernel_check import flat_inputs
from finecast.engines.torch.planning import ENGINE, device_of
from finecast.engines.torch.session import Arguments
from finecast.errors import UsageError
from finecast.frontends.torch import Captured
from finecast.frontends.torch.observing import observe
from finecast.numbers.formats import Format
from finecast.pipeline.adjusting import no_adjustments
from finecast.pipeline.subject import UserRules
from finecast.planning.planner import Planner
from finecast.rules import Context, permit
from finecast.rules.matching import check_names
from finecast.rules.override import active, check_overrides
from finecast.rules.policy import Policy, Scope
from finecast.subjects.torch.source import TorchBuilt, built_of, kept_advice

# As an option of torch.compile it comes too late: the module is traced without it.
FREEZING: Final = "torch._inductor.config.freezing = True"
HOW_TO_RUN: Final = (
    f"set {FREEZING} and run it by torch.compile under torch.no_grad():"
    " its products are on integers there alone"
)

# Of the outputs: sums in another order may move a value by a code here and there, which is far
# less than one half of a step in all of them.
_MOST_WRONG: Final = Format.INT8.unit_roundoff


def quantized(
    captured: Captured, arguments: Arguments, policy: Policy, rules: UserRules
) -> tuple[TorchBuilt, tuple[str, ...]]:
    """The module with every product in int8 that the compiled module runs so.

    The ranges of values are those of the example inputs. Kinds of ops that the compiled module
    does not run on integers keep fp32.

    Raises:
        UsageError: If the policy, the device or the compiler has no place for it.
    """
    graph = captured.graph
    args = flat_inputs(*arguments)
    _check(policy, device_of(captured.module, args))
    check_names(policy, graph)
    check_overrides(graph)
    told: tuple[str, ...] = ()
    natives = sorted({n.native for n in graph.nodes if takes_codes(n)})
    left = list(natives)
    while True:
        planner = _planner(captured, policy, args, rules, left)
        built = built_of(captured, planner.lowest())
        planned = [d for d in built.plan.decisions if d.format is Format.INT8]
        if not planned:
            return built, (*kept_advice(graph, policy), *told, *_nothing(told))
        found = _compiled(built, arguments)
        if not found.error <= _MOST_WRONG:
            why = f"products on integers are wrong by {found.error:.2g} on this CPU"
            unchanged = built_of(captured, planner.highest(why))
            return unchanged, (f"{why}: every op keeps fp32; it takes VNNI",)
        ran = found.count
        if ran >= len(planned):
            return built, (*kept_advice(graph, policy), *told, HOW_TO_RUN)
        # Which of them did not cannot be told from the code: a kind of op at a time.
        dropped = left.pop()
        why = f"of {len(planned)} products in int8 the compiled module runs {ran} on integers"
        told = (*told, f"{dropped} keeps fp32: {why}")


def _planner(
    captured: Captured,
    policy: Policy,
    args: Sequence[Any],
    user_rules: UserRules,
    natives: Collection[str],
) -> Planner:
    """What the rules leave each op, where only ops of ``natives`` may be on integers."""
    graph = captured.graph
    context = Context(
        graph=graph,
        policy=policy,
        facts=observe(captured, args),
        kernels=lambda node, _: None if node.native in natives else False,
        engine=ENGINE,
        user_rules=(*user_rules, *active()),
        measured=True,
        casts_around=frozenset(policy.formats),
    )
    return Planner(graph=graph, policy=policy, permissions=permit(context), engine=ENGINE)


def _compiled(built: TorchBuilt, arguments: Arguments) -> CompiledProducts:
    args, kwargs = arguments
    try:
        return products_on_integers(built.model, args, kwargs)
    except RuntimeError as error:
        raise UsageError(
            f"int8 runs in compiled modules, and this one cannot be compiled: {_first(error)}",
            where="policy",
            fix="install a C++ compiler, or use bf16",
        ) from error


def _first(error: BaseException) -> str:
    lines: Sequence[Any] = str(error).strip().splitlines() or [type(error).__name__]
    return str(lines[0])


def _nothing(told: tuple[str, ...]) -> tuple[str, ...]:
    return () if told else ("no op can have int8 here: see the plan's reasons",)


def check_adjusts(policy: Policy) -> None:
    """Raise UsageError if operands are to be adjusted: a program's are not."""
    if policy.adjust:
        raise no_adjustments("a program of PyTorch")


def _check(policy: Policy, device: str) -> None:
    if policy.formats != (Format.INT8,) or policy.scope is Scope.AUTO:
        raise UsageError(
            f"policy {policy.label}: PyTorch's products get int8 alone, and all of them",
            fix='use "matmult:int8", or bf16',
        )
    check_adjusts(policy)
    if device != "cpu":
        raise UsageError(
            f"int8 on {device}: plans are made for the CPU's kernels", fix="use bf16 or fp16"
        )
