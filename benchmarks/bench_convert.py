"""Convert 1,000 to 100,000 nodes in linear time, and 2.4 GB of weights in bounded memory.

Bars: 100,000 nodes in 20 s, load, plan and save included; time per node no more than 1.5
times that at 10,000; peak memory 1.5 times the largest tensor plus 300 MB.

    python -m benchmarks.bench_convert [--nodes N | --memory | --one-file]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import cpu_seconds, peak_bytes, report
from finecast.frontends import onnx as frontend
from finecast.planning.planner import Planner
from finecast.rules import Context, permit
from finecast.rules.policy import Policy

NODES = (1_000, 10_000, 100_000)
POLICIES = ("all:bf16", "matmult:bf16")
BAR_S, BAR_GROWTH, BAR_FACTOR, BAR_REST_MB = 20.0, 1.5, 1.5, 300.0
_WIDTH = 8192  # a weight of 268 MB
_WEIGHTS = 9


def main(arguments: Sequence[str]) -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--policy", default=POLICIES[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--one-file", action="store_true", help="peak of a 403 MB file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder:
        sys.stdout.write(json.dumps(convert(options.folder, options.policy)))
        return
    with tempfile.TemporaryDirectory(prefix="finecast-") as name:
        folder = Path(name)
        if options.nodes:
            onnx.save(chain(options.nodes), folder / "in.onnx")
            sys.stdout.write(json.dumps(convert(folder, options.policy)))
        elif options.memory:
            huge(folder)
            # In another process: making weights must not count in the peak of converting.
            sys.stdout.write(json.dumps(_apart("--folder", name)))
        elif options.one_file:
            one_file(folder)
            sys.stdout.write(json.dumps(_apart("--folder", name)))
        else:
            _report()


def _report() -> None:
    for policy in POLICIES:
        per_node: dict[int, float] = {}
        for nodes in NODES:
            found = _apart("--nodes", str(nodes), "--policy", policy)
            bar = BAR_S if nodes == NODES[-1] else None
            what = f"{nodes} nodes, {policy}"
            report("convert", what, round(found["wall_s"], 2), "s", bar=bar, **found)
            per_node[nodes] = found["cpu_s"] / nodes
        growth = per_node[NODES[-1]] / per_node[NODES[-2]]
        report("convert", f"growth, {policy}", round(growth, 2), "x", bar=BAR_GROWTH)
    found = _apart("--memory")
    largest_mb = _WIDTH * _WIDTH * 4 / 1e6
    bar = BAR_FACTOR * largest_mb + BAR_REST_MB
    report("convert", "peak memory, 2.4 GB", round(found["peak_mb"]), "MB", bar=bar, **found)


def _apart(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_convert", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def chain(nodes: int) -> onnx.ModelProto:
    """Blocks of MatMul, Relu, Softmax and Add, one after the other."""
    steps: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    last = "x"
    for i in range(nodes // 4):
        weights.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), f"w{i}"))
        names = [f"{kind}{i}" for kind in "abcd"]
        ops = ("MatMul", "Relu", "Softmax", "Add")
        inputs = ([last, f"w{i}"], [names[0]], [names[1]], [names[2], last])
        for op, sources, name in zip(ops, inputs, names, strict=True):
            steps.append(helper.make_node(op, sources, [name], name=f"/block{i}/{op}"))
        last = names[-1]
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 8]) for n in ("x", last)
    ]
    graph = helper.make_graph(steps, "chain", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def huge(folder: Path) -> None:
    """A model of MatMuls with 2.4 GB of random weights in external data."""
    rng, nodes, weights, size = np.random.default_rng(0), [], [], _WIDTH * _WIDTH * 4
    with (folder / "in.data").open("wb") as file:
        for i in range(_WEIGHTS):
            for _ in range(8):
                piece = rng.standard_normal((_WIDTH // 8, _WIDTH), dtype=np.float32)
                file.write(piece.tobytes())
            weight = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[_WIDTH] * 2)
            weight.data_location = TensorProto.EXTERNAL
            place = {"location": "in.data", "offset": str(i * size), "length": str(size)}
            for key, value in place.items():
                weight.external_data.add(key=key, value=value)
            weights.append(weight)
            nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]))
    names = ("x0", f"x{_WEIGHTS}")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", _WIDTH]) for n in names]
    graph = helper.make_graph(nodes, "huge", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "in.onnx").write_bytes(model.SerializeToString())


def one_file(folder: Path) -> None:
    """A model of MatMuls with 403 MB of random weights inside of its file."""
    width, rng = _WIDTH // 2, np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((width, width), dtype=np.float32), f"w{i}")
        for i in range(6)
    ]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(6)]
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width]) for n in ("x0", "x6")
    ]
    graph = helper.make_graph(nodes, "one", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "in.onnx")


def convert(folder: Path, policy_text: str) -> dict[str, Any]:
    """Convert ``in.onnx``: seconds, and peak memory, with that of onnx's passes' process."""
    wall, cpu = perf_counter(), cpu_seconds()
    policy = Policy.parse(policy_text)
    file = frontend.load(folder / "in.onnx")
    with frontend.paused_collection():  # as finecast.convert does
        prepared = frontend.prepare(file, policy)
        planner = Planner(
            graph=prepared.graph,
            policy=policy,
            permissions=permit(Context(graph=prepared.graph, policy=policy)),
            opset=prepared.minimal_opset,
        )
        plan = planner.lowest()
        applied = frontend.apply(file, plan, prepared)
    size = frontend.save(applied.model, folder / "out.onnx")
    peaks = peak_bytes()
    return {
        "wall_s": perf_counter() - wall,
        "cpu_s": cpu_seconds() - cpu,
        "peak_mb": sum(peaks) / 1e6,
        "own_peak_mb": peaks[0] / 1e6,
        "edits": len(applied.edits),
        "saved_mb": round(size / 1e6),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
