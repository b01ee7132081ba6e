"""A PyTorch module, run compiled or as it is: accuracy and times are measured."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from finecast.engines.base import Array, Feeds, Session, TensorSpec
from finecast.engines.exact import Exact
from finecast.engines.probe import Speed
from finecast.engines.torch.integers import Prepare, compiled_frozen
from finecast.engines.torch.kernel_check import flat_inputs
from finecast.engines.torch.planning import (
    ENGINE,
    analysis_of,
    check_formats,
    compiled_cost,
    device_of,
    points_of,
    sensitivities,
    speed_here,
)
from finecast.engines.torch.session import (
    Arguments,
    ModuleSession,
    ProgramSignature,
    arguments_of,
    output_array,
    runnable,
)
from finecast.errors import EngineError
from finecast.frontends import torch as frontend
from finecast.frontends.torch.capture import evaluating
from finecast.frontends.torch.input_check import check_examples
from finecast.frontends.torch.observing import observe
from finecast.frontends.torch.reader import hinted_shapes
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.pipeline.subject import Built, Examined, Subject, UserRules
from finecast.pipeline.workload import Workload
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.progress import Progress, silent
from finecast.rules.calibration import uncalibrated
from finecast.rules.facts import ValueFacts, merge
from finecast.rules.policy import Policy
from finecast.subjects.torch.integers import (
    FREEZING,
    check_adjusts,
    check_device,
    coded_sensitivities,
    drop_unfused,
    named,
)
from finecast.subjects.torch.judging import judged
from finecast.subjects.torch.source import (
    CODED,
    TorchBuilt,
    TorchSource,
    uses_codes,
    without_codes,
)

FROZEN_TIMES: Final = (
    f"times are those of modules compiled with frozen weights ({FREEZING}): on integers"
    " products run there alone"
)

# Plans of the frontier that are built and timed: each costs a compilation.
_STEPS: Final = 5


def deployed() -> Prepare:
    """``torch.compile`` where there is a C++ compiler for it, else the module as it is."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return lambda module: module
    return torch.compile


def deployed_frozen() -> Prepare:
    """``deployed`` with frozen weights.

    A module that was compiled without that option before is compiled again.
    """
    if deployed() is not torch.compile:
        return deployed()
    return partial(torch.compile, options={"freezing": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How plans of modules are tried.

    Attributes:
        prepare: ``prepare(module)`` is what is timed; by default the compiled module, if there
            is a compiler.
        probing: Probe every rounding alone, instead of one backward pass for all.
        steps: Plans of the frontier that are built and timed, at least 2.
        dynamic_shapes: As ``torch.export.export`` takes them.
    """

    prepare: Prepare | None = None
    probing: bool = False
    steps: int = _STEPS
    dynamic_shapes: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSession(Session):
    """A module that always runs on its example inputs: feeds are ignored."""

    module: torch.nn.Module
    arguments: Arguments

    inputs: Sequence[TensorSpec] = ()  # they have no names
    outputs: Sequence[TensorSpec] = ()  # they are known by number

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs, by number."""
        del feeds
        args, kwargs = copied(self.arguments)
        with torch.no_grad(), evaluating(self.module), unwritten([self.module]):
            leaves = tree_leaves(self.module(*args, **kwargs))
        tensors = (x for x in leaves if isinstance(x, torch.Tensor))
        return {str(number): output_array(x) for number, x in enumerate(tensors)}


@dataclass(slots=True, kw_only=True)
class TorchSubject(Subject):
    """A PyTorch module to tune.

    Attributes:
        model: The module and its graph.
        options: How plans are tried.
        examples: Positional and keyword inputs; None for the workload's first feeds.
        signature: That of the exported program; None for a module.
    """

    model: TorchSource
    options: TuneOptions
    examples: Arguments | None
    signature: ProgramSignature | None
    _frozen: bool = field(default=False, init=False)
    _run: Callable[..., Any] | None = field(default=None, init=False)
    _progress: Progress = field(default=silent, init=False)

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module | ExportedProgram,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: TuneOptions,
    ) -> TorchSubject:
        """A module with example inputs; a program carries its own.

        Raises:
            UsageError: If it is neither.
            ModelError: If the module cannot be captured.
        """
        examples = arguments_of(module, args, kwargs)
        captured = frontend.capture(module, *examples, dynamic_shapes=options.dynamic_shapes)
        check_examples(captured.module, captured.program, *examples)
        original = runnable(module) if isinstance(module, ExportedProgram) else module
        source = TorchSource(
            model=original,
            captured=captured,
            name=type(original).__name__,
            digest=captured.graph.digest,
        )
        return cls(
            model=source,
            options=options,
            examples=examples,
            signature=None,
            reference=ExampleSession(module=original, arguments=examples),
        )

    @property
    def runner(self) -> str:
        """PyTorch."""
        return ENGINE

    @property
    def formats(self) -> tuple[Format, ...]:
        """bf16."""
        return (Format.BF16,)

    @property
    def max_steps(self) -> int:
        """The number of steps in the options."""
        return self.options.steps

    @property
    def compiles(self) -> bool:
        """Whether ``torch.compile`` is what modules are timed under.

        Not for modules with codes: whether their products run on integers is seen compiled.
        """
        given = self.options.prepare
        return not self._frozen and (deployed() if given is None else given) is torch.compile

    @property
    def device(self) -> str:
        """The device that the module runs on."""
        return device_of(self.model.model, self.examples[0] if self.examples else ())

    def arguments(self, workload: Workload) -> Arguments:
        """The inputs on which the module is timed and its errors are measured."""
        if self.examples is not None:
            return self.examples
        assert self.signature is not None
        return self.signature.arguments(workload.timing()[0])

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that PyTorch's ops or compiled kernels lack."""
        check_formats(policy, coded=CODED)
        check_device(policy, self.device)
        check_adjusts(policy)

    def speed(self, fmt: Format) -> Speed:
        """Whether a format is faster than fp32, by timed products."""
        return speed_here(self.device, fmt)

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> TorchExamined:
        """Let the rules judge; drop missing kernels, and int8 where it runs on floats."""
        self._progress = progress
        arguments, captured = self.arguments(workload), self.model.captured
        self._frozen = uses_codes(policy)
        facts = self._facts(workload) if self._frozen else None
        planner = judged(captured, arguments, policy, user_rules, facts)
        if self._frozen:
            self.tell(*uncalibrated(planner.graph, policy.formats, facts or {}), FROZEN_TIMES)
            try:
                planner, told = drop_unfused(captured, planner, arguments, progress)
                self.tell(*told)
            except EngineError as error:
                self.tell(f"{error.what}: nothing is planned in int8; {error.fix}")
                planner = judged(captured, arguments, without_codes(policy), user_rules)
        exact = Exact.of(self.reference, self.feeds(workload), workload.of)
        return TorchExamined(
            subject=self,
            planner=planner,
            arguments=arguments,
            progress=progress,
            counted=exact.counted,
        )

    def _facts(self, workload: Workload) -> dict[int, ValueFacts]:
        """Facts of values on the calibration data; of a module on its examples."""
        captured, signature = self.model.captured, self.signature
        if signature is None:
            return observe(captured, flat_inputs(*self.arguments(workload)))
        facts: dict[int, ValueFacts] = {}
        for feeds in workload.calibration():
            facts = merge(facts, observe(captured, signature.leaves(feeds)))
        return facts

    def session(self, built: Built) -> Session:
        """A session of a plan's module, not compiled."""
        return self._session(built.model)

    def _session(self, module: torch.nn.Module) -> Session:
        if self.signature is not None:
            return ModuleSession(module=module, signature=self.signature)
        assert self.examples is not None
        return ExampleSession(module=module, arguments=self.examples)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Time all modules, each prepared as it is deployed."""
        args, kwargs = copied(self.arguments(workload))

        def call(run: Callable[..., Any]) -> object:
            with torch.no_grad():
                return run(*args, **kwargs)

        original = self.model.model
        modules = [original, *(one.model for one in built.values())]
        calls: dict[str, Callable[[], object]] = {}
        with evaluating(original), unwritten(modules):
            for name, one in built.items():
                try:
                    calls[name] = partial(call, self._prepared(one, (args, kwargs)))
                except EngineError as error:
                    self.tell(f"a plan was dropped: {error.what}")
            anchor = self._prepared(None, (args, kwargs))
            self._compile([partial(call, anchor), *calls.values()])
            return Race.of(partial(call, anchor), calls, effort)

    def _compile(self, calls: Sequence[Callable[[], object]]) -> None:
        """Call each module once: ``torch.compile`` compiles at the first call."""
        for done, first in enumerate(calls):
            self._progress("compile", done, len(calls))
            first()
        self._progress("timing", 0, 1)

    def _prepared(self, built: Built | None, arguments: Arguments) -> Callable[..., Any]:
        """The prepared module of a plan, or of fp32 for None; made once."""
        if built is None:
            # Compared with None, as the truth of a compiled module may be its length.
            if self._run is None:
                self._run = self._prepare(self.model.model, arguments)[0]
            return self._run
        assert isinstance(built, TorchBuilt)
        if built.run is None:
            run, failed = self._prepare(built.model, arguments)
            if failed:
                raise EngineError(
                    f"{failed[0]!r} is planned in int8 and runs in floats",
                    fix="keep it in fp32 by --exclude",
                )
            built.run = run
        return built.run

    def _prepare(
        self, module: torch.nn.Module, arguments: Arguments
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        """A module as it is deployed, and its products on codes that run on floats there."""
        if not self._frozen:
            return (self.options.prepare or deployed())(module), ()
        prepare = self.options.prepare or deployed_frozen()
        run, failed = compiled_frozen(module, *arguments, prepare)
        return run, named(self.model.captured, failed)

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The feeds that are timed; for a module its example inputs, by number."""
        if self.signature is not None:
            return workload.timing()[:1]
        leaves = flat_inputs(*self.arguments(workload))
        tensors = (x for x in leaves if torch.is_tensor(x) and x.layout is torch.strided)
        return [{str(number): output_array(x) for number, x in enumerate(tensors)}]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchExamined(Examined):
    """A module whose every op the rules have judged.

    ``counted`` are numbers of the outputs that errors are of.
    """

    subject: TorchSubject
    planner: Planner
    arguments: Arguments
    progress: Progress
    counted: frozenset[int]

    def analysis(self) -> Analysis:
        """Times by single kernels; errors by one backward pass, of codes by probing."""
        captured, planner = self.subject.model.captured, self.planner
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
        args, formats = flat_inputs(*self.arguments), planner.policy.formats
        errors = sensitivities(
            captured,
            points,
            [f for f in formats if not f.scaled],
            args,
            probing=self.subject.options.probing,
            counted=self.counted,
            progress=self.progress,
        )
        codes = coded_sensitivities(planner, captured, args, self.progress, self.counted)
        return analysis_of(planner, cost, points, errors, codes)


def copied(arguments: Arguments) -> Arguments:
    """A copy of ``arguments`` with cloned tensors."""
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, arguments)
    return args, kwargs


@contextmanager
def unwritten(modules: Iterable[torch.nn.Module]) -> Generator[None]:
    """Restore the modules' buffers afterwards if they were written to.

    Sparse ones are not looked at: no op writes into them.
    """
    found = (b for module in modules for b in module.buffers())
    buffers = {id(b): b for b in found if b.layout is torch.strided}
    before = [(b, b.detach().clone()) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in before:
                # Batch norms do not count their writes as new versions.
                if not torch.equal(buffer, was):
                    buffer.copy_(was)
