"""An exported program, opened: each verb's work on it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from finecast.data.deviation import LIMIT
from finecast.devices.emulation import Emulation
from finecast.engines.torch.planning import make_torch_planner
from finecast.engines.torch.session import ModuleSession, Signature, examples, runnable
from finecast.errors import UsageError, WrongNumbersError
from finecast.files import check_writable
from finecast.frontends import torch as frontend
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified, compare
from finecast.pipeline.census import Census, count_classes, notes
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.model import RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.rules.matching import check_names
from finecast.rules.policy import Policy
from finecast.subjects.torch import TorchBuilt, TorchSubject, TuneOptions, planned
from finecast.subjects.torch_convert import convert
from finecast.subjects.torch_files import ProgramFile, export, load_file, save
from finecast.subjects.torch_lengths import Inputs, longest


def read(path: Path, *, trust: bool = False) -> TorchProgram:
    """The program in a ``.pt2`` file."""
    return TorchProgram(file=load_file(path, trust=trust))


def take(model: Any) -> TorchProgram:
    """An exported program.

    Raises:
        UsageError: If it is a module: what it is called with is not known.
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
class TorchProgram:
    """A ``.pt2`` file, opened."""

    file: ProgramFile
    external: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """Its file."""
        return self.file.path

    @property
    def digest(self) -> str:
        """Of the file."""
        return self.file.digest

    @property
    def model(self) -> ExportedProgram:
        """The program."""
        return self.file.program

    def taken(self, from_type: str) -> TorchProgram:
        """Refused: a module is taken to fp32 before it is exported."""
        raise UsageError(
            "--from-type does not apply to .pt2 files",
            where=from_type,
            fix="export the module in fp32: copy.deepcopy(module).float()",
        )

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the program, converted, may be written there."""
        _refuse({"--external-data/--one-file": output.external_data is not None})
        if output.path is not None:
            check_writable(output.path, force=output.force)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """Compiled where there is a compiler, else as it is."""
        _refuse({"--engine": engine, "--target": device})
        program = self.file.program
        module, signature = runnable(program), Signature.of(program)
        return TorchSubject(
            source=program,
            original=module,
            captured=frontend.capture(program, ()),
            options=TuneOptions(),
            examples=None,
            signature=signature,
            name=self.file.name,
            digest=self.file.digest,
            size_bytes=self.file.size_bytes,
            reference=ModuleSession(module=module, signature=signature),
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Verified on the program's own example inputs."""
        start = time.perf_counter()
        _refuse_run(options)
        _refuse({"--no-verify": not options.verify, "--io": policy.io or policy.io_low})
        program = self.file.program
        args, kwargs = examples(program)
        with _heard() as said:
            low = convert(
                program, args, policy, example_kwargs=kwargs, user_rules=options.user_rules
            )
        plan: Plan = low.finecast_plan  # type: ignore[assignment]
        done = self._write(low, plan, output, (args, kwargs), start)
        told = dict.fromkeys(str(one.message) for one in said)
        return replace(done, warnings=tuple(told))

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Verified on the program's own example inputs."""
        start = time.perf_counter()
        _refuse_run(options)
        _refuse({"--no-verify": not options.verify})
        captured = frontend.capture(self.file.program, ())
        low = planned(captured, plan)
        plan.check_complete(captured.graph, where=self.file.name)
        return self._write(low, plan, output, examples(self.file.program), start)

    def _write(
        self,
        low: GraphModule,
        plan: Plan,
        output: Destination,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        start: float,
    ) -> Conversion:
        result = export(low, self.file.program)
        verified = _verified(self.file.program, result, inputs)
        size = save(result, output.path, plan=plan) if output.path is not None else 0
        captured = frontend.capture(self.file.program, ())
        edits = frontend.planned_edits(captured, plan)
        return Conversion(
            plan=plan,
            nodes=len(captured.graph.nodes),
            casts=cast_count(captured.graph, edits),
            size_bytes=(self.file.size_bytes, size),
            seconds=time.perf_counter() - start,
            verified=verified,
            model=result if output.path is None else None,
        )

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Verified on the feeds that were timed."""
        assert isinstance(outcome.built, TorchBuilt)
        assert isinstance(subject, TorchSubject)
        result = export(outcome.built.model, self.file.program)
        verified = _verified(self.file.program, result, subject.arguments(workload))
        assert output.path is not None
        return save(result, output.path, plan=outcome.plan), verified

    def census(self, options: RunOptions, low: Format) -> Census:
        """With the sizes of the program's example inputs."""
        del low
        _refuse_run(options)
        _refuse({"--batch": options.batch != 1})
        captured = frontend.capture(self.file.program, (), fold=False)
        classes = count_classes(captured.graph, hinted_shapes(captured.binding))
        return Census(
            name=self.file.name,
            opset=0,
            nodes=len(captured.graph.nodes),
            parameters=sum(c.parameters for c in classes),
            size_bytes=self.file.size_bytes,
            classes=classes,
            notes=notes(captured.graph, {}),
            warnings=(),
        )

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """By the rules alone."""
        _refuse_run(options)
        captured = frontend.capture(self.file.program, ())
        check_names(policy, captured.graph)
        rules = tuple(options.user_rules.items())
        planner = make_torch_planner(captured.graph, policy, user_rules=rules, measured=False)
        return captured.graph, planner.lowest()

    def graph_for(self, plan: Plan) -> Graph:
        """The captured graph."""
        captured = frontend.capture(self.file.program, ())
        frontend.planned_edits(captured, plan)
        plan.check_complete(captured.graph, where=self.file.name)
        return captured.graph


def _refuse_run(options: RunOptions) -> None:
    given = {"--engine": options.engine, "--target": options.device, "--data": options.data}
    _refuse({**given, "--dim": options.dims})


def _refuse(options: Mapping[str, object]) -> None:
    """Raise UsageError for an option that says nothing of an exported program."""
    for name, value in options.items():
        if value:
            raise UsageError(f"{name} does not apply to .pt2 files", fix="leave it out")


_TOLD: Final = r".*(on this.*measured|ops compute in)"


@contextmanager
def _heard() -> Generator[list[warnings.WarningMessage]]:
    """What is said of the formats asked for: that one is slow here, and by how much."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, message=_TOLD)
        yield said


def _verified(
    program: ExportedProgram,
    result: ExportedProgram,
    inputs: Inputs,
) -> Verified:
    """How far the result is from the program on ``inputs``, and where free sizes are largest.

    Raises:
        WrongNumbersError: If there are NaN or Inf where the program has none, or no digit is
            right at the largest sizes alone.
    """
    found = _compared(program, result, inputs)
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
    return replace(max(found, there, key=lambda v: v.relative_error or 0.0), sizes=sizes)


@contextmanager
def _at_sizes(at: str) -> Generator[None]:
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
    return compare("torch", got, wanted)
