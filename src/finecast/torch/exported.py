"""Exported programs, in memory and as ``.pt2`` files: load, convert, tune, save."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from finecast.edits import cast_count
from finecast.engines.base import Feeds
from finecast.errors import UsageError, WrongNumbersError
from finecast.files import CommandFiles
from finecast.frontends import torch as frontend
from finecast.frontends.torch.archive import load_program
from finecast.frontends.torch.capture import quiet
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.measure.census import Census, count_classes, notes
from finecast.measure.criterion import Criterion
from finecast.measure.deviation import LIMIT
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.rules import UserRule
from finecast.rules.matching import check_names
from finecast.rules.user import without_opinion
from finecast.sensitivity import squared_error
from finecast.torch.convert import convert
from finecast.torch.lengths import Inputs, longest
from finecast.torch.planning import device_of, make_torch_planner
from finecast.torch.session import ModuleSession, Signature, examples, runnable
from finecast.torch.tuning import Prepare, TorchOutcome, TuneOptions, deployed, tune
from finecast.tuner.artefact import Verified, compare
from finecast.tuner.conversion import Conversion
from finecast.tuner.sources import DataOptions, workload_of
from finecast.tuner.study import Trial, TrialKey
from finecast.tuner.tuning import Measured, Outcome, Verdict

PLAN_FILE = "finecast.plan.json"
"""The plan's name among the extra files of a saved program."""


def load(path: str | Path, *, trust: bool = False) -> ExportedProgram:
    """The program in a ``.pt2`` file; nothing in it is executed unless ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute what it brings.
    """
    with quiet():
        return load_program(Path(path), trust=trust)


def export(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """A converted module as a program that takes what ``program`` takes.

    Sizes that are free in ``program`` are free in the result, within the same bounds.

    Raises:
        ModelError: If the program carries no example inputs.
    """
    args, kwargs = examples(program)
    shapes = ShapesCollection()
    signature = Signature.of(program)
    tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes}
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        free = {
            axis: _dim(program, dim)
            for axis, dim in enumerate(fakes[spec.name].shape)
            if not isinstance(dim, int)
        }
        if free:
            shapes[tensor] = free
    given = shapes.dynamic_shapes(module, args, kwargs)
    with quiet():
        return torch.export.export(module, args, kwargs, dynamic_shapes=given)


def _dim(program: ExportedProgram, size: torch.SymInt) -> Any:
    """The same free size again; export finds out by itself what is made of several."""
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return Dim.AUTO
    lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return Dim(str(size), min=lower, max=upper)


def save(program: ExportedProgram, path: Path, *, plan: Plan | None = None) -> int:
    """Write a program in one step, with its plan as an extra file; returns its bytes."""
    extra = {PLAN_FILE: plan.to_json()} if plan is not None else {}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
        staged = Path(folder) / "model.pt2"
        with quiet():
            torch.export.save(program, staged, extra_files=extra)
            # What was written has to be what can be read, by the strict reader too.
            load_program(staged)
        try:
            size = staged.stat().st_size
            staged.replace(path)
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error
    return size


def convert_file(
    model: str | Path,
    output: str | Path,
    policy: Policy | str = "auto:bf16",
    *,
    user_rules: Mapping[str, UserRule] | None = None,
    trust: bool = False,
    force: bool = False,
) -> Conversion:
    """Convert a ``.pt2`` file by a policy, run it on its example inputs, and write it.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    start = time.perf_counter()
    source, target = Path(model), Path(output)
    _claim(source, target, force=force)
    program = load(source, trust=trust)
    args, kwargs = examples(program)
    with _heard() as said:
        low = convert(program, args, policy, example_kwargs=kwargs, user_rules=user_rules)
    done = _write(program, low, source, target, (args, kwargs))
    unheard = without_opinion(user_rules or (), done.plan)
    return replace(
        done, seconds=time.perf_counter() - start, warnings=(*_once(said), *unheard)
    )


_TOLD: Final = r".*(on this.*measured|ops compute in)"


@contextmanager
def _heard() -> Generator[list[warnings.WarningMessage]]:
    """What is said of the formats asked for: that one is slow here, and by how much."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, message=_TOLD)
        yield said


def _once(said: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(one.message) for one in said))


def _write(
    program: ExportedProgram,
    low: GraphModule,
    source: Path,
    target: Path,
    inputs: Inputs,
) -> Conversion:
    plan: Plan = low.finecast_plan  # type: ignore[assignment]
    result = export(low, program)
    verified = _verify(program, result, inputs)
    size = save(result, target, plan=plan)
    captured = frontend.capture(program, ())
    edits = frontend.planned_edits(captured, plan)
    return Conversion(
        plan=plan,
        nodes=len(captured.graph.nodes),
        casts=cast_count(captured.graph, edits),
        size_bytes=(source.stat().st_size, size),
        seconds=0.0,
        verified=verified,
    )


def _verify(
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


def tune_file(
    model: str | Path,
    output: str | Path,
    data: DataOptions,
    criterion: Criterion,
    policy: Policy | str = "auto:bf16",
    *,
    user_rules: Sequence[tuple[str, UserRule]] = (),
    prepare: Prepare | None = None,
    trust: bool = False,
    force: bool = False,
) -> Outcome:
    """Tune a ``.pt2`` file on data with the inputs' names; write it where that helps.

    What is timed is ``prepare(module)``: by default compiled, where there is a compiler.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    start = time.perf_counter()
    source, target = Path(model), Path(output)
    files = _claim(source, target, force=force)
    for role, given in (("data", data.data), ("calibration data", data.calib)):
        if isinstance(given, str | Path):
            files.read(f"the {role}", given)
    program = load(source, trust=trust)
    asked = Policy.parse(policy) if isinstance(policy, str) else policy
    if asked.names_nodes:  # a slip shows before the baseline is evaluated
        check_names(asked, frontend.capture(program, ()).graph)
    signature = Signature.of(program)
    reference = ModuleSession(module=runnable(program), signature=signature)
    workload = workload_of(data, reference)
    baseline = workload.evaluate(reference, None)
    goal = replace(criterion, higher_is_better=workload.higher_is_better)
    goal.check(baseline, workload.worst)
    feeds: Feeds = next(iter(workload.timing()))
    args, kwargs = signature.arguments(feeds)

    def evaluate(module: torch.nn.Module) -> float:
        session = ModuleSession(module=module, signature=signature)
        return workload.evaluate(session, reference)

    with _heard() as said:
        found = tune(
            program,
            args,
            example_kwargs=kwargs,
            evaluate=evaluate,
            baseline=baseline,
            criterion=goal,
            policy=policy,
            options=TuneOptions(prepare=prepare or deployed(), user_rules=tuple(user_rules)),
        )
    found = replace(found, why="; ".join((found.why, *_once(said))))
    size = source.stat().st_size
    after, error = size, 0.0
    if found.improved:
        assert isinstance(found.model, GraphModule)
        after = _write(program, found.model, source, target, (args, kwargs)).size_bytes[1]
        low = ModuleSession(module=found.model, signature=signature)
        got, wanted = (list(one.run(feeds).values()) for one in (low, reference))
        error = squared_error(got, wanted) ** 0.5
    seconds = time.perf_counter() - start
    outcome = _outcome(found, size, after, error, workload.digest, seconds)
    unheard = without_opinion((name for name, _ in user_rules), found.plan)
    warnings = (*outcome.warnings, *workload.warnings, *unheard)
    return replace(outcome, warnings=warnings, stale=files.stale())


def _claim(source: Path, target: Path, *, force: bool) -> CommandFiles:
    """The files of a call; UsageError if what is read would be written."""
    files = CommandFiles(force=force)
    files.read("the model", source)
    files.write("the output", target)
    return files


def census(model: str | Path, *, trust: bool = False) -> Census:
    """Ops of a ``.pt2`` file by class, with the sizes of its example inputs.

    Raises:
        FinecastError: If the file cannot be read.
    """
    path = Path(model)
    captured = frontend.capture(load(path, trust=trust), (), fold=False)
    classes = count_classes(captured.graph, hinted_shapes(captured.binding))
    return Census(
        name=str(path),
        opset=0,
        nodes=len(captured.graph.nodes),
        parameters=sum(c.parameters for c in classes),
        size_bytes=path.stat().st_size,
        classes=classes,
        notes=notes(captured.graph, {}),
        warnings=(),
    )


def judge(
    model: str | Path,
    policy: Policy,
    plan: Plan | None = None,
    *,
    user_rules: Sequence[tuple[str, UserRule]] = (),
    trust: bool = False,
) -> tuple[Graph, Plan]:
    """The graph of a ``.pt2`` file with ``plan``, else with what the rules alone say of it.

    Raises:
        FinecastError: If the file cannot be read, or the plan was made for another program.
    """
    captured = frontend.capture(load(model, trust=trust), ())
    if plan is not None:
        frontend.planned_edits(captured, plan)
        plan.check_complete(captured.graph, where=str(model))
        return captured.graph, plan
    check_names(policy, captured.graph)
    device = device_of(captured.module, ())
    planner = make_torch_planner(
        captured.graph, policy, device, user_rules=tuple(user_rules), measured=False
    )
    return captured.graph, planner.lowest()


def _outcome(
    found: TorchOutcome, before: int, after: int, error: float, data: str, seconds: float
) -> Outcome:
    """What tuning found, as tuning an ONNX model reports it."""
    return Outcome(
        verdict=Verdict.IMPROVED if found.improved else Verdict.UNCHANGED,
        why=found.why,
        baseline=Measured(
            metric=found.baseline, latency_s=found.baseline_s, size_bytes=before
        ),
        tuned=Measured(metric=found.metric, latency_s=found.latency_s, size_bytes=after),
        speedup=found.speedup,
        speedup_spread=found.speedup_spread,
        plan=found.plan,
        casts=found.casts,
        trials=tuple(
            Trial(
                key=TrialKey(
                    model=t.plan.model, plan=t.plan.digest, engine=t.plan.engine, data=data
                ),
                name=t.name,
                metric=t.metric,
                passed=t.passed,
                latency_s=t.latency_s,
            )
            for t in found.trials
        ),
        evaluations=1 + len(found.trials),
        seconds=seconds,
        # One backward pass stands for all of them.
        probes=0,
        predicted_error=found.predicted_error,
        measured_error=error,
    )
