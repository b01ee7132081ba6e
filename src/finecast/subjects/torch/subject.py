"""A PyTorch module, run compiled or as it is: accuracy and times are measured."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from finecast.engines.base import Array, Feeds, KernelTime, Session, TensorSpec
from finecast.engines.probe import Speed
from finecast.engines.torch.kernel_check import flat_inputs, missing_kernels
from finecast.engines.torch.planning import (
    ENGINE,
    analysis_of,
    check_formats,
    compiled_cost,
    device_of,
    make_torch_planner,
    points_of,
    sensitivities,
    speed_here,
)
from finecast.engines.torch.session import (
    ModuleSession,
    ProgramSignature,
    output_array,
    runnable,
)
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured
from finecast.frontends.torch.capture import evaluating
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.measure.timing import Latency, latency
from finecast.numbers.formats import Format
from finecast.pipeline.conversion import kept_types
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import Workload
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import Analysis
from finecast.progress import Progress
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.rules.policy import Policy, Scope

# Makes of a module what is deployed: ``torch.compile``, or nothing.
Prepare = Callable[[torch.nn.Module], Callable[..., Any]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Candidates that are built and timed: each costs a compilation.
_STEPS: Final = 5
_REPEATS: Final = 7


def deployed() -> Prepare:
    """``torch.compile`` where there is a C++ compiler for it, else the module as it is."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return lambda module: module
    return torch.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How plans of modules are tried.

    Attributes:
        prepare: What is timed is ``prepare(module)``; by default compiled, where there is a
            compiler.
        probing: Probe every rounding alone instead of one backward pass for all.
        steps: Plans of the frontier that are built and timed.
        dynamic_shapes: As ``torch.export.export`` takes them.
    """

    prepare: Prepare | None = None
    probing: bool = False
    steps: int = _STEPS
    dynamic_shapes: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSession:
    """A module with the inputs that it is tuned on: feeds say nothing to it."""

    module: torch.nn.Module
    arguments: Arguments

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """None by name."""
        return ()

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """None by name."""
        return ()

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs, by number."""
        del feeds
        args, kwargs = copied(self.arguments)
        with torch.no_grad(), evaluating(self.module), unwritten([self.module]):
            leaves = tree_leaves(self.module(*args, **kwargs))
        tensors = (x for x in leaves if isinstance(x, torch.Tensor))
        return {str(number): output_array(x) for number, x in enumerate(tensors)}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Empty: compiled kernels do not carry the names of ops."""
        del feeds, repeats
        return []


@dataclass(slots=True, kw_only=True)
class TorchBuilt:
    """The module that a plan gives; ``run`` is what is timed of it, once it was prepared."""

    model: GraphModule
    plan: Plan
    casts: int
    run: Callable[..., Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its state."""
        return state_bytes(self.model)


@dataclass(slots=True, kw_only=True)
class TorchSubject:
    """A module, or an exported program, which ``signature`` is given of.

    ``examples`` are positional and keyword inputs; None for the workload's first feeds.
    """

    original: torch.nn.Module
    captured: Captured
    options: TuneOptions
    examples: Arguments | None
    signature: ProgramSignature | None
    name: str
    digest: str
    size_bytes: int
    reference: Session
    truth: None = None
    target: str = ""
    runner: str = ENGINE
    _run: Callable[..., Any] | None = field(default=None, init=False)

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module | ExportedProgram,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: TuneOptions,
    ) -> TorchSubject:
        """A module with example inputs.

        Raises:
            ModelError: If the module cannot be captured.
        """
        examples = (tuple(args), dict(kwargs or {}))
        captured = frontend.capture(module, *examples, dynamic_shapes=options.dynamic_shapes)
        original = runnable(module) if isinstance(module, ExportedProgram) else module
        return cls(
            original=original,
            captured=captured,
            options=options,
            examples=examples,
            signature=None,
            name=type(original).__name__,
            digest=captured.graph.digest,
            size_bytes=state_bytes(original),
            reference=ExampleSession(module=original, arguments=examples),
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        """bf16."""
        return (Format.BF16,)

    @property
    def max_steps(self) -> int:
        """As the options say."""
        return self.options.steps

    @property
    def device(self) -> str:
        """Where the module runs."""
        return device_of(self.original, self.examples[0] if self.examples else ())

    def arguments(self, workload: Workload) -> Arguments:
        """What the module is timed with, and its errors are estimated on."""
        if self.examples is not None:
            return self.examples
        assert self.signature is not None
        return self.signature.arguments(workload.timing()[0])

    def check(self, policy: Policy) -> None:
        """Refuse formats that no op computes in, and names of nothing."""
        check_policy(policy, self.captured.graph)

    def speed(self, fmt: Format) -> Speed:
        """By timed products."""
        return speed_here(self.device, fmt)

    def first_nan(self, workload: Workload) -> str:
        """Not looked for."""
        del workload
        return ""

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> TorchExamined:
        """Judge once more until every op whose low kernel is missing is known."""
        args, kwargs = self.arguments(workload)
        unsupported: frozenset[str] = frozenset()
        while True:
            planner = make_torch_planner(
                self.captured.graph,
                policy,
                user_rules=user_rules,
                unsupported=unsupported,
                measured=True,
            )
            lowest = frontend.apply(self.captured, planner.lowest()).eval()
            missing = missing_kernels(lowest, args, kwargs) - unsupported
            if not missing:
                return TorchExamined(
                    subject=self,
                    planner=planner,
                    arguments=(args, kwargs),
                    progress=progress,
                )
            unsupported |= missing

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of ops that keep a type of their own."""
        return kept_advice(planner.graph, planner.policy)

    def build(self, plan: Plan) -> TorchBuilt:
        """The plan's module, with the plan attached."""
        return built_of(self.captured, plan)

    def session(self, built: Built) -> Session:
        """The module, run as it is."""
        return self._session(built.model)

    def _session(self, module: torch.nn.Module) -> Session:
        if self.signature is not None:
            return ModuleSession(module=module, signature=self.signature)
        assert self.examples is not None
        return ExampleSession(module=module, arguments=self.examples)

    def times(
        self, models: Mapping[str, Built | None], workload: Workload, min_time_s: float
    ) -> dict[str, Latency]:
        """Each prepared as it is deployed, once, and called in turns."""
        args, kwargs = copied(self.arguments(workload))

        def call(run: Callable[..., Any]) -> object:
            with torch.no_grad():
                return run(*args, **kwargs)

        modules = [self.original, *(b.model for b in models.values() if b is not None)]
        with evaluating(self.original), unwritten(modules):
            calls = {n: partial(call, self._prepared(b)) for n, b in models.items()}
            return latency(calls, min_time_s=min_time_s, repeats=_REPEATS)

    def _prepared(self, built: Built | None) -> Callable[..., Any]:
        prepare = self.options.prepare or deployed()
        if built is None:
            # Not by truth: a compiled module refuses to be asked for its length.
            if self._run is None:
                self._run = prepare(self.original)
            return self._run
        assert isinstance(built, TorchBuilt)
        if built.run is None:
            built.run = prepare(built.model)
        return built.run

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """Those that are timed."""
        return workload.timing()[:1] if self.signature is not None else [{}]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchExamined:
    """A module's planner."""

    subject: TorchSubject
    planner: Planner
    arguments: Arguments
    progress: Progress

    def analysis(self) -> Analysis:
        """Single kernels are timed; one backward pass gives the errors."""
        captured, planner = self.subject.captured, self.planner
        self.progress("profile", 0, 1)
        cost = compiled_cost(
            planner.graph,
            planner.policy,
            self.subject.device,
            shapes=hinted_shapes(captured.binding),
            binding=captured.binding,
        )
        points = points_of(planner)
        self.progress("sensitivity", 0, 1)
        errors = sensitivities(
            captured,
            points,
            planner.policy.formats,
            flat_inputs(*self.arguments),
            probing=self.subject.options.probing,
        )
        return analysis_of(planner, cost, points, errors)


def check_policy(policy: Policy, graph: Graph) -> None:
    """Raise UsageError for types of ports, formats no op computes in, names of nothing."""
    if policy.io or policy.io_low:
        raise UsageError("--io does not apply to PyTorch models", fix="leave it out")
    check_formats(policy)
    check_names(policy, graph)
    check_overrides(graph)


def built_of(captured: Captured, plan: Plan) -> TorchBuilt:
    """The module that ``plan`` gives."""
    edits = frontend.planned_edits(captured, plan)
    return TorchBuilt(
        model=planned(captured, plan), plan=plan, casts=cast_count(captured.graph, edits)
    )


def kept_advice(graph: Graph, policy: Policy) -> tuple[str, ...]:
    """Of ops in fp64 or a low type: that they stay so, and how they would not."""
    if policy.scope is Scope.NONE:
        return ()
    fix = "convert copy.deepcopy(module).float(), with inputs in fp32"
    return tuple(f"{text}: {fix}" for text in kept_types(graph, policy).values())


def planned(captured: Captured, plan: Plan) -> GraphModule:
    """The module that ``plan`` gives, with the plan attached as ``finecast_plan``."""
    result = frontend.apply(captured, plan)
    result.eval()
    result.finecast_plan = plan  # type: ignore[assignment]
    return result


def state_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def copied(arguments: Arguments) -> Arguments:
    """The caller's tensors stay as they are."""
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, arguments)
    return args, kwargs


@contextmanager
def unwritten(modules: Iterable[torch.nn.Module]) -> Generator[None]:
    """Buffers that are written to inside have their numbers again after."""
    buffers = {id(b): b for module in modules for b in module.buffers()}
    before = [(b, b.detach().clone()) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in before:
                # Batch norms do not count their writes as new versions.
                if not torch.equal(buffer, was):
                    buffer.copy_(was)
