"""A module or an exported program, opened: its conversion, and each verb's work on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch.export import ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader

from finecast.data.options import DataOptions
from finecast.data.sizes import MOST_LENGTH, MOST_PRODUCTS
from finecast.data.sources import workload_of
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation
from finecast.engines.base import Engine, Feeds, Loadable, Session
from finecast.engines.exact import Exact
from finecast.engines.fallen_apart import FallenApart, Kernels
from finecast.engines.probe import speed_of
from finecast.engines.torch import NAME, TorchEngine
from finecast.engines.torch.session import (
    Arguments,
    ProgramSignature,
    arguments_of,
    examples,
    runnable,
)
from finecast.errors import EngineError, UsageError, WrongNumbersError
from finecast.files import check_writable, digest
from finecast.frontends import torch as frontend
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import (
    TorchApplied,
    TorchFile,
    TorchPrepared,
)
from finecast.frontends.torch.aten import BODIES
from finecast.frontends.torch.capture import exported
from finecast.frontends.torch.converted import ConvertedModule, own_tensors, provenance_in
from finecast.frontends.torch.input_check import OtherSizes, check_examples, input_check
from finecast.frontends.torch.native import TorchNative
from finecast.frontends.torch.reader import device_kind
from finecast.frontends.torch.runnable import RunnableModule
from finecast.graph import Dim, Graph
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.conversion import Converter, Request
from finecast.native.emulated import Program
from finecast.native.engine_model import EngineModel
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.planning import Judging
from finecast.native.source import EngineBuilt, VerifyOn
from finecast.native.subject import Built
from finecast.native.torch.files import converted, export, load, save
from finecast.native.torch.planning import (
    HOW_TO_RUN,
    autocast_formats,
    check_device,
    check_target,
    choose,
    compiled_times,
    judged,
    measured_errors,
    products_low,
    uses_codes,
)
from finecast.native.torch.program import TorchEmulatedSubject, TorchProgram
from finecast.native.torch.subject import TorchSubject, TuneOptions
from finecast.native.torch.workload import ModuleWorkload
from finecast.native.verifying import verify
from finecast.numbers.thresholds import LIMIT, SAME_TIME
from finecast.planning.adjustments import Adjustment
from finecast.planning.alternatives import explained
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import predicted_error
from finecast.planning.proposing import frontier_of, predicted_cost, proposal
from finecast.plugin import PROGRAMS
from finecast.rules.facts import ValueFacts
from finecast.rules.guests import FINECAST
from finecast.rules.policy import Policy, Scope

# ------------------------------------------ from a program and a policy to a converted program


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConverter(Converter):
    """Converts a program or a module by a policy or a plan."""

    source: TorchModel  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen

    @property
    def examples(self) -> Feeds:
        """Inputs on which kernels are tried and errors are estimated."""
        return self.feeds.batches[0] if self.feeds.batches else self.source.examples

    def convert(self, policy: Policy, **options: Any) -> Converted:
        """As ``Converter.convert``; integers are refused where ops had to be measured."""
        if uses_codes(policy, self.engines[0].device):
            if policy.scope is Scope.AUTO and not options.get("target"):
                raise UsageError(
                    f"policy {policy.label}: what is converted by it is measured, op by op",
                    fix='use tune, or "matmult:int8" for all products',
                )
            self.progress("observe", 0, 1)
        return Converter.convert(self, policy, **options)

    def _planner(
        self, prepared: PreparedModel, request: Request, facts: Mapping[int, ValueFacts]
    ) -> Planner:
        """The planner without kernels that are missing, and products that run on floats."""
        engine, policy = self.engines[0], request.policy
        if not isinstance(engine, TorchEngine):
            if engine.emulates is not None:
                check_target(policy, engine.emulates)
            return Converter._planner(self, prepared, request, facts)
        assert isinstance(prepared, TorchPrepared)
        check_device(policy, device_kind(prepared.captured.module))
        how = Judging(
            facts=facts,
            user_rules=request.user_rules,
            measured=policy.scope is Scope.AUTO,
        )
        planner, told = judged(
            self.source, prepared, policy, engine, how, self.examples, self.progress
        )
        lowest = planner.lowest().decisions
        runs = uses_codes(policy, engine.device) and any(
            d.format.multiplies_integers for d in lowest
        )
        self.told.extend((*told, *((HOW_TO_RUN,) if runs else ())))
        return planner

    def _choose(
        self,
        prepared: PreparedModel,
        planner: Planner,
        facts: Mapping[int, ValueFacts],
        target: Emulation | None,
    ) -> Plan:
        """The plan by the scope: ``auto`` and ``like-autocast`` within autocast's error."""
        policy = planner.policy
        chosen = policy.scope in (Scope.AUTO, Scope.LIKE_AUTOCAST) and planner.is_free
        if target is not None or not chosen or uses_codes(policy, self.engines[0].device):
            return Converter._choose(self, prepared, planner, facts, target)
        assert isinstance(prepared, TorchPrepared)
        measures = policy.scope is Scope.AUTO
        times = compiled_times(planner, prepared, single_kernels=measures)
        exact = Exact.of(self.source.reference(), [self.examples])
        errors = measured_errors(prepared, planner, times, exact)
        analysis = times.analysis(prepared, planner, errors)
        formats = autocast_formats(planner.graph, planner.permissions, policy.formats)
        # If autocast rounds nothing, its error is no limit.
        budget = predicted_error(analysis, formats) or math.inf
        if not measures:
            if budget == math.inf:
                return planner.lowest()
            planner = products_low(planner)
        choice = choose(frontier_of(planner, analysis), budget)
        # The frontier begins with the fastest of the most accurate plans. Where that gains a
        # hair by ops that round nothing, such as masks, the module may as well stay as it is.
        high = planner.highest()
        enough = SAME_TIME * choice.time_s
        if (
            measures
            and not high.low_formats
            and predicted_cost(planner, analysis, high) <= enough
        ):
            return explained(planner, analysis, high)
        return proposal(planner, analysis, choice).plan


def slow_formats(plan: Plan, engine: TorchEngine) -> list[str]:
    """Notes on formats of a plan that gain nothing here."""
    speeds = (speed_of(engine, fmt) for fmt in plan.low_formats if not fmt.multiplies_integers)
    return [f"{s.text}: no speed is gained here" for s in speeds if not s.gains]


def read(path: Path, *, trust: bool = False) -> TorchModel:
    """Open the program in a ``.pt2`` file; no code in it is executed without ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute code.
    """
    program = load(path, trust=trust)
    file = TorchFile(
        path=path,
        name=str(path),
        model=program,
        program=program,
        digest=digest(path),
        size_bytes=path.stat().st_size,
        converted=converted(path) or provenance_in(program),
    )
    return TorchModel(file=file)


def take(model: Any, how: ReadOptions) -> TorchModel:
    """Open a module or a program in memory, with the example inputs that ``how`` has.

    Raises:
        UsageError: If it is neither, or a module comes without inputs.
        ModelError: If it cannot be captured.
    """
    arguments = arguments_of(model, how.example_inputs, how.example_kwargs)
    torch_model = of_module(model, arguments, dynamic_shapes=how.dynamic_shapes)
    torch_model.as_program = isinstance(model, ExportedProgram)
    return torch_model


def of_module(
    module: torch.nn.Module | ExportedProgram,
    arguments: Arguments,
    *,
    dynamic_shapes: Any = None,
) -> TorchModel:
    """Open a module, or a program in memory, with example inputs.

    Raises:
        UsageError: If the inputs are not those of the program.
        ModelError: If the module cannot be captured.
    """
    program = exported(module, *arguments, dynamic_shapes=dynamic_shapes)
    original = runnable(module) if isinstance(module, ExportedProgram) else module
    name = type(original).__name__
    file = TorchFile(
        path=Path(f"({name} in memory).pt2"),  # no file of a user's has that name
        name=name,
        model=original,
        program=program,
        digest="",
        size_bytes=state_bytes(original),
        converted=module.provenance
        if isinstance(module, ConvertedModule)
        else provenance_in(program),
    )
    captured = file.captured(Policy().label)
    check_examples(captured.module, captured.program, *arguments)
    file = replace(file, digest=captured.graph.digest)
    return TorchModel(file=file, given=arguments)


@dataclass(slots=True, kw_only=True)
class TorchBuilt(EngineBuilt):
    """The module of a plan.

    Attributes:
        run: The prepared module that is timed, once it was made.
        program: The module exported, once it was.
    """

    run: Callable[..., Any] | None = None
    program: ExportedProgram | None = None

    def release(self) -> None:
        """Forget the session and the prepared module."""
        EngineBuilt.release(self)
        self.run = None


@dataclass(slots=True, kw_only=True, repr=False)
class TorchModel(EngineModel[TorchFile, TorchPrepared]):
    """A module or a program, opened.

    Attributes:
        given: Example arguments of a module in memory; None for those of the program.
        rule_set: Which rules judge its ops.
        calibration: Feeds by whose ranges scales are chosen; empty for the examples.
        tuning: How plans are tried.
        as_program: Whether a result is given back as an exported program, not as a module.
        sizes_freed: Whether it was captured anew, as an evaluation has calls of other sizes.
    """

    library: ClassVar[str] = "PyTorch"
    engine: ClassVar[str] = NAME
    kind: ClassVar[str] = PROGRAMS
    builds: ClassVar[type[EngineBuilt]] = TorchBuilt
    converts: ClassVar[type[Converter]] = TorchConverter
    fp32_fix: ClassVar[str] = "convert copy.deepcopy(module).float(), with inputs in fp32"

    given: Arguments | None = None
    rule_set: str = FINECAST
    calibration: Sequence[Feeds] = ()
    tuning: TuneOptions = TuneOptions()
    as_program: bool = False
    sizes_freed: bool = False
    signature: ProgramSignature = field(init=False)

    def __post_init__(self) -> None:
        """The facts of the model are those of its file."""
        EngineModel.__post_init__(self)
        self.signature = ProgramSignature.of(self.file.program)

    @property
    def gives_modules(self) -> bool:
        """Whether a result in memory is a module, and not a program."""
        return self.given is not None and not self.as_program

    @property
    def arguments(self) -> Arguments:
        """The example arguments."""
        return self.given if self.given is not None else examples(self.file.program)

    @property
    def examples(self) -> Feeds:
        """The feeds of the example arguments."""
        return self.signature.feeds(*self.arguments)

    @property
    def loadable(self) -> RunnableModule:
        """The module with its program."""
        model = self.file.model
        module = runnable(model) if isinstance(model, ExportedProgram) else model
        return RunnableModule(module=module, program=self.file.program)

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine given, on the device that the program's tensors are on.

        Raises:
            UsageError: If another device or engine is named.
        """
        name, _, device = (spec or NAME).partition(":")
        own = self.signature.device.type
        engines = EngineModel.runners(self, f"{name}:{device or own}")
        if any(isinstance(e, TorchEngine) and e.device.lower() != own for e in engines):
            raise UsageError(
                f"the tensors of {self.name} are on {own}",
                where="--engine",
                fix=f"use {name}:{own.upper()}, or export the model on the other device",
            )
        return engines

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs."""
        return {spec.name: spec.shape for spec in self.signature.inputs}

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> TorchNative:
        """A copy whose values can be rounded."""
        return TorchNative.of(self.file.captured(policy, adjustments))

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """None: PyTorch reports no kernels, so nothing is compiled to compare them."""
        return ()

    def program(self, emulation: Emulation) -> Program:
        """The program in the form that the emulator runs."""
        return TorchProgram(source=self, emulation=emulation)

    def load_written(
        self, built: EngineBuilt, written: Loadable, engine: Engine
    ) -> tuple[Session, Kernels]:
        """The plan's model as it was written; a device's emulator takes the program."""
        device = engine.emulates
        if device is None:
            return EngineModel.load_written(self, built, written, engine)
        return self.program(device).plan_session(built.plan, device), ()

    def measured(self, **parts: Any) -> TorchSubject:
        """The program compiled, if there is a compiler, else as it is; of these parts."""
        return TorchSubject(model=self, options=self.tuning, **parts)

    def workload(self, options: DataOptions, session: Session) -> Workload:
        """The data; of a module in memory the user's metric gets the module itself."""
        if self.given is None or options.evaluate is None:
            return EngineModel.workload(self, options, session)
        captured = self.file.captured(Policy().label)
        of_module = partial(
            ModuleWorkload,
            known=options.baseline,
            examples=self.examples,
            signature=self.signature,
            inputs=input_check(captured.module, captured.program),
            freed=None if self.sizes_freed else self.freed,
        )
        return workload_of(replace(options, rows=self.rows_read), session, of_module)

    def fitted(self, options: DataOptions) -> TorchModel:
        """With the number of rows free if a DataLoader ends with a partial batch.

        So the result takes all batches of the DataLoader, as the module does.
        """
        data: Any = options.data
        if not isinstance(data, DataLoader) or data.drop_last or not self.gives_modules:
            return self
        sizes, rows = {s.shape[0] for s in self.signature.inputs if s.shape}, data.batch_size
        if rows is None or sizes != {rows} or not isinstance(data.dataset, Sized):
            return self
        if len(data.dataset) % rows == 0:
            return self
        args, kwargs = self.arguments
        leaves = enumerate(tree_leaves((args, kwargs)))
        axes = {(i, 0) for i, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
        return self.freed(OtherSizes(text="", args=args, kwargs=kwargs, axes=frozenset(axes)))

    def freed(self, other: OtherSizes) -> TorchModel:
        """The module captured anew, with the sizes free that calls of it differ in.

        It is captured with the inputs of such a call: of one row ``torch.export`` would fix
        the number. The example inputs, on which it is timed, stay.

        Raises:
            ModelError: If the module cannot be captured so.
        """
        shapes, module = ShapesCollection(), cast("torch.nn.Module", self.file.model)
        for index, leaf in enumerate(tree_leaves((other.args, other.kwargs))):
            axes = {axis: torch.export.Dim.AUTO for at, axis in other.axes if at == index}
            if axes:
                shapes[leaf] = axes
        arguments = (other.args, other.kwargs)
        dynamic_shapes = shapes.dynamic_shapes(module, *arguments)
        model = of_module(module, arguments, dynamic_shapes=dynamic_shapes)
        return replace(self, file=model.file, sizes_freed=True)

    def emulated(self, **parts: Any) -> TorchEmulatedSubject:
        """The program on a device, of these parts."""
        return TorchEmulatedSubject(model=self, **parts)

    def observed(
        self, policy: Policy, options: RunOptions, batches: Sequence[Feeds]
    ) -> Sequence[Feeds]:
        """The user's batches; without them the examples, for scales and for devices."""
        needed = options.device is not None or any(f.runs_on_codes for f in policy.formats)
        return batches or ((self.calibration or [self.examples]) if needed else ())

    def _prepare(self, policy: Policy) -> TorchPrepared:
        if policy.retypes_ports:
            raise UsageError("--io does not apply to PyTorch models", fix="leave it out")
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> TorchApplied:
        captured = self.file.captured(plan.policy, plan.adjustments)
        done = frontend.applied(captured, plan, self.name)
        if done.edits or not plan.decisions:
            return done
        # Of a plan that lowers nothing the module stays as it was: a batch norm that is folded
        # into a convolution, so that both are planned as one, rounds otherwise.
        plain = self.file.captured(Scope.NONE.value)
        model = frontend.apply(plain, ())
        model.eval()
        model.finecast_plan = plan
        return replace(done, model=model, captured=plain)

    def _size_of(self, model: torch.nn.Module) -> int:
        return state_bytes(model)

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep another type than fp32, and on bodies, which keep theirs."""
        if policy.scope is Scope.NONE:
            return []
        bodies = Counter(n.native for n in graph.nodes if n.native.startswith(f"{BODIES}::"))
        return EngineModel.kept_notes(self, graph, policy) + [
            f"what is inside of {native} keeps its types ({count} in the model): write short"
            " branches by torch.where, or convert modules that have none"
            for native, count in bodies.items()
        ]

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the program, converted, may be written there."""
        output.check_plain(".pt2 files")
        if output.path is not None:
            check_writable(output.path, force=output.force)

    def store(
        self, built: EngineBuilt, output: Destination, on: VerifyOn
    ) -> tuple[int, Verified]:
        """Write the module, exported; a module in memory stays one."""
        assert isinstance(built, TorchBuilt)
        if output.path is None and (self.gives_modules or not on.engines):
            module = RunnableModule(module=built.model, program=self.file.program)
            return built.size_bytes, self._verified(built, module, on)
        built.program = export(built.model, self.file.program)
        written = RunnableModule(module=runnable(built.program), program=self.file.program)
        verified = self._verified(built, written, on)
        if output.path is None:
            return built.size_bytes, verified
        size = save(built.program, output.path, plan=built.plan, original=self.name)
        return size, verified

    def given_back(self, built: Built | None) -> Any:
        """The converted module, with tensors of its own, or the program exported of it."""
        if built is None:
            return self.file.program if self.as_program else self.model
        assert isinstance(built, TorchBuilt)
        if self.gives_modules:
            own_tensors(built.model)
            return built.model
        return built.program or export(built.model, self.file.program)

    def _verified(self, built: TorchBuilt, written: RunnableModule, on: VerifyOn) -> Verified:
        """How ``written`` was verified: on the feeds, and at the largest free sizes.

        The larger error counts.

        Raises:
            WrongNumbersError: If its formats do not explain its outputs.
        """
        verified, feeds = verify(self, built, written, on), on.feeds
        measured = on.engines and on.engines[0].emulates is None
        if feeds.examples is None or feeds.batches or not measured:
            return verified
        long = longest(self.file.program, self.arguments)
        if long is None:
            return verified
        arguments, sizes = long
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        given = self.signature.feeds(*arguments)
        larger = replace(feeds, examples=given, dims={}, batch=1)
        try:
            self.reference().run(given)
        except EngineError as error:
            return replace(verified, note=f"the program does not run at {at}: {error.what}")
        try:
            there = verify(self, built, written, replace(on, feeds=larger))
        except WrongNumbersError as error:
            raise WrongNumbersError(
                f"at {at} {error.what}", where=error.where, fix=error.fix
            ) from error
        before, after = verified.relative_error or 0.0, there.relative_error or 0.0
        if after >= LIMIT > before:
            raise WrongNumbersError(
                f"at {at} the outputs have a relative error of {after:.3g}: no digit is right",
                fix="exclude ops with --exclude or --op NAME=fp32, or use `tune`",
            )
        worst = max(verified, there, key=lambda v: v.relative_error or 0.0)
        return replace(worst, sizes=sizes, warnings=verified.warnings)


def state_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; of sparse ones those that they would have if dense."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(t.numel() * t.element_size() for t in tensors)


def longest(
    program: ExportedProgram, inputs: Arguments
) -> tuple[Arguments, dict[str, int]] | None:
    """``inputs`` as large as the program's bounds allow, and their sizes by INPUT.AXIS.

    Law: larger inputs repeat the example; integers that count up by 1 along an axis, such as
    positions, go on counting. None if no bound is above the example's size. Sizes are smaller
    if a run at the bounds would take too long.
    """
    leaves, tree = tree_flatten(inputs)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes}
    specs = ProgramSignature.of(program).inputs
    shapes = [fakes[spec.name].shape for spec in specs]
    have: dict[Any, int] = {}
    names: dict[Any, str] = {}
    for number, spec, shape in zip(tensors, specs, shapes, strict=True):
        for axis, dim in enumerate(shape):
            if not isinstance(dim, int) and dim.node.expr.is_Symbol:
                have[dim.node.expr] = leaves[number].shape[axis]
                names.setdefault(dim.node.expr, f"{spec.name}.{axis}")
    sizes = _affordable(_bounds(program, have), have, program)
    if sizes == have:
        return None
    for number, shape in zip(tensors, shapes, strict=True):
        for axis, dim in enumerate(shape):
            if not isinstance(dim, int):
                size = int(dim.node.expr.subs(sizes))
                leaves[number] = _grown(leaves[number], axis, size)
    return tree_unflatten(leaves, tree), {names[s]: size for s, size in sizes.items()}


def _bounds(program: ExportedProgram, have: Mapping[Any, int]) -> dict[Any, int]:
    """The upper bound of each free size; its size in the example if there is no bound."""
    upper_bounds = dict(have)
    for name, size in have.items():
        bounds = program.range_constraints.get(name)
        if bounds is not None and bounds.upper.is_Integer:
            upper_bounds[name] = max(size, min(int(bounds.upper), MOST_LENGTH))
    return upper_bounds


def _affordable(
    sizes: dict[Any, int], have: Mapping[Any, int], program: ExportedProgram
) -> dict[Any, int]:
    """``sizes``, the largest halved until weights times all sizes are few enough."""
    weights = sum(p.numel() for p in program.parameters()) or 1
    while math.prod(sizes.values()) * weights > MOST_PRODUCTS:
        larger = [name for name in sizes if sizes[name] > have[name]]
        if not larger:
            break
        most = max(larger, key=lambda name: sizes[name])
        sizes[most] = max(sizes[most] // 2, have[most])
    return sizes


def _grown(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """``tensor`` repeated, or counted on, along ``axis`` up to ``size``."""
    old = tensor.shape[axis]
    if size == old or not old:
        return tensor
    index = torch.arange(size, device=tensor.device)
    repeated = tensor.index_select(axis, index % old)
    whole = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
    if not whole or old == 1 or bool((tensor.diff(dim=axis) != 1).any()):
        return repeated
    steps = (index - index % old).to(tensor.dtype)
    return repeated + steps.reshape([-1] + [1] * (tensor.ndim - axis - 1))
