"""Whether a converted model's formats explain its outputs, and if not, the first wrong op.

Law: a model is refused if it gives NaN or Inf where fp32 gives none; if no digit of an output
is right; or if an output's error in the engine is far above that of the model's formats, which
means that the engine computes some op wrongly. Of outputs that are decisions by rounded
numbers (classes, masks) the share that changes is the error; of what follows from decisions in
other ways it does not count (``native/judged_outputs.py``), unless an op before the decisions
is computed wrongly; where no digit is right, that is told. Nor does it for outputs whose
digits fp32 itself does not determine.

On random inputs a good model may lose all digits: numbers that it never saw in training
cancel or grow. There an output without a right digit is accepted, with a warning, if low
products alone cost as much: those that the engine lowers by its own precision hint, or those
of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.data.deviation import Deviation, Expected, deviation, expected
from finecast.data.response import blurred, nan_outputs, untold
from finecast.engines import other_engines
from finecast.engines.base import Array, Engine, Feeds, Loadable, Session, each_call, feeds_for
from finecast.engines.fallen_apart import Kernels, try_with_kernels
from finecast.engines.loading import load_model
from finecast.errors import EngineError, WrongNumbersError
from finecast.frontends.prepared import AppliedModel
from finecast.graph import Graph, Node
from finecast.graph.worklist import Worklist
from finecast.native.judged_outputs import JudgedOutput
from finecast.native.source import EngineBuilt, Source
from finecast.numbers.formats import Format
from finecast.numbers.rounding import widened
from finecast.numbers.thresholds import LIMIT, excused
from finecast.ops import by_name
from finecast.planning.free_rows import free_outputs, matched
from finecast.planning.plan import Plan

_FIX: Final = (
    "keep it in fp32 by --exclude or --op NAME=fp32, use another format or `tune`; "
    "--no-verify writes the model all the same"
)

_ON_DATA: Final = "Verify the model on data of its own: --data FILE.npz, or `tune`"

_ON_OTHERS: Final = (
    "Verify the model on other data: samples whose outputs differ, and are numbers"
)

_RANDOM: Final = (
    "; the inputs were random numbers or examples: --data FILE.npz verifies with yours"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An fp32 model and the model that a plan makes of it, both to run in one engine.

    Attributes:
        source: The fp32 model.
        built: What the plan made.
        written: The same model as it was written: what an engine loads.
    """

    source: Source
    built: EngineBuilt
    written: Loadable
    engine: Engine

    def reference(self) -> tuple[Session, Kernels]:
        """The fp32 model in the engine, and the nodes in its kernels, if the engine tells.

        A device may have no fp32 products of its own: it is compared with exact fp32.
        """
        if self.engine.emulates is not None:
            return self.source.reference(), ()
        return try_with_kernels(self.engine, self.source.loadable)

    def converted(self) -> tuple[Session, Kernels]:
        """The plan's model in the engine, and the nodes in its kernels."""
        return self.source.load_written(self.built, self.written, self.engine)

    def original(self) -> AppliedModel:
        """The model in which the plan lowers nothing, with the same names of values."""
        return self.source.build(replace(self.built.plan, decisions=(), io={})).applied

    def exact(self, feeds: Feeds) -> Outputs:
        """The fp32 model's outputs by the definitions of its ops."""
        session = self.source.reference()
        return session.run(feeds_for(session, feeds))

    def explained(self, plan: Plan, feeds: Feeds) -> Outputs:
        """The outputs that the formats of ``plan`` alone explain."""
        return self.source.explained(self.built, self.written, plan, feeds)

    def usual(self, feeds: Feeds) -> tuple[str, Outputs] | None:
        """What the fp32 model gives if it is lowered in the usual way, with that way's name.

        The engine's own hint is one; where it has none, products alone in the plan's formats.
        None if neither can be run.
        """
        with suppress(EngineError):
            hinted = self._under_hint(feeds)
            if hinted is not None:
                return hinted
        if not self.source.explains:
            return None
        with suppress(EngineError):
            outputs = self.explained(_products_of(self.built.plan), feeds)
            return "the model with its products alone in reduced precision", outputs
        return None

    def _under_hint(self, feeds: Feeds) -> tuple[str, Outputs] | None:
        """The fp32 model's outputs under the engine's hint for the plan's format, by name."""
        engine, lows = self.engine, self.built.plan.low_formats
        if not engine.lowers_by_hint or len(lows) != 1:
            return None
        (low,) = lows
        session = engine.load_hinted(self.source.loadable, low)
        if all(kernel.computed != low.label for kernel in session.kernel_formats()):
            return None
        name = f"{engine.title}'s own {low.label} hint"
        return name, session.run(feeds_for(session, feeds))


def _products_of(plan: Plan) -> Plan:
    """``plan`` with all but its matrix products in fp32."""
    decisions = tuple(
        d if by_name(d.op).matmul_engine else replace(d, format=Format.FP32)
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions, by_hint=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A converted model that was run beside the fp32 one.

    Attributes:
        pair: Both models, which can be run again.
        feeds: The inputs of both.
        random: Whether they were drawn: a model may need data that look like its own.
        followed: The relative change of fp32's outputs with other inputs; empty if unknown.
    """

    pair: Pair
    feeds: Feeds
    random: bool
    followed: Mapping[str, float]

    @property
    def engine(self) -> Engine:
        """The engine that ran both."""
        return self.pair.engine

    @property
    def applied(self) -> AppliedModel:
        """The converted model."""
        return self.pair.built.applied

    @property
    def formats(self) -> dict[int, Format]:
        """The plan's formats, by node id."""
        ids = {n.name: n.id for n in self.applied.graph.nodes}
        return {ids[n]: f for n, f in self.pair.built.plan.formats.items()}

    @property
    def fix(self) -> str:
        """What a user can do about wrong numbers."""
        return f"{_FIX}{_RANDOM if self.random else ''}"

    @property
    def advice(self) -> str:
        """What a user can do about inputs that show little."""
        return _ON_DATA if self.random else _ON_OTHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What is wrong with ``output``; ``bad`` tells whether an inner value is wrong, too.

    It takes the value's id and deviation. ``chooser`` is the op that decides the output.

    ``engine`` is true if the formats are not at fault, but the engine, by one of the ops.
    """

    output: str
    text: str
    engine: bool = False
    chooser: Node | None = None
    bad: Callable[[int, Deviation], bool]


def accept(case: Case, got: Outputs, wanted: Outputs) -> tuple[str, ...]:
    """Check that the converted model's formats explain its outputs ``got``.

    Returns warnings: of outputs in which fp32 has NaN, of errors that are explained though no
    digit of an output is right, and of outputs that would show no error on these inputs.

    ``wanted`` are the outputs of the fp32 model.

    Raises:
        WrongNumbersError: If not; names an output and, if found, the first op that is wrong.
    """
    graph = case.applied.graph
    bounds = expected(graph, case.formats)
    fault, warnings = _fault(case, bounds, got, wanted)
    if fault is None:
        inputs = "random inputs or examples" if case.random else "these inputs"
        nans = (f"{text}. {case.advice}" for text in nan_outputs(wanted, inputs))
        return *nans, *warnings, *_untold(case, bounds, got, wanted)
    if fault.chooser is not None and not fault.engine:  # no op is wrong: it has too few digits
        where = f"chosen by {fault.chooser.name!r} ({fault.chooser.native})"
        fix = case.fix.replace("it", "what it reads", 1)
        raise WrongNumbersError(fault.text, where=where, fix=fix)
    node = _first_wrong(case, bounds, fault)
    where = f"first at {node.name!r} ({node.native})" if node is not None else ""
    if node is None or not fault.engine:
        raise WrongNumbersError(fault.text, where=where, fix=case.fix)
    fmt = case.formats.get(node.id, Format.FP32)
    if fmt is Format.FP32:  # such as an op that came quantized
        raise WrongNumbersError(fault.text, where=where, fix=other_engines(case.engine.name))
    unfit = {node.name: (fmt.label, f"computes it wrongly: {fault.text}")}
    raise WrongNumbersError(fault.text, where=where, fix=case.fix, unfit=unfit)


def accept_fp32(graph: Graph, taken: Outputs, exact: Outputs, nudged: Outputs) -> None:
    """Check that a model converted from fp64 to fp32 gives right digits.

    ``exact`` and ``nudged`` are outputs of the fp64 model, the latter for feeds that are off
    by one unit in the last place: digits that change by that are not judged.

    Raises:
        WrongNumbersError: If no digit of an output is right; names the output.
    """
    every = {node.id: Format.BF16 for node in graph.float_nodes}  # any rounding will do
    bounds, values = expected(graph, every), {v.name: v for v in graph.outputs}
    for name, wanted in exact.items():
        value, text = values.get(name), ""
        one = value and JudgedOutput.of(graph, bounds, value, wanted)
        if deviation(taken[name], wanted).nonfinite:
            text = f"output {name!r} has NaN or Inf where fp64 has none"
        elif one is not None and replace(one, explained=0.0).is_lost(taken[name]):
            noise = one.error(nudged[name])
            text = one.text(one.error(taken[name])) if noise < min(LIMIT, one.limit) else ""
        if text:
            raise WrongNumbersError(
                f"of the model taken to fp32 {text}",
                where="--from-type fp64",
                fix="it needs fp64: leave it as it is, or scale its numbers",
            )


def _fault(
    case: Case, bounds: Expected, got: Outputs, wanted: Outputs
) -> tuple[_Fault | None, tuple[str, ...]]:
    """The first output that the formats do not explain, and warnings of explained ones."""
    graph = case.applied.graph
    values = {v.name: v for v in graph.outputs}
    suspects: list[tuple[JudgedOutput, Array]] = []
    lost: list[tuple[str, float]] = []
    pairs = matched(free_outputs(graph), got, wanted)
    for name, reference in pairs.wanted.items():
        difference, value = deviation(pairs.got[name], reference), values.get(name)
        if difference.nonfinite:
            text = f"output {name!r} has NaN or Inf where fp32 has none"
            formats = _explained(case)
            engine = formats is not None and not deviation(formats[name], reference).nonfinite
            return _Fault(
                output=name,
                text=f"{text}, nor in its formats" if engine else text,
                engine=engine,
                bad=lambda _, d: d.nonfinite,
            ), ()
        if value is not None and value.id in bounds.decided and not difference.comparable:
            continue
        if not difference.comparable:
            raise WrongNumbersError(
                f"output {name!r} has shape {list(got[name].shape)}, fp32's has "
                f"{list(reference.shape)}",
                fix=case.fix,
            )
        one = value and JudgedOutput.of(graph, bounds, value, reference)
        if one is not None and one.error(pairs.got[name]) > one.unnoticed:
            suspects.append((one, pairs.got[name]))
        if one is None and difference.relative >= LIMIT:
            lost.append((name, difference.relative))
    _check_given(case, suspects)
    fault = _mistaken(case, bounds, suspects)
    if fault is not None:
        return fault, ()
    fault, warnings = _hopeless(case, suspects)
    if fault is not None or not lost:
        return fault, warnings
    fault, texts = _behind_decisions(case, bounds, lost, pairs.wanted)
    return fault, (*warnings, *texts)


def _behind_decisions(
    case: Case, bounds: Expected, lost: Sequence[tuple[str, float]], wanted: Outputs
) -> tuple[_Fault | None, tuple[str, ...]]:
    """The fault of an op before the decisions that outputs follow, with warnings without one.

    Errors of outputs behind decisions have no bound. Where no digit is right, and the formats
    alone explain that by no means, the engine may compute an op before them wrongly.
    """
    formats, warnings = _explained(case), list[str]()
    for name, error in lost:
        text = f"output {name!r} has a relative error of {error:.3g}"
        alone = None if formats is None else deviation(formats[name], wanted[name])
        if alone is not None and alone.comparable and error > excused(alone.relative):
            fault = _Fault(
                output=name,
                text=f"{text} in {case.engine.title}, where its formats give"
                f" {alone.relative:.3g}: an op is computed wrongly",
                engine=True,
                bad=partial(_beyond, bounds),
            )
            node = _first_wrong(case, bounds, fault)
            if node is not None and not bounds.decided.issuperset(node.outputs):
                return fault, ()
        warnings.append(
            f"{text}: no digit of it is right behind decisions by rounded numbers. Judge the"
            " model on your data, by `tune`"
        )
    return None, tuple(warnings)


def _check_given(case: Case, suspects: Sequence[tuple[JudgedOutput, Array]]) -> None:
    """Raise EngineError if the engine computes the fp32 model wrongly."""
    lost = [one for one, got in suspects if one.is_lost(got)]
    exact = _outputs_on(case, case.feeds) if lost else None
    if exact is None:
        return
    for one in lost:
        right = replace(one, wanted=exact[one.name])
        certain = right.is_lost(one.wanted) and _fp32_noise(case, right) < LIMIT
        if certain and not _undetermined(case, right):
            raise EngineError(
                f"{case.engine.title} computes the model wrongly as it was given:"
                f" {right.text(right.error(one.wanted))} in fp32",
                fix=other_engines(case.engine.name),
            )


def _hopeless(
    case: Case, suspects: Sequence[tuple[JudgedOutput, Array]]
) -> tuple[_Fault | None, tuple[str, ...]]:
    """The fault of an output of which no digit is right, though fp32 determines some.

    With warnings of those that low products explain on random inputs.
    """
    lost = [
        (one, one.error(got))
        for one, got in suspects
        if one.is_lost(got)
        and _fp32_noise(case, one) <= one.unnoticed
        and not _undetermined(case, one)
    ]
    usual = case.pair.usual(case.feeds) if lost and case.random else None
    warnings: list[str] = []
    for one, error in lost:
        text = one.text(error)
        as_usual = one.error(usual[1][one.name]) if usual else 0.0
        if usual is None or not error <= one.excused(as_usual) < math.inf:
            return _Fault(
                output=one.name,
                text=f"{text}: {one.loss}",
                chooser=one.chooser,
                bad=partial(_lost, limit=LIMIT if one.chooser else one.limit),
            ), ()
        warnings.append(
            f"{text} on random inputs: {one.loss} there. The formats explain it:"
            f" {usual[0]} gives {one.figure(as_usual)}. {_ON_DATA}"
        )
    return None, tuple(warnings)


def _lost(_: int, found: Deviation, limit: float) -> bool:
    return found.nonfinite or found.relative >= limit


def _untold(case: Case, bounds: Expected, got: Outputs, wanted: Outputs) -> tuple[str, ...]:
    """A warning if the inputs leave lowered outputs as they are, errors or none."""
    if not case.pair.built.plan.lowers:
        return ()
    ids = {v.name: v.id for v in case.applied.graph.outputs}

    def near() -> Outputs | None:
        feeds = blurred(case.feeds)
        return None if feeds is None else _outputs_on(case, feeds)

    texts = untold(
        (wanted, got),
        {
            name: allowed
            for name, array in wanted.items()
            if (allowed := bounds.relative.get(ids.get(name, -1), 0.0)) > 0
            and not _all_nan(array)  # which is said by itself
        },
        max((f.unit_roundoff for f in case.formats.values()), default=0.0),
        case.followed,
        near,
    )
    return tuple(f"{text}. {case.advice}" for text in texts)


def _all_nan(array: Array) -> bool:
    return array.dtype.kind not in "biuOSU" and bool(np.isnan(widened(array)).all())


def _outputs_on(case: Case, feeds: Feeds) -> Outputs | None:
    """What the fp32 model gives on other feeds, by the definitions of its ops."""
    try:
        return case.pair.exact(feeds)
    except EngineError:
        return None


def _fp32_noise(case: Case, one: JudgedOutput) -> float:
    """The error of fp32 against itself, by other kernels and inputs off by one unit."""
    again = _outputs_on(case, nudged(case.feeds))
    return 0.0 if again is None else one.error(again[one.name])


def _undetermined(case: Case, one: JudgedOutput) -> bool:
    """Whether fp32 determines no digit of an output: results of ops are off by one unit, too.

    Inputs alone may not show that: a softmax of huge numbers that are equal but for the order
    of sums, as those of weights that are the same everywhere, has no digit that is certain.
    """
    if not case.pair.source.explains:
        return False
    with suppress(EngineError, NotImplementedError):
        session = case.pair.source.noisy_session()
        moved = session.run(feeds_for(session, nudged(case.feeds)))
        return one.error(moved[one.name]) >= min(one.limit, LIMIT)
    return False


def nudged(feeds: Feeds) -> Feeds:
    """Inputs that fp32 hardly tells from ``feeds``: digits that they change are noise."""
    return each_call(feeds, lambda call: {n: _nudged(a) for n, a in call.items()})


def _nudged(array: Array) -> Array:
    """Numbers of fp32 or fp64 off by one unit in the last place, up and down in turns."""
    if array.dtype.name not in ("float32", "float64"):
        return array
    towards = np.where(np.arange(array.size) % 2, np.inf, -np.inf)
    return np.nextafter(array, towards.astype(array.dtype).reshape(array.shape))


def _mistaken(
    case: Case, bounds: Expected, suspects: Sequence[tuple[JudgedOutput, Array]]
) -> _Fault | None:
    """The fault of an output whose error is far above that of the model's formats."""
    model = _explained(case) if suspects else None
    if model is None:
        return None
    for one, got in suspects:
        error, predicted = one.error(got), one.error(model[one.name])
        limit = one.excused(predicted)
        if error > limit:
            return _Fault(
                output=one.name,
                text=f"{one.text(error)} in {case.engine.title}, where its formats give"
                f" {one.figure(predicted)}: an op is computed wrongly",
                engine=True,
                chooser=one.chooser,
                bad=partial(_beyond, bounds) if one.chooser else partial(_lost, limit=limit),
            )
    return None


def _explained(case: Case) -> Outputs | None:
    """What the model's formats alone give; None if emulated or not run here."""
    if case.engine.emulates is not None or not case.pair.source.explains:
        return None
    with suppress(EngineError):
        return case.pair.explained(case.pair.built.plan, case.feeds)
    return None


def _beyond(bounds: Expected, value: int, found: Deviation) -> bool:
    """Whether an engine's error of a value is more than the formats before it explain."""
    return found.nonfinite or found.relative > excused(bounds.relative.get(value, 0.0))


def _first_wrong(case: Case, bounds: Expected, fault: _Fault) -> Node | None:
    """The op whose result is wrong though its inputs are right; None if it is not found."""
    original, converted = case.pair.original(), case.applied
    shown = converted.observable().keys()
    names = {
        index: name
        for name, index in original.observable().items()
        if name in shown and index not in bounds.decided
    }

    def run(model: Any) -> Outputs:
        session = load_model(case.engine, model)
        return session.run(feeds_for(session, case.feeds))

    def both(values: Sequence[str]) -> tuple[Outputs, Outputs]:
        return run(converted.with_outputs(values)), run(original.with_outputs(values))

    search = FirstWrong(graph=converted.graph, names=names, both=both, wrong=fault.bad)
    node = search.op_before(fault.output)
    # Where the floats that decide are right, it is the op that chooses, and none behind it.
    last = node is not None and fault.output in {
        converted.graph.values[i].name for i in node.output_ids
    }
    return fault.chooser if last and fault.chooser is not None else node


# ---------------------------------- the first op of a model that two runs of it disagree about

Outputs: TypeAlias = Mapping[str, Array]

_SHOWN: Final = 8
"""Values that one run of the search outputs: few, as an output may prevent fusion."""

_MOST_RUNS: Final = 24
"""Most runs of the search: enough for 8 to the power of 7 ops and some detours."""


@dataclass(slots=True, kw_only=True)
class FirstWrong:
    """A search for the first wrong value, by runs of two models that output a few values.

    Attributes:
        names: The names, by id, of the values that both models can output.
        both: Runs both models with outputs of these names: what is judged, and what is right.
        wrong: Whether a value of the first one, by its id, is wrong, by its deviation from the
            second.
        runs: The runs so far.
    """

    graph: Graph
    names: Mapping[int, str]
    both: Callable[[Sequence[str]], tuple[Outputs, Outputs]]
    wrong: Callable[[int, Deviation], bool]
    runs: int = field(default=0, init=False)

    def op_before(self, output: str) -> Node | None:
        """The op whose result is wrong though its inputs are right; None if none is found."""
        target = next((v.id for v in self.graph.outputs if v.name == output), None)
        if target is None:
            return None
        try:
            wrong_id = self._first_bad(target)
            while (bad := self._bad(self._inputs(wrong_id))) and self.runs < _MOST_RUNS:
                wrong_id = self._first_bad(bad[0])
        except EngineError:
            return None  # the engine does not run the model with other outputs
        producer = self.graph.values[wrong_id].producer
        return self.graph.nodes[producer] if producer is not None else None

    def _bad(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are wrong; values that cannot be output count as right."""
        shown = {self.names[i]: i for i in ids if i in self.names}
        if not shown:
            return []
        self.runs += 1
        got, wanted = self.both(list(shown))
        pairs = ((i, deviation(got[n], wanted[n])) for n, i in shown.items())
        return [
            i for i, difference in pairs if difference.comparable and self.wrong(i, difference)
        ]

    def _first_bad(self, target: int) -> int:
        """A wrong value that ``target`` depends on, before which no value seen was wrong."""
        order = [i for i in self._ancestors(target) if i in self.names]
        order.append(target)
        low, high = -1, len(order) - 1
        while high - low > 1 and self.runs < _MOST_RUNS:
            count = min(_SHOWN, high - low - 1)
            picks = [low + (k + 1) * (high - low) // (count + 1) for k in range(count)]
            bad = set(self._bad(order[k] for k in picks))
            first = next((k for k in picks if order[k] in bad), high)
            low, high = max((k for k in picks if k < first), default=low), first
        return order[high]

    def _inputs(self, value: int) -> list[int]:
        producer = self.graph.values[value].producer
        if producer is None:
            return []
        return self.graph.nodes[producer].input_ids

    def _ancestors(self, value: int) -> list[int]:
        """Ids of all values that ``value`` is computed from, in the order of computation."""
        last = self.graph.values[value].producer
        nodes = Worklist([last])
        for node in nodes:
            inputs = self.graph.nodes[node].input_ids
            nodes.add(self.graph.values[i].producer for i in inputs)
        made = (self.graph.nodes[n].outputs for n in sorted(nodes.seen) if n != last)
        return [i for outputs in made for i in outputs if i is not None]
