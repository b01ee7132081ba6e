"""How far plans lie from the best one, on nets whose every plan has been tried.

    python -m benchmarks.judge                        # 40 nets; also ``make judge``
    python -m benchmarks.judge --nets 100 --first 40
    python -m benchmarks.judge --reverse              # on a device that sums otherwise
    python -m benchmarks.judge --peers build/peers/bin/python

Each net of ``judge_nets`` has 10 to 14 ops in fp32 or fp16 on a made-up device, an SNR to keep
between what fp16 alone gives and fp32, and so a fastest assignment that keeps it, found by
enumeration. A tool answers with the ops that compute in fp16; its gap is the time of that
assignment over the best one's. An assignment that loses more than is allowed has no gap.
Beside finecast stand three usual ways, written here, and with ``--peers`` (a Python with
onnxconverter-common and ModelOpt) other tools themselves. The enumeration itself stands there,
too, made with sums in the reverse order: no tool can be expected to be nearer to the best than
that on a device whose order of sums it does not know, as with ``--reverse``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.common import print_environment, report
from benchmarks.judge_nets import OP_S, PRODUCT_TFLOPS, VECTOR_TFLOPS, JudgeNet, draw
from finecast import api
from finecast.devices.emulation import Emulation
from finecast.devices.targets import parse_target
from finecast.numbers.formats import Format

_BAR_GAP: Final = 0.02
_BAR_SHARE: Final = 0.95
_PEER: Final = Path(__file__).parent / "peers" / "fp16_ops.py"
_PEER_LIMIT_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A net with the SNR and time of all assignments, and the SNR to keep.

    ``reversed_db`` are the SNRs with sums in the other order.
    """

    net: JudgeNet
    snr_db: NDArray[np.float64]
    reversed_db: NDArray[np.float64]
    time_s: NDArray[np.float64]
    required_db: float

    @property
    def best_s(self) -> float:
        """The time of the fastest assignment that keeps the SNR."""
        return float(self.time_s[self.snr_db >= self.required_db].min())

    def gap(self, mask: int) -> float | None:
        """Time over the best one's, less 1; None if too much is lost."""
        if self.snr_db[mask] < self.required_db:
            return None
        return float(self.time_s[mask] / self.best_s - 1)


Tool: TypeAlias = Callable[[Case], int]


def case(seed: int, *, reverse: bool = False) -> Case:
    """The net of a seed, all its assignments, and an SNR that most of them miss."""
    net = draw(seed)
    snr_db, time_s = net.snrs_db(reverse=reverse), net.times_s()
    other_db = net.snrs_db(reverse=not reverse)
    share = np.random.default_rng([seed, 1]).uniform(0.5, 0.99)
    required = float(np.quantile(snr_db[np.isfinite(snr_db)], share))
    return Case(
        net=net,
        snr_db=snr_db,
        reversed_db=other_db,
        time_s=time_s,
        required_db=round(required, 2),
    )


def device(net: JudgeNet) -> Emulation:
    """The made-up device of a net: its memory takes no time, its order of sums is known."""
    rates = {"matmul": PRODUCT_TFLOPS, "vector": VECTOR_TFLOPS}
    engines = "\n".join(
        f'[engines.{role}]\naccumulates_in = "fp32"\nflushes_subnormals = []\n'
        f"[engines.{role}.rates_tflops]\n" + "\n".join(f"{f} = {r}" for f, r in rate.items())
        for role, rate in rates.items()
    )
    text = f"""
description = "made up"
unit = "one chip"
stochastic_rounding = false
[memory]
bandwidth_gb_s = 1e9
[overhead]
op_us = {OP_S * 1e6}
cast_us = {net.cast_s * 1e6}
free_casts = false
{engines}
[transposes]
by = ["byte_move"]
[saturation]
infinity_in_transposes = false
fp8_conversions = false
"""
    return Emulation(
        target=parse_target(text, file="judge.toml"), format=Format.FP16, share=0.0
    )


def by_finecast(one: Case) -> int:
    """What ``tune`` chooses for the device."""
    found = api.tune(
        one.net.model(),
        policy="all:fp16",
        data={"x": one.net.x},
        metric="snr_db",
        tolerance=one.required_db,
        target=device(one.net),
        min_speedup=1.0,
        progress=False,
    )
    low = {d.node for d in found.plan.decisions if d.format is Format.FP16}
    return _mask(one.net, low)


def by_other_sums(one: Case) -> int:
    """The best of all assignments, where products are summed in the other order."""
    keeps = np.flatnonzero(one.reversed_db >= one.required_db)
    return int(keeps[one.time_s[keeps].argmin()]) if len(keeps) else 0


def all_low(one: Case) -> int:
    """Every op in fp16, as a compiler's global flag has it; nothing if that loses too much."""
    mask = len(one.snr_db) - 1
    return mask if one.snr_db[mask] >= one.required_db else 0


def returned_one_by_one(one: Case) -> int:
    """All ops in fp16; the one that loses most alone returns to fp32, until enough is kept.

    So do Neural Compressor's basic strategy and NNCF's accuracy control.
    """
    count = len(one.net.ops)
    mask = (1 << count) - 1
    for i in sorted(range(count), key=lambda i: one.snr_db[1 << i]):
        if one.snr_db[mask] >= one.required_db:
            break
        mask &= ~(1 << i)
    return mask


def first_in_fp32(one: Case) -> int:
    """The fewest first ops in fp32 that keep enough, as Polygraphy's bisection finds them."""
    count = len(one.net.ops)
    for first in range(count + 1):
        mask = (1 << count) - (1 << first)
        if one.snr_db[mask] >= one.required_db:
            return mask
    return 0


TOOLS: Final[Mapping[str, Tool]] = {
    "finecast": by_finecast,
    "all tried, sums reversed": by_other_sums,
    "all in fp16": all_low,
    "returned one by one": returned_one_by_one,
    "first N in fp32": first_in_fp32,
}


def by_peers(python: Path, cases: list[Case]) -> dict[str, dict[int, int | None]]:
    """By peer and seed, what other tools choose; None where a tool fails.

    They run in an environment of their own, all nets in one process.
    """
    with tempfile.TemporaryDirectory(prefix="finecast-judge-") as name:
        folder = Path(name)
        for one in cases:
            onnx.save(one.net.model(), folder / f"{one.net.seed}.onnx")
            np.savez(folder / f"{one.net.seed}.npz", x=one.net.x)
        wanted = json.dumps({one.net.seed: one.required_db for one in cases})
        done = subprocess.run(
            [python, _PEER, folder, wanted],
            capture_output=True, text=True, check=False, timeout=_PEER_LIMIT_S,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr.strip()[-600:]}")
    nets = {one.net.seed: one.net for one in cases}
    answers: dict[str, dict[str, list[str] | None]] = json.loads(done.stdout.splitlines()[-1])
    return {
        peer: {
            int(seed): None if low is None else _mask(nets[int(seed)], set(low))
            for seed, low in chosen.items()
        }
        for peer, chosen in answers.items()
    }


def _mask(net: JudgeNet, low: set[str]) -> int:
    return sum(1 << i for i, name in enumerate(net.names()) if name in low)


def summed_up(tool: str, gaps: list[float | None], failed: int) -> None:
    """Print a tool's line: how often it was near the best, and how far off it was."""
    kept = [g for g in gaps if g is not None]
    near = sum(g <= _BAR_GAP for g in kept) / len(gaps)
    report(
        f"judge: {tool}", f"nets within {_BAR_GAP:.0%} of the best", round(near, 3), "share",
        bar=_BAR_SHARE if tool == "finecast" else None, at_least=True,
        nets=len(gaps), failed=failed, loses_too_much=len(gaps) - len(kept) - failed,
        mean_gap=round(mean(kept), 4) if kept else None,
        median_gap=round(median(kept), 4) if kept else None,
        largest_gap=round(max(kept), 4) if kept else None,
    )  # fmt: skip


def main() -> None:
    """Draw nets, enumerate them, ask all tools, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nets", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--peers", type=Path, help="a Python that has other tools")
    parser.add_argument("--reverse", action="store_true", help="sum in the reverse order")
    parser.add_argument("--each", action="store_true", help="a line for each net as well")
    asked = parser.parse_args()
    print_environment()
    seeds = range(asked.first, asked.first + asked.nets)
    cases = [case(seed, reverse=asked.reverse) for seed in seeds]
    masks: dict[str, list[int | None]] = {
        name: [tool(one) for one in cases] for name, tool in TOOLS.items()
    }
    if asked.peers is not None:
        for peer, chosen in by_peers(asked.peers, cases).items():
            masks[peer] = [chosen.get(one.net.seed) for one in cases]
    for name, found in masks.items():
        gaps = [None if m is None else one.gap(m) for one, m in zip(cases, found, strict=True)]
        if asked.each:
            for one, gap, mask in zip(cases, gaps, found, strict=True):
                line = {
                    "net": one.net.seed,
                    "tool": name,
                    "gap": gap,
                    "low": mask,
                }
                print(json.dumps(line))
        summed_up(name, gaps, found.count(None))


if __name__ == "__main__":
    main()
