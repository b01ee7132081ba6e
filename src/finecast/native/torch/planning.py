"""What is particular to plans of PyTorch: missing kernels, costs, autocast's plan, int8."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves, tree_map

from finecast import ops
from finecast.data.deviation import deviation
from finecast.devices.emulation import Emulation
from finecast.engines.base import Engine, Feeds
from finecast.engines.exact import Exact
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.costs import CompiledCost
from finecast.engines.torch.integers import compiled_frozen, relative_error
from finecast.engines.torch.session import Arguments, ProgramSignature
from finecast.errors import EngineError, ModelError, UsageError, first_line
from finecast.frontends.torch import Captured, TorchApplied, TorchPrepared, applied
from finecast.frontends.torch.aten import native_name
from finecast.frontends.torch.native import TorchNative
from finecast.frontends.torch.probing import first_order
from finecast.frontends.torch.reader import device_kind, hinted_shapes
from finecast.frontends.torch.runnable import Isolated
from finecast.graph import Graph, Node
from finecast.native.conversion_notes import plan_notes
from finecast.native.planning import USUAL, Judging, make_planner
from finecast.native.roundings import Times, probe_sensitivity, switched_probe
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import APPROXIMATED, SAME_TIME
from finecast.ops import OpKind, by_name
from finecast.planning.planner import Planner, lowest, pick
from finecast.planning.points import moves
from finecast.planning.problem import Choice
from finecast.planning.sensitivity import Sensitivity
from finecast.progress import Progress, silent
from finecast.rules import Permission
from finecast.rules.guests import FINECAST, GUESTS, guest_of
from finecast.rules.override import check_overrides, current
from finecast.rules.policy import Policy, Scope

if TYPE_CHECKING:
    from finecast.native.torch.model import TorchModel

_FAST_PATH: Final = (
    "its TransformerEncoder gives zeros where inputs are padded; call"
    " torch.backends.mha.set_fastpath_enabled(False) before, and it gives what was captured"
)


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
    if rule_set in GUESTS:
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
    notes = _capture_notes(model, captured, feeds)
    if not uses_codes(policy, engine.device):
        return planner, notes
    arguments = model.signature.unflattened(leaves)
    planner, of_codes = with_codes(captured, planner, arguments, progress)
    return planner, (*notes, *of_codes)


def _capture_notes(model: TorchModel, captured: Captured, feeds: Feeds) -> tuple[str, ...]:
    """What is said of a module that computes otherwise than what was captured of it.

    All errors are against the module: they count that difference, which no format makes.
    """
    module = model.file.model
    if not isinstance(module, torch.nn.Module) or isinstance(module, GraphModule):
        return ()
    leaves = model.signature.leaves(feeds)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        wanted = model.reference().run(feeds)
        torch.manual_seed(0)
        got = tree_leaves(Isolated(captured.module).leaves(leaves))
    pairs = [
        (array, tensor.numpy(force=True))
        for array, tensor in zip(wanted.values(), got, strict=False)
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32
    ]
    error = max((deviation(ours, its).relative for its, ours in pairs), default=0.0)
    if error <= APPROXIMATED or len(wanted) != len(got):
        return ()
    fast = any(isinstance(part, torch.nn.TransformerEncoder) for part in module.modules())
    remedy = f": {_FAST_PATH}" if fast else ""
    note = (
        "the module gives other numbers than what torch.export captures of it, in fp32"
        f" (relative error {error:.2g}), and errors count that{remedy}"
    )
    return (note,)


def _check_runs(captured: Captured, leaves: Sequence[Any]) -> None:
    """Raise ModelError if the module fails as it came, on its own example inputs."""
    try:
        with torch.no_grad():
            Isolated(captured.module).leaves(leaves)
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"the module does not run on its example inputs: {first_line(error)}",
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
    sensitivities: dict[Format, Sensitivity] = {}
    floats = {
        fmt: at for fmt, at in points.items() if not fmt.multiplies_codes and not probing
    }
    if floats:
        leaves = ProgramSignature.of(captured.program).leaves(feeds)
        with suppress(RuntimeError, NotImplementedError):
            sensitivities = first_order(
                TorchNative.of(captured),
                floats,
                leaves,
                exact.counted,
                exact.axis,
                progress=progress,
            )
    return sensitivities | probe_sensitivity(
        planner,
        {fmt: at for fmt, at in points.items() if fmt not in sensitivities},
        lambda switches: switched_probe(prepared, switches, [feeds]),
        progress,
        exact,
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


# -------------------- kernels that are missing or wrong here, found by running the module once
#
# A kernel can be wrong because it overflows inside, or computes coordinates in the low format.
# So each op that a plan made low is run in fp32 as well, on the same rounded operands; the two
# results may differ by a few roundings and not by more.

_NO_KERNEL: Final = re.compile(r"not implemented for|not support|expected scalar type|dtype")
_LOW: Final = frozenset({torch.bfloat16, torch.float16})
# Allowed error as a multiple of eps, relative in the norm. A fused kernel rounds once for each
# of its ops, by up to eps / 2: this allows for sixteen roundings in a row.
_UNITS: Final = 8


def missing_kernels(module: GraphModule, leaves: Sequence[Any]) -> frozenset[str]:
    """Native names of ops without a working kernel in the format that the plan gave them."""
    finder = _Finder(module)
    try:
        with torch.no_grad():
            finder.leaves(leaves)
    except (RuntimeError, NotImplementedError):
        if not finder.failed:
            raise
    return finder.failed


class _Finder(Isolated):
    failed: frozenset[str] = frozenset()

    def run_node(self, n: FxNode) -> Any:
        """Run one node, and record its op if the kernel is missing or wrong."""
        try:
            result = super().run_node(n)
        except (RuntimeError, NotImplementedError) as error:
            if not _NO_KERNEL.search(str(error)):
                raise
            self.failed |= {native_name(n)}
            raise
        if _is_checked(n, result):
            wide = self._in_fp32(n)
            if any(is_wrong(a, b) for a, b in zip(tree_leaves(result), wide, strict=True)):
                self.failed |= {native_name(n)}
        return result

    def _in_fp32(self, node: FxNode) -> list[Any]:
        args, kwargs = tree_map(_widened, self.fetch_args_kwargs_from_env(node))
        assert isinstance(node.target, OpOverload)
        return tree_leaves(node.target(*args, **kwargs))


def _is_checked(node: FxNode, result: Any) -> bool:
    """Whether the op computes in a low format and is deterministic."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
        return False
    info = ops.lookup(native_name(node))
    if info.exact or info.kind in (OpKind.CAST, OpKind.RANDOM, OpKind.CONSTANT):
        return False
    lows = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype in _LOW)
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and next(lows, None) is not None


def _widened(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.float() if arg.dtype in _LOW else arg
    return torch.float32 if isinstance(arg, torch.dtype) and arg in _LOW else arg


def is_wrong(low: Any, wide: Any) -> bool:
    """Whether ``low`` is off from ``wide`` by more than roundings, but for overflow."""
    if not isinstance(low, torch.Tensor) or low.dtype not in _LOW or low.numel() == 0:
        return False
    rounded = wide.to(low.dtype)
    fits = rounded.isfinite()
    if bool((fits & ~low.isfinite()).any()):
        return True
    error = (low.float() - wide).where(fits, 0.0).norm()
    return bool(error > _UNITS * torch.finfo(low.dtype).eps * wide.where(fits, 0.0).norm())


# ---------------------------------------------------- the plan that ``torch.autocast`` follows
#
# Autocast is what users have without finecast. A plan that rounds more than it does would lose
# accuracy that nobody asked to give up.


def autocast_formats(
    graph: Graph,
    permissions: Mapping[int, Permission],
    formats: Sequence[Format],
    further: Callable[[Graph, Mapping[int, Format]], Iterable[Node]] | None = None,
) -> dict[int, Format]:
    """The plan that ``torch.autocast`` follows, as far as the rules permit.

    Products are low. Other ops are low if all that they read is low, and fp32 if anything is
    fp32, such as a residual or a parameter. An op that only moves numbers is low if all its
    readers are, for that rounds the same numbers.

    Ops that ``further`` gives, by the formats of all others, are low all the same.
    """
    asked = lowest(graph, permissions, *formats)
    stored: dict[int, Format] = {}
    chosen: dict[int, Format] = {}
    for node in graph.float_nodes:
        read = {stored.get(v.id, v.format) for v in graph.following_inputs(node)}
        follows = by_name(node.op).matmul_engine or read == {asked[node.id]}
        wanted = asked[node.id] if follows else Format.FP32
        chosen[node.id] = pick(permissions[node.id], wanted)
        stored |= {v.id: chosen[node.id] for v in graph.following_outputs(node)}
    for node in further(graph, chosen) if further is not None else ():
        chosen[node.id] = pick(permissions[node.id], asked[node.id])
    for node in reversed(graph.float_nodes):
        readers = {chosen.get(n) for v in graph.following_outputs(node) for n in v.uses}
        shown = any(v.is_output for v in graph.following_outputs(node))
        if moves(node) and readers == {asked[node.id]} and not shown:
            chosen[node.id] = asked[node.id]
    return chosen


# ------------------------------------- plans in int8, for modules compiled with frozen weights

_GPU: Final = "cuda"
FREEZING: Final = "torch._inductor.config.freezing = True"
HOW_TO_RUN: Final = (
    f"set {FREEZING} and run it by torch.compile under torch.no_grad():"
    " its products are on integers there alone"
)

_WRONG: Final = "runs it in wrong numbers, as on CPUs without VNNI, all the same"
_ON_FLOATS: Final = "runs it in floats all the same"
# The compiled module's error may be this many times that of the module's own ops, and _SLACK
# more: a value between two codes may get the other code if sums are in another order, which is
# no more than half a step of all outputs. Beyond that, kernels are wrong: on CPUs without VNNI
# sums of 8-bit products saturate.
_MORE_WRONG: Final = 1.25
_SLACK: Final = Format.INT8.unit_roundoff
# Each turn drops ops, and the compiler fuses the others anew: more turns have not been needed.
_MOST_TURNS: Final = 4


def uses_codes(policy: Policy, device: str) -> bool:
    """Whether ops may read integers that compiled modules with frozen weights multiply.

    On GPUs graphs state such products themselves.
    """
    integers = any(f.multiplies_integers for f in policy.formats)
    return integers and policy.scope is not Scope.NONE and device.lower() != _GPU


def with_codes(
    captured: Captured, planner: Planner, arguments: Arguments, progress: Progress = silent
) -> tuple[Planner, tuple[str, ...]]:
    """``planner`` without products that compiled modules do not run on integers; and notes.

    Where products on integers are wrong here, no op has their format.

    Raises:
        UsageError: If the module cannot be compiled.
    """
    told: list[str] = []
    for fmt in (f for f in planner.policy.formats if f.multiplies_integers):
        before, nodes = planner, planner.graph.nodes
        for turn in range(_MOST_TURNS):
            progress("compile", turn, turn + 1)
            built = applied(captured, planner.lowest(fmt))
            try:
                failed = unfused(captured, built, arguments)
            except EngineError as error:
                names = [nodes[i].name for i, p in before.permissions.items()
                         if fmt in p.formats]  # fmt: skip
                told.append(f"{error.what}: nothing is planned in {fmt.label}; {error.fix}")
                planner = before.without(dict.fromkeys(names, (fmt.label, _WRONG)))
                break
            if not failed:
                break
            planner = planner.without(dict.fromkeys(failed, (fmt.label, _ON_FLOATS)))
    return planner, (*told, *plan_notes(planner.lowest()))


def unfused(captured: Captured, built: TorchApplied, arguments: Arguments) -> list[str]:
    """Names of products that the plan puts on codes and the compiled module runs on floats.

    Raises:
        UsageError: If the module cannot be compiled.
        EngineError: If what it computes on integers is wrong.
    """
    plan = built.model.finecast_plan
    if plan is None or not any(f.multiplies_integers for f in plan.formats.values()):
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
        raise UsageError(
            "products on integers run in compiled modules, and this one cannot be compiled:"
            f" {type(cause).__name__}: {first_line(cause)}",
            where="policy",
            fix="install a C++ compiler, or use bf16"
            if missing
            else "see if torch.compile(module)(*example_inputs) works, or use bf16",
        ) from error


_FP8_SINCE: Final = (8, 9)
"""The first compute capability of GPUs with products in fp8."""


def check_target(policy: Policy, emulation: Emulation) -> None:
    """Raise UsageError for integers that modules state for a CPU's compiler, on a GPU."""
    target = emulation.target
    by_row = target.computes_in(Format.INT8_DYNAMIC_ROW)
    for fmt in (f for f in policy.formats if f.multiplies_codes and emulation.signed_codes):
        _check_states(fmt, target.name, by_row=by_row)


def check_device(policy: Policy, device: str) -> None:
    """Raise UsageError for products on codes that the device has no kernels for."""
    for fmt in (f for f in policy.formats if f.multiplies_codes and device != "cpu"):
        _check_states(fmt, device, by_row=device == _GPU)
        if fmt.has_float_codes and torch.cuda.get_device_capability() < _FP8_SINCE:
            raise UsageError(
                f"{fmt.label} on {device}: it takes a GPU with fp8 products (Ada, Hopper or"
                " later)",
                fix="use bf16 or fp16",
            )


def _check_states(fmt: Format, device: str, *, by_row: bool) -> None:
    """Raise UsageError for codes whose products modules state for a CPU's compiler alone.

    ``by_row`` says that the device has ``int8_dynamic_row``.
    """
    if not by_row or (fmt.runs_on_codes and not fmt.has_float_codes):
        alike = f"{Format.INT8_DYNAMIC_ROW.label}, " if by_row else ""
        raise UsageError(
            f"{fmt.label} on {device}: plans are made for the CPU's kernels",
            fix=f"use {alike}bf16 or fp16",
        )
