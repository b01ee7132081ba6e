"""What a search can reach that knows all times and errors, and judges plans by samples.

    python -m benchmarks.lab bound --nets 15

The plans are those of the frontier of true times and of squares of single roundings, and the
best one that is known. Each is evaluated on the samples that a search sees, and the fastest
one that passes is chosen: by the limit on these samples alone, or as ``tune`` has it. What is
left to the best plan is what so few samples do not tell, whatever a search does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Final, TypeAlias

import numpy as np

from benchmarks.common import count
from benchmarks.lab import drawn
from benchmarks.lab.architectures import FAMILIES
from benchmarks.lab.drawn import DrawnNet
from benchmarks.lab.nets import Key
from benchmarks.lab.subject import score
from finecast.data.criterion import Criterion
from finecast.data.metrics import Score, by_margins
from finecast.solver.assignment import Ints
from finecast.solver.expansion import envelope

_STEPS: Final = 60

Rule: TypeAlias = Callable[[Criterion, float, Score], bool]
"""Whether a score passes beside the baseline."""


def on_these(criterion: Criterion, baseline: float, seen: Score) -> bool:
    """Within the limit on the samples."""
    return criterion.passes(seen, baseline)


def on_others(criterion: Criterion, baseline: float, seen: Score) -> bool:
    """Within the limit on the samples and, as ``tune`` expects it, on others."""
    expected = by_margins(baseline, seen)
    elsewhere = expected is None or criterion.passes(expected.cautious, baseline)
    return elsewhere and criterion.passes(seen, baseline)


RULES: Final[dict[str, Rule]] = {"these samples alone": on_these, "as tune": on_others}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The plan that a rule chooses of a net: regret, true loss, and whether it is not fp32."""

    regret: float
    loss: float
    accepted: bool


def reached(net: DrawnNet) -> dict[str, Reached]:
    """What each rule chooses."""
    rows, best_s = np.arange(net.samples), min(net.best.time_s, net.fp32_s)
    nothing = np.zeros(len(net.units.members), dtype=np.int64)
    exact = score(net, net.outcomes(nothing, rows))
    baseline = math.inf if net.metric == "snr_db" else exact
    timed = sorted(
        ((net.time_s(label, by_hint=by), number, label, by))
        for number, (label, by) in enumerate(_plans(net))
    )
    chosen: dict[str, Reached] = {}
    for name, passes in RULES.items():
        chosen[name] = Reached(regret=net.fp32_s / best_s - 1, loss=0.0, accepted=False)
        for time_s, _, label, by_hint in timed:
            seen = score(net, net.outcomes(label, rows, by_hint=by_hint))
            if time_s < net.fp32_s and passes(net.criterion, baseline, seen):
                loss = float(net.losses(label[None], by_hint=by_hint)[0])
                regret = max(time_s / best_s - 1, 0.0)
                chosen[name] = Reached(regret=regret, loss=loss, accepted=True)
                break
    return chosen


def _plans(net: DrawnNet) -> Iterator[tuple[Ints, bool]]:
    yield net.best.label, net.best.by_hint
    ways = (False, True) if net.states_by_hint else (False,)
    for by_hint in ways:
        problem = net.by_hints if by_hint else net.by_casts
        yield from ((s.label, by_hint) for s in envelope(problem, max_steps=_STEPS))


def main(arguments: Sequence[str]) -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab bound",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--nets", type=count, default=15, help="of each family (default: 15)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    asked = parser.parse_args(arguments)
    keys = [
        Key(family=family.name, held_out=False, seed=asked.first + number)
        for number in range(asked.nets)
        for family in FAMILIES
    ]
    with ProcessPoolExecutor(2) as pool:
        of_nets = [*pool.map(reached_of, keys)]
    print("| rule | nets | regret | accepted | loses |\n|---|---|---|---|---|")
    for rule in RULES:
        plans = [of_net[rule] for of_net in of_nets]
        accepted = [p for p in plans if p.accepted]
        regret = mean(p.regret for p in plans if p.loss <= 1)
        loses = mean(p.loss > 1 for p in accepted) if accepted else 0.0
        share = len(accepted) / len(plans)
        print(f"| {rule} | {len(plans)} | {regret:.1%} | {share:.1%} | {loses:.1%} |")


def reached_of(key: Key) -> dict[str, Reached]:
    """``reached`` of the drawn net of a key."""
    return reached(drawn.draw(key))
