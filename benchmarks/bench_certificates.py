"""How often a plan is certified that loses more than it may, after a selection.

    python -m benchmarks.bench_certificates --runs 10000

Each run draws a data set and plans of known true loss, chooses on one half of the samples
and certifies on the other, as ``tune --confidence``. Counted are runs in which the plan taken
truly loses more than is allowed, and those in which a bound alone, without any choice, is
below the true loss. In most settings there is one plan, which loses 1% more than is allowed:
the hardest case, as no other plan's test has to hold before its own. The bar is 5% plus two
standard errors of the count.

``--power`` finds how many samples certify, in 80% of runs, a plan that loses nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from benchmarks.common import report
from finecast.data import certificates
from finecast.data.criterion import Criterion
from finecast.data.metrics import METRICS, Score
from finecast.data.samples import (
    SHARE,
    UNKNOWN,
    Indices,
    Samples,
    SummedSamples,
    ratio,
)
from finecast.errors import UsageError
from finecast.tuning.certifying import certifier_of

CONFIDENCE: Final = 0.95
COUNTS: Final = (50, 100, 200, 500, 1000)
UNBOUNDED: Final = (1000, 1200, 2000)
"""Below 1,200 samples a metric without a known range is refused, which counts as not false."""
ABOVE: Final = 1.01
"""The true loss of a single plan, over what is allowed."""
# True losses of eight plans over what is allowed, from the slowest to the fastest.
LOSSES: Final = (0.0, 0.25, 0.6, 0.99, 1.01, 1.1, 1.5, 2.0)
RIGHT: Final = 0.9
# Decisions of other samples become right: as many as a quarter of those that are lost.
WON: Final = 0.25

Floats = NDArray[np.float64]
Draw = Callable[[int, np.random.Generator], "Drawn"]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A data set: the samples of fp32, and of each plan its true loss and its samples.

    Plans are in order, the slowest first; ``groups`` has the cluster of each sample.
    """

    exact: Samples
    plans: Sequence[tuple[float, Samples]]
    groups: Indices | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How data sets are drawn, what may be lost, and which numbers of samples are tried."""

    draw: Draw
    allowed: float
    counts: Sequence[int] = COUNTS
    higher_is_better: bool = True
    share_of_runs: float = 1.0


def eight_plans(count: int, rng: np.random.Generator) -> Drawn:
    """Decisions: fp32 is right on 90% of the samples, the plans lie around 2 points lost."""
    exact, plans = rng.random(count) < RIGHT, list[tuple[float, Samples]]()
    for share in LOSSES:
        net = share * 0.02
        lost, won = net * (1 + WON) / RIGHT, net * WON / (1 - RIGHT)
        drawn = rng.random(count)
        right = np.where(exact, drawn >= lost, drawn < won)
        plans.append((net, decisions(right)))
    return Drawn(exact=decisions(exact), plans=plans)


def scores(values: Floats, score_range: tuple[float, float] = SHARE) -> SummedSamples:
    """Samples of which each has a score."""
    terms = np.stack([values, np.ones(len(values))], axis=-1)
    return SummedSamples(terms=terms, metric=ratio, score_range=score_range)


def decisions(right: NDArray[np.bool_]) -> SummedSamples:
    """Samples of which each is a decision, right or wrong."""
    return scores(right.astype(np.float64))


def rare_harm(share: float, *, noise: float = 0.0) -> Draw:
    """A share of the samples loses 1; with noise the others change, on average by 0."""

    def draw(count: int, rng: np.random.Generator) -> Drawn:
        lost = (rng.random(count) < share).astype(np.float64)
        moved = rng.uniform(-noise, noise, count) * (1 - lost)
        exact = np.full(count, 1.0 if not noise else 1 - noise)
        low = np.clip(exact + moved - lost, 0, 1)
        return Drawn(exact=scores(exact), plans=[(share, scores(low))])

    return draw


def losses(drawn: Callable[[int, np.random.Generator], Floats], mean: float) -> Draw:
    """A metric without a known range, a loss: that of fp32 is 0, the plan's is drawn."""

    def draw(count: int, rng: np.random.Generator) -> Drawn:
        low = scores(drawn(count, rng), UNKNOWN)
        return Drawn(exact=scores(np.zeros(count), UNKNOWN), plans=[(mean, low)])

    return draw


def cut_losses(count: int, rng: np.random.Generator) -> Drawn:
    """Lognormal losses (sigma 2), cut at 100 and scaled to a range of 1."""
    low = np.minimum(rng.lognormal(0, 2, count), 100) / 100
    return Drawn(exact=scores(np.ones(count)), plans=[(CUT_MEAN, scores(1 - low))])


def clusters(count: int, rng: np.random.Generator) -> Drawn:
    """Decisions in clusters of 1 to 19, each with its own share of losses, 10% on average."""
    sizes = rng.integers(1, 20, count)
    groups = np.repeat(np.arange(count), sizes)
    share = np.repeat(rng.beta(0.3, 2.7, count), sizes)
    low = rng.random(len(groups)) >= share
    exact = decisions(np.ones(len(groups), np.bool_))
    return Drawn(exact=exact, plans=[(0.1, decisions(low))], groups=groups)


def harmed_clusters(count: int, rng: np.random.Generator) -> Drawn:
    """Clusters of 5 decisions, 1% of which are lost as a whole."""
    groups = np.repeat(np.arange(count), 5)
    low = np.repeat(rng.random(count) >= 0.01, 5)
    exact = decisions(np.ones(len(groups), np.bool_))
    return Drawn(exact=exact, plans=[(0.01, decisions(low))], groups=groups)


def built_in(name: str, share: float, true: float) -> Draw:
    """A metric that is no mean: a share of the samples has scores of another sign."""

    def draw(count: int, rng: np.random.Generator) -> Drawn:
        truth = rng.normal(size=count)
        exact = truth + 0.3 * rng.normal(size=count)
        low = np.where(rng.random(count) < share, -exact, exact)

        def samples(value: Floats) -> Samples:
            total = METRICS[name].start()
            if name == "spearman":
                total.update({"y": value[:, None]}, truth, None)
            else:
                two = np.stack([-value, value], axis=-1)
                total.update({"y": two}, (truth > 0).astype(np.int64), None)
            found = total.samples()
            assert found is not None
            return found

        return Drawn(exact=samples(exact), plans=[(true, samples(low))])

    return draw


@cache
def true_loss(name: str, share: float) -> float:
    """The loss of ``built_in`` on the population, from a million samples."""
    found = built_in(name, share, 0.0)(1_000_000, np.random.default_rng(3))
    sign = 1 if METRICS[name].higher_is_better else -1
    return sign * (found.exact.value() - found.plans[0][1].value())


CUT_MEAN: Final = float(
    np.minimum(np.random.default_rng(2).lognormal(0, 2, 20_000_000), 100).mean() / 100
)


def built_in_setting(name: str) -> Setting:
    """Three of a thousand samples are harmed, the least share that 1,200 samples show."""
    true = true_loss(name, 0.003)
    return Setting(
        draw=built_in(name, 0.003, true),
        allowed=true / ABOVE,
        counts=UNBOUNDED[1:],
        higher_is_better=METRICS[name].higher_is_better,
        share_of_runs=0.1,
    )


def settings() -> dict[str, Setting]:
    """By name; made when they are asked for."""
    return {
        "decisions, eight plans": Setting(draw=eight_plans, allowed=0.02, counts=COUNTS[2:]),
        "decisions, 1% harmed": Setting(draw=rare_harm(0.01), allowed=0.01 / ABOVE),
        "decisions, .3% harmed": Setting(draw=rare_harm(0.003), allowed=0.003 / ABOVE),
        "scores in [0, 1], 1% harmed": Setting(
            draw=rare_harm(0.01, noise=0.01), allowed=0.01 / ABOVE
        ),
        "scores in [0, 1], .3% harmed": Setting(
            draw=rare_harm(0.003, noise=0.01), allowed=0.003 / ABOVE
        ),
        "scores in [0, 1], lognormal, cut": Setting(draw=cut_losses, allowed=CUT_MEAN / ABOVE),
        "clusters of decisions": Setting(draw=clusters, allowed=0.1 / ABOVE),
        "clusters, 1% harmed": Setting(draw=harmed_clusters, allowed=0.01 / ABOVE),
        "no range, lognormal, sigma 1": Setting(
            draw=losses(lambda n, rng: rng.lognormal(0, 1, n), math.exp(0.5)),
            allowed=math.exp(0.5) / ABOVE,
            counts=UNBOUNDED,
            higher_is_better=False,
        ),
        "no range, lognormal, sigma 2": Setting(
            draw=losses(lambda n, rng: rng.lognormal(0, 2, n), math.exp(2)),
            allowed=math.exp(2) / ABOVE,
            counts=UNBOUNDED,
            higher_is_better=False,
        ),
        "no range, Pareto, exponent 1.5": Setting(
            draw=losses(lambda n, rng: rng.pareto(1.5, n), 2.0),
            allowed=2 / ABOVE,
            counts=UNBOUNDED,
            higher_is_better=False,
        ),
        "no range, .3% harmed": Setting(
            draw=losses(
                lambda n, rng: (rng.random(n) < 0.003) + rng.normal(0, 0.001, n), 0.003
            ),
            allowed=0.003 / ABOVE,
            counts=UNBOUNDED,
            higher_is_better=False,
        ),
        "f1, .3% harmed": built_in_setting("f1"),
        "spearman, .3% harmed": built_in_setting("spearman"),
        "perplexity, .3% harmed": built_in_setting("perplexity"),
    }


@dataclass(frozen=True, kw_only=True)
class Selected:
    """What a selection gave.

    Attributes:
        certified: Whether a plan was certified.
        is_false: Whether the plan taken, the fastest certified one, loses too much.
        is_exceeded: Whether the bound of the least bad plan is below its true loss, however
            it does on the samples that choose.
    """

    certified: bool = False
    is_false: bool = False
    is_exceeded: bool = False


def selected(drawn: Drawn, setting: Setting) -> Selected:
    """Choose on one half of the samples and certify on the other."""

    def score(samples: Samples) -> Score:
        return Score(samples.value(), samples={"": samples})

    criterion = Criterion(
        max_drop=setting.allowed,
        confidence=CONFIDENCE,
        higher_is_better=setting.higher_is_better,
    )
    try:
        certifier = certifier_of(criterion, score(drawn.exact), drawn.groups)
    except UsageError:  # too few samples
        return Selected()
    assert certifier is not None
    plans = {str(i): score(samples) for i, (_, samples) in enumerate(drawn.plans)}
    passed = [name for name in plans if certifier.passes(plans[name])]
    found = certifier.certified(plans, passed)
    held = [name for name, one in found.items() if certifier.holds(one)]
    true = {str(i): loss for i, (loss, _) in enumerate(drawn.plans)}
    bad = next((name for name in plans if true[name] > setting.allowed), None)
    if bad is not None and bad not in found:
        found[bad] = certifier.certificate(plans[bad])
    return Selected(
        certified=bool(held),
        is_false=bool(held) and true[held[-1]] > setting.allowed,
        is_exceeded=bad is not None and found[bad].bound < true[bad],
    )


def count_false(name: str, setting: Setting, all_runs: int) -> None:
    """Print how often selections are false, for each number of samples."""
    runs = max(1, round(all_runs * setting.share_of_runs))
    for count in setting.counts:
        rng = np.random.default_rng(1)
        found = [selected(setting.draw(count, rng), setting) for _ in range(runs)]
        false = sum(one.is_false for one in found) / runs
        report(
            "certificates",
            f"{name}, {count} samples",
            100 * false,
            "% false",
            bar=100 * (0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)),
            bounds_exceeded=f"{sum(one.is_exceeded for one in found) / runs:.2%}",
            certified=f"{sum(one.certified for one in found) / runs:.1%}",
            runs=runs,
        )


def power(all_runs: int) -> None:
    """Print how many samples certify a plan that loses nothing in 80% of the runs."""

    def differing(share: float) -> Draw:
        def draw(count: int, rng: np.random.Generator) -> Drawn:
            differs, exact = rng.random(count) < share, rng.random(count) < 0.5
            return Drawn(exact=decisions(exact), plans=[(0.0, decisions(exact ^ differs))])

        return draw

    def noisy(spread: float, score_range: tuple[float, float]) -> Draw:
        def draw(count: int, rng: np.random.Generator) -> Drawn:
            low = scores(expit(spread * 4 * rng.normal(size=count)), score_range)
            return Drawn(exact=scores(np.full(count, 0.5), score_range), plans=[(0.0, low)])

        return draw

    rows = {
        "decisions, 2% differ, 1 point": (differing(0.02), 0.01),
        "decisions, .2% differ, 1 point": (differing(0.002), 0.01),
        "scores in [0, 1], deviation .02, .01 allowed": (noisy(0.02, SHARE), 0.01),
        "scores in [0, 1], deviation .2, .02 allowed": (noisy(0.2, SHARE), 0.02),
        "no range, deviation .2, .02 allowed": (noisy(0.2, UNKNOWN), 0.02),
    }
    runs = max(100, all_runs // 50)
    for name, (draw, allowed) in rows.items():
        setting, rng = Setting(draw=draw, allowed=allowed), np.random.default_rng(1)
        count, certified = 40, 0.0
        while certified < 0.8:
            count = math.ceil(count * 1.05)
            found = [selected(draw(count, rng), setting) for _ in range(runs)]
            certified = sum(one.certified for one in found) / runs
        report("certificates", name, count, "samples in all", runs=runs)


def main() -> None:
    """Count, and print a line for each setting and number of samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--only", default="", help="settings whose name has this")
    parser.add_argument("--power", action="store_true", help="how many samples are needed")
    asked = parser.parse_args()
    # Many data sets have as many decisions lost and won as others.
    certificates.decision_bound = cache(certificates.decision_bound)
    if asked.power:
        power(asked.runs)
        return
    for name, setting in settings().items():
        if asked.only in name:
            count_false(name, setting, asked.runs)


if __name__ == "__main__":
    main()
