"""``finecast blame`` on faults that are planted in five nets, beside two ways of others.

Bars: the culprit is among the first three ops named in 95% of 50 faults, and none is named in
models without a fault: in fp16, in int8, and the fp32 model itself. Beside it: bisection for
the first N ops that have to stay in fp32, as Polygraphy's ``debug precision`` does it, and a
walk from the outputs back through ops whose results are wrong, as coremltools'
``MLModelComparator`` does it.

    python -m benchmarks.bench_blame            # all nets; those of shared/models where there
    python -m benchmarks.bench_blame cnn lstm   # some of them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from time import process_time
from typing import Any, Final

from benchmarks.blame_nets import (
    Fault,
    Net,
    cnn,
    faults,
    lstm,
    minilm,
    own_outliers,
    resnet,
    to_fp16,
    to_int8,
    transformer,
)
from benchmarks.common import SHARED_MODELS, print_environment
from finecast import api
from finecast.data.criterion import Criterion
from finecast.data.deviation import expected
from finecast.data.options import DataOptions
from finecast.diagnosis.judging import BlameOptions, judge_of
from finecast.engines.exact import CachedSession
from finecast.graph import Node
from finecast.native.model import LowModel

_NETS: Final[Mapping[str, Callable[[], Net]]] = {
    "transformer": transformer,
    "lstm": lstm,
    "cnn": cnn,
    "resnet": resnet,
    "minilm": minilm,
}
_REAL: Final = ("resnet", "minilm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a way finds.

    Attributes:
        named: The ops that it names, the most suspicious first.
        evaluations: The models that it evaluated.
        kept: The ops that it would keep in fp32; None if it does not say.
    """

    named: tuple[str, ...]
    evaluations: int
    kept: int | None = None

    def is_right(self, fault: Fault) -> bool:
        """Whether the culprit is among the first three."""
        return bool({*self.named[:3]} & fault.planted)


def first_n(low: LowModel, passes: Callable[[frozenset[int]], bool]) -> Answer:
    """Bisection for the least N such that the model passes with its first N ops in fp32."""
    evaluations, below, above = 0, 0, len(low.groups)
    while above - below > 1:
        middle = (below + above) // 2
        evaluations += 1
        if passes(frozenset(range(middle))):
            above = middle
        else:
            below = middle
    node = low.graph.nodes[low.groups[above - 1].nodes[0]]
    return Answer(named=(node.name,), evaluations=evaluations, kept=above)


def walk_back(low: LowModel, feeds: Mapping[str, Any]) -> Answer:
    """A walk from the outputs back through ops with wrong results, a step an evaluation."""
    graph, seen = low.graph, low.seen(feeds, None)
    bounds = expected(graph, low.formats)

    def is_wrong(node: Node) -> bool:
        for index in node.outputs:
            one = seen.get(index) if index is not None else None
            limit = bounds.relative.get(index, 0.0) if index is not None else 0.0
            if one is not None and (one.spoiled or one.total > limit):
                return True
        return False

    front = [n for v in graph.outputs if (n := graph.maker(v)) is not None]
    known: set[int] = {n.id for n in front}
    named: list[str] = []
    evaluations = 0
    while front:
        evaluations += 1
        after: dict[int, Node] = {}
        for node in front:
            if not is_wrong(node):
                continue
            before = [m for i in node.inputs if (m := graph.maker(i)) is not None]
            if not any(map(is_wrong, before)):
                named.append(node.name)
            after |= {m.id: m for m in before if m.id not in known}
        known |= after.keys()
        front = [*after.values()]
    return Answer(named=tuple(named), evaluations=evaluations)


def answers(net: Net, fault: Fault) -> Iterator[tuple[str, Answer, float]]:
    """What each way names, and its seconds of processor time."""
    start = process_time()
    found = api.blame(fault.fp32, fault.low, data=net.feeds, progress=False)
    seconds = process_time() - start
    names = tuple(one.node for one in found.culprits)
    answer = Answer(named=names, evaluations=found.evaluations, kept=len(names))
    yield "blame", answer, seconds
    yield "probes", Answer(named=names, evaluations=found.probes), 0.0
    exact = api.load(fault.fp32)
    low = exact.beside(api.load(fault.low), None)
    reference = CachedSession(exact.reference())
    data = DataOptions(data=net.feeds)
    workload = exact.workload(data, reference)
    options = BlameOptions()
    judge = judge_of(options, data, Criterion(), workload, low, reference)
    start = process_time()
    answer = first_n(low, lambda returned: judge.judge(low.session(returned))[1])
    yield "first N", answer, process_time() - start
    start = process_time()
    yield "walk back", walk_back(low, net.feeds[0]), process_time() - start


def main(names: list[str]) -> None:
    """Print a line of JSON for each fault, then the figures of all."""
    real = (SHARED_MODELS / "cases.py").is_file()
    print_environment()
    rows: dict[str, list[tuple[bool, Answer, float]]] = {}
    clean: list[str] = []
    for number, (name, make) in enumerate(_NETS.items()):
        if (names and name not in names) or (name in _REAL and not real):
            continue
        net = make()
        line: dict[str, Any]
        right = to_fp16(net.model), to_int8(net.model, net.feeds, net.outliers), net.model
        for low in right:
            found = api.blame(net.model, low, data=net.feeds, progress=False)
            clean += [one.node for one in found.culprits]
            print(
                json.dumps({"net": net.name, "fault": None, "error": found.value}), flush=True
            )
        for fault in (*own_outliers(net), *faults(net, seed=number)):
            line = {"net": net.name, "fault": fault.kind}
            for way, answer, seconds in answers(net, fault):
                right = answer.is_right(fault)
                rows.setdefault(way, []).append((right, answer, seconds))
                line[way] = {
                    "right": right,
                    "evaluations": answer.evaluations,
                    "cpu_s": round(seconds, 2),
                    "named": answer.named[:3],
                }
            line["planted"] = sorted(fault.planted)
            print(json.dumps(line), flush=True)
    for way, found in rows.items():
        share = mean(right for right, _, _ in found)
        counts = [answer.evaluations for _, answer, _ in found]
        kept = [answer.kept for _, answer, _ in found if answer.kept is not None]
        figures = {
            "way": way,
            "faults": len(found),
            "right": round(share, 3),
            "evaluations": {"mean": round(mean(counts), 1), "most": max(counts)},
            "kept in fp32": round(mean(kept), 1) if kept else None,
            "cpu_s": round(sum(s for _, _, s in found), 1),
        }
        print(json.dumps(figures))
    print(json.dumps({"named in clean models": clean}))


if __name__ == "__main__":
    main(sys.argv[1:])
