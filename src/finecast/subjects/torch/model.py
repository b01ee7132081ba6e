"""An exported program, opened: each verb's work on it."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from finecast.data.deviation import LIMIT
from finecast.data.response import blurred, change, resampled, untold
from finecast.devices.emulation import Emulation
from finecast.engines import EMULATOR
from finecast.engines.base import Array, Session
from finecast.engines.torch.kernel_check import flat_inputs
from finecast.engines.torch.planning import Known, make_torch_planner
from finecast.engines.torch.session import ModuleSession, ProgramSignature, examples, runnable
from finecast.errors import UsageError, WrongNumbersError
from finecast.files import check_writable, digest
from finecast.frontends import torch as frontend
from finecast.frontends.torch.observing import observe
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified, compare_finite
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion, nothing_converted
from finecast.pipeline.model import OpenedModel, RunOptions
from finecast.pipeline.modelled import fastest_plan, plan_time_s
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import PlanRequest, Program
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from finecast.subjects import check_options
from finecast.subjects.emulated import EmulatedSubject
from finecast.subjects.torch.convert import lowered
from finecast.subjects.torch.files import export, load, save
from finecast.subjects.torch.integers import check_adjusts, quantized
from finecast.subjects.torch.lengths import Inputs, longest
from finecast.subjects.torch.program import TorchProgram
from finecast.subjects.torch.source import TorchBuilt, TorchSource, uses_codes
from finecast.subjects.torch.subject import TorchSubject, TuneOptions

# Formats that a program can state, tried on a device if the user names none.
_CASTABLE: Final = (Format.BF16, Format.FP16)


def read(path: Path, *, trust: bool = False) -> TorchModel:
    """Open the program in a ``.pt2`` file; no code in it is executed without ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute code.
    """
    program = load(path, trust=trust)
    return TorchModel(
        path=path,
        model=program,
        captured=frontend.capture(program, ()),
        name=str(path),
        digest=digest(path),
    )


def take(model: Any) -> TorchModel:
    """Refuse an exported program or a module: ``finecast.torch`` converts these.

    Raises:
        UsageError: Always; names the function to call.
    """
    if isinstance(model, ExportedProgram):
        raise UsageError(
            "an exported program in memory goes to finecast.torch",
            fix="finecast.torch.convert(program), or save it with torch.export.save",
        )
    raise UsageError(
        f"a {type(model).__name__} is converted by finecast.torch",
        fix="finecast.torch.convert(module, example_inputs)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel(TorchSource, OpenedModel):
    """A ``.pt2`` file, opened: ``model`` is its program."""

    model: ExportedProgram
    path: Path
    external: tuple[Path, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def to_fp32(self, from_type: str) -> TorchModel:
        """Refuse: a module has to be in fp32 before it is exported."""
        check_options(self.path, {"--from-type": from_type})
        return self

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the program, converted, may be written there."""
        apart = output.external_data is not None
        check_options(self.path, {"--external-data/--one-file": apart})
        if output.path is not None:
            check_writable(output.path, force=output.force)

    def reference(self) -> Session:
        """The program as it was exported."""
        return ModuleSession(
            module=runnable(self.model), signature=ProgramSignature.of(self.model)
        )

    def program(self, emulation: Emulation) -> Program:
        """The program in the form that the emulator runs."""
        return TorchProgram(program=self.model, captured=self.captured, emulation=emulation)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """The program compiled, if there is a compiler, else as it is; or on ``device``."""
        check_options(self.path, {"--engine": engine})
        if device is not None:
            return EmulatedSubject(model=self, emulation=device, states=_CASTABLE)
        reference = self.reference()
        assert isinstance(reference, ModuleSession)
        module = TorchSource(
            model=reference.module,
            captured=self.captured,
            name=self.name,
            digest=self.digest,
        )
        return TorchSubject(
            model=module,
            options=TuneOptions(),
            examples=None,
            signature=reference.signature,
            reference=reference,
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Convert by a policy and write, verified on the program's own example inputs."""
        start = time.perf_counter()
        self._check_run(options)
        check_adjusts(policy)
        self.check_policy(policy)
        told: tuple[str, ...] = ()
        if options.device is not None:
            built = self.build(self._plan_for(policy, options, options.device))
        else:
            rules = tuple(options.user_rules.items())
            captured = self.captured
            if policy.scope is Scope.NONE:  # no number may change, so nothing is folded
                captured = frontend.capture(self.model, (), fold=False)
            inputs = examples(self.model)
            if uses_codes(policy):
                built, told = quantized(captured, inputs, policy, rules, options.progress)
            else:
                built, told = lowered(captured, inputs, policy, rules)
        if policy.scope is not Scope.NONE and not built.edits:
            told = (*told, nothing_converted(built.plan))
        done = self._write(built, output, options, start)
        return replace(done, warnings=(*done.warnings, *told))

    def _check_run(self, options: RunOptions) -> None:
        """Raise UsageError for options of engines and data: a program has its own inputs."""
        given = {"--engine": options.engine, "--data": options.data, "--dim": options.dims}
        check_options(self.path, given)

    def _plan_request(
        self, program: Program, policy: Policy, options: RunOptions, device: Emulation
    ) -> PlanRequest:
        """The policy on a device, with facts of the program's own example inputs."""
        feeds = [ProgramSignature.of(self.model).feeds(*examples(self.model))]
        return PlanRequest(
            policy=policy,
            emulation=device,
            feeds=feeds,
            facts=program.observe(feeds),
            progress=options.progress,
            user_rules=tuple(options.user_rules.items()),
            measured=False,
        )

    def _plan_for(self, policy: Policy, options: RunOptions, device: Emulation) -> Plan:
        """The policy's lowest plan; with ``auto`` the fastest by the device's roofline."""
        program = self.program(device)
        request = self._plan_request(program, policy, options, device)
        examined = program.examine(request)
        planner = examined.planner
        if policy.scope is not Scope.AUTO or not planner.is_free:
            return planner.lowest()
        shapes = {i: f.shape for i, f in request.facts.items()}
        cost = RooflineCost(target=device.target, shapes=shapes)

        def time_s(plan: Plan) -> float:
            return plan_time_s(program.graph, cost, device, program.formats(plan))

        return fastest_plan(planner, examined.analysis(), time_s)

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Write the program of a plan, verified on its own example inputs."""
        start = time.perf_counter()
        self._check_run(options)
        built = self.build(plan)
        plan.check_complete(self.captured.graph, where=self.name)
        return self._write(built, output, options, start)

    def _write(
        self, built: TorchBuilt, output: Destination, options: RunOptions, start: float
    ) -> Conversion:
        plan = built.plan
        result = export(built.model, self.model)
        verified = Verified(engine=None, note="not run: no engine was asked to")
        if options.verify:
            verified = self._verified(result, plan, options.device)
        size = save(result, output.path, plan=plan) if output.path is not None else 0
        return Conversion(
            plan=plan,
            ops=plan.counts_in(self.captured.graph),
            nodes=len(self.captured.graph.nodes),
            casts=built.casts,
            size_bytes=(self.size_bytes, size),
            seconds=time.perf_counter() - start,
            verified=verified,
            warnings=verified.warnings,
            model=result if output.path is None else None,
        )

    def _verified(
        self, result: ExportedProgram, plan: Plan, device: Emulation | None
    ) -> Verified:
        inputs = examples(self.model)
        if device is None:
            return _verified(self.model, result, inputs, plan)
        feeds = ProgramSignature.of(self.model).feeds(*inputs)
        emulated = self.program(device).plan_session(plan, device).run(feeds)
        name = f"{EMULATOR}:{device.target.name}"
        return compare_finite(
            name, [*emulated.values()], [*self.reference().run(feeds).values()]
        )

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned program, verified on the timing feeds."""
        assert isinstance(outcome.built, TorchBuilt)
        result = export(outcome.built.model, self.model)
        inputs = ProgramSignature.of(self.model).arguments(workload.timing()[0])
        verified = _verified(self.model, result, inputs, outcome.plan)
        assert output.path is not None
        return save(result, output.path, plan=outcome.plan), verified

    def census(self, options: RunOptions, low: Format) -> Census:
        """Count ops by the shapes of the program's example inputs; no value is observed."""
        del low
        self._check_run(options)
        check_options(self.path, {"--batch": options.batch != 1})
        captured = frontend.capture(self.model, (), fold=False)
        return Census.of(
            captured.graph,
            hinted_shapes(captured.binding),
            name=self.name,
            size_bytes=self.size_bytes,
        )

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """The graph, and the lowest plan that the rules permit; nothing is measured."""
        self._check_run(options)
        captured = self.captured
        self.check_policy(policy)
        if options.device is not None:
            program = self.program(options.device)
            request = self._plan_request(program, policy, options, options.device)
            return captured.graph, program.examine(request).planner.lowest()
        rules = tuple(options.user_rules.items())
        planner = make_torch_planner(
            captured.graph,
            policy,
            user_rules=rules,
            known=Known(measured=False, facts=self._facts() if uses_codes(policy) else {}),
        )
        return captured.graph, planner.lowest()

    def _facts(self) -> dict[int, ValueFacts]:
        """Facts of values on the program's own example inputs."""
        return observe(self.captured, flat_inputs(*examples(self.model)))

    def graph_for(self, plan: Plan) -> Graph:
        """The captured graph."""
        captured = self.captured
        frontend.planned_edits(captured, plan)
        plan.check_complete(captured.graph, where=self.name)
        return captured.graph


def _verified(
    program: ExportedProgram,
    result: ExportedProgram,
    inputs: Inputs,
    plan: Plan,
) -> Verified:
    """The error of ``result`` on ``inputs`` and at the largest free sizes; the larger one.

    With a warning if no digit of an output is right, or the inputs show no error.

    Raises:
        WrongNumbersError: If the result has NaN or Inf where the program has none, or if no
            digit is right at the largest sizes though some are on ``inputs``.
    """
    found = _compared(program, result, inputs)
    found = replace(found, warnings=_doubts(found, program, result, inputs, plan))
    long = longest(program, inputs)
    if long is None:
        return found
    larger, sizes = long
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    try:
        with torch.no_grad():
            runnable(program)(*larger[0], **larger[1])
    except (RuntimeError, IndexError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return replace(found, note=f"the program does not run at {at}: {first}")
    with _at_sizes(at):
        there = _compared(program, result, larger)
    before, after = found.relative_error or 0.0, there.relative_error or 0.0
    if after >= LIMIT > before:
        raise WrongNumbersError(
            f"at {at} the outputs have a relative error of {after:.3g}: no digit is right",
            fix="exclude ops with --exclude or --op NAME=fp32, or use `tune`",
        )
    worst = max(found, there, key=lambda v: v.relative_error or 0.0)
    return replace(worst, sizes=sizes, warnings=found.warnings)


def _doubts(
    found: Verified,
    program: ExportedProgram,
    result: ExportedProgram,
    inputs: Inputs,
    plan: Plan,
) -> tuple[str, ...]:
    """Warnings of what ``found``, on ``inputs``, says little of."""
    error, on_data = found.relative_error or 0.0, "judge it on your data, by `tune`"
    if error >= LIMIT:
        text = (
            f"the worst output has a relative error of {error:.3g} on the program's example"
            f" inputs: no digit of it is right there; {on_data}"
        )
        return (text,)
    signature = ProgramSignature.of(program)
    before, after = (
        ModuleSession(module=runnable(p), signature=signature) for p in (program, result)
    )
    feeds = signature.feeds(*inputs)
    wanted, others = before.run(feeds), resampled(feeds)

    def near() -> Mapping[str, Array] | None:
        nearby = blurred(feeds)
        return None if nearby is None else before.run(nearby)

    try:
        texts = untold(
            (wanted, after.run(feeds)),
            dict.fromkeys(wanted if plan.lowers else (), 0.0),
            max((f.unit_roundoff for f in plan.low_formats), default=0.0),
            {} if others is None else change(wanted, before.run(others)),
            near,
        )
    except (RuntimeError, IndexError, ValueError):
        return ()  # it does not run on other inputs
    return tuple(f"{text}; {on_data}" for text in texts)


@contextmanager
def _at_sizes(at: str) -> Generator[None]:
    """Put the sizes before the message of a WrongNumbersError inside."""
    try:
        yield
    except WrongNumbersError as error:
        raise WrongNumbersError(f"at {at} {error.what}", fix=error.fix) from error


def _compared(program: ExportedProgram, result: ExportedProgram, inputs: Inputs) -> Verified:
    args, kwargs = inputs
    with torch.no_grad():
        got, wanted = (
            [
                x.detach().cpu().float().numpy()
                for x in tree_leaves(runnable(p)(*args, **kwargs))
                if isinstance(x, torch.Tensor)
            ]
            for p in (result, program)
        )
    return compare_finite("torch", got, wanted)
