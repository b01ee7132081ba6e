"""Whether a second engine computes the fp32 model as the first one does.

All errors are measured against what the engine gives for the fp32 model. If the engine
computes an op of that model wrongly, a conversion that keeps the fault looks right. So the
model is run once in a second engine, which costs loading it there and one run. The same
session tells random feeds whose sizes do not fit the model: not every engine checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from finecast.data.deviation import Deviation, Expected, deviation, expected
from finecast.engines.base import Array, Engine, Feeds, Session, feeds_for
from finecast.engines.exact import CachedSession
from finecast.engines.faults import fault_of_integers
from finecast.engines.loading import load_model
from finecast.errors import EngineError
from finecast.graph import Graph
from finecast.naming import left_out
from finecast.native.acceptance import FirstWrong, Outputs, nudged
from finecast.native.integers import quantized_mismatch
from finecast.native.source import AS_IT_IS, Source
from finecast.numbers.formats import Format
from finecast.numbers.rounding import widened
from finecast.numbers.thresholds import APPROXIMATED, ENGINE_FACTOR, LIMIT
from finecast.planning.free_rows import free_outputs, matched
from finecast.plugin import title_of
from finecast.rules.quantized import quantized_notes

_MOST_TOLD: Final = 3
"""Outputs whose first wrong op is sought: each takes several loads and runs."""


@dataclass(slots=True, kw_only=True)
class SecondOpinion:
    """The fp32 model in another engine than ``engine``, if there is one that loads it.

    Attributes:
        source: The model, as the library of its file reads it.
        engine: The engine that is compared.
        remedy: What else than the engine's option takes its numbers.
    """

    source: Source
    engine: Engine
    remedy: str = ""
    _loaded: Session | None = None

    @classmethod
    def on(cls, source: Source, engine: Engine) -> SecondOpinion:
        """That on ``source``; of an ONNX file that is read for IR, on the file's own model."""
        exported = source.exported
        remedy = "" if exported is source else f", if the output is {exported.library}"
        return cls(source=exported, engine=engine, remedy=remedy)

    @property
    def other(self) -> Engine | None:
        """The other engine."""
        return self.source.second_engine(self.engine)

    @property
    def session(self) -> Session | None:
        """The model there, loaded once; feeds are run once. None if it cannot be loaded."""
        other = self.other
        if self._loaded is None and other is not None:
            with suppress(EngineError):
                self._loaded = CachedSession(other.load(self.source.loadable))
        return self._loaded


def differing(second: SecondOpinion, graph: Graph, feeds: Feeds, outputs: Outputs) -> str:
    """What the user is told if a second engine gives other outputs; empty if it does not.

    Digits that fp32 does not determine are no difference. Nor are those of outputs that hinge
    on a decision between numbers, unless none of them is right. Quantized models are not
    compared: each engine rounds codes in its way.

    ``outputs`` are those of the first engine.
    """
    session = None if quantized_notes(graph) else second.session
    if session is None:
        return ""
    try:
        wanted = session.run(feeds_for(session, feeds))
        ids, bounds = {v.name: v.id for v in graph.outputs}, _bounds(graph)
        pairs = matched(free_outputs(graph), outputs, wanted)
        off = {name: deviation(pairs.got[name], array) for name, array in pairs.wanted.items()}
        apart = {n: d for n, d in off.items() if bounds.is_beyond(ids.get(n), d, APPROXIMATED)}
        if not apart:
            return ""
        again = session.run(feeds_for(session, nudged(feeds)))
    except EngineError:
        return ""  # it does not run there, so that there is no second opinion
    wrong: dict[str, tuple[Deviation, float]] = {}
    for name, difference in apart.items():
        noise = deviation(again[name], wanted[name])
        hinges = ids.get(name) in bounds.decided - bounds.stepped
        if noise.counted and hinges and noise.as_numbers > LIMIT:
            continue  # fp32 does not determine which integers these are
        size = noise.beyond_step if noise.counted else noise.relative
        limit = LIMIT if noise.counted and hinges else max(APPROXIMATED, ENGINE_FACTOR * size)
        if bounds.is_beyond(ids.get(name), difference, limit):
            wrong[name] = difference, limit
    return _text(second, feeds, wrong) if wrong else ""


def mismatch_of(
    source: Source, engine: Engine, graph: Graph, feeds: Feeds, outputs: Outputs
) -> str:
    """``quantized_mismatch``, against what the ops of the model's file say.

    IR has codes of OpenVINO's own reading of an ONNX file: they are compared with the file's.
    """
    origin = source.exported

    def exact() -> Outputs:
        session = origin.reference()
        return session.run(feeds_for(session, feeds))

    first = "" if origin is source else f"write {origin.library}, and "
    return quantized_mismatch(graph, engine.name, outputs, exact, first)


def _bounds(graph: Graph) -> Expected:
    """Which values hinge on a decision between numbers, in any rounding."""
    return expected(graph, {node.id: Format.BF16 for node in graph.float_nodes})


def _text(
    second: SecondOpinion, feeds: Feeds, wrong: Mapping[str, tuple[Deviation, float]]
) -> str:
    """A sentence on outputs that differ, with their deviations and what noise explains."""
    assert second.other is not None
    engines, own = (second.engine, second.other), second.engine.title
    shown: list[str] = []
    for name, (difference, limit) in [*wrong.items()][:_MOST_TOLD]:
        what = f"by a relative {difference.relative:.3g}"
        if difference.counted:
            what = f"in {100 * difference.relative:.3g}% of its elements"
        if not difference.comparable:
            what = "in its shape"
        elif difference.nonfinite:
            what = "by NaN or Inf"
        searched = difference.comparable
        first = _first_op(second.source, engines, feeds, name, limit) if searched else ""
        shown.append(f"output {name!r} differs {what}{first}")
    texts = "; ".join((*shown, *left_out(len(wrong), _MOST_TOLD, " outputs differ")))
    return (
        f"{own} and {second.other.title} disagree about the fp32 model: {texts}. Errors here"
        f" are against {own}'s; --engine {second.other.name} takes the other{second.remedy}"
    )


def _first_op(
    source: Source, engines: tuple[Engine, Engine], feeds: Feeds, name: str, limit: float
) -> str:
    """The first op that both engines disagree about; empty if it is not found."""
    prepared = source.prepare(AS_IT_IS)
    bounds = _bounds(prepared.graph)

    def run(engine: Engine, model: Any) -> Outputs:
        session = load_model(engine, model)
        return session.run(feeds_for(session, feeds))

    def both(values: Sequence[str]) -> tuple[Outputs, Outputs]:
        first, second = (run(e, prepared.with_outputs(values)) for e in engines)
        return first, second

    search = FirstWrong(
        graph=prepared.graph,
        names={index: shown for shown, index in prepared.countable().items()},
        both=both,
        wrong=lambda value, one: bounds.is_beyond(value, one, limit),
    )
    node = search.op_before(name)
    if node is None:
        return ""
    graph, names = prepared.graph, {i: shown for shown, i in prepared.countable().items()}
    ports = [graph.values[i] for i in (*node.input_ids, *node.output_ids)]
    computed = run(
        engines[1], prepared.with_outputs([names[v.id] for v in ports if v.id in names])
    )
    arrays = [*computed.values(), *(feeds[v.name] for v in ports if v.name in feeds)]
    arrays += [v.constant.read() for v in ports if v.constant is not None]
    largest = max(map(_largest, arrays), default=0.0)
    known = [f for e in engines if (f := fault_of_integers(e.name, graph, node, largest))]
    fault_text = "".join(
        f": {title_of(f.engine)} is wrong there, by a known fault ({f.name})" for f in known
    )
    return f", first at {node.name!r} ({node.native}){fault_text}"


def _largest(array: Array) -> float:
    """The largest magnitude of its finite numbers."""
    numbers = widened(array)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
