"""What became of one case under one format: every case has an outcome and a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import onnx

import finecast
from finecast.errors import FinecastError
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.rules.policy import Policy
from tests.conformance import agreement
from tests.conformance.cases import LIGHT, Case
from tests.conformance.conversion import Converted, convert, invalid, originally_invalid
from tests.conformance.runners import (
    CONVERTED_FOR,
    ENGINES,
    NotRunError,
    Runner,
    by_onnxruntime,
    by_reference,
    feeds_for,
)

# The suite's own tolerance, for the original model in fp32.
_RTOL: Final = 1e-3


# Where an engine is wrong in the low format alone, as a model written by hand shows.
_FAULTS: Final[Mapping[tuple[str, str, str], str]] = {
    ("test_maxpool_with_argmax_2d_precomputed_pads", "bf16", "onnx.reference"): (
        "its MaxPool of a bf16 tensor gives indices below 0, whoever made the model"
    ),
}


class Result(Enum):
    """The last stage that a case reached."""

    NO_FLOAT = "no float in it"
    FAILED = "conversion failed"
    INVALID = "invalid"
    INVALID_BEFORE = "invalid before and after"
    KEPT = "left alone"
    NOT_RUN = "no engine runs it"
    UNDEFINED = "no engine here is right about it"
    DISAGREES = "disagrees"
    AGREES = "agrees"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row of the record."""

    case: str
    kind: str
    op: str
    format: str
    result: Result
    reason: str = ""
    low: int = 0
    engine: str = ""


def outcome(case: Case, fmt: Format, folder: Path, *, skipped: int = 0) -> Outcome:
    """Convert, check, run and compare ``case``; never raises for what it finds.

    Args:
        case: The case.
        fmt: The format to lower to.
        folder: For the files.
        skipped: How many of the format's engines crash on the case.
    """
    about: dict[str, Any] = {"case": case.name, "kind": case.kind, "op": case.op}
    about["format"] = fmt.label
    if not case.carries_floats:
        return Outcome(**about, result=Result.NO_FLOAT)
    source, target = folder / "original.onnx", folder / "converted.onnx"
    onnx.save(case.model, source)
    policy = Policy.parse(f"all:{fmt.label}")
    if case.kind == LIGHT:
        return _whole_net(case, policy, source, about)
    try:
        converted = convert(source, target, policy, CONVERTED_FOR[fmt.label])
    except FinecastError as error:
        before = originally_invalid(case.model)
        result = Result.INVALID_BEFORE if before else Result.FAILED
        return Outcome(**about, result=result, reason=before or str(error))
    problem = invalid(target)
    if problem:
        before = originally_invalid(case.model)
        result = Result.INVALID_BEFORE if before else Result.INVALID
        return Outcome(**about, result=result, reason=before or problem, low=converted.low)
    if not converted.low:
        return Outcome(**about, result=Result.KEPT, reason=converted.kept)
    result, reason, engine = _run(case, fmt, converted, folder, skipped)
    return Outcome(**about, result=result, reason=reason, low=converted.low, engine=engine)


def _whole_net(case: Case, policy: Policy, source: Path, about: dict[str, Any]) -> Outcome:
    """A net converted on the suite's data, by finecast's own verification.

    The bounds of single ops say nothing of so many in a row.
    """
    feeds = feeds_for(case.model, case.data_sets[0][0])
    try:
        done = finecast.convert(source, None, policy, data=feeds)
    except FinecastError as error:
        return Outcome(**about, result=Result.FAILED, reason=str(error))
    low = sum(fmt is not Format.FP32 for fmt in done.plan.formats.values())
    if not low:
        return Outcome(**about, result=Result.KEPT, reason=done.warnings[-1])
    engine = done.verified.engine or ""
    return Outcome(**about, result=Result.AGREES, low=low, engine=engine)


def _run(
    case: Case, fmt: Format, converted: Converted, folder: Path, skipped: int
) -> tuple[Result, str, str]:
    engines = ENGINES[fmt.label]
    reasons = [f"{name}: crashes" for name, _ in engines[:skipped]]
    found = Result.NOT_RUN
    if not case.data_sets:
        return found, "the suite gives no data for it", ""
    for name, runner in engines[skipped:]:
        try:
            problem = _compare(case, fmt, converted, folder, runner)
        except NotRunError as error:
            reasons.append(f"{name}: {error}")
            continue
        except _UndefinedError as error:
            reasons.append(f"{name}: {error}")
            found = Result.UNDEFINED
            continue
        if not problem:
            return Result.AGREES, "; ".join(reasons), name
        # Blame the engine only where it fails the case before conversion, too.
        before = _FAULTS.get((case.name, fmt.label, name)) or _before(case, folder, runner)
        if not before:
            return Result.DISAGREES, f"{name}: {problem}", name
        reasons.append(f"{name}: {before}")
        found = Result.UNDEFINED
    return found, "; ".join(reasons), ""


def _before(case: Case, folder: Path, runner: Runner) -> str:
    """What the engine makes of the original that the suite does not expect; or nothing."""
    for inputs, expected in case.data_sets:
        feeds = feeds_for(case.model, inputs)
        try:
            problem = _strict(expected).disagreement(runner(folder / "original.onnx", feeds))
        except NotRunError as error:
            problem = f"does not run: {error}"
        if problem:
            return f"of the original in fp32, {problem}"
    return ""


def _strict(expected: Sequence[Any]) -> agreement.Bound:
    """The suite's own tolerance."""
    return agreement.Bound(
        expected=expected,
        rounded=expected,
        moved=(),
        steps=_RTOL / Format.FP32.unit_roundoff,
        low_ops=0,
        format=Format.FP32,
    )


class _UndefinedError(Exception):
    """The engine does not give the expected outputs for the original model either."""


def _compare(
    case: Case, fmt: Format, converted: Converted, folder: Path, runner: Runner
) -> str:
    for inputs, expected in case.data_sets:
        feeds = feeds_for(case.model, inputs)
        got = runner(folder / "converted.onnx", feeds)
        bound = _bound(case, fmt, converted, folder, feeds, expected, runner)
        problem = bound.disagreement(got)
        if problem:
            return problem
    return ""


def _bound(
    case: Case,
    fmt: Format,
    converted: Converted,
    folder: Path,
    feeds: Mapping[str, Any],
    expected: Sequence[Any],
    runner: Runner,
) -> agreement.Bound:
    exact = _fp32_runner(folder / "original.onnx", feeds, expected, runner)
    variant = folder / "variant.onnx"

    names = agreement.read_low(converted)
    # Elements of a sequence have no name of their own.
    names |= {n for n, v in feeds.items() if isinstance(v, list)}

    def run(change: Any) -> list[Any]:
        onnx.save(agreement.changed_model(case.model, change, names), variant)
        return exact(variant, agreement.changed_feeds(feeds, change, names))

    return agreement.Bound(
        expected=expected,
        rounded=run(lambda a: round_to(a, fmt)),
        moved=[
            run(lambda a, rng=rng: agreement.move(a, fmt, rng)) for rng in agreement.draws(fmt)
        ],
        steps=agreement.steps_of(converted),
        low_ops=converted.low,
        format=fmt,
        numbers=agreement.whole_numbers(case.model),
    )


def _fp32_runner(
    original: Path, feeds: Mapping[str, Any], expected: Sequence[Any], engine: Runner
) -> Runner:
    """An engine that gives the suite's outputs for the original, the case's own first."""
    problems: list[str] = []
    for runner in dict.fromkeys((engine, by_onnxruntime, by_reference)):
        try:
            got = runner(original, feeds)
        except NotRunError as error:
            problems.append(str(error))
            continue
        problem = _strict(expected).disagreement(got)
        if not problem:
            return runner
        problems.append(f"of the original in fp32, {problem}")
    raise _UndefinedError(problems[0])
