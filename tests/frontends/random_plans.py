"""One random graph, one random plan: converted, checked, run, and held against the emulation.

python -m tests.frontends.random_plans [--graphs 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.planning.edits import InsertCast
from finecast.planning.plan import Decision, Plan
from finecast.rules.policy import Policy
from tests.frontends.emulated import Emulator
from tests.frontends.leftovers import (
    stale_types,
    unread,
    with_stated_types,
    without_dead,
)
from tests.frontends.random_graphs import SHAPE, Generator


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one trial was made of."""

    nodes: int
    low: int
    casts: int
    bodies: int


def try_one(random: Random, folder: Path) -> Tried:
    """Raises if the converted model is invalid or differs from the emulation."""
    proto = with_stated_types(Generator(random).model())
    if random.random() < 0.5:
        proto = without_dead(proto)
    source, target = folder / "random.onnx", folder / "planned.onnx"
    onnx.save(proto, source)
    onnx.checker.check_model(proto, full_check=True)
    file = frontend.load(source)
    prepared = frontend.prepare(file, Policy.parse("all:fp16"))
    graph = prepared.graph
    allowed = random.choice(([Format.FP16], [Format.BF16], [Format.FP16, Format.BF16]))
    formats: dict[str, Format] = {}
    for node in graph.float_nodes:
        low = random.choice(allowed)
        if node.format is Format.FP32 and low in node.admits and random.random() < 0.6:
            formats[node.name] = low
    plan = Plan(
        model=file.digest,
        policy="all:fp16",
        opset=22,
        decisions=tuple(
            Decision(node=n.name, op=n.op, format=formats.get(n.name, Format.FP32))
            for n in graph.float_nodes
            if n.format is Format.FP32
        ),
    )
    applied = frontend.apply(file, plan)
    frontend.save(applied.model, target, force=True)
    frontend.check(target)
    written = onnx.load(target)
    assert not set(stale_types(written)) - set(stale_types(proto))
    assert unread(proto) or not unread(written)
    _one_cast_per_value_and_format(applied.edits)
    rng = np.random.default_rng(random.randrange(1 << 30))
    feeds: dict[str, np.ndarray] = {
        p.name: rng.standard_normal(SHAPE).astype(np.float32) * 4
        for p in proto.graph.input
        if p.name != "c"
    }
    feeds["c"] = np.array(random.random() < 0.5)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        named = ir.to_proto(prepared.model)
        wanted = Emulator(named, graph, formats).run(feeds)
        got = ReferenceEvaluator(str(target)).run(None, feeds)
    for output, w, result in zip(proto.graph.output, wanted, got, strict=True):
        g = np.asarray(result)
        assert g.dtype == np.float32, output.name
        assert np.array_equal(np.asarray(w, np.float32), g, equal_nan=True), (
            f"{output.name}: {g} instead of {w}"
        )
    bodies = sum(n.op_type in ("If", "Loop", "Scan") for n in prepared.model.graph.all_nodes())
    casts = sum(isinstance(e, InsertCast) for e in applied.edits)
    return Tried(nodes=len(graph.nodes), low=len(formats), casts=casts, bodies=bodies)


def _one_cast_per_value_and_format(edits: Sequence[object]) -> None:
    seen = Counter((e.value, e.to) for e in edits if isinstance(e, InsertCast))
    assert not [key for key, count in seen.items() if count > 1]


def main(arguments: Sequence[str]) -> int:
    """Try many graphs and print what they were made of."""
    parser = argparse.ArgumentParser(prog="random_plans", description=__doc__)
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    start, total, failed = time.perf_counter(), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        for number in range(options.graphs):
            try:
                tried = try_one(Random(f"{options.seed}/{number}"), Path(folder))
            except Exception as error:  # reported, counted, and the run goes on
                failed += 1
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                sys.stdout.write(
                    f"graph {options.seed}/{number}: {type(error).__name__}: {first[:300]}\n"
                )
                continue
            total.update(
                nodes=tried.nodes, low=tried.low, casts=tried.casts, bodies=tried.bodies
            )
            total["with bodies"] += tried.bodies > 0
    seconds = time.perf_counter() - start
    sys.stdout.write(
        f"{options.graphs} graphs, {failed} failed, {seconds:.0f} s; {dict(total)}\n"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
