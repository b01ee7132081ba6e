"""Whether a converted model's formats explain its outputs, and if not, the first wrong op.

Law: a model is refused if it gives NaN or Inf where fp32 gives none; if no digit of an output
is right; or if an output's error in the engine is far above that of the model's formats, which
means that the engine computes some op wrongly. The error does not count for outputs that
hinge on a decision between rounded numbers, and for those whose digits fp32 itself does not
determine.

On random inputs a good model may lose all digits: numbers that it never saw in training
cancel or grow. There an output without a right digit is accepted, with a warning, if low
products alone cost as much: those that the engine lowers by its own precision hint, or those
of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.data.deviation import (
    LIMIT,
    USELESS,
    Deviation,
    Expected,
    deviation,
    excused,
    expected,
)
from finecast.data.response import blurred, untold
from finecast.engines.base import Array, Engine, Feeds, Session, each_call
from finecast.engines.loading import load_model
from finecast.engines.ports import DTYPES
from finecast.errors import EngineError, WrongNumbersError
from finecast.frontends.prepared import AppliedModel
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format

Outputs: TypeAlias = Mapping[str, Array]

_SHOWN: Final = 8
"""Values that one run of the search outputs: few, as an output may prevent fusion."""

_MOST_RUNS: Final = 24
"""Most runs of the search: enough for 8 to the power of 7 ops and some detours."""

_FIX: Final = (
    "keep it in fp32 by --exclude or --op NAME=fp32, use another format or `tune`; "
    "--no-verify writes the model all the same"
)

_ON_DATA: Final = "Verify the model on data of its own: --data FILE.npz, or `tune`"

_RANDOM: Final = "; the inputs were random numbers: --data FILE.npz verifies with yours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A converted model that was run beside the fp32 one, and ways to run both again.

    Attributes:
        engine: The engine that ran both.
        applied: The converted model.
        original: Makes the fp32 model with the same names of values.
        formats: The plan's formats, by node id.
        feeds: The inputs of both.
        random: Whether they were drawn: a model may need data that look like its own.
        exact: Runs the fp32 model by the definitions of its ops, on given feeds.
        emulated: Runs the converted model by the definitions of its ops; None if that cannot
            be done, or the engine is an emulator.
        followed: The relative change of fp32's outputs with other inputs; empty if unknown.
        usual: Runs the model lowered in the usual way, with a name for it: under the engine's
            own hint, else with its products alone in the plan's formats. None if that cannot
            be done.
    """

    engine: Engine
    applied: AppliedModel
    original: Callable[[], AppliedModel]
    formats: Mapping[int, Format]
    feeds: Feeds
    random: bool
    exact: Callable[[Feeds], Outputs]
    emulated: Callable[[], Outputs] | None
    followed: Mapping[str, float]
    usual: Callable[[], tuple[str, Outputs] | None]

    @property
    def fix(self) -> str:
        """What a user can do about wrong numbers."""
        return f"{_FIX}{_RANDOM if self.random else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What is wrong with ``output``; ``bad`` tells whether an inner value is wrong, too.

    ``engine`` is true if the formats are not at fault, but the engine, by one of the ops.
    """

    output: str
    text: str
    engine: bool = False
    bad: Callable[[Deviation], bool]


def accept(case: Case, got: Outputs, wanted: Outputs) -> tuple[str, ...]:
    """Check that the converted model's formats explain its outputs ``got``.

    Returns warnings: of errors that are explained though no digit of an output is right, and
    of outputs that would show no error on these inputs.

    Args:
        case: Both models.
        got: Outputs of the converted model.
        wanted: Those of the fp32 model.

    Raises:
        WrongNumbersError: If not; names an output and, if found, the first op that is wrong.
    """
    graph = case.applied.graph
    bounds = expected(graph, case.formats)
    fault, warnings = _fault(case, bounds, got, wanted)
    if fault is None:
        return *warnings, *_untold(case, bounds, got, wanted)
    node = _first_wrong(case, bounds, fault)
    where = f"first at {node.name!r} ({node.native})" if node is not None else ""
    miscomputed = node.name if node is not None and fault.engine else ""
    raise WrongNumbersError(fault.text, where=where, fix=case.fix, miscomputed=miscomputed)


def accept_fp32(graph: Graph, taken: Outputs, exact: Outputs, nudged: Outputs) -> None:
    """Check that a model converted from fp64 to fp32 gives right digits.

    Args:
        graph: The graph of the fp32 model.
        taken: Outputs of the fp32 model.
        exact: Outputs of the fp64 model.
        nudged: Outputs of the fp64 model for feeds that are off by one unit in the last
            place: digits that change by that are not judged.

    Raises:
        WrongNumbersError: If no digit of an output is right; names the output.
    """
    every = {node.id: Format.BF16 for node in graph.float_nodes}  # any rounding will do
    decided = expected(graph, every).decided
    ids = {v.name: v.id for v in graph.outputs}
    for name, wanted in exact.items():
        found = deviation(taken[name], wanted)
        text = ""
        if found.nonfinite:
            text = "has NaN or Inf where fp64 has none"
        elif ids.get(name) not in decided and found.relative >= LIMIT:
            noise = deviation(nudged[name], wanted).relative
            text = f"has a relative error of {found.relative:.3g}" if noise < LIMIT else ""
        if text:
            raise WrongNumbersError(
                f"output {name!r} of the model taken to fp32 {text}",
                where="--from-type fp64",
                fix="it needs fp64: leave it as it is, or scale its numbers",
            )


def _fault(
    case: Case, bounds: Expected, got: Outputs, wanted: Outputs
) -> tuple[_Fault | None, tuple[str, ...]]:
    """The first output that the formats do not explain, and warnings of explained ones."""
    ids = {v.name: v.id for v in case.applied.graph.outputs}
    suspects: dict[str, Deviation] = {}
    for name, reference in wanted.items():
        found, index = deviation(got[name], reference), ids.get(name)
        if found.nonfinite:
            text = f"output {name!r} has NaN or Inf where fp32 has none"
            return _Fault(output=name, text=text, bad=lambda d: d.nonfinite), ()
        if index in bounds.decided:
            continue
        if not found.comparable:
            raise WrongNumbersError(
                f"output {name!r} has shape {list(got[name].shape)}, fp32's has "
                f"{list(reference.shape)}",
                fix=case.fix,
            )
        if index is not None and found.relative > bounds.relative.get(index, 0.0):
            suspects[name] = found
    allowed = {name: bounds.relative.get(ids[name], 0.0) for name in suspects}
    _check_given(case, suspects, wanted)
    fault = _mistaken(case, suspects, allowed, wanted)
    return (fault, ()) if fault is not None else _hopeless(case, suspects, allowed, wanted)


def _check_given(case: Case, suspects: Mapping[str, Deviation], wanted: Outputs) -> None:
    """Raise EngineError if the engine computes the fp32 model wrongly."""
    lost = [name for name, found in suspects.items() if found.relative >= LIMIT]
    exact = _outputs_on(case, case.feeds) if lost else None
    if exact is None:
        return
    for name in lost:
        off = deviation(wanted[name], exact[name]).relative
        if off >= LIMIT and _fp32_noise(case, name, exact) < LIMIT:
            raise EngineError(
                f"{case.engine.name} computes the model wrongly as it was given: output"
                f" {name!r} has a relative error of {off:.3g} in fp32",
                fix="use another engine: an ONNX model runs in onnxruntime",
            )


def _hopeless(
    case: Case,
    suspects: Mapping[str, Deviation],
    allowed: Mapping[str, float],
    wanted: Outputs,
) -> tuple[_Fault | None, tuple[str, ...]]:
    """The fault of an output of which no digit is right, though fp32 determines some.

    With warnings of those that low products explain on random inputs.
    """
    limits = {name: min(USELESS, max(LIMIT, allowed[name])) for name in suspects}
    lost = {
        name: found
        for name, found in suspects.items()
        if found.relative >= limits[name] and _fp32_noise(case, name, wanted) <= allowed[name]
    }
    usual = case.usual() if lost and case.random else None
    warnings: list[str] = []
    for name, found in lost.items():
        text = f"output {name!r} has a relative error of {found.relative:.3g}"
        as_usual = deviation(usual[1][name], wanted[name]).relative if usual else 0.0
        if usual is None or not found.relative <= excused(as_usual) < math.inf:
            return _Fault(
                output=name,
                text=f"{text}: no digit of it is right",
                bad=partial(_lost, limit=limits[name]),
            ), ()
        warnings.append(
            f"{text} on random inputs: no digit of it is right there. The formats explain it:"
            f" {usual[0]} errs by {as_usual:.3g}. {_ON_DATA}"
        )
    return None, tuple(warnings)


def _lost(found: Deviation, limit: float) -> bool:
    return found.nonfinite or found.relative >= limit


def _untold(case: Case, bounds: Expected, got: Outputs, wanted: Outputs) -> tuple[str, ...]:
    """A warning if the inputs leave lowered outputs as they are, errors or none."""
    ids = {v.name: v.id for v in case.applied.graph.outputs}

    def near() -> Outputs | None:
        feeds = blurred(case.feeds)
        return None if feeds is None else _outputs_on(case, feeds)

    found = untold(
        (wanted, got),
        {n: a for n in wanted if (a := bounds.relative.get(ids.get(n, -1), 0.0)) > 0},
        max((f.unit_roundoff for f in case.formats.values()), default=0.0),
        case.followed,
        near,
    )
    return tuple(f"{text}. {_ON_DATA}" for text in found)


def _outputs_on(case: Case, feeds: Feeds) -> Outputs | None:
    """What the fp32 model gives on other feeds, by the definitions of its ops."""
    try:
        return case.exact(feeds)
    except EngineError:
        return None


def _fp32_noise(case: Case, name: str, wanted: Outputs) -> float:
    """Relative error of fp32 against itself, by other kernels and inputs off by one unit."""
    nudged = each_call(case.feeds, lambda call: {n: nudge(a) for n, a in call.items()})
    again = _outputs_on(case, nudged)
    return 0.0 if again is None else deviation(again[name], wanted[name]).relative


def nudge(array: Array) -> Array:
    """Numbers of fp32 or fp64 off by one unit in the last place, up and down in turns."""
    if array.dtype.name not in ("float32", "float64"):
        return array
    towards = np.where(np.arange(array.size) % 2, np.inf, -np.inf)
    return np.nextafter(array, towards.astype(array.dtype).reshape(array.shape))


def _mistaken(
    case: Case,
    suspects: Mapping[str, Deviation],
    allowed: Mapping[str, float],
    wanted: Outputs,
) -> _Fault | None:
    """The fault of an output whose error is far above that of the model's formats."""
    if case.emulated is None or not suspects:
        return None
    try:
        model = case.emulated()
    except EngineError:
        return None  # no other engine here runs it
    for name, found in suspects.items():
        predicted = deviation(model[name], wanted[name]).relative
        limit = max(allowed[name], excused(predicted))
        if found.relative > limit:
            return _Fault(
                output=name,
                text=f"output {name!r} has a relative error of {found.relative:.3g} in "
                f"{case.engine.name}, where its formats give {predicted:.2g}: "
                "an op is computed wrongly",
                engine=True,
                bad=partial(_lost, limit=limit),
            )
    return None


def _first_wrong(case: Case, bounds: Expected, fault: _Fault) -> Node | None:
    """The op whose result is wrong though its inputs are right; None if it is not found."""
    graph = case.applied.graph
    target = next((v.id for v in graph.outputs if v.name == fault.output), None)
    if target is None:
        return None
    try:
        search = _Search(case, fault, bounds.decided)
        found = search.first_bad(target)
        while (wrong := search.bad(_inputs(graph, found))) and search.runs < _MOST_RUNS:
            found = search.first_bad(wrong[0])
    except EngineError:
        return None  # the engine does not run the model with other outputs
    producer = graph.values[found].producer
    return graph.nodes[producer] if producer is not None else None


class _Search:
    """A search for the first wrong value, by runs of both models that output a few values."""

    def __init__(self, case: Case, fault: _Fault, decided: frozenset[int]) -> None:
        self.case = case
        self.fault = fault
        self.original = case.original()
        shown = case.applied.observable().keys()
        self.names = {
            index: name
            for name, index in self.original.observable().items()
            if name in shown and index not in decided
        }
        self.runs = 0

    def bad(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are wrong; values that cannot be output count as right."""
        names = {self.names[i]: i for i in ids if i in self.names}
        if not names:
            return []
        self.runs += 1
        models = (self.original, self.case.applied)
        wanted, got = (self._run(m.with_outputs(list(names))) for m in models)
        pairs = ((i, deviation(got[n], wanted[n])) for n, i in names.items())
        return [i for i, found in pairs if found.comparable and self.fault.bad(found)]

    def _run(self, model: Any) -> Outputs:
        session = load_model(self.case.engine, model)
        return session.run(feeds_for(session, self.case.feeds))

    def first_bad(self, target: int) -> int:
        """A wrong value that ``target`` depends on, before which no value seen was wrong."""
        order = [i for i in _ancestors(self.case.applied.graph, target) if i in self.names]
        order.append(target)
        low, high = -1, len(order) - 1
        while high - low > 1 and self.runs < _MOST_RUNS:
            count = min(_SHOWN, high - low - 1)
            picks = [low + (k + 1) * (high - low) // (count + 1) for k in range(count)]
            wrong = set(self.bad(order[k] for k in picks))
            first = next((k for k in picks if order[k] in wrong), high)
            low, high = max((k for k in picks if k < first), default=low), first
        return order[high]


def feeds_for(session: Session, feeds: Feeds) -> Feeds:
    """The feeds that ``session`` takes, in the declared types of its inputs."""
    specs = [s for s in session.inputs if s.name in feeds]
    return each_call(
        feeds,
        lambda call: {s.name: call[s.name].astype(DTYPES[s.dtype], copy=False) for s in specs},
    )


def _inputs(graph: Graph, value: int) -> list[int]:
    producer = graph.values[value].producer
    return (
        [i for i in graph.nodes[producer].inputs if i is not None]
        if producer is not None
        else []
    )


def _ancestors(graph: Graph, value: int) -> list[int]:
    """Ids of all values that ``value`` is computed from, in the order of computation."""
    waiting, nodes = [value], set[int]()
    while waiting:
        producer = graph.values[waiting.pop()].producer
        if producer is not None and producer not in nodes:
            nodes.add(producer)
            waiting.extend(i for i in graph.nodes[producer].inputs if i is not None)
    last = graph.values[value].producer
    made = (graph.nodes[n].outputs for n in sorted(nodes) if n != last)
    return [i for outputs in made for i in outputs if i is not None]
