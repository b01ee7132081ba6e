"""The data of a report: what is known of a model's plan, as one JSON of a stated schema.

Laws: what is not known is null or absent, and ``unknown`` says in words what that is and what
would tell it. ``schema.json`` describes the content; a change that older readers would
misread raises ``VERSION``. Ops, values and reasons are numbered by their place in lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from finecast.engines.base import KernelTime
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import FLOATS
from finecast.ops import by_name
from finecast.ops.flops import flops
from finecast.planning import biases, range_scaling
from finecast.planning.adjustments import Adjustment
from finecast.planning.contributions import Contributions, PrecisionGroup, precision_groups
from finecast.planning.plan import Decision, Plan
from finecast.planning.problem import Analysis
from finecast.plugin import title_of
from finecast.reports.summary import summary_of
from finecast.rules.base import DECIDED_BY, Reason
from finecast.rules.facts import Facts, ValueFacts
from finecast.terminal import finite

KIND: Final = "finecast.report"
VERSION: Final = 1
_DIGITS: Final = 6
"""Of numbers in a report."""
# Numbers of constants that are read for histograms: a second on one core. Most models have
# fewer; of the others the constants read first have one.
_MOST_CONSTANTS: Final = 1 << 27
# Rules of the reasons for adjusted operands.
_REPAIRS: Final = frozenset({range_scaling.RULE, biases.RULE})
# What ``tune --json`` prints that has another place in the content.
_ELSEWHERE: Final = frozenset({"formats", "sensitivities", "ran"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a report is made of. Only the plan is always there.

    Attributes:
        graph: The graph whose nodes the plan names; None where the model is not given.
        facts: What calibration data showed of values, by id.
        analysis: The times and errors that the plan was chosen by; None if not known.
        found: What ``tune --json`` prints; None of a plan without its search.
        kernels: The engine's kernels, of the models ``fp32`` and ``tuned``.
        machine: The machine, as ``environment().as_json()``.
        how_to_run: How the written model is run, a line each.
    """

    model: str
    plan: Plan
    graph: Graph | None = None
    facts: Facts = field(default_factory=dict[int, ValueFacts])
    analysis: Analysis | None = None
    found: Mapping[str, Any] | None = None
    kernels: Mapping[str, Sequence[KernelTime]] = field(
        default_factory=dict[str, Sequence[KernelTime]]
    )
    machine: Mapping[str, Any] | None = None
    how_to_run: Sequence[str] = ()


def content_of(sources: Sources) -> dict[str, Any]:
    """The content of a report, which ``schema.json`` describes."""
    made = _Content(sources)
    plan, found = sources.plan, sources.found
    content: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "model": {"name": sources.model, "digest": plan.model},
        "plan": {
            "digest": plan.digest,
            "policy": plan.policy,
            "engine": plan.engine,
            "engine_title": title_of(plan.engine),
            "opset": plan.opset,
            "from_type": plan.from_type,
            "by_hint": plan.by_hint,
            "counts": plan.counts,
            "adjusted": len(plan.adjustments),
            "declared": list(plan.declared),
        },
        "machine": None if sources.machine is None else dict(sources.machine),
        "result": None if found is None else _result(found),
        "formats": _formats(),
        "ops": list(made.ops()),
        "reasons": list(made.reasons),
        "lines": list(made.lines),
        "values": list(made.values()),
        "units": [made.unit(group) for group in made.groups],
        "repairs": list(made.repairs()),
        "alone": made.alone(),
        "kernels": made.kernels(),
        "how_to_run": list(sources.how_to_run),
        "unknown": list(_unknown(sources)),
    }
    costly = Contributions.among(made.groups)
    content["summary"] = summary_of(
        content, *([made.unit(group) for group in some] for some in (costly.low, costly.kept))
    )
    # The limits of formats stay exact: bins of binades are compared with them.
    return {**finite(content, _DIGITS), "formats": content["formats"]}


def _result(found: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tune`` found, without what stands elsewhere; of a plan the number of changes."""
    kept = {key: value for key, value in found.items() if key not in _ELSEWHERE}
    for name in ("frontier", "candidates"):
        kept[name] = [_counted(plan) for plan in kept.get(name, ())]
    if kept.get("next_faster") is not None:
        kept["next_faster"] = _counted(kept["next_faster"])
    return kept


def _counted(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {**plan, "changes": len(plan["changes"])}


def _formats() -> dict[str, dict[str, float]]:
    """The range of each float format, its bits of precision, and what leaves its range.

    To nearest, numbers up to half of the smallest one become zero; numbers are out of range
    that are half a step or more above the largest one.
    """
    return {
        fmt.label: {
            "largest": fmt.max,
            "to_zero_up_to": fmt.smallest_subnormal / 2,
            "overflow_from": fmt.max + fmt.epsilon * 2.0 ** (math.frexp(fmt.max)[1] - 2),
            "smallest_normal": fmt.smallest_normal,
            "smallest": fmt.smallest_subnormal,
            "precision_bits": fmt.mantissa_bits + 1,
        }
        for fmt in FLOATS
    }


class _Content:
    """Numbers ops, reasons and values as they come."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.reasons: list[dict[str, Any]] = []
        self.lines: dict[str, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._decided = {d.node: d for d in sources.plan.decisions}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each op by its name; ops are in the graph's order."""
        graph = self.sources.graph
        names = self._decided if graph is None else [n.name for n in graph.nodes]
        return {name: number for number, name in enumerate(names)}

    def ops(self) -> Iterator[dict[str, Any]]:
        """Each op with its type, its reasons, its times and what is around it."""
        graph = self.sources.graph
        ran = {name: k.format for k in self.sources.kernels.get("tuned", ()) for name in k.ops}
        if graph is None:
            for one in self._decided.values():
                yield {
                    "name": one.node,
                    "op": one.op,
                    "class": by_name(one.op).kind.label,
                    **self._decision(one),
                }
            return
        for node in graph.nodes:
            decision = self._decided.get(node.name)
            yield {
                "name": node.name,
                "op": node.op,
                "native": node.native,
                "class": by_name(node.op).kind.label,
                "scope": _path(node.scope),
                "inputs": node.input_ids,
                "outputs": node.output_ids,
                **({} if decision is None else self._decision(decision)),
                **self._more(node, ran),
            }

    def _decision(self, decision: Decision) -> dict[str, Any]:
        numbered = [self._reason(r) for r in decision.reasons]
        return {
            "type": decision.format.label,
            "reasons": numbered,
            "deciding": [self._reason(r) for r in decision.deciding],
        }

    def _more(self, node: Node, ran: Mapping[str, str]) -> dict[str, Any]:
        """What is known of some ops only."""
        found: dict[str, Any] = {}
        if node.name in ran:
            found["ran"] = ran[node.name]
        if node.source:
            found["line"] = self.lines.setdefault(node.source, len(self.lines))
        times = self._times(node)
        return found | ({"ms": times} if times else {})

    def _times(self, node: Node) -> dict[str, float]:
        """Milliseconds of an op's kernel in each format, as plans were chosen by."""
        analysis = self.sources.analysis
        if analysis is None or analysis.node_time is None:
            return {}
        seconds = {fmt.label: analysis.node_time(node, fmt) for fmt in analysis.times}
        return {label: 1e3 * s for label, s in seconds.items() if math.isfinite(s) and s}

    def _reason(self, reason: Reason) -> int:
        key = (reason.rule, reason.text, reason.permits, *reason.evidence.items())
        if key not in self._known:
            self._known[key] = len(self.reasons)
            self.reasons.append(
                {
                    "rule": reason.rule,
                    "text": reason.text,
                    "permits": list(reason.permits),
                    "evidence": dict(reason.evidence),
                }
            )
        return self._known[key]

    def values(self) -> Iterator[dict[str, Any]]:
        """Each value, with the histogram of its binades where it was observed."""
        graph, left = self.sources.graph, _MOST_CONSTANTS
        if graph is None:
            return
        for value in graph.values:
            facts = self.sources.facts.get(value.id)
            constant = value.constant
            if facts is None and constant is not None and value.format is not None:
                left -= constant.size
                facts = ValueFacts.of(constant.read()) if left >= 0 else None
            yield {
                "name": value.name,
                "dtype": value.dtype,
                "shape": None if value.shape is None else list(value.shape),
                "from": _origin(value),
                **({"output": True} if value.is_output else {}),
                **({} if facts is None else {"facts": _facts(facts)}),
            }

    def unit(self, group: PrecisionGroup) -> dict[str, Any]:
        """Ops that were decided together: what each format would cost, and the error then.

        ``error`` is that of the whole model if this unit alone had the format and all others
        that of the plan; ``alone`` that of a model in fp32 but for this unit.
        """
        return {
            "ops": [self.numbers[n] for n in group.ops if n in self.numbers],
            "main": self.numbers.get(group.main),
            "type": group.format,
            "by": str(group.reason.evidence.get(DECIDED_BY, "")),
            "reason": self._reason(group.reason),
            "ms": {label: us / 1e3 for label, us in group.times_us.items()},
            "casts_ms": {label: us / 1e3 for label, us in group.casts_us.items()},
            "error": group.errors,
            "share": group.share,
            "measured_share": group.measured_share,
            "measured": None if group.measured is None else [*group.measured],
            "saved_ms": {label: us / 1e3 for label, us in group.saved_us.items()},
            "alone": self._alone_by_op.get(group.ops[0], {}),
        }

    def repairs(self) -> Iterator[dict[str, Any]]:
        """Each op with adjusted operands, which it could not be low without, and the proof."""
        made: dict[str, list[Adjustment]] = {}
        for one in self.sources.plan.adjustments:
            made.setdefault(one.node, []).append(one)
        for name, adjustments in made.items():
            decision = self._decided.get(name)
            if decision is not None and name in self.numbers:
                yield {
                    "op": self.numbers[name],
                    "operands": [_operand(one) for one in adjustments],
                    "reasons": [
                        self._reason(r) for r in decision.reasons if r.rule in _REPAIRS
                    ],
                }

    @cached_property
    def groups(self) -> list[PrecisionGroup]:
        """The ops that costs decided together; of a plan alone, as far as figures tell."""
        analysis, graph = self.sources.analysis, self.sources.graph
        numbers: dict[str, int] = {}
        if analysis is not None and graph is not None:
            numbers = {graph.nodes[n].name: u for n, u in analysis.units.of.items()}
        return precision_groups(self.sources.plan, numbers)

    @cached_property
    def _alone_by_op(self) -> dict[str, dict[str, dict[str, float]]]:
        """By op and format: relative error of its unit's weights, and of its activations."""
        analysis, graph = self.sources.analysis, self.sources.graph
        found: dict[str, dict[str, dict[str, float]]] = {}
        if analysis is None or graph is None:
            return found
        for fmt, rounded in analysis.rounded.items():
            relative = rounded.saturation.relative
            values = rounded.by_unit
            for unit, nodes in enumerate(analysis.units.members):
                errors = {
                    "weights": relative(float(rounded.units[unit])),
                    "activations": relative(float(values[unit])),
                }
                for node in nodes:
                    found.setdefault(graph.nodes[node].name, {})[fmt.label] = errors
        return found

    def alone(self) -> dict[str, dict[str, float]] | None:
        """By format: the error with all weights rounded alone, all activations, and both."""
        analysis = self.sources.analysis
        if analysis is None:
            return None
        return {
            fmt.label: {
                "weights": rounded.saturation.relative(float(rounded.units.sum())),
                "activations": rounded.saturation.relative(rounded.values),
                "both": rounded.saturation.relative(rounded.total),
            }
            for fmt, rounded in analysis.rounded.items()
        }

    def kernels(self) -> dict[str, list[dict[str, Any]]]:
        """The kernels of each model that was profiled; those without ops are the engine's.

        The first op of a kernel is its main one, which performs the most operations.
        """
        return {
            name: [
                {
                    "name": k.kernel,
                    "kind": k.kind,
                    "type": k.format,
                    "ms": 1e3 * k.time_s,
                    "ops": [self.numbers[n] for n in self._main_first(k.ops)],
                }
                for k in kernels
                if k.time_s
            ]
            for name, kernels in self.sources.kernels.items()
            if kernels
        }

    def _main_first(self, ops: Sequence[str]) -> list[str]:
        known = [name for name in ops if name in self.numbers]
        return sorted(known, key=self._operations, reverse=True)

    def _operations(self, name: str) -> float:
        """Operations of an op for one sample; 0 if they are not known."""
        graph = self.sources.graph
        if graph is None:
            return 0.0
        node = graph.nodes[self.numbers[name]]
        declared = {i: graph.values[i].shape for i in (*node.input_ids, *node.output_ids)}
        shapes = {
            i: tuple(d if isinstance(d, int) and d > 0 else 1 for d in dims)
            for i, dims in declared.items()
            if dims is not None
        }
        return flops(graph, node, shapes) or 0.0


def _path(scope: str) -> str:
    """A scope with slashes between its parts, which libraries write with dots, too.

    ``layer.0`` stays one part where slashes stand around it.
    """
    parts = [p for p in scope.split("/") if p]
    if len(parts) < 2:
        return scope.strip("/").replace(".", "/")
    return "/".join(p.replace(".", "/") if p.count(".") > 1 else p for p in parts)


def _origin(value: Value) -> int | str:
    if value.producer is not None:
        return value.producer
    return "constant" if value.constant is not None else "input"


def _operand(adjustment: Adjustment) -> dict[str, Any]:
    """What is done to an operand: ``lowest`` and ``highest`` are powers of two."""
    exponents = adjustment.exponents or (0,)
    return {
        "at": adjustment.attribute or f"input {adjustment.port}",
        "channels": adjustment.channels,
        "lowest": min(exponents),
        "highest": max(exponents),
        "adds": bool(adjustment.add),
    }


def _facts(facts: ValueFacts) -> dict[str, Any]:
    """Counts by binade: ``binades[k]`` numbers are in [2**(first + k), 2**(first + k + 1))."""
    seen = np.flatnonzero(facts.binades)
    first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, -1)
    return {
        "count": facts.count,
        "zeros": facts.zeros,
        "nans": facts.nans,
        "infs": facts.infs,
        "lowest": facts.lowest,
        "highest": facts.highest,
        "largest": facts.largest,
        "smallest_nonzero": facts.smallest_nonzero,
        "first": first - 149,
        "binades": [int(n) for n in facts.binades[first : last + 1]],
    }


def _unknown(sources: Sources) -> Iterator[str]:
    """What is not known, and what would tell it."""
    if sources.graph is None:
        yield "the graph: give the model beside the plan to see ops around one another"
    if sources.found is None:
        yield (
            "the search: no study with this plan was given, so that there are no trials, no"
            " frontier and no measured speed"
        )
    if sources.graph is not None and not sources.facts:
        yield "the ranges of values: none was observed on data"
    if not any(sources.kernels.values()):
        target = (sources.found or {}).get("target")
        yield (
            f"kernels: {target} is not here, times are modelled"
            if target
            else "the engine's kernels: times of ops are those that plans were chosen by"
        )
