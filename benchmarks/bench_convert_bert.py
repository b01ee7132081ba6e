"""A 12-layer BERT converts in 1 s without load and save, in 1.5 times the model's size.

The model is made on the spot: BERT-base's shapes, random weights, 436 MB in external data.

    python -m benchmarks.bench_convert_bert
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx_ir as ir

from benchmarks.common import peak_bytes, report

LAYERS, HIDDEN, HEADS, INNER, WORDS = 12, 768, 12, 3072, 30522


class _Builder:
    """Adds ops to a graph as present exporters do."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[ir.Node] = []
        self.constants: dict[int, ir.Value] = {}
        self.initializers: list[ir.Value] = []

    def weight(self, name: str, *shape: int) -> ir.Value:
        return self.constant(name, self.rng.standard_normal(shape, dtype=np.float32) * 0.02)

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        tensor = ir.tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape))
        value.type = ir.TensorType(tensor.dtype)
        self.initializers.append(value)
        return value

    def op(self, kind: str, *inputs: ir.Value, **attributes: float | list[int]) -> ir.Value:
        name = f"{kind}_{len(self.nodes)}"
        node = ir.node(kind, list(inputs), attributes, name=name)
        node.outputs[0].name = f"{name}_out"
        self.nodes.append(node)
        return node.outputs[0]

    def linear(self, name: str, x: ir.Value, into: int, out: int) -> ir.Value:
        product = self.op("MatMul", x, self.weight(f"{name}.weight", into, out))
        return self.op("Add", product, self.weight(f"{name}.bias", out))

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        scale = self.constant(f"{name}.weight", np.ones(HIDDEN, np.float32))
        bias = self.weight(f"{name}.bias", HIDDEN)
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    def attention(self, name: str, x: ir.Value) -> ir.Value:
        split = self.constant(f"{name}.split", np.array([0, 0, HEADS, HIDDEN // HEADS]))
        join = self.constant(f"{name}.join", np.array([0, 0, HIDDEN]))
        turned: list[ir.Value] = []
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            y = self.linear(f"{name}.{part}", x, HIDDEN, HIDDEN)
            turned.append(self.op("Transpose", self.op("Reshape", y, split), perm=order))
        q, k, v = turned
        scale = self.constant(f"{name}.scale", np.float32((HIDDEN // HEADS) ** 0.5))
        share = self.op("Softmax", self.op("Div", self.op("MatMul", q, k), scale), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", share, v), perm=[0, 2, 1, 3])
        return self.linear(f"{name}.out", self.op("Reshape", mixed, join), HIDDEN, HIDDEN)

    def gelu(self, name: str, x: ir.Value) -> ir.Value:
        root, one, half = (
            self.constant(f"{name}.{key}", np.float32(number))
            for key, number in (("root", 2**0.5), ("one", 1.0), ("half", 0.5))
        )
        erf = self.op("Add", self.op("Erf", self.op("Div", x, root)), one)
        return self.op("Mul", self.op("Mul", x, erf), half)

    def layer(self, name: str, x: ir.Value) -> ir.Value:
        x = self.norm(f"{name}.norm0", self.op("Add", x, self.attention(f"{name}.attn", x)))
        inner = self.gelu(f"{name}.gelu", self.linear(f"{name}.up", x, HIDDEN, INNER))
        down = self.linear(f"{name}.down", inner, INNER, HIDDEN)
        return self.norm(f"{name}.norm1", self.op("Add", x, down))


def bert() -> ir.Model:
    """BERT-base without its pooler: 109 million parameters."""
    b = _Builder()
    ids = ir.Value(
        name="input_ids",
        shape=ir.Shape(["batch", "length"]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    words = b.op("Gather", b.weight("words", WORDS, HIDDEN), ids)
    x = b.norm("embeddings", b.op("Add", words, b.weight("kind", HIDDEN)))
    for i in range(LAYERS):
        x = b.layer(f"layer{i}", x)
    x.name, x.type = "last_hidden_state", ir.TensorType(ir.DataType.FLOAT)
    x.shape = ir.Shape(["batch", "length", HIDDEN])
    graph = ir.Graph(
        [ids],
        [x],
        nodes=b.nodes,
        initializers=b.initializers,
        opset_imports={"": 17},
        name="bert",
    )
    return ir.Model(graph, ir_version=8)


def child(source: Path, output: Path) -> None:
    """Convert in this process; prints times and peaks."""
    from finecast.engines import get_engine
    from finecast.frontends import onnx as frontend
    from finecast.measure.memory import resident_peak_bytes
    from finecast.native.planning import make_planner
    from finecast.rules.policy import Policy

    engine = get_engine("openvino")
    policy = Policy.parse("all:bf16")
    idle = resident_peak_bytes()
    start = perf_counter()
    file = frontend.load(source)
    loaded = perf_counter()
    plan = make_planner(frontend.prepare(file, policy), policy, engine).lowest()
    applied = frontend.apply(file, plan)
    converted = perf_counter()
    frontend.save(applied.model, output)
    saved = perf_counter()
    found = {
        "load_s": loaded - start,
        "convert_s": converted - loaded,
        "save_s": saved - converted,
        "peak_bytes": sum(peak_bytes()) - idle,
        "idle_bytes": idle,
        "size_bytes": file.size_bytes,
        "counts": plan.counts,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def main() -> None:
    """Make the model, convert it in a fresh process."""
    if len(sys.argv) == 3:
        child(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "bert.onnx"
        ir.save(bert(), source, external_data="bert.onnx.data")
        command = [sys.executable, "-m", __spec__.name, str(source)]
        runs = []
        for number in range(3):
            output = str(Path(folder) / f"low{number}.onnx")
            done = subprocess.run(
                [*command, output], capture_output=True, text=True, check=True
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        best = min(runs, key=lambda r: r["convert_s"])
    size = best["size_bytes"]
    report(
        "convert_bert", "convert all:bf16", round(best["convert_s"], 3), "s", bar=1.0,
        load_s=round(best["load_s"], 3), save_s=round(best["save_s"], 3), ops=best["counts"],
    )  # fmt: skip
    report(
        "convert_bert", "peak memory over model size",
        round(best["peak_bytes"] / size, 3), "x", bar=1.5, size_mb=round(size / 1e6),
        peak_mb=round(best["peak_bytes"] / 1e6), idle_mb=round(best["idle_bytes"] / 1e6),
    )  # fmt: skip


if __name__ == "__main__":
    main()
