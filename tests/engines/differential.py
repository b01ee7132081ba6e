"""Random small graphs in fp32, in OpenVINO and ONNX Runtime, held against numpy.

python -m tests.engines.differential [--graphs 1000] [--seed 0]

Constants are shared and mostly square, shapes odd, ranks from 0 to 5, opsets from 7 to 23.
What finecast knows to be wrong is restated when a model is taken: only new faults show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from finecast.engines import get_engine
from finecast.errors import EngineError
from finecast.native.onnx import take

Array = NDArray[Any]
TOLERANCE: Final = 1e-4
"""Of values of the order of 1, after some ops of fp32."""
SIDES: Final = (1, 2, 3, 5)


class Graph:
    """A graph that grows op by op; every value is computed once as well, by numpy."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.opset = random.randint(7, 23)
        self.rng = np.random.default_rng(random.randrange(1 << 30))
        rank = random.randint(0, 5)
        self.x = self.array([random.choice(SIDES) for _ in range(rank)])
        self.values: dict[str, Array] = {"x": self.x}
        self.constants: dict[str, Array] = {}
        self.nodes: list[onnx.NodeProto] = []

    def array(self, shape: Sequence[int]) -> Array:
        return self.rng.normal(size=tuple(shape)).astype(np.float32)

    def constant(self, array: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def shared(self, shape: Sequence[int]) -> str:
        """A constant of that shape, one that is there already if there is one."""
        fitting = [n for n, a in self.constants.items() if a.shape == tuple(shape)]
        floats = [n for n in fitting if self.constants[n].dtype == np.float32]
        return self.random.choice(floats) if floats else self.constant(self.array(shape))

    def op(self, kind: str, inputs: Sequence[str], result: Array, **attributes: Any) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        self.values[name] = np.asarray(result, np.float32)

    def model(self) -> onnx.ModelProto:
        """The model; all its values are outputs."""
        kind = onnx.TensorProto.FLOAT
        fixed = self.random.random() < 0.5
        shape = [n if fixed else None for n in self.x.shape]
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info("x", kind, shape)],
            [
                helper.make_tensor_value_info(n, kind, [None] * a.ndim)
                for n, a in self.values.items()
                if n != "x"
            ],
            [numpy_helper.from_array(a, n) for n, a in self.constants.items()],
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8
        )


def _unary(g: Graph, name: str, v: Array) -> None:
    kind, of = g.random.choice(
        [("Relu", lambda a: np.maximum(a, 0)), ("Tanh", np.tanh), ("Abs", np.abs),
         ("Neg", np.negative), ("Sigmoid", lambda a: 1 / (1 + np.exp(-a)))]
    )  # fmt: skip
    g.op(kind, [name], of(v))


def _binary(g: Graph, name: str, v: Array) -> None:
    """With a constant or a value, broadcast either way."""
    shape = [n if g.random.random() < 0.7 else 1 for n in v.shape][g.random.randint(0, 1) :]
    fitting = [n for n, a in g.values.items() if a.shape == v.shape]
    other = g.random.choice(fitting) if g.random.random() < 0.4 else g.shared(shape)
    w = g.values.get(other, g.constants.get(other))
    assert w is not None
    kind, of = g.random.choice([("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply)])
    pair = [(name, v), (other, w)]
    g.random.shuffle(pair)
    g.op(kind, [n for n, _ in pair], of(pair[0][1], pair[1][1]))


def _product(g: Graph, name: str, v: Array) -> None:
    if v.ndim < 1:
        return
    side = v.shape[-1] if g.random.random() < 0.7 else g.random.choice(SIDES)
    weights = g.shared((v.shape[-1], side))
    if side == v.shape[-1] and g.random.random() < 0.5:
        turned = g.constants[weights].T
        if v.ndim == 2 and g.random.random() < 0.5:
            bias = g.shared((side,))
            result = v @ turned + g.constants[bias]
            g.op("Gemm", [name, weights, bias], result, transB=1)
            return
        g.op("Transpose", [weights], turned, perm=[1, 0])
        g.op("MatMul", [name, f"v{len(g.nodes) - 1}"], v @ turned)
        return
    g.op("MatMul", [name, weights], v @ g.constants[weights])


def _transpose(g: Graph, name: str, v: Array) -> None:
    if not v.ndim:
        return
    order = list(range(v.ndim))
    g.random.shuffle(order)
    g.op("Transpose", [name], np.transpose(v, order), perm=order)


def _reduce(g: Graph, name: str, v: Array) -> None:
    if not v.ndim:
        return
    count = g.random.randint(1, v.ndim)
    axes = sorted(g.random.sample(range(v.ndim), count))
    keep = g.random.randint(0, 1)
    kind, of = g.random.choice(
        [("ReduceSum", np.sum), ("ReduceMax", np.max), ("ReduceMean", np.mean),
         ("ReduceL1", lambda a, **k: np.sum(np.abs(a), **k)), ("ReduceMin", np.min)]
    )  # fmt: skip
    result = of(v, axis=tuple(axes), keepdims=bool(keep))
    if g.opset >= (13 if kind == "ReduceSum" else 18):
        g.op(kind, [name, g.constant(np.array(axes))], result, keepdims=keep)
    else:
        g.op(kind, [name], result, keepdims=keep, axes=axes)


def _softmax(g: Graph, name: str, v: Array) -> None:
    if not v.ndim:
        return
    axis = g.random.randrange(v.ndim)
    over = tuple(range(axis, v.ndim)) if g.opset < 13 else axis
    e = np.exp(v - v.max(axis=over, keepdims=True))
    g.op("Softmax", [name], e / e.sum(axis=over, keepdims=True), axis=axis)


def _concat(g: Graph, name: str, v: Array) -> None:
    if not v.ndim:
        return
    axis = g.random.randrange(v.ndim)
    other = g.shared(v.shape)
    both = [v, g.constants[other]]
    g.op("Concat", [name, other], np.concatenate(both, axis), axis=axis)


def _reshape(g: Graph, name: str, v: Array) -> None:
    shape = [*v.shape, 1] if g.random.random() < 0.5 else [-1]
    if len(shape) < 6:
        g.op("Reshape", [name, g.constant(np.array(shape))], v.reshape(shape))


OPS: Final[Sequence[Callable[[Graph, str, Array], None]]] = (
    _unary, _binary, _binary, _product, _product, _transpose, _reduce, _softmax, _concat,
    _reshape,
)  # fmt: skip


def random_graph(random: Random) -> Graph:
    """A graph of some ops on the values before."""
    g = Graph(random)
    while len(g.nodes) < random.randint(3, 9):
        name, value = random.choice(list(g.values.items())[-3:])
        random.choice(OPS)(g, name, value)
    return g


def difference(g: Graph, engine: str) -> str:
    """How an engine's numbers differ from numpy's, in one line; empty if they do not."""
    try:
        taken = take(g.model())  # its file lives as long as it does
        session = get_engine(engine).load(taken.loadable)
        found = session.run({"x": g.x})
    except EngineError as error:
        return f"not run: {error.what}"
    for name, value in g.values.items():
        if name == "x":
            continue
        got = found[name]
        if got.shape != value.shape:
            return f"{name} has the shape {got.shape} and not {value.shape}"
        scale = 1 + np.abs(value).max(initial=0)
        error = float(np.abs(got - value).max(initial=0) / scale)
        if not error < TOLERANCE:
            return f"{name} is off by {error:.3g}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Print the graphs that an engine computes otherwise than numpy."""
    parser = argparse.ArgumentParser(prog="differential", description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = 0
    for number in range(options.graphs):
        g = random_graph(Random(f"{options.seed}/{number}"))
        for engine in ("openvino", "onnxruntime"):
            if text := difference(g, engine):
                failed += 1
                sys.stdout.write(f"graph {options.seed}/{number} in {engine}: {text}\n")
                sys.stdout.write(f"{onnx.printer.to_text(g.model())}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
