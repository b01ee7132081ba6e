"""The first op of a model that two runs of it disagree about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from finecast.data.deviation import Deviation, deviation
from finecast.engines.base import Array
from finecast.errors import EngineError
from finecast.graph import Graph, Node

Outputs: TypeAlias = Mapping[str, Array]

_SHOWN: Final = 8
"""Values that one run of the search outputs: few, as an output may prevent fusion."""

_MOST_RUNS: Final = 24
"""Most runs of the search: enough for 8 to the power of 7 ops and some detours."""


@dataclass(slots=True, kw_only=True)
class FirstWrong:
    """A search for the first wrong value, by runs of two models that output a few values.

    Attributes:
        graph: The graph of both models.
        names: The names, by id, of the values that both models can output.
        both: Runs both models with outputs of these names: what is judged, and what is right.
        wrong: Whether a value of the first one is wrong, by its deviation from the second.
        runs: The runs so far.
    """

    graph: Graph
    names: Mapping[int, str]
    both: Callable[[Sequence[str]], tuple[Outputs, Outputs]]
    wrong: Callable[[Deviation], bool]
    runs: int = field(default=0, init=False)

    def op_before(self, output: str) -> Node | None:
        """The op whose result is wrong though its inputs are right; None if it is not found.

        Args:
            output: The name of an output of the model that is wrong.
        """
        target = next((v.id for v in self.graph.outputs if v.name == output), None)
        if target is None:
            return None
        try:
            found = self._first_bad(target)
            while (bad := self._bad(self._inputs(found))) and self.runs < _MOST_RUNS:
                found = self._first_bad(bad[0])
        except EngineError:
            return None  # the engine does not run the model with other outputs
        producer = self.graph.values[found].producer
        return self.graph.nodes[producer] if producer is not None else None

    def _bad(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are wrong; values that cannot be output count as right."""
        shown = {self.names[i]: i for i in ids if i in self.names}
        if not shown:
            return []
        self.runs += 1
        got, wanted = self.both(list(shown))
        pairs = ((i, deviation(got[n], wanted[n])) for n, i in shown.items())
        return [i for i, found in pairs if found.comparable and self.wrong(found)]

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
        return [i for i in self.graph.nodes[producer].inputs if i is not None]

    def _ancestors(self, value: int) -> list[int]:
        """Ids of all values that ``value`` is computed from, in the order of computation."""
        waiting, nodes = [value], set[int]()
        while waiting:
            producer = self.graph.values[waiting.pop()].producer
            if producer is not None and producer not in nodes:
                nodes.add(producer)
                waiting.extend(i for i in self.graph.nodes[producer].inputs if i is not None)
        last = self.graph.values[value].producer
        made = (self.graph.nodes[n].outputs for n in sorted(nodes) if n != last)
        return [i for outputs in made for i in outputs if i is not None]
