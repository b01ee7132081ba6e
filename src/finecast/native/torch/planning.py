"""What is particular to plans of PyTorch: missing kernels, costs, the error of autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from finecast.engines.base import Engine, Feeds
from finecast.engines.exact import Exact
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.autocast import autocast_formats, saved_ops
from finecast.engines.torch.costs import CompiledCost
from finecast.engines.torch.kernel_check import missing_kernels
from finecast.engines.torch.session import ProgramSignature
from finecast.errors import ModelError, UsageError
from finecast.frontends.torch import Captured, TorchPrepared, applied
from finecast.frontends.torch.probing import first_order
from finecast.frontends.torch.reader import device_kind, hinted_shapes
from finecast.frontends.torch.runnable import Isolated
from finecast.native.planning import USUAL, Judging, make_planner
from finecast.native.roundings import Times, probe_sensitivity, switched_probe
from finecast.native.torch.integers import uses_codes, with_codes
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.choices import SAME_TIME, Choice
from finecast.planning.planner import Planner, lowest
from finecast.planning.sensitivity import Sensitivity
from finecast.progress import Progress, silent
from finecast.rules.base import Reason
from finecast.rules.guests import FINECAST, GUESTS, TRAINING, guest_of
from finecast.rules.override import check_overrides, current
from finecast.rules.policy import Policy
from finecast.rules.training import TRAINING_RULES

if TYPE_CHECKING:
    from finecast.native.torch.model import TorchModel

_PROMOTED: Final = (
    "it reads fp32: rounded, it would add errors that torch.autocast does not make"
)
_SAVED: Final = "the backward pass reads its result, which torch.autocast saves in this format"


def planner_of(
    prepared: TorchPrepared,
    policy: Policy,
    engine: Engine,
    rule_set: str = FINECAST,
    how: Judging = USUAL,
) -> Planner:
    """Let the rules of a set judge every op.

    Raises:
        RuleConflictError: If they leave an op no format.
        UsageError: If the graph cannot state a format, or an override names no op of it.
        ModelError: If a guest's rules lack an op.
    """
    if rule_set == TRAINING:
        how = replace(how, judges=TRAINING_RULES)
    elif rule_set in GUESTS:
        graph, held = prepared.graph, how.overrides
        if held is None:
            check_overrides(graph)
            held = current()
        # A guest's rules are of another kind: they apply overrides themselves.
        lists = guest_of(rule_set).rules(graph, _only_format(policy, rule_set), held)
        how = replace(how, judges=lists, overrides={})
    return make_planner(prepared, policy, engine, how)


def judged(
    model: TorchModel,
    prepared: TorchPrepared,
    policy: Policy,
    engine: TorchEngine,
    how: Judging,
    feeds: Feeds,
    progress: Progress,
) -> tuple[Planner, tuple[str, ...]]:
    """The planner, once no op has a format in which its kernel is missing or wrong; and notes.

    Ops are judged again until the lowest plan, run on ``feeds``, needs no such kernel. Then
    products leave int8 that compiled modules do not run on integers.

    Raises:
        ModelError: If the module does not run on ``feeds``, or not with the formats that the
            user gave to ops.
        UsageError: If ops may read codes, and the module cannot be compiled.
    """
    captured, leaves = prepared.captured, model.signature.leaves(feeds)
    while True:
        planner = planner_of(prepared, policy, engine, model.rule_set, how)
        lowest = applied(captured, planner.lowest()).model
        try:
            missing = missing_kernels(lowest, leaves)
        except (RuntimeError, NotImplementedError):
            _check_runs(captured, leaves)
            raise
        if not missing:
            break
        if not engine.lacking:
            _check_runs(captured, leaves)
        if missing <= engine.lacking:
            raise ModelError(
                f"the converted module does not run: {', '.join(sorted(missing))}",
                fix="exclude these ops by a rule, and report the module",
            )
        engine = engine.without(missing)
    if not uses_codes(policy):
        return planner, ()
    return with_codes(captured, planner, model.signature.unflattened(leaves), progress)


def _check_runs(captured: Captured, leaves: Sequence[Any]) -> None:
    """Raise ModelError if the module fails as it came, on its own example inputs."""
    try:
        with torch.no_grad():
            Isolated(captured.module).leaves(leaves)
    except (RuntimeError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"the module does not run on its example inputs: {first}",
            fix="give inputs on which the module itself runs",
        ) from error


def _only_format(policy: Policy, rule_set: str) -> Format:
    """The policy's one low format; raises UsageError if there are several."""
    if len(policy.formats) > 1:
        raise UsageError(
            f"the rule set {rule_set} takes one format, not {policy.label}",
            fix="name one of them",
        )
    return policy.format


def products_low(planner: Planner) -> Planner:
    """``planner`` with every product in the first low format that it may have."""
    asked = lowest(planner.graph, planner.permissions, *planner.policy.formats)
    nodes = planner.graph.nodes
    narrowed = {
        i: replace(p, formats=frozenset({asked[i]}))
        if by_name(nodes[i].op).matmul_engine
        else p
        for i, p in planner.permissions.items()
    }
    return replace(planner, permissions=narrowed)


def as_autocast(planner: Planner) -> Planner:
    """``planner``, restricted in two ways to what ``torch.autocast`` does.

    Ops that autocast keeps in fp32 stay in fp32, and ops whose results it saves for the
    backward pass in a low format are low, as far as the rules permit.
    """
    graph, permissions = planner.graph, planner.permissions
    followed = autocast_formats(graph, permissions, planner.policy.formats)
    saved = saved_ops(graph)
    narrowed = dict(permissions)
    for node, permission in permissions.items():
        fmt = followed[node]
        text = _PROMOTED if fmt is Format.FP32 else _SAVED if node in saved else ""
        if text and len(permission.formats) > 1:
            reason = Reason(rule="autocast", text=text, permits=(fmt.label,))
            narrowed[node] = replace(
                permission, formats=frozenset({fmt}), reasons=(*permission.reasons, reason)
            )
    return replace(planner, permissions=narrowed)


def compiled_times(
    planner: Planner, prepared: TorchPrepared, *, single_kernels: bool = True
) -> Times:
    """Times of a compiled module; fused kernels compute in fp32 inside, so ops are units.

    Single kernels are measured, or modelled by the device's rates.
    """
    binding = prepared.captured.binding
    cost = CompiledCost.of(
        planner.graph,
        planner.policy.formats,
        device_kind(binding.module),
        hinted_shapes(binding),
        binding if single_kernels else None,
    )
    return Times.modelled(planner, cost, ())


def measured_errors(
    prepared: TorchPrepared,
    planner: Planner,
    times: Times,
    exact: Exact,
    *,
    probing: bool = False,
    progress: Progress = silent,
) -> dict[Format, Sensitivity]:
    """Errors by format: of floats from one backward pass, of codes by probing.

    They are of the points of ``times``, on the first call of ``exact``. Floats are probed,
    too, if ``probing`` is set or if an op has no gradient.
    """
    captured, feeds, points = prepared.captured, exact.calls[0], times.points
    found: dict[Format, Sensitivity] = {}
    floats = {fmt: at for fmt, at in points.items() if not fmt.runs_on_codes and not probing}
    if floats:
        leaves = ProgramSignature.of(captured.program).leaves(feeds)
        with suppress(RuntimeError, NotImplementedError):
            found = first_order(captured, floats, leaves, exact.counted, progress=progress)
    return found | probe_sensitivity(
        planner,
        {fmt: at for fmt, at in points.items() if fmt not in found},
        lambda switches: switched_probe(prepared, switches, [feeds]),
        progress,
        counted=exact.counted,
    )


def choose(found: Sequence[Choice], budget: float = math.inf) -> Choice:
    """The fastest choice whose squared error is within ``budget``.

    Of equally fast ones the most accurate; if none is within it, the most accurate of all.
    """
    least = min(p.error for p in found)
    within = [p for p in found if p.error <= max(budget, least)]
    fastest = min(p.time_s for p in within)
    return min((p for p in within if p.time_s <= SAME_TIME * fastest), key=lambda p: p.error)


def device_of(module: torch.nn.Module, args: Sequence[Any]) -> str:
    """The device that the module runs on: ``cpu``, ``cuda``."""
    tensors = (*module.parameters(), *(a for a in args if isinstance(a, torch.Tensor)))
    return next((t.device.type for t in tensors), "cpu")
