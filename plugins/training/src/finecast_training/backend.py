"""``compile`` and the backend ``finecast``: training graphs planned, and what was not."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypedDict, Unpack

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from finecast import Plan, Policy, Scope
from finecast.calls import checks
from finecast.engines import drop_slow_formats, speed_of
from finecast.engines.torch import CompiledCost, TorchEngine, check_no_autocast
from finecast.errors import UsageError
from finecast.frontends.torch import (
    TRAINED,
    FxBinding,
    TorchPrepared,
    hinted_shapes,
    mark_regions,
)
from finecast.graph import Graph
from finecast.naming import kind_of, listed, look_up, suggestion
from finecast.native import Judging, Times, check_stated
from finecast.native.torch import planner_of, slow_formats
from finecast.ops import graph_flops, recurrent_flops
from finecast.planning import Planner, frontier_of, proposal
from finecast.rules import (
    DEFAULT_POLICY,
    FINECAST,
    GUESTS,
    Overrides,
    UserRule,
    current,
    op_names,
    rule_set_of,
    unmatched,
)
from finecast_training.products import check_device
from finecast_training.training_rules import TRAINING_RULES, as_autocast
from finecast_training.weights import WeightCache


class Memory(Enum):
    """What the forward pass saves for the backward pass.

    AUTOCAST: what ``torch.compile`` under ``torch.autocast`` saves, including low copies of
    parameters. LEAST: as little as possible without computing a product twice; casts of
    parameters and pointwise ops are computed twice.
    """

    AUTOCAST = "autocast"
    LEAST = "least"


# Each compilation has a backend of its own, and Dynamo keeps at most eight compiled graphs for
# the code of one class or function: the ninth model would run in fp32. Since PyTorch 2.13 each
# call of torch.compile can have eight of its own.
_ISOLATES: Final = "isolate_recompiles" in inspect.signature(torch.compile).parameters


CALL_OUTSIDE: Final = (
    "call it outside of the block, or within torch.autocast(..., enabled=False)"
)
"""What to do where a compiled function is called inside of ``torch.autocast``."""

_NO_OPS: Final = TorchPrepared(graph=Graph(nodes=(), values=(), digest=""), of=TRAINED)
"""A training graph, which tells what policies all such graphs can state."""


class Compiled(Protocol):
    """The result of ``compile``: it is called like the function or module it was made of.

    Attributes:
        finecast_plans: The plans of the graphs compiled so far.
        finecast_coverage: How much of the work they cover.
        finecast_backend: The backend that compiles further graphs.
    """

    finecast_plans: list[Plan]
    finecast_coverage: Coverage
    finecast_backend: Backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function or module."""
        ...


class CompileKeywords(TypedDict, total=False):
    """What ``torch.compile`` takes beside what ``compile`` names, with any backend."""

    fullgraph: bool
    dynamic: bool | None
    disable: bool
    isolate_recompiles: bool


@checks
def compile(  # noqa: A001 - named after torch.compile
    function: nn.Module | Callable[..., Any],
    policy: str | Policy = DEFAULT_POLICY,
    *,
    memory: str = "autocast",
    accumulation: bool = False,
    user_rules: Mapping[str, UserRule] | None = None,
    rule_set: str = "finecast",
    **options: Unpack[CompileKeywords],
) -> Compiled:
    """``torch.compile`` with mixed precision planned over forward and backward together.

    Laws: inputs, outputs and gradients of parameters keep their types; parameters stay
    fp32, low copies of them are made as needed; with the scope ``auto`` nothing is rounded
    that ``torch.autocast`` keeps in fp32. ``result.finecast_plans`` has the plans of the
    graphs compiled so far, ``result.finecast_coverage.share`` the share of FLOPs that they
    cover. If the compiler left out a large share, one warning says so, with the reason.
    Overrides of the blocks around this call hold for all later compilations.

    Args:
        function: A module, or a function such as a whole training step.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        memory: ``autocast`` saves for the backward pass what compiled autocast saves;
            ``least`` saves far less, and computes more a second time.
        accumulation: For several backward passes between two optimizer steps. Low copies of
            parameters are kept until the parameters change, so that all microbatches, and
            calls without gradients, share one cast; they take half of the parameters' memory
            in addition. Gradients are added up inside the backward pass. Changes are noticed
            by autograd's version counter, which in-place writes through ``parameter.data``
            (FSDP's, a moving average that is swapped in so) do not raise: leave the option
            off there.
        user_rules: Rules by name.
        rule_set: ``finecast``, or a guest's (``rules/guests.py``), as ``raf``.
        options: What else ``torch.compile`` takes: ``dynamic``, ``fullgraph``, ``disable``.

    Raises:
        UsageError: If ``function`` cannot be called, or an argument is none of these, or
            training graphs cannot state the policy. Calls of the result raise it inside of
            ``torch.autocast``, which would cast ops before they are planned.
    """
    if not callable(function):
        raise UsageError(
            f"{kind_of(function)} cannot be compiled",
            fix="give a module or a function; for a file finecast.torch.load(path).module()",
        )
    backend = Backend(
        policy,
        memory=memory,
        accumulation=accumulation,
        user_rules=user_rules,
        rule_set=rule_set,
    )
    return compiled(function, backend, **options)


def compiled(
    function: Callable[..., Any], backend: Backend, **options: Unpack[CompileKeywords]
) -> Compiled:
    """``function``, compiled by a backend of its own."""
    backend.coverage = coverage = Coverage(function)
    result: Any = watched(compiled_apart(function, backend, **options), coverage)
    result.finecast_coverage = coverage
    result.finecast_plans = backend.plans
    result.finecast_backend = backend
    return result


def compiled_apart(
    function: Callable[..., Any], backend: Any, **options: Unpack[CompileKeywords]
) -> Callable[..., Any]:
    """``torch.compile``, whose graphs do not count as others' of the same code."""
    how: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    how |= options
    return torch.compile(function, backend=backend, **how)


def _check_formats(policy: Policy) -> None:
    """Raise UsageError for a format in which no training step is planned."""
    for fmt in policy.formats:
        if fmt not in TRAINED.states:
            raise UsageError(
                f"training steps have no plans in {fmt.label}",
                where="policy",
                fix=f"use one of {', '.join(f.label for f in TRAINED.states)}",
            )


@checks
class Backend:
    """A ``torch.compile`` backend: Inductor, with finecast's pass on the joint graph.

    It keeps the plans of all graphs that it compiled, and low copies of their parameters.
    ``overrides`` hold for all compilations; by default those of the blocks around the call.
    A ``chooser`` chooses among the plans that the rules permit, in place of the policy.
    Without ``kernels`` graphs run op by op, with the plan's casts: nothing is built, and all
    else is the same.
    """

    def __init__(
        self,
        policy: str | Policy = DEFAULT_POLICY,
        *,
        memory: str = "autocast",
        accumulation: bool = False,
        user_rules: Mapping[str, UserRule] | None = None,
        rule_set: str = "finecast",
        overrides: Overrides | None = None,
        chooser: Chooser | None = None,
        kernels: bool = True,
    ) -> None:
        self.policy = Policy.of(policy)
        _check_formats(self.policy)
        check_stated(self.policy, TorchEngine(device="CPU"), _NO_OPS)
        for name, rule in (user_rules or {}).items():
            if not callable(rule):
                raise UsageError(
                    f"the rule {name!r} is of type {type(rule).__name__}, and no function",
                    where="user_rules",
                    fix="give a dict of functions by name",
                )
        choices = {m.value: m for m in Memory}
        self.memory = look_up(memory, choices, what="choice of memory", where="memory")
        self.cache = WeightCache() if accumulation else None
        self.user_rules = tuple((user_rules or {}).items())
        self.rule_set = rule_set_of(rule_set)
        _check_rule_set(self.rule_set, self.policy)
        self.plans: list[Plan] = []
        self.overrides = current() if overrides is None else overrides
        self.unmatched = self.overrides
        self.ops: dict[str, None] = {}
        self.followed: dict[str, Policy] = {}
        self.warned: set[str] = set()
        self.coverage: Coverage | None = None
        self.chooser = chooser
        self.kernels = kernels
        self.inputs: Sequence[Any] = ()

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile one graph that Dynamo captured."""
        self.inputs = example_inputs
        if self.coverage is not None:
            self.coverage.add(module, example_inputs)
        mark_regions(module)
        # Inductor is imported here because it takes seconds, and warns about its own code as
        # it loads. Warnings of finecast and of the user's rules are let through.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            from finecast_training.inductor import compile_graph

            compiled = compile_graph(self, module, example_inputs)
        self._say_unmatched()
        return compiled

    def plan(self, graph: Graph, binding: FxBinding, device: str) -> Plan:
        """The plan of one graph; among permitted formats costs alone decide, not errors."""
        engine, shapes = TorchEngine(device=device.upper()), hinted_shapes(binding)
        if device not in self.followed:  # once per device, for many graphs
            check_device(self.policy, device)
            gains = partial(speed_of, engine)
            self.followed[device], notes = drop_slow_formats(
                self.policy, gains, self.user_rules
            )
            self._tell(notes)
        policy = self.followed[device]
        self.unmatched = unmatched(self.unmatched, [graph])
        self.ops.update(op_names(graph.nodes))
        if self.coverage is not None:
            self.coverage.planned_flops += graph_flops(graph, shapes)
        prepared = TorchPrepared(graph=graph, of=TRAINED)
        how = Judging(user_rules=self.user_rules, overrides=self.overrides_held())
        if self.rule_set == FINECAST:
            how = replace(how, judges=TRAINING_RULES)
        planner = planner_of(prepared, policy, engine, self.rule_set, how)
        joint = JointGraph(
            planner=planner, prepared=prepared, binding=binding, inputs=self.inputs,
            device=device,
        )  # fmt: skip
        plan = self._planned(joint) if self.chooser is None else self.chooser(joint)
        self._tell(slow_formats(plan, engine))
        self.plans.append(plan)
        return plan

    def _planned(self, joint: JointGraph) -> Plan:
        """The plan by the policy."""
        if self.policy.scope is not Scope.AUTO or self.rule_set in GUESTS:
            return joint.planner.lowest()
        return joint.fastest(as_autocast(joint.planner, products=True))

    def _tell(self, notes: Iterable[str]) -> None:
        """Warn of each note once, however many graphs it holds for."""
        for text in notes:
            if text not in self.warned:
                self.warned.add(text)
                warnings.warn(text, stacklevel=3)

    def overrides_held(self) -> Overrides:
        """The overrides from when the backend was made, and the current ones, which win."""
        return {**self.overrides, **current()}

    def _say_unmatched(self) -> None:
        """Warn of overrides that match no op of any graph compiled so far: likely misspelt."""
        for name in self.unmatched:
            warnings.warn(
                f"the override {name!r} matches no op compiled so far: "
                f"{suggestion(name.rpartition('::')[2], self.ops)}",
                stacklevel=3,
            )

    @property
    def least_memory(self) -> bool:
        """Whether the backward pass recomputes values to save memory."""
        return self.memory is Memory.LEAST

    @property
    def kept_bytes(self) -> int:
        """Bytes of the low copies of parameters that are kept from call to call."""
        return self.cache.nbytes if self.cache is not None else 0

    def stale(self) -> tuple[str, ...]:
        """Names of the parameters whose low copies no longer equal them.

        With ``accumulation`` copies are kept, and who writes to a parameter through ``.data``
        is not noticed.
        """
        modules = () if self.coverage is None else self.coverage.modules
        names: dict[torch.Tensor, str] = {
            p: name for module in modules for name, p in module.named_parameters()
        }
        tensors = [] if self.cache is None else self.cache.stale()
        unknown = "a parameter of shape {}"
        return tuple(names.get(t, unknown.format(list(t.shape))) for t in tensors)

    @property
    def key(self) -> str | None:
        """Backends of equal keys compile alike; None with functions of users or guests."""
        if self.user_rules or self.overrides_held() or self.rule_set in GUESTS or self.chooser:
            return None
        return repr(self.policy)


def _check_rule_set(name: str, policy: Policy) -> None:
    """Raise UsageError for formats of products that a guest's rules do not know."""
    further = [fmt.label for fmt in policy.formats if not fmt.encodes_results]
    if name in GUESTS and further:
        raise UsageError(
            f"the rule set {name} has no products in {further[0]}",
            where="rule_set",
            fix="use bf16 or fp16, or finecast's own rules",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """Forward and backward pass in one graph, as it is planned: before any cast is inserted.

    Attributes:
        planner: The graph, and what the rules permit its ops.
        prepared: The graph as the analysis takes it.
        binding: The FX graph that it was read from.
        inputs: What the captured function was called with.
        device: The device that it runs on.
    """

    planner: Planner
    prepared: TorchPrepared
    binding: FxBinding
    inputs: Sequence[Any]
    device: str

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.planner.graph

    def times(self, planner: Planner, *, single_kernels: bool = False) -> Times:
        """The times that plans are chosen by, from rates of the device.

        With ``single_kernels`` products, convolutions and attention are run, and measured.
        """
        cost = CompiledCost.of(
            self.graph,
            planner.policy.formats,
            self.device,
            hinted_shapes(self.binding),
            self.binding if single_kernels else None,
        )
        return Times.modelled(planner, cost, ())

    def fastest(self, planner: Planner, *, single_kernels: bool = False) -> Plan:
        """The fastest plan by these times that ``planner`` permits."""
        times = self.times(planner, single_kernels=single_kernels)
        analysis = times.analysis(self.prepared, planner)
        return proposal(planner, analysis, frontier_of(planner, analysis)[-1]).plan


Chooser: TypeAlias = Callable[[JointGraph], Plan]


def finecast(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The backend of ``torch.compile(model, backend="finecast")``: the policy ``auto:bf16``.

    Each graph has a backend of its own, which lives as long as the compiled graph. The
    overrides of the blocks around the compiling call hold.
    """
    check_no_autocast(fix=CALL_OUTSIDE)
    return Backend(overrides={})(module, example_inputs)


# ------------------------------------------------- how much of a compiled function was planned
#
# Dynamo does not capture some parts of a function: recurrent layers, code that it cannot
# trace. They run op by op in fp32. The FLOPs of planned graphs and of recurrent layers are
# counted. Those of code that was not captured are estimated: as many per weight as in planned
# graphs. Code that uses no weights of the function's modules is not counted at all.

# The unplanned share of FLOPs from which on there is a warning.
_SUBSTANTIAL: Final = 0.1
_NAMED: Final = 4
_RECURRENT: Final = (nn.RNN, nn.LSTM, nn.GRU)
_LOOKED_UP: Final = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT_REASON: Final = (
    "PyTorch's compiler runs recurrent layers as they are (it unrolls them, step by step, "
    "with torch._dynamo.config.allow_rnn = True)"
)
# Gradients of inputs and of weights take a product each, like that of the forward pass.
_WITH_GRADIENTS: Final = 3.0


# FLOPs of each recurrent layer that ran so far in the current call; None outside of calls.
_RAN: ContextVar[list[float] | None] = ContextVar("ran", default=None)


def _opaque(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a recurrent layer, excluded from Dynamo; records its FLOPs."""

    @functools.wraps(forward)
    def run(layer: nn.RNNBase, sequence: Any, *args: Any, **kwargs: Any) -> Any:
        ran = _RAN.get()
        if ran is not None:
            ran.append(_flops(layer, sequence))
        return forward(layer, sequence, *args, **kwargs)

    return torch.compiler.disable(run, reason="recurrent layers run as they are")


def _flops(layer: nn.RNNBase, sequence: torch.Tensor | PackedSequence) -> float:
    data = sequence.data if isinstance(sequence, PackedSequence) else sequence
    matrices = [p for p in layer.parameters() if p.dim() > 1]
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in matrices)
    forward = recurrent_flops(data.numel() / data.shape[-1], sum(p.numel() for p in matrices))
    return forward * (_WITH_GRADIENTS if trained else 1.0)


_OPAQUE: Final = {kind: _opaque(kind.forward) for kind in _RECURRENT}


class Coverage:
    """The FLOPs of a function, and how many of them are in planned graphs.

    Counted are calls in which a graph was compiled, with their backward passes.

    Attributes:
        planned_flops: FLOPs of planned graphs.
        recurrent_flops: FLOPs of recurrent layers, which are not planned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules = tuple(_modules_of(function))
        self.read = WeakTensorKeyDictionary()
        self.said = False
        self.planned_flops = 0.0
        self.recurrent_flops = 0.0

    def add(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Record the parameters that a planned graph reads."""
        for tensor in (*inputs, *module.parameters()):
            if isinstance(tensor, nn.Parameter):
                self.read[tensor] = True

    @property
    def share(self) -> float:
        """Share of planned FLOPs; those of ``uncounted`` modules are estimated by weights."""
        weights = [(m, p) for _, m, p in self._weights()]
        read = sum(p.numel() for _, p in weights if p in self.read)
        if not self.planned_flops or not read:  # no FLOPs per weight known: count weights
            total = sum(p.numel() for _, p in weights)
            return read / total if total else 1.0
        missed = sum(p.numel() for m, p in weights if self._is_uncounted(m, p))
        estimated = self.planned_flops * missed / read
        return self.planned_flops / (self.planned_flops + self.recurrent_flops + estimated)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names of modules whose weights no planned graph reads, except recurrent layers."""
        return tuple(
            dict.fromkeys(n for n, m, p in self._weights() if self._is_uncounted(m, p))
        )

    def _is_uncounted(self, module: nn.Module, weight: nn.Parameter) -> bool:
        return weight not in self.read and not isinstance(module, _RECURRENT)

    def warn(self, reasons: Sequence[str]) -> None:
        """Warn once of unplanned modules, if they are a large share; ``reasons`` say why."""
        missed = {n: m for n, m, p in self._weights() if p not in self.read}
        if self.said or not reasons or 1 - self.share < _SUBSTANTIAL:
            return
        self.said = True
        if any(isinstance(m, _RECURRENT) for m in missed.values()):
            reasons = [_RECURRENT_REASON]
        known, rest = (listed([*n], _NAMED) for n in (self.uncounted, missed))
        guessed = f" (by the weights of {known}, whose code was not captured)" if known else ""
        warnings.warn(
            f"finecast planned {self.share:.0%} of the FLOPs{guessed}; {rest} stay fp32:"
            f" {'; '.join(reasons)}",
            stacklevel=3,
        )

    def _weights(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Each weight matrix once: the name of the module that owns it, the module, it."""
        seen: set[int] = set()
        for root in self.modules:
            for name, module in root.named_modules():
                for own, parameter in module.named_parameters(recurse=False):
                    known = id(parameter) in seen
                    if (
                        parameter.dim() > 1
                        and not known
                        and not isinstance(module, _LOOKED_UP)
                    ):
                        seen.add(id(parameter))
                        yield name or own, module, parameter


def watched(compiled: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    """``compiled``, with recurrent layers excluded from Dynamo, and a warning if due."""
    recurrent = any(isinstance(m, _RECURRENT) for r in coverage.modules for m in r.modules())
    module = isinstance(compiled, nn.Module)
    inner: Callable[..., Any] = compiled.forward if module else compiled

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_no_autocast(fix=CALL_OUTSIDE)
        if coverage.said and not recurrent:
            return inner(*args, **kwargs)
        before, planned = _stops(), coverage.planned_flops
        with _around_recurrent_layers(wanted=recurrent) as ran:
            result = inner(*args, **kwargs)
        if coverage.planned_flops != planned:
            coverage.recurrent_flops += sum(ran)
        if not coverage.said:
            coverage.warn([*(_stops() - before)])
        return result

    if not module:
        return call
    compiled.forward = call
    return compiled


def _stops() -> Counter[str]:
    """How often each reason has stopped Dynamo's capture so far in this process."""
    kinds: Mapping[str, Mapping[str, int]] = counters
    stops = Counter[str]()
    for kind in ("graph_break", "unimplemented"):
        for text, count in kinds.get(kind, {}).items():
            stops[_short(text)] += count
    return stops


def _short(text: str) -> str:
    """The explanation in Dynamo's message of several lines, or else its first line."""
    lines = [line.strip() for line in text.splitlines()]
    explained = [line for line in lines if line.startswith("Explanation: ")]
    return (explained or lines)[0].removeprefix("Explanation: ").rstrip(".")


@contextmanager
def _around_recurrent_layers(*, wanted: bool) -> Generator[list[float]]:
    """Have the code before and after a recurrent layer compiled, which Dynamo would not do.

    Gives a list to which the FLOPs of each recurrent layer are added as it runs.
    """
    if not wanted or dynamo_config.allow_rnn:
        yield []
        return
    ran: list[float] = []
    token = _RAN.set(ran)
    before = {kind: kind.forward for kind in _RECURRENT}
    try:
        for kind, opaque in _OPAQUE.items():
            setattr(kind, "forward", opaque)  # noqa: B010 - the kinds' types differ
        with dynamo_config.patch(allow_rnn=True):
            yield ran
    finally:
        _RAN.reset(token)
        for kind, forward in before.items():
            setattr(kind, "forward", forward)  # noqa: B010


def _modules_of(function: Callable[..., Any]) -> Iterator[nn.Module]:
    """The modules that ``function`` is, is a method of, or refers to."""
    if isinstance(function, nn.Module):
        yield function
        return
    named: list[Any] = [getattr(function, "__self__", None)]
    if inspect.isfunction(inspect.unwrap(function)):
        closure = inspect.getclosurevars(inspect.unwrap(function))
        named += [*closure.nonlocals.values(), *closure.globals.values()]
    yield from (m for m in named if isinstance(m, nn.Module))
